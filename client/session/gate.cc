#include "client/session/gate.h"

#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

namespace cuda_remote::client {
namespace {

int64_t NowMs() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t(now.tv_sec) * 1000 + now.tv_nsec / 1000000;
}

void FutexWait(std::atomic<uint32_t>* word, uint32_t expected, int timeout_ms) {
  const timespec timeout{timeout_ms / 1000, (timeout_ms % 1000) * 1000000L};
  syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, expected, timeout_ms < 0 ? nullptr : &timeout, nullptr, 0);
}

void FutexWake(std::atomic<uint32_t>* word) {
  syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace

bool Gate::Close(int timeout_ms) {
  const int64_t deadline = NowMs() + timeout_ms;
  closed_.store(1, std::memory_order_seq_cst);
  while (true) {
    const uint32_t left_before = left_.load(std::memory_order_seq_cst);
    if (Empty()) return true;
    const int64_t left = deadline - NowMs();
    if (left <= 0) {
      Open();
      return false;
    }
    FutexWait(&left_, left_before, int(left));
  }
}

// Not one moment's picture, and need not be: whoever enters a lane that was seen empty finds the gate closed.
bool Gate::Empty() const {
  for (const Lane& lane : lanes_) {
    if (lane.inside.load(std::memory_order_seq_cst) != 0) return false;
  }
  return true;
}

void Gate::Open() {
  closed_.store(0, std::memory_order_seq_cst);
  FutexWake(&closed_);
}

void Gate::WaitOpen() {
  while (closed_.load(std::memory_order_seq_cst)) FutexWait(&closed_, 1, -1);
}

void Gate::WakeCloser() {
  left_.fetch_add(1, std::memory_order_seq_cst);
  FutexWake(&left_);
}

}  // namespace cuda_remote::client
