// Host functions in streams: the driver calls back here when a function's turn has come; the client is told over the event
// ring, runs the application's function and answers; until then the stream waits. Thread-safe.
#ifndef CUDA_REMOTE_SERVER_WORKER_HOST_FUNCTIONS_H_
#define CUDA_REMOTE_SERVER_WORKER_HOST_FUNCTIONS_H_

#include <cuda.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "server/driver/driver_table.h"

namespace cuda_remote::server {

class HostFunctions {
 public:
  // `announce` sends the event (id, status of the stream); it may block, and is called on the driver's threads.
  explicit HostFunctions(std::function<void(uint64_t id, CUresult status)> announce) : announce_(std::move(announce)) {}

  // Puts function `id` into the stream. `callback`: as cuStreamAddCallback, which also runs after errors. `captured`: the
  // stream is being captured, so it may run any number of times.
  CUresult Launch(const DriverTable& driver, CUstream stream, uint64_t id, bool callback, bool captured);

  // The client has run function `id`. Unknown ids are ignored.
  void Done(uint64_t id);

  // Functions whose turn has come and that are not done.
  int waiting() const;

  // Sleeps until the turn of a function has come, or `stop` is set and Interrupt called.
  void AwaitTurn(const std::atomic<bool>& stop);
  void Interrupt();

  // Lets everything that waits go on: the client is gone.
  void Stop();

 private:
  struct Record {
    HostFunctions* owner;
    uint64_t id;
    bool captured;
    int done = 0;  // answers that no turn has used yet
  };
  void Turn(Record* record, CUresult status);

  const std::function<void(uint64_t, CUresult)> announce_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::condition_variable turn_;
  std::unordered_map<uint64_t, std::unique_ptr<Record>> records_;
  int waiting_ = 0;
  bool stop_ = false;
};

}  // namespace cuda_remote::server

#endif  // CUDA_REMOTE_SERVER_WORKER_HOST_FUNCTIONS_H_
