// The admission gate: every driver call passes it, and a checkpoint closes it.
//
// Open, it costs two atomic additions a call, to a counter that few other threads use: there are kLanes of them, and
// each thread keeps to one (ThreadState::lane). Closed, new calls wait in the kernel; the calls that are inside finish
// first, and Close returns when the last one has left. A thread that is already inside (a call made by another
// call's body) never enters twice: Call keeps a depth for each thread.
//
// Nothing here allocates, so a process that is snapshotted while threads wait at the gate resumes correctly: their
// futex wait is restarted and they look again.
#ifndef CUDA_REMOTE_CLIENT_SESSION_GATE_H_
#define CUDA_REMOTE_CLIENT_SESSION_GATE_H_

#include <atomic>
#include <cstdint>

namespace cuda_remote::client {

class Gate {
 public:
  static constexpr unsigned kLanes = 64;

  // Waits while the gate is closed. Leave takes the same lane; any number below kLanes.
  void Enter(unsigned lane = 0) {
    while (true) {
      lanes_[lane].inside.fetch_add(1, std::memory_order_seq_cst);
      if (!closed_.load(std::memory_order_seq_cst)) return;
      Leave(lane);
      WaitOpen();
    }
  }

  void Leave(unsigned lane = 0) {
    lanes_[lane].inside.fetch_sub(1, std::memory_order_seq_cst);
    if (closed_.load(std::memory_order_seq_cst)) WakeCloser();
  }

  // Lets no new call in and waits until all calls inside have left. False after `timeout_ms`: the gate is open again.
  bool Close(int timeout_ms);

  void Open();

  bool closed() const { return closed_.load(std::memory_order_acquire); }

 private:
  struct alignas(64) Lane {
    std::atomic<uint32_t> inside{0};
  };

  void WaitOpen();
  void WakeCloser();
  bool Empty() const;

  // Both are futex words.
  std::atomic<uint32_t> closed_{0};
  std::atomic<uint32_t> left_{0};  // changes when a call leaves a closed gate
  Lane lanes_[kLanes];
};

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_SESSION_GATE_H_
