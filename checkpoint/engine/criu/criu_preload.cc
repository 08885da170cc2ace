// SPDX-License-Identifier: Apache-2.0
// libcuda-remote-criu.so: is loaded into CRIU while it saves a job (LD_PRELOAD), and changes what CRIU reads of threads
// that sleep in a system call.
//
// CRIU stops threads by ptrace. The kernel could continue a poll or a nanosleep afterwards, as after SIGSTOP and
// SIGCONT, by what it has noted about the thread (restart_block). What CRIU does in the thread deletes that, and no
// image has it. Then the call fails with EINTR, in the job that continues and in the restarted one. Others, such as
// epoll_wait, fail with EINTR whenever a thread is stopped. Where no signal handler has run, programs do not expect
// that: sleeps end too early, and servers give up.
//
// So CRIU is shown these calls as ones that are made once more, with the whole of their time limit, unless a signal
// handler runs first (ERESTARTNOHAND, which pause and select have). CRIU has a restored thread make the call again.
// In a job that continues it does that, too, and a handler that runs for a signal of meanwhile does not end the call.
// So what it writes into such a thread is changed back, and the kernel decides.
//
// With nothing but the C library's oldest functions: CRIU may have a C library of its own.

#include <elf.h>
#include <errno.h>
#include <stdarg.h>
#include <stdint.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#ifdef __x86_64__
#include <sys/user.h>
#endif

namespace {

long Ptrace(long request, pid_t thread, void* address, void* data) {
  return syscall(SYS_ptrace, request, thread, address, data);
}

#ifdef __x86_64__

constexpr long kNoHand = -514;                          // ERESTARTNOHAND, which only the kernel sees
constexpr long kRestartBlock = -516;                    // ERESTART_RESTARTBLOCK, which only the kernel sees
constexpr unsigned long long kCodeOf64Bit = 0x33;       // code segment
constexpr unsigned kCallBytes = 2, kCallCode = 0x050f;  // the instruction `syscall`
constexpr unsigned kLoadBytes = 5, kLoadNumber = 0xb8;  // `mov $NUMBER, %eax`
constexpr uint64_t kNoCall = ~uint64_t{0};

// Whether the call does nothing before it sleeps, can be made again as it was, and fails with EINTR after a handler.
bool IsEndedByHandler(uint64_t call) {
  switch (call) {
    case SYS_clock_nanosleep:
    case SYS_epoll_pwait:
    case 441:  // epoll_pwait2
    case SYS_epoll_wait:
    case SYS_nanosleep:
    case SYS_pause:
    case SYS_poll:
    case SYS_ppoll:
    case SYS_pselect6:
    case SYS_rt_sigsuspend:
    case SYS_rt_sigtimedwait:
    case SYS_select:
    case SYS_semop:
    case SYS_semtimedop:
      return true;
    default:
      return false;
  }
}

// The same of those that may go on after a handler.
bool Sleeps(uint64_t call) {
  switch (call) {
    case SYS_accept:
    case SYS_accept4:
    case SYS_futex:
    case SYS_recvfrom:
    case SYS_recvmsg:
      return true;
    default:
      return IsEndedByHandler(call);
  }
}

// The call that the instruction before `address` makes. glibc and Go load its number by the one before that.
uint64_t CallBefore(pid_t thread, uint64_t address) {
  uint64_t code = 0;
  const uint64_t begin = address - kCallBytes - kLoadBytes;
  if (Ptrace(PTRACE_PEEKTEXT, thread, reinterpret_cast<void*>(begin), &code) != 0) return kNoCall;
  if ((code & 0xff) != kLoadNumber || (code >> 8 * kLoadBytes & 0xffff) != kCallCode) return kNoCall;
  return code >> 8 & 0xffffffff;
}

void ShowInterrupted(pid_t thread, user_regs_struct* registers) {
  const auto result = long(registers->rax);
  if (registers->cs != kCodeOf64Bit || (result != kRestartBlock && result != -EINTR)) return;
  uint64_t call = registers->orig_rax;
  // An earlier stop has interrupted the call, and the kernel has continued it under this number.
  if (call == SYS_restart_syscall) call = CallBefore(thread, registers->rip);
  if (!Sleeps(call)) return;
  registers->orig_rax = call;
  registers->rax = static_cast<unsigned long long>(kNoHand);
}

// Where CRIU has set a thread back to the instruction that makes its call.
void LeaveToKernel(pid_t thread, user_regs_struct* registers) {
  uint64_t code = 0;
  if (registers->cs != kCodeOf64Bit || registers->rax != registers->orig_rax || !IsEndedByHandler(registers->rax))
    return;
  if (Ptrace(PTRACE_PEEKTEXT, thread, reinterpret_cast<void*>(registers->rip), &code) != 0) return;
  if ((code & 0xffff) != kCallCode) return;
  registers->rax = static_cast<unsigned long long>(kNoHand);
  registers->rip += kCallBytes;
}

#endif

}  // namespace

// In place of the C library's.
extern "C" __attribute__((visibility("default"))) long ptrace(__ptrace_request request, ...) noexcept {
  va_list arguments;
  va_start(arguments, request);
  const auto thread = pid_t(va_arg(arguments, long));
  void* const address = va_arg(arguments, void*);
  void* const data = va_arg(arguments, void*);
  va_end(arguments);
  if (request == PTRACE_PEEKTEXT || request == PTRACE_PEEKDATA || request == PTRACE_PEEKUSER) {
    long word = 0;
    const long status = Ptrace(request, thread, address, &word);
    if (status == 0) errno = 0;
    return status == 0 ? word : status;
  }
#ifdef __x86_64__
  const bool is_registers = (request == PTRACE_GETREGSET || request == PTRACE_SETREGSET) &&
                            reinterpret_cast<uintptr_t>(address) == NT_PRSTATUS;
  if (is_registers) {
    const auto* const set = static_cast<const iovec*>(data);
    user_regs_struct registers;
    if (request == PTRACE_SETREGSET && set->iov_len == sizeof(registers)) {
      registers = *static_cast<const user_regs_struct*>(set->iov_base);
      LeaveToKernel(thread, &registers);
      iovec changed{&registers, sizeof(registers)};
      return Ptrace(request, thread, address, &changed);
    }
    const long status = Ptrace(request, thread, address, data);
    if (status == 0 && set->iov_len == sizeof(registers))
      ShowInterrupted(thread, static_cast<user_regs_struct*>(set->iov_base));
    return status;
  }
#endif
  return Ptrace(request, thread, address, data);
}
