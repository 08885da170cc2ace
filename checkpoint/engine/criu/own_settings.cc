// SPDX-License-Identifier: Apache-2.0
// With nothing but the C library's oldest functions: CRIU may have a C library of its own.
#include "checkpoint/engine/criu/own_settings.h"

#include <elf.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#ifdef __x86_64__
#include <sys/user.h>
#endif

namespace cuda_remote::checkpoint {
namespace {

#ifdef __x86_64__

constexpr uint64_t kPageBytes = 4096;
constexpr uint64_t kNoError = -4095ul;  // results from here on are errors
constexpr uint64_t kAsk = 0xffffffff;   // of personality(2)
constexpr uint64_t kAllSignals = ~uint64_t{0};
// Newer than the C library's headers (prctl(2)).
constexpr int kSetMdwe = 65, kGetMdwe = 66, kSetMemoryMerge = 67, kGetMemoryMerge = 68;
// Of MCL_FUTURE and MCL_ONFAULT; and the number of mlock2(2).
constexpr uint64_t kLater = 2, kWhenUsed = 4, kLockRange = 325, kLockWhenUsed = 1;
constexpr char kLockLater[] = "lock-later", kLockedWhenUsed[] = "locked-when-used";
// Settings that one call asks for, and one sets.
constexpr struct {
  const char* name;
  uint64_t usual;  // in a new process
  uint64_t ask[3], set[3];
  int value;  // which argument of `set` it is
} kSettings[] = {
    {"machine-checks", PR_MCE_KILL_DEFAULT, {SYS_prctl, PR_MCE_KILL_GET, 0}, {SYS_prctl, PR_MCE_KILL, 1}, 2},
    {"merge", 0, {SYS_prctl, kGetMemoryMerge, 0}, {SYS_prctl, kSetMemoryMerge, 0}, 1},
    {"write-or-execute", 0, {SYS_prctl, kGetMdwe, 0}, {SYS_prctl, kSetMdwe, 0}, 1},
    {"personality", 0, {SYS_personality, kAsk, 0}, {SYS_personality, 0, 0}, 0},
};

// System calls in another process, through its first thread.
class Calls {
 public:
  // The thread stands still with all of its state, and gets that back at the end.
  explicit Calls(int thread) : thread_(thread) {
    iovec set{&before_, sizeof(before_)};
    ok_ = Trace(PTRACE_GETREGSET, NT_PRSTATUS, &set) && set.iov_len == sizeof(before_) &&
          Trace(PTRACE_GETSIGMASK, sizeof(mask_), &mask_) && FindInstruction();
    uint64_t none = kAllSignals;
    ok_ = ok_ && Trace(PTRACE_SETSIGMASK, sizeof(none), &none);
  }
  ~Calls() {
    if (!ok_) return;
    iovec set{&before_, sizeof(before_)};
    Trace(PTRACE_SETREGSET, NT_PRSTATUS, &set);
    Trace(PTRACE_SETSIGMASK, sizeof(mask_), &mask_);
    // It came meanwhile, and was taken from the thread.
    if (stop_) syscall(SYS_tkill, thread_, SIGSTOP);
  }
  Calls(const Calls&) = delete;
  Calls& operator=(const Calls&) = delete;

  // What the kernel returns.
  uint64_t Do(uint64_t call, uint64_t a = 0, uint64_t b = 0, uint64_t c = 0, uint64_t d = 0, uint64_t e = 0,
              uint64_t f = 0) {
    user_regs_struct registers = before_;
    registers.orig_rax = kAllSignals;  // it is in no call
    registers.rip = instruction_;
    registers.rax = call;
    registers.rdi = a;
    registers.rsi = b;
    registers.rdx = c;
    registers.r10 = d;
    registers.r8 = e;
    registers.r9 = f;
    iovec set{&registers, sizeof(registers)};
    if (!ok_ || !Trace(PTRACE_SETREGSET, NT_PRSTATUS, &set) || !Step() || !Trace(PTRACE_GETREGSET, NT_PRSTATUS, &set)) {
      return kNoError;
    }
    return registers.rax;
  }

 private:
  bool Trace(long request, uint64_t address, void* data) {
    return syscall(SYS_ptrace, request, thread_, address, data) == 0;
  }

  bool Step() {
    for (uint64_t signal = 0;;) {
      int status = 0;
      if (!Trace(PTRACE_SINGLESTEP, 0, reinterpret_cast<void*>(signal))) return false;
      while (syscall(SYS_wait4, thread_, &status, __WALL, nullptr) != thread_) {
        if (errno != EINTR) return false;
      }
      if (!WIFSTOPPED(status)) return false;
      if (WSTOPSIG(status) == SIGTRAP && status >> 16 == 0) return true;
      stop_ = stop_ || WSTOPSIG(status) == SIGSTOP;
    }
  }

  // An instruction that makes a system call: the kernel's own code in each process has some.
  bool FindInstruction() {
    char path[64];
    snprintf(path, sizeof(path), "/proc/%d/auxv", thread_);
    const int facts = int(syscall(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC));
    uint64_t fact[2], begin = 0;
    while (facts >= 0 && read(facts, fact, sizeof(fact)) == ssize_t(sizeof(fact))) {
      if (fact[0] == AT_SYSINFO_EHDR) begin = fact[1];
    }
    if (facts >= 0) close(facts);
    static unsigned char code[2 * kPageBytes];
    iovec here{code, sizeof(code)}, there[2];
    for (uint64_t i = 0; i < 2; ++i) there[i] = {reinterpret_cast<void*>(begin + i * kPageBytes), kPageBytes};
    // The second page may be missing.
    const long got = begin != 0 ? syscall(SYS_process_vm_readv, thread_, &here, 1, there, 2, 0) : 0;
    for (long i = 0; i + 1 < got; ++i) {
      if (code[i] != 0x0f || code[i + 1] != 0x05) continue;
      instruction_ = begin + uint64_t(i);
      return true;
    }
    return false;
  }

  const int thread_;
  bool ok_ = false, stop_ = false;
  user_regs_struct before_;
  uint64_t mask_ = 0, instruction_ = 0;
};

int g_note = -1;
// What was saved: lines.
char* g_saved = nullptr;

int Descriptor(const char* variable) {
  const char* const number = getenv(variable);
  return number ? atoi(number) : -1;
}

__attribute__((constructor)) void FindDescriptors() {
  g_note = Descriptor(kNoteSettingsVariable);
  const int saved = Descriptor(kOwnSettingsVariable);
  const off_t bytes = saved < 0 ? 0 : lseek(saved, 0, SEEK_END);
  if (bytes <= 0) return;
  g_saved = static_cast<char*>(calloc(size_t(bytes) + 1, 1));
  if (g_saved && pread(saved, g_saved, size_t(bytes), 0) != bytes) g_saved[0] = '\0';
}

void Note(int process, const char* name, uint64_t value, uint64_t second = 0) {
  char line[128];
  const int bytes = snprintf(line, sizeof(line), "%d %s %lx %lx\n", process, name, value, second);
  // An image without it would be incomplete, and with CRIU's end there is none.
  if (write(g_note, line, size_t(bytes)) != bytes) abort();
}

// A number in /proc/PID/status; 0 if there is none.
uint64_t StatusNumber(int process, const char* name) {
  char path[64], line[256];
  snprintf(path, sizeof(path), "/proc/%d/status", process);
  FILE* const status = fopen(path, "re");
  uint64_t number = 0;
  while (status && fgets(line, sizeof(line), status)) {
    if (strncmp(line, name, strlen(name)) == 0) number = strtoul(line + strlen(name), nullptr, 10);
  }
  if (status) fclose(status);
  return number;
}

void NoteLockedWhenUsed(int process) {
  char path[64], line[4096];
  snprintf(path, sizeof(path), "/proc/%d/smaps", process);
  FILE* const maps = fopen(path, "re");
  uint64_t begin = 0, end = 0;
  while (maps && fgets(line, sizeof(line), maps)) {
    uint64_t first, last;
    if (sscanf(line, "%lx-%lx ", &first, &last) == 2) {
      begin = first;
      end = last;
    } else if (strncmp(line, "VmFlags:", 8) == 0 && strstr(line, " lf") != nullptr) {
      Note(process, kLockedWhenUsed, begin, end - begin);
    }
  }
  if (maps) fclose(maps);
}

// The kernel does not say it, so the process maps a page, and is asked how much of its memory is locked.
void NoteLockLater(int process, Calls* calls) {
  constexpr char kLocked[] = "VmLck:";
  const uint64_t before = StatusNumber(process, kLocked);
  const uint64_t page =
      calls->Do(SYS_mmap, 0, kPageBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, uint64_t(-1), 0);
  if (page >= kNoError) return;
  if (StatusNumber(process, kLocked) > before) {
    // A page that is locked only when it is used is not there yet.
    uint64_t entry = 0;
    char path[64];
    snprintf(path, sizeof(path), "/proc/%d/pagemap", process);
    const int pagemap = int(syscall(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC));
    const bool known = pagemap >= 0 && pread(pagemap, &entry, sizeof(entry),
                                             off_t(page / kPageBytes * sizeof(entry))) == ssize_t(sizeof(entry));
    if (pagemap >= 0) close(pagemap);
    Note(process, kLockLater, kLater | (known && entry >> 63 == 0 ? kWhenUsed : 0));
  }
  calls->Do(SYS_munmap, page, kPageBytes);
}

// One line of what was saved, if it is of this process.
struct Line {
  char name[32];
  uint64_t value = 0, second = 0;
  bool Read(const char* text, int wanted) {
    int process = 0;
    return sscanf(text, "%d %31s %lx %lx", &process, name, &value, &second) == 4 && process == wanted;
  }
};

void Set(const Line& line, Calls* calls) {
  if (strcmp(line.name, kLockLater) == 0) calls->Do(SYS_mlockall, line.value);
  if (strcmp(line.name, kLockedWhenUsed) == 0) calls->Do(kLockRange, line.value, line.second, kLockWhenUsed);
  for (const auto& setting : kSettings) {
    if (strcmp(line.name, setting.name) != 0) continue;
    uint64_t arguments[] = {setting.set[1], setting.set[2], 0};
    arguments[setting.value] = line.value;
    calls->Do(setting.set[0], arguments[0], arguments[1], arguments[2]);
  }
}

const char* NextLine(const char* text) {
  const char* const end = strchr(text, '\n');
  return end ? end + 1 : text + strlen(text);
}

#endif

}  // namespace

#ifdef __x86_64__

void NoteOwnSettings(int thread) {
  static unsigned char noted[1 << 19];  // a bit for each number that the kernel gives
  if (g_note < 0 || thread <= 0 || thread >= int(sizeof(noted)) * 8) return;
  if ((noted[thread / 8] >> thread % 8 & 1) != 0) return;
  noted[thread / 8] = static_cast<unsigned char>(noted[thread / 8] | 1 << thread % 8);
  if (StatusNumber(thread, "Tgid:") != uint64_t(thread)) return;
  Calls calls(thread);
  for (const auto& setting : kSettings) {
    const uint64_t value = calls.Do(setting.ask[0], setting.ask[1], setting.ask[2]);
    if (value < kNoError && value != setting.usual) Note(thread, setting.name, value);
  }
  NoteLockLater(thread, &calls);
  if (StatusNumber(thread, "VmLck:") > 0) NoteLockedWhenUsed(thread);
}

void RestoreOwnSettings(int thread) {
  Line line;
  const char* text = g_saved ? g_saved : "";
  while (*text != '\0' && !line.Read(text, thread)) text = NextLine(text);
  if (*text == '\0') return;
  Calls calls(thread);
  for (; *text != '\0'; text = NextLine(text)) {
    if (line.Read(text, thread)) Set(line, &calls);
  }
}

#else

void NoteOwnSettings(int) {}
void RestoreOwnSettings(int) {}

#endif

}  // namespace cuda_remote::checkpoint
