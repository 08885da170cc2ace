// Host functions: the application's callbacks that the GPU's streams call back into this process.
//
// cuLaunchHostFunc and cuStreamAddCallback send a number in place of the function. When the stream reaches it, the
// server sends an event with that number, the callback thread runs the function here, and an acknowledgement lets
// the stream go on. The thread is started by the first registration, so a program without host functions has none.
#ifndef CUDA_REMOTE_CLIENT_SESSION_HOST_FUNCTIONS_H_
#define CUDA_REMOTE_CLIENT_SESSION_HOST_FUNCTIONS_H_

#include <cuda.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <unordered_map>

namespace cuda_remote {
class ClientChannel;
}

namespace cuda_remote::client {

class HostFunctions {
 public:
  // Remembers `function` and returns the number that stands for it, never 0. It runs once, with the status of the
  // stream; `keep` keeps it for repeated runs (a graph's host node).
  uint64_t Register(std::function<void(CUresult)> function, bool keep);

  // Forgets a registration whose call failed.
  void Forget(uint64_t number);

  // Functions registered but not run yet.
  size_t outstanding() const { return outstanding_.load(std::memory_order_acquire); }

  // From now on events come from this channel (null: from none). Returns when no other channel is being read any more.
  void SetChannel(ClientChannel* channel);

 private:
  void StartThreadUnlocked();
  void Loop();

  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  ClientChannel* channel_ = nullptr;
  ClientChannel* reading_ = nullptr;  // what the thread reads from just now
  bool started_ = false;
  uint64_t next_number_ = 1;
  struct Entry {
    std::function<void(CUresult)> function;
    bool keep;
  };
  std::unordered_map<uint64_t, Entry> functions_;
  std::atomic<size_t> outstanding_{0};
};

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_SESSION_HOST_FUNCTIONS_H_
