// SPDX-License-Identifier: Apache-2.0
// Host functions: the application's callbacks that the GPU's streams call back into this process.
//
// cuLaunchHostFunc and cuStreamAddCallback send a number in place of the function. When the stream reaches it, the
// server sends an event with that number, the callback thread runs the function here, and an acknowledgement lets
// the stream go on. The thread is started before the first registration, so a program without host functions has none.
#ifndef CUDA_REMOTE_CLIENT_CORE_HOST_FUNCTIONS_H_
#define CUDA_REMOTE_CLIENT_CORE_HOST_FUNCTIONS_H_

#include <cuda.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <unordered_map>
#include <utility>

#include "client/core/recorded_objects.h"
#include "proto/threads/mutex.h"

namespace cuda_remote {
class ClientChannel;
}

namespace cuda_remote::client {

class HostFunctions {
 public:
  // `recorded`: the session's objects, which outlive this.
  explicit HostFunctions(RecordedObjects* recorded) : recorded_(recorded) {}

  // Starts the callback thread, if there is none yet. False: the system gives no thread. Everything that registers
  // something calls this before.
  bool Start();

  // Remembers `function` and returns the number that stands for it, never 0. It runs once, with the status of the
  // stream.
  uint64_t Register(std::function<void(CUresult)> function);

  // The number of a function that a graph calls, any number of times, for as long as the process lives: the same number
  // for the same function and data. (A graph that is gone may still be running, so there is no moment to forget one.)
  uint64_t RegisterForGraph(CUhostFn function, void* data);
  // What RegisterForGraph was told. False for any other number.
  bool FindForGraph(uint64_t number, CUhostFn* function, void** data) const;

  // Has `destroy(data)` called when the server says that the user object `handle` is gone; then the
  // session's objects forget it.
  void RegisterObject(uint64_t handle, CUhostFn destroy, void* data);

  // Forgets a registration whose call failed.
  void Forget(uint64_t number);

  // Functions registered but not run yet.
  size_t outstanding() const { return outstanding_.load(std::memory_order_acquire); }

  // From now on events come from this channel (null: from none). Returns when no other channel is being read any more.
  void SetChannel(ClientChannel* channel);
  // SetChannel(nullptr) that waits for `timeout_ms` at most: false if a function runs for longer. Then the channel is
  // still in use, and to be set again.
  bool Detach(int timeout_ms);
  // How long the function that runs now (or a user object's destructor) has been running, at least 1; 0: none runs.
  uint64_t RunningMs() const;

  // What is done with the channel right before and after every host function, and when the server has been told that it
  // has ended. Once, before the first one is registered.
  void SetAround(std::function<void(ClientChannel*)> before, std::function<void(ClientChannel*)> after,
                 std::function<void()> told) {
    before_ = std::move(before);
    after_ = std::move(after);
    told_ = std::move(told);
  }

 private:
  void Loop();

  RecordedObjects* const recorded_;
  mutable Mutex mutex_;  // guards what follows
  Condition changed_;
  ClientChannel* channel_ CR_GUARDED_BY(mutex_) = nullptr;
  ClientChannel* reading_ CR_GUARDED_BY(mutex_) = nullptr;  // what the thread reads from just now
  bool started_ CR_GUARDED_BY(mutex_) = false;
  uint64_t next_number_ CR_GUARDED_BY(mutex_) = 1;
  std::unordered_map<uint64_t, std::function<void(CUresult)>> functions_ CR_GUARDED_BY(mutex_);
  struct Target {
    CUhostFn function;
    void* data;
  };
  std::unordered_map<uint64_t, Target> of_graphs_ CR_GUARDED_BY(mutex_);  // by number
  std::map<std::pair<CUhostFn, void*>, uint64_t> numbers_ CR_GUARDED_BY(mutex_);
  std::unordered_map<uint64_t, Target> objects_ CR_GUARDED_BY(mutex_);  // by handle
  std::atomic<size_t> outstanding_{0};
  std::atomic<int64_t> running_since_ns_{0};  // 0: no function runs
  std::function<void(ClientChannel*)> before_, after_;
  std::function<void()> told_;
};

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_CORE_HOST_FUNCTIONS_H_
