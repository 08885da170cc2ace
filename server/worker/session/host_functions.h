// SPDX-License-Identifier: Apache-2.0
// Host functions in streams: the driver calls back here when a function's turn has come; the client is told over the
// event ring, runs the application's function and answers; until then the stream waits. Thread-safe.
#ifndef CUDA_REMOTE_SERVER_WORKER_SESSION_HOST_FUNCTIONS_H_
#define CUDA_REMOTE_SERVER_WORKER_SESSION_HOST_FUNCTIONS_H_

#include <cuda.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <unordered_map>
#include <unordered_set>

#include "proto/threads/mutex.h"
#include "server/driver/driver_table.h"

namespace cuda_remote::server {

class HostFunctions {
 public:
  // `announce` sends the event (id, turn, status of the stream); it may block, and is called on the driver's threads.
  explicit HostFunctions(std::function<void(uint64_t id, uint64_t turn, CUresult status)> announce)
      : announce_(std::move(announce)) {}

  // Puts function `id` into the stream. `callback`: as cuStreamAddCallback, which also runs after errors. `captured`:
  // the stream is being captured, so it may run any number of times, and more than once at a time.
  CUresult Launch(const DriverTable& driver, CUstream stream, uint64_t id, bool callback, bool captured);

  // What a graph's host node is to call for function `id`, which the driver gives `*data`: null if the id is taken by a
  // function that runs once.
  CUhostFn ForNode(uint64_t id, void** data);
  // The id of a function that a node calls; 0 for a function that is none of these.
  uint64_t IdOf(CUhostFn function, void* data) const;

  // The client has run a function's turn. Unknown turns are ignored.
  void Done(uint64_t turn);
  // Whether the client has run function `id`, which was not captured.
  bool IsDone(uint64_t id) const;

  // Functions whose turn has come and that are not done.
  int waiting() const;
  // Whether there are functions whose turn may come, or that are not done.
  bool Any() const;

  // Sleeps until the turn of a function has come, or `stop` is set and Interrupt called.
  void AwaitTurn(const std::atomic<bool>& stop);
  void Interrupt();

  // Lets everything that waits go on: the client is gone.
  void Stop();

 private:
  struct Record {
    HostFunctions* owner;
    uint64_t id;
    bool captured;      // in a graph, for good
    uint64_t turn = 0;  // the latest one; 0: none yet
  };
  static void CUDA_CB Call(void* data);
  void Turn(Record* record, CUresult status);

  // The record of a captured function, the same for the same id. Null if the id is another's.
  Record* CapturedLocked(uint64_t id) CR_REQUIRES(mutex_);

  const std::function<void(uint64_t, uint64_t, CUresult)> announce_;
  mutable Mutex mutex_;
  Condition changed_;
  Condition turn_;
  std::unordered_map<uint64_t, std::unique_ptr<Record>> records_ CR_GUARDED_BY(mutex_);
  std::unordered_set<const void*> captured_ CR_GUARDED_BY(mutex_);  // the records that graphs refer to
  std::unordered_set<uint64_t> turns_ CR_GUARDED_BY(mutex_);        // announced, and not done
  uint64_t next_turn_ CR_GUARDED_BY(mutex_) = 1;
  bool stop_ CR_GUARDED_BY(mutex_) = false;
};

}  // namespace cuda_remote::server

#endif  // CUDA_REMOTE_SERVER_WORKER_SESSION_HOST_FUNCTIONS_H_
