// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/engine/criu/continue.h"

#include <errno.h>
#include <signal.h>
#include <stdint.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <thread>
#include <vector>

#include "checkpoint/job/account.h"
#include "checkpoint/job/job.h"
#include "proto/base/clock.h"

namespace cuda_remote::checkpoint {
namespace {

constexpr uint64_t kContinueBit = uint64_t{1} << (SIGCONT - 1), kStopBit = uint64_t{1} << (SIGSTOP - 1);
// For what the kernel does at once.
constexpr std::chrono::seconds kLimit(5);

// Whether the process is this thread's user's, as far as signals go.
bool MaySignal(int pid) {
  const std::vector<uint64_t> users = StatusNumbers(pid, "Uid", 10);
  const uint64_t user = geteuid();
  return user == 0 || (!users.empty() && std::count(users.begin(), users.end(), user) == long(users.size()));
}

// Whether a thread's mask of signals, a line of its status, has one of these bits.
bool Has(int thread, const char* line, uint64_t bits) {
  const std::vector<uint64_t> mask = StatusNumbers(thread, line, 16);
  return !mask.empty() && (mask[0] & bits) != 0;
}

// Whether the program has a handler for SIGCONT, or a thread that blocks it and may ask for it (sigwait, signalfd).
bool MayNotice(int pid) {
  const std::vector<int> threads = ThreadsOf(pid);
  return Has(pid, "SigCgt", kContinueBit) ||
         std::any_of(threads.begin(), threads.end(), [](int thread) { return Has(thread, "SigBlk", kContinueBit); });
}

// Whether the process is stopped, or about to stop. Threads of one that runs would be waited for in vain: as after a
// dump that has failed, since CRIU lets the processes go then.
bool Stops(int pid) {
  const std::vector<int> threads = ThreadsOf(pid);
  return Has(pid, "ShdPnd", kStopBit) || std::any_of(threads.begin(), threads.end(), [](int thread) {
           const char state = StateOf(thread);
           return state == 'T' || state == 't' || Has(thread, "SigPnd", kStopBit);
         });
}

bool Send(int process, int signal) { return syscall(SYS_pidfd_send_signal, process, signal, nullptr, 0u) == 0; }

// Waits for a thread that is traced to stop; false if it ends instead, or never stops.
bool AwaitStop(int thread, int* status) {
  const auto end = Now() + kLimit;
  for (;;) {
    const pid_t got = waitpid(thread, status, __WALL | WNOHANG);
    if (got == thread) return WIFSTOPPED(*status);
    if (got < 0 && errno != EINTR) return false;
    if (Now() >= end) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

// While this lives, the calling thread traces all threads of a process that is stopped.
class Tracer {
 public:
  Tracer(int pid, int process) : process_(process) {
    for (const int thread : ThreadsOf(pid)) {
      int status;
      if (ptrace(PTRACE_SEIZE, thread, nullptr, nullptr) == 0) {
        threads_.push_back(thread);
        ok_ = AwaitStop(thread, &status) && ok_;
      } else if (IsRunning(thread)) {  // as the first one, which may have ended
        ok_ = false;
      }
    }
    // As long as the process is there, its number is no other's.
    ok_ = Send(process_, 0) && ok_;
  }
  ~Tracer() {
    for (const int thread : threads_) ptrace(PTRACE_DETACH, thread, nullptr, nullptr);
  }
  Tracer(const Tracer&) = delete;
  Tracer& operator=(const Tracer&) = delete;
  bool ok() const { return ok_ && !threads_.empty(); }

  // Sends SIGCONT and takes it from the thread to which it is delivered. The other threads stay stopped. False if it
  // cannot be sent.
  bool TakeContinue() {
    const int thread = threads_.front();
    uint64_t before = 0;
    if (ptrace(PTRACE_GETSIGMASK, thread, sizeof(before), &before) != 0) return false;
    // No other signal is delivered meanwhile.
    uint64_t only = ~kContinueBit;
    ptrace(PTRACE_SETSIGMASK, thread, sizeof(only), &only);
    const bool sent = Send(process_, SIGCONT);
    int status = 0;
    // First it reports that it is stopped no more.
    while (sent && ptrace(PTRACE_CONT, thread, nullptr, nullptr) == 0 && AwaitStop(thread, &status)) {
      if (WSTOPSIG(status) == SIGCONT && status >> 16 == 0) break;
    }
    ptrace(PTRACE_SETSIGMASK, thread, sizeof(before), &before);
    return sent;
  }

 private:
  const int process_;
  std::vector<int> threads_;
  bool ok_ = true;
};

}  // namespace

bool ContinueUnnoticed(int pid, int process) {
  bool sent = false;
  if (MaySignal(pid) && MayNotice(pid) && Stops(pid)) {
    // With the end of the thread nothing is traced any more, whatever has happened.
    std::thread([&] {
      const AsRoot root;  // the rights of its user alone allow nobody else to trace a process
      Tracer tracer(pid, process);
      sent = tracer.ok() && tracer.TakeContinue();
    }).join();
  }
  return sent || Send(process, SIGCONT) || errno == ESRCH;
}

}  // namespace cuda_remote::checkpoint
