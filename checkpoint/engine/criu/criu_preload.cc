// SPDX-License-Identifier: Apache-2.0
// libcuda-remote-criu.so: is loaded into CRIU while it saves or restores a job (LD_PRELOAD). It changes what CRIU reads
// of threads that sleep in a system call, of memory, and of sockets. It also keeps some settings of processes
// (own_settings.h).
//
// Sleeping threads. CRIU stops threads by ptrace. The kernel could continue a poll or a nanosleep afterwards, as after
// SIGSTOP and SIGCONT, by what it has noted about the thread (restart_block). What CRIU does in the thread deletes
// that, and no image has it. Then the call fails with EINTR, in the job that continues and in the restarted one.
// Others, such as epoll_wait, fail with EINTR whenever a thread is stopped. Where no signal handler has run, programs
// do not expect that: sleeps end too early, and servers give up.
//
// So CRIU is shown these calls as ones that are made once more, with the whole of their time limit, unless a signal
// handler runs first (ERESTARTNOHAND, which pause and select have). CRIU has a restored thread make the call again.
// In a job that continues it does that, too, and a handler that runs for a signal of meanwhile does not end the call.
// So what it writes into such a thread is changed back, and the kernel decides.
//
// Memory. One thread of CRIU's sends all pages, while the processes stand still. So the pages of large anonymous
// mappings are hidden from it, and cr-checkpoint is told where they are and reads them itself (pages_socket.h). CRIU
// asks for the pages of such a mapping alone, by PAGEMAP_SCAN (CRIU from 4.0, Linux from 6.7). What it asks for in
// another way it sees, and sends.
//
// Sockets. CRIU saves few of their options, and takes an empty datagram for the end of a queue. Whenever it asks for a
// socket's family, the socket is looked at (criu_sockets.h). CRIU restores the ends of a TCP connection one after the
// other, and the kernel resets one that sends to the other too early. So whenever CRIU is about to restore an end
// (TCP_REPAIR), the socket is kept from being reset.
//
// With nothing but the C library's oldest functions: CRIU may have a C library of its own.

#include <elf.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#ifdef __x86_64__
#include <sys/user.h>
#endif

#include "checkpoint/engine/criu/criu_sockets.h"
#include "checkpoint/engine/criu/own_settings.h"
#include "checkpoint/engine/criu/pages_socket.h"
#include "proto/base/environment.h"
#include "proto/base/pagemap_scan.h"

namespace {

using cuda_remote::kPageIsGuard;
using cuda_remote::kPagemapScan;
using cuda_remote::ScanArguments;
using cuda_remote::ScanRegion;
using cuda_remote::TrustedVariable;
using cuda_remote::checkpoint::HiddenPages;
using cuda_remote::checkpoint::HoldsBackTerminal;
using cuda_remote::checkpoint::KeepResetsOut;
using cuda_remote::checkpoint::kMostHidden;
using cuda_remote::checkpoint::kPagesSocketVariable;
using cuda_remote::checkpoint::NoteSocket;
using cuda_remote::checkpoint::ReceiveForCriu;

constexpr uint64_t kPageBytes = 4096;
// CRIU asks for a mapping of this length alone, for shorter ones together with their neighbours.
constexpr uint64_t kLarge = 2 << 20;

// The large anonymous mappings of one process, in the order of their addresses. CRIU has one thread.
struct Mapping {
  uint64_t begin, end;
};
struct {
  int process = 0;
  uint32_t count = 0, hidden = 0;
  Mapping mappings[4096];
} g_large;

// Where cr-checkpoint is told; -1: nothing is hidden.
int g_pages_socket = -1;

__attribute__((constructor)) void FindPagesSocket() {
  const char* const number = TrustedVariable(kPagesSocketVariable);
  if (number != nullptr) g_pages_socket = atoi(number);
}

// The process whose pagemap `fd` is; 0 if it is another file.
int ProcessOfPagemap(int fd) {
  char link[64], path[256];
  snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
  const ssize_t length = readlink(link, path, sizeof(path) - 1);
  if (length <= 0) return 0;
  path[length] = '\0';
  char* const file = strrchr(path, '/');
  if (file == nullptr || strcmp(file, "/pagemap") != 0) return 0;
  *file = '\0';
  const char* const folder = strrchr(path, '/');
  return atoi(folder != nullptr ? folder + 1 : path);
}

// A line of /proc/PID/maps: "BEGIN-END rw-p OFFSET DEVICE INODE   NAME".
void NoteMapping(const char* line) {
  char* after;
  const uint64_t begin = strtoul(line, &after, 16);
  const uint64_t end = *after == '-' ? strtoul(after + 1, &after, 16) : begin;
  unsigned long inode;
  char rights[8];
  int name = 0;
  if (end - begin < kLarge || sscanf(after, " %7s %*x %*s %lu %n", rights, &inode, &name) != 2 || name == 0) return;
  // Of others CRIU has just changed the rights, so that it can read them, and will change them back.
  const bool is_private = rights[0] == 'r' && rights[1] == 'w' && rights[3] == 'p';
  const char* const text = after + name;
  const bool is_plain = *text == '\0' || strcmp(text, "[heap]") == 0 || strncmp(text, "[anon:", 6) == 0;
  if (!is_private || inode != 0 || !is_plain) return;
  if (g_large.count < sizeof(g_large.mappings) / sizeof(Mapping)) g_large.mappings[g_large.count++] = {begin, end};
}

void ReadMappings(int process) {
  g_large.process = process;
  g_large.count = g_large.hidden = 0;
  char text[8192];
  snprintf(text, sizeof(text), "/proc/%d/maps", process);
  const int fd = int(syscall(SYS_openat, AT_FDCWD, text, O_RDONLY | O_CLOEXEC));
  size_t held = 0;
  while (fd >= 0) {
    const ssize_t got = read(fd, text + held, sizeof(text) - 1 - held);
    if (got <= 0) break;
    held += size_t(got);
    text[held] = '\0';
    char* line = text;
    for (char* end; (end = strchr(line, '\n')) != nullptr; line = end + 1) {
      *end = '\0';
      NoteMapping(line);
    }
    held -= size_t(line - text);
    memmove(text, line, held);
  }
  if (fd >= 0) close(fd);
}

bool LiesInLargeMapping(uint64_t begin, uint64_t end) {
  for (uint32_t i = 0; i < g_large.count; ++i) {
    if (begin >= g_large.mappings[i].begin && end <= g_large.mappings[i].end) return true;
  }
  return false;
}

bool Tell(const HiddenPages* pages, size_t count) {
  const char* at = reinterpret_cast<const char*>(pages);
  for (size_t left = count * sizeof(*pages); left > 0;) {
    const ssize_t sent = send(g_pages_socket, at, left, MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent <= 0) return false;
    at += sent;
    left -= size_t(sent);
  }
  return true;
}

// Takes out of `count` regions that the kernel has found what cr-checkpoint is to read. Returns how many are left; -1:
// cr-checkpoint is gone.
long HidePages(int fd, const ScanArguments& scan, long count) {
  const int process = ProcessOfPagemap(fd);
  if (process == 0) return count;
  if (process != g_large.process) ReadMappings(process);
  if (!LiesInLargeMapping(scan.start, scan.end)) return count;
  auto* const regions = reinterpret_cast<ScanRegion*>(scan.regions);
  HiddenPages told[128];
  size_t to_tell = 0;
  long left = 0;
  for (long i = 0; i < count; ++i) {
    if ((regions[i].categories & kPageIsGuard) != 0 || g_large.hidden >= kMostHidden) {
      regions[left++] = regions[i];
      continue;
    }
    // The kernel may find more than it says it has looked at. CRIU asks again from there.
    const uint64_t end = regions[i].end < scan.walk_end ? regions[i].end : scan.walk_end;
    if (regions[i].start >= end) break;
    ++g_large.hidden;
    told[to_tell].process = process;
    told[to_tell].address = regions[i].start;
    told[to_tell].pages = (end - regions[i].start) / kPageBytes;
    if (++to_tell < sizeof(told) / sizeof(told[0])) continue;
    if (!Tell(told, to_tell)) return -1;
    to_tell = 0;
  }
  return Tell(told, to_tell) ? left : -1;
}

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

// These are in place of the C library's.

extern "C" __attribute__((visibility("default"))) int ioctl(int fd, unsigned long request, ...) noexcept {
  va_list arguments;
  va_start(arguments, request);
  void* const argument = va_arg(arguments, void*);
  va_end(arguments);
  const long result = syscall(SYS_ioctl, fd, request, argument);
  if (request != kPagemapScan || result <= 0 || g_pages_socket < 0) return int(result);
  return int(HidePages(fd, *static_cast<const ScanArguments*>(argument), result));
}

extern "C" __attribute__((visibility("default"))) int getsockopt(int fd, int level, int option, void* value,
                                                                 socklen_t* bytes) noexcept {
  if (level == SOL_SOCKET && option == SO_DOMAIN && !NoteSocket(fd)) return -1;
  return int(syscall(SYS_getsockopt, fd, level, option, value, bytes));
}

extern "C" __attribute__((visibility("default"))) int setsockopt(int fd, int level, int option, const void* value,
                                                                 socklen_t bytes) noexcept {
  if (level == IPPROTO_TCP && option == TCP_REPAIR) KeepResetsOut(fd);
  return int(syscall(SYS_setsockopt, fd, level, option, value, bytes));
}

extern "C" __attribute__((visibility("default"))) ssize_t recvmsg(int fd, msghdr* message, int flags) {
  return ReceiveForCriu(fd, message, flags);
}

extern "C" __attribute__((visibility("default"))) ssize_t read(int fd, void* to, size_t bytes) {
  if (HoldsBackTerminal(fd)) {
    errno = EAGAIN;
    return -1;
  }
  return syscall(SYS_read, fd, to, bytes);
}

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
  if (request == PTRACE_DETACH) cuda_remote::checkpoint::RestoreOwnSettings(thread);
#ifdef __x86_64__
  const bool is_registers = (request == PTRACE_GETREGSET || request == PTRACE_SETREGSET) &&
                            reinterpret_cast<uintptr_t>(address) == NT_PRSTATUS;
  if (is_registers) {
    if (request == PTRACE_GETREGSET) cuda_remote::checkpoint::NoteOwnSettings(thread);
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
