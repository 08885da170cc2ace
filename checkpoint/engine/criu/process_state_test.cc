// SPDX-License-Identifier: Apache-2.0
// What the kernel keeps for a process, and a restart must bring back: timers, prctl(2), memory settings, signals,
// scheduling, locks, watches, files of /proc. Each child of a subject has one value of everything, notes what the
// kernel says of it, and compares that after each of two restarts. Needs root and a CRIU that works (tools/setup-criu).
//
// docs/limits.md lists what does not come back.

#include <linux/ioprio.h>
#include <linux/securebits.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/fanotify.h>
#include <sys/file.h>
#include <sys/inotify.h>
#include <sys/mman.h>
#include <sys/personality.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/timerfd.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <sstream>
#include <thread>
#include <utility>

#include "checkpoint/engine/criu/testing/saved_tree.h"
#include "proto/base/mappings.h"

namespace cuda_remote::checkpoint {
namespace {

constexpr size_t kPage = 4096;
constexpr long kSecond = 1000000000;
// Newer than the C library's headers (prctl(2)).
constexpr int kSetMdwe = 65, kGetMdwe = 66, kSetMemoryMerge = 67, kGetMemoryMerge = 68;

// Something that the kernel keeps, and how it is now.
struct State {
  std::string name;
  std::function<std::string()> value;
};
using States = std::vector<State>;
// Makes the state of one child, and says what to compare.
using MakeStates = std::function<States()>;

template <typename T>
std::string Text(const T& value) {
  std::ostringstream text;
  text << value;
  return text.str();
}

std::string Result(long result) { return result < 0 ? strerror(errno) : Text(result); }

std::string Path(const std::string& name) { return g_folder + "/" + name; }

int NewFile(const std::string& name, int flags = O_RDWR) {
  const int fd = open(Path(name).c_str(), flags | O_CREAT | O_CLOEXEC, 0600);
  MUST(fd >= 0 && ftruncate(fd, 4 * kPage) == 0);
  return fd;
}

// A child for each of `makers`, which must all find their states again.
void Compare(const std::vector<MakeStates>& makers) {
  int ready[2];
  MUST(pipe2(ready, O_CLOEXEC) == 0);
  std::vector<pid_t> children;
  for (const MakeStates& make : makers) {
    children.push_back(Child([&] {
      const States states = make();
      std::vector<std::string> before;
      for (const State& state : states) before.push_back(state.value());
      MUST(write(ready[1], "x", 1) == 1);
      while (!Exists(Path("go"))) usleep(5000);
      bool same = true;
      for (size_t i = 0; i < states.size(); ++i) {
        const std::string now = states[i].value();
        if (now == before[i]) continue;
        same = false;
        std::ofstream(Path("failed"), std::ios::app) << "child " << children.size() << ", " << states[i].name << ":\n  "
                                                     << before[i] << "\nis now\n  " << now << "\n";
      }
      _exit(same ? 0 : 1);
    }));
    char byte;
    pollfd waiting{ready[0], POLLIN, 0};
    MUST(poll(&waiting, 1, 30000) == 1 && read(ready[0], &byte, 1) == 1);
  }
  Pause();
  bool same = true;
  for (const pid_t child : children) {
    int status = -1;
    MUST(waitpid(child, &status, 0) == child);
    if (WIFSIGNALED(status))
      std::ofstream(Path("failed"), std::ios::app) << "a child died of signal " << WTERMSIG(status) << "\n";
    same = same && WIFEXITED(status) && WEXITSTATUS(status) == 0;
  }
  if (!same) _exit(1);
}

// A line of a file of /proc that begins so.
std::string Line(const std::string& path, const std::string& begin) {
  std::ifstream in(path);
  for (std::string line; std::getline(in, line);) {
    if (line.compare(0, begin.size(), begin) == 0) return line;
  }
  return "no " + begin + " in " + path;
}

std::string Whole(const std::string& path) {
  std::ifstream in(path);
  return in ? std::string(std::istreambuf_iterator<char>(in), {}) : "no " + path;
}

// A thread that stays, after it has done `work`.
pid_t Stay(const std::function<void()>& work) {
  auto* const number = new std::atomic<pid_t>(0);
  std::thread([work, number] {
    work();
    *number = pid_t(syscall(SYS_gettid));
    for (;;) pause();
  }).detach();
  while (*number == 0) usleep(1000);
  return *number;
}

// prctl(2).

State Control(const std::string& name, int option) {
  return {name, [=] { return Result(prctl(option, 0, 0, 0, 0)); }};
}

State ControlOut(const std::string& name, int option) {
  return {name, [=] {
            int value = 0;
            const int result = prctl(option, &value, 0, 0, 0);
            return result < 0 ? Result(result) : Text(value);
          }};
}

std::string NameOf(pid_t thread) { return Whole("/proc/self/task/" + Text(thread) + "/comm"); }

MakeStates Controls(bool set, unsigned long slack, int signal, int machine_check) {
  return [=]() -> States {
    MUST(prctl(PR_SET_NAME, set ? "a b) c" : "plain", 0, 0, 0) == 0);
    const pid_t thread = Stay([=] {
      prctl(PR_SET_NAME, "thread (2", 0, 0, 0);
      prctl(PR_SET_TIMERSLACK, slack + 1, 0, 0, 0);
    });
    prctl(PR_SET_TIMERSLACK, slack, 0, 0, 0);
    prctl(PR_SET_PDEATHSIG, signal, 0, 0, 0);
    prctl(PR_MCE_KILL, PR_MCE_KILL_SET, machine_check, 0, 0);
    if (set) {
      prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
      prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0);
      prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0);
      prctl(PR_SET_SECUREBITS, SECBIT_NO_SETUID_FIXUP | SECBIT_KEEP_CAPS, 0, 0, 0);
      prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);
      prctl(PR_SET_IO_FLUSHER, 1, 0, 0, 0);
      prctl(PR_SET_TSC, PR_TSC_ENABLE, 0, 0, 0);
      prctl(kSetMemoryMerge, 1, 0, 0, 0);
      prctl(kSetMdwe, 1, 0, 0, 0);
      prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
    }
    return {{"name", [] { return NameOf(getpid()); }},
            {"name of a thread", [=] { return NameOf(thread); }},
            {"timer slack of a thread", [=] { return Whole("/proc/" + Text(thread) + "/timerslack_ns"); }},
            Control("timer slack", PR_GET_TIMERSLACK),
            ControlOut("parent-death signal", PR_GET_PDEATHSIG),
            ControlOut("subreaper", PR_GET_CHILD_SUBREAPER),
            ControlOut("time stamps", PR_GET_TSC),
            Control("machine checks", PR_MCE_KILL_GET),
            Control("huge pages", PR_GET_THP_DISABLE),
            Control("kept capabilities", PR_GET_KEEPCAPS),
            Control("secure bits", PR_GET_SECUREBITS),
            Control("dumpable", PR_GET_DUMPABLE),
            Control("flusher", PR_GET_IO_FLUSHER),
            Control("merging", kGetMemoryMerge),
            Control("write or execute", kGetMdwe),
            Control("no new rights", PR_GET_NO_NEW_PRIVS)};
  };
}

void ControlsOfProcesses() {
  Compare({Controls(false, 50000, 0, PR_MCE_KILL_DEFAULT), Controls(true, 1, SIGUSR1, PR_MCE_KILL_EARLY),
           Controls(true, 123456789, SIGKILL, PR_MCE_KILL_LATE), Controls(false, 50001, SIGTERM, PR_MCE_KILL_LATE)});
}

// Scheduling and limits.

std::string Attributes(pid_t thread) {
  uint32_t words[16] = {};
  if (syscall(SYS_sched_getattr, thread, words, sizeof(words), 0) != 0) return strerror(errno);
  std::string text;
  for (const uint32_t word : words) text += " " + Text(word);
  return text;
}

MakeStates Scheduling(int policy, int priority, int nice, int io, int out_of_memory, const std::string& dumped,
                      rlim_t files) {
  return [=]() -> States {
    sched_param parameters{};
    parameters.sched_priority = priority;
    const auto set = [=](int more) {
      setpriority(PRIO_PROCESS, id_t(syscall(SYS_gettid)), nice + more);
      syscall(SYS_ioprio_set, IOPRIO_WHO_PROCESS, 0, io);
      sched_setscheduler(0, policy, &parameters);
    };
    const pid_t thread = Stay([=] { set(1); });
    set(0);
    std::ofstream("/proc/self/oom_score_adj") << out_of_memory;
    std::ofstream("/proc/self/coredump_filter") << dumped;
    const rlimit limit{files, files + 1}, none{0, 0};
    MUST(setrlimit(RLIMIT_NOFILE, &limit) == 0 && setrlimit(RLIMIT_CORE, &none) == 0);
    personality(files % 2 == 0 ? ADDR_NO_RANDOMIZE : 0);
    umask(files % 2 == 0 ? 0137 : 022);
    MUST(chdir(files % 2 == 0 ? "/proc" : "/") == 0);
    return {
        {"scheduling", [] { return Attributes(0); }},
        {"scheduling of a thread", [=] { return Attributes(thread); }},
        {"input and output", [] { return Result(syscall(SYS_ioprio_get, IOPRIO_WHO_PROCESS, 0)); }},
        {"input and output of a thread", [=] { return Result(syscall(SYS_ioprio_get, IOPRIO_WHO_PROCESS, thread)); }},
        {"out of memory", [] { return Whole("/proc/self/oom_score_adj"); }},
        {"core dumps", [] { return Whole("/proc/self/coredump_filter"); }},
        {"limits", [] { return Whole("/proc/self/limits"); }},
        {"personality", [] { return Result(personality(0xffffffff)); }},
        {"umask", [] { return Line("/proc/self/status", "Umask"); }},
        {"working directory", [] { return ReadLink("/proc/self/cwd"); }},
        {"capabilities", [] { return Line("/proc/self/status", "CapPrm") + Line("/proc/self/status", "CapBnd"); }}};
  };
}

void SchedulingOfProcesses() {
  Compare({Scheduling(SCHED_OTHER, 0, 0, 0, 0, "0x33", 512), Scheduling(SCHED_BATCH, 0, 5, 0x4003, 300, "0x7f", 601),
           Scheduling(SCHED_IDLE, 0, 3, 0x6000, 1000, "0x1", 640),
           Scheduling(SCHED_OTHER | SCHED_RESET_ON_FORK, 0, 7, 0x4007, 7, "0", 701)});
}

// Memory.

std::string FlagsAt(const void* address) {
  std::ifstream in("/proc/self/smaps");
  const auto wanted = reinterpret_cast<unsigned long>(address);
  bool inside = false;
  for (std::string line; std::getline(in, line);) {
    unsigned long begin, end;
    if (sscanf(line.c_str(), "%lx-%lx ", &begin, &end) == 2) inside = wanted >= begin && wanted < end;
    if (!inside || line.compare(0, 8, "VmFlags:") != 0) continue;
    std::istringstream words(line.substr(8));
    std::string text;
    // What the kernel notes of accesses, and what each process may have.
    for (std::string word; words >> word;) text += word == "sd" || word == "ac" || word == "me" ? "" : word + " ";
    return text;
  }
  return "not mapped";
}

std::string NameAt(const void* address) {
  for (const Mapping& mapping : MappingsOf("/proc/self")) {
    if (mapping.begin == reinterpret_cast<uint64_t>(address)) return mapping.name;
  }
  return "not mapped";
}

char* Map(size_t pages, int flags = MAP_PRIVATE, int fd = -1) {
  void* const memory =
      mmap(nullptr, pages * kPage, PROT_READ | PROT_WRITE, flags | (fd < 0 ? MAP_ANONYMOUS : 0), fd, 0);
  MUST(memory != MAP_FAILED);
  // The next one does not become one with it.
  MUST(mmap(static_cast<char*>(memory) + (pages - 1) * kPage, kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED,
            -1, 0) != MAP_FAILED);
  return static_cast<char*>(memory);
}

void AddFlags(const std::string& name, char* memory, States* states) {
  memory[0] = 1;
  states->push_back({name, [memory] { return FlagsAt(memory); }});
}

States Advice() {
  States states;
  const std::pair<const char*, int> kinds[] = {{"sequential", MADV_SEQUENTIAL},     {"random", MADV_RANDOM},
                                               {"not for children", MADV_DONTFORK}, {"not dumped", MADV_DONTDUMP},
                                               {"merged", MADV_MERGEABLE},          {"huge", MADV_HUGEPAGE},
                                               {"not huge", MADV_NOHUGEPAGE},       {"wiped", MADV_WIPEONFORK}};
  const int file = NewFile("advised");
  for (const auto& [name, advice] : kinds) {
    char* const memory = Map(600);
    MUST(madvise(memory, 590 * kPage, advice) == 0 || errno == EINVAL);
    AddFlags(name, memory, &states);
    char* const shared = Map(3, MAP_SHARED);
    if (madvise(shared, 2 * kPage, advice) == 0) AddFlags(std::string(name) + ", shared", shared, &states);
    char* const mapped = Map(3, MAP_SHARED, file);
    if (madvise(mapped, 2 * kPage, advice) == 0) AddFlags(std::string(name) + ", a file", mapped, &states);
  }
  AddFlags("without swap", Map(4, MAP_PRIVATE | MAP_NORESERVE), &states);
  AddFlags("growing", Map(4, MAP_PRIVATE | MAP_GROWSDOWN), &states);
  for (const char* const name : {"one", "another name"}) {
    char* const memory = Map(5);
    prctl(PR_SET_VMA, PR_SET_VMA_ANON_NAME, memory, 4 * kPage, name);
    memory[0] = 1;
    states.push_back({std::string("name ") + name, [memory] { return NameAt(memory); }});
  }
  return states;
}

// `all`: flags of mlockall(2); 0: some mappings only.
MakeStates Locked(int all) {
  return [=] {
    States states;
    MUST(all == 0 || mlockall(all) == 0);
    char* const plain = Map(40);
    char* const locked = Map(40);
    char* const when_used = Map(40);
    char* const by_flag = Map(10, MAP_PRIVATE | MAP_LOCKED);
    if (all == 0) {
      MUST(mlock(locked, 20 * kPage) == 0 && mlock2(when_used, 39 * kPage, MLOCK_ONFAULT) == 0);
    }
    AddFlags("plain", plain, &states);
    AddFlags("locked", locked, &states);
    AddFlags("behind locked", locked + 20 * kPage, &states);
    AddFlags("locked when used", when_used, &states);
    AddFlags("locked by its flag", by_flag, &states);
    states.push_back({"a new mapping", [] {
                        char* const fresh = Map(2);
                        const std::string flags = FlagsAt(fresh);
                        munmap(fresh, 2 * kPage);
                        return flags;
                      }});
    return states;
  };
}

void AdvisedMemory() { Compare({Advice}); }

void LockedMemory() {
  Compare({Locked(0), Locked(MCL_CURRENT), Locked(MCL_FUTURE), Locked(MCL_CURRENT | MCL_FUTURE),
           Locked(MCL_FUTURE | MCL_ONFAULT), Locked(MCL_CURRENT | MCL_FUTURE | MCL_ONFAULT)});
}

// Signals.

std::string ActionOf(int number) {
  struct sigaction action = {};
  if (sigaction(number, nullptr, &action) != 0) return strerror(errno);
  std::string text = Text(action.sa_flags) + " " + Text(reinterpret_cast<void*>(action.sa_handler));
  for (int other = 1; other < NSIG; ++other) text += sigismember(&action.sa_mask, other) == 1 ? "1" : "0";
  return text;
}

std::string SignalsOf(pid_t thread) {
  std::string text;
  for (const char* const mask : {"SigQ", "SigPnd", "ShdPnd", "SigBlk", "SigIgn", "SigCgt"})
    text += Line("/proc/self/task/" + Text(thread) + "/status", mask).substr(0, mask[3] == 'Q' ? 0 : 80) + " ";
  return text;
}

States Signals() {
  struct sigaction action = {};
  for (const int number : {SIGUSR1, SIGHUP, SIGPIPE, SIGCHLD, SIGRTMIN + 3, SIGRTMAX}) {
    action.sa_handler = number == SIGPIPE ? SIG_IGN : [](int) {};
    action.sa_flags = number == SIGHUP ? SA_RESTART | SA_ONSTACK : number == SIGCHLD ? SA_NOCLDSTOP | SA_NOCLDWAIT : 0;
    sigaddset(&action.sa_mask, number == SIGHUP ? SIGTERM : SIGRTMIN);
    MUST(sigaction(number, &action, nullptr) == 0);
  }
  const auto block = [](std::initializer_list<int> numbers) {
    sigset_t mask;
    sigemptyset(&mask);
    for (const int number : numbers) sigaddset(&mask, number);
    pthread_sigmask(SIG_SETMASK, &mask, nullptr);
  };
  const pid_t thread = Stay([=] {
    // What waits for the process waits only while every thread blocks it.
    block({SIGUSR1, SIGUSR2, SIGRTMIN + 5, SIGRTMIN + 6});
    for (const int value : {1, 2}) pthread_sigqueue(pthread_self(), SIGRTMIN + 6, sigval{value});
  });
  block({SIGUSR1, SIGRTMIN + 5, SIGWINCH, SIGURG});
  for (const int value : {5, 7, 5}) sigqueue(getpid(), SIGRTMIN + 5, sigval{value});
  kill(getpid(), SIGUSR1);
  static char stack[1 << 16];
  const stack_t other{stack, 0, sizeof(stack)};
  MUST(sigaltstack(&other, nullptr) == 0);
  return {{"masks", [] { return SignalsOf(getpid()); }},
          {"masks of a thread", [=] { return SignalsOf(thread); }},
          {"actions",
           [] {
             std::string text;
             for (int number = 1; number < NSIG; ++number) text += ActionOf(number) + "\n";
             return text;
           }},
          {"stack",
           [] {
             stack_t now = {};
             sigaltstack(nullptr, &now);
             return Text(now.ss_sp) + " " + Text(now.ss_size) + " " + Text(now.ss_flags);
           }},
          {"queue", [] {
             static std::string queue;
             // Once: it is read here.
             if (!Exists(Path("go"))) return std::string("SIGRTMIN+5: 5 7 5");
             sigset_t mask;
             sigemptyset(&mask);
             sigaddset(&mask, SIGRTMIN + 5);
             const timespec none = {};
             queue = "SIGRTMIN+5:";
             for (siginfo_t info; sigtimedwait(&mask, &info, &none) > 0;) queue += " " + Text(info.si_value.sival_int);
             return queue;
           }}};
}

void PendingSignals() { Compare({Signals}); }

// Files.

// What fdinfo says, but for numbers that a restart may change.
std::string InfoOf(int fd) {
  std::ifstream in("/proc/self/fdinfo/" + Text(fd));
  std::string text;
  std::set<std::string> watched;  // in any order
  for (std::string line; std::getline(in, line);) {
    const bool changes = line.compare(0, 6, "mnt_id") == 0 || line.compare(0, 4, "ino:") == 0 ||
                         line.compare(0, 8, "it_value") == 0 || line.compare(0, 5, "ticks") == 0 ||
                         line.compare(0, 7, "settime") == 0 || line.compare(0, 10, "eventfd-id") == 0;
    const size_t inode = line.compare(0, 4, "tfd:") == 0 ? line.find(" pos") : std::string::npos;
    if (inode != std::string::npos) {
      watched.insert(line.substr(0, inode));
    } else if (!changes) {
      text += line + "\n";
    }
  }
  for (const std::string& line : watched) text += line + "\n";
  return text;
}

std::string OwnerOf(int fd) {
  f_owner_ex owner = {};
  const int result = fcntl(fd, F_GETOWN_EX, &owner);
  return Result(result) + " " + Text(owner.type) + " " + Text(owner.pid) + " " + Text(fcntl(fd, F_GETSIG));
}

void AddFile(const std::string& name, int fd, States* states) {
  MUST(fd >= 0);
  states->push_back({name, [fd] {
                       return InfoOf(fd) + OwnerOf(fd) + " " + Text(fcntl(fd, F_GETFD)) + " " +
                              Text(fcntl(fd, F_GETFL)) + " " + Text(fcntl(fd, F_GETLEASE)) + " " +
                              Result(fcntl(fd, F_GET_SEALS));
                     }});
}

States Files() {
  States states;
  const int plain = NewFile("plain"), appended = NewFile("appended", O_WRONLY | O_APPEND | O_NOATIME);
  MUST(lseek(plain, 4711, SEEK_SET) == 4711);
  AddFile("plain", plain, &states);
  AddFile("appended", appended, &states);
  AddFile("position of a copy", fcntl(plain, F_DUPFD, 100), &states);
  AddFile("folder", open("/", O_RDONLY), &states);
  AddFile("name only", open(Path("plain").c_str(), O_PATH | O_CLOEXEC), &states);
  AddFile("synchronous", open(Path("plain").c_str(), O_RDWR | O_SYNC | O_NONBLOCK), &states);
  for (const unsigned seals : {0u, unsigned(F_SEAL_SHRINK), unsigned(F_SEAL_GROW | F_SEAL_WRITE | F_SEAL_SEAL)}) {
    const int memory = memfd_create("sealed", MFD_ALLOW_SEALING | (seals == 0 ? MFD_CLOEXEC : 0));
    MUST(ftruncate(memory, 3 * kPage) == 0 && fcntl(memory, F_ADD_SEALS, seals) == 0);
    AddFile("memory with seals " + Text(seals), memory, &states);
  }
  // Owners of signals.
  int ends[2][2];
  MUST(pipe2(ends[0], O_CLOEXEC) == 0 && pipe2(ends[1], O_NONBLOCK) == 0);
  const f_owner_ex owners[] = {{F_OWNER_TID, getpid()}, {F_OWNER_PID, getppid()}, {F_OWNER_PGRP, getpgrp()}};
  for (int i = 0; i < 3; ++i) {
    const int fd = ends[i / 2][i % 2];
    MUST(fcntl(fd, F_SETOWN_EX, &owners[i]) == 0 && fcntl(fd, F_SETSIG, i == 1 ? 0 : SIGRTMIN + i) == 0);
    if (i != 2) MUST(fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_ASYNC) == 0);
    AddFile("owner " + Text(i), fd, &states);
  }
  // Locks.
  for (const short type : {short(F_RDLCK), short(F_WRLCK)}) {
    const std::string name = "lock" + Text(type);
    struct flock lock = {};
    lock.l_type = type;
    lock.l_start = 100;
    lock.l_len = type == F_RDLCK ? 50 : 0;
    const int posix = NewFile(name + "p"), open_file = NewFile(name + "o"), whole = NewFile(name + "w");
    const int leased = open(Path(name + "l").c_str(), O_RDONLY | O_CREAT, 0600);
    MUST(fcntl(posix, F_SETLK, &lock) == 0 && fcntl(open_file, F_OFD_SETLK, &lock) == 0);
    MUST(flock(whole, type == F_RDLCK ? LOCK_SH : LOCK_EX) == 0 && fcntl(leased, F_SETLEASE, type) == 0);
    AddFile(name + ", POSIX", posix, &states);
    AddFile(name + ", of an open file", open_file, &states);
    AddFile(name + ", of a whole file", whole, &states);
    AddFile(name + ", a lease", leased, &states);
  }
  for (const uint64_t count : {uint64_t{0}, uint64_t{7}, uint64_t{0xfffffffe}}) {
    const int events = eventfd(0, EFD_NONBLOCK);
    MUST(count == 0 || write(events, &count, sizeof(count)) == sizeof(count));
    AddFile("events " + Text(count), events, &states);
  }
  for (const int number : {SIGUSR1, SIGRTMAX}) {
    sigset_t mask;
    sigemptyset(&mask);
    sigaddset(&mask, number);
    AddFile("signals " + Text(number), signalfd(-1, &mask, SFD_CLOEXEC), &states);
  }
  // Watches.
  const int watches = inotify_init1(IN_NONBLOCK), removed = inotify_init1(0);
  for (const uint32_t mask :
       {uint32_t(IN_MODIFY), uint32_t(IN_ALL_EVENTS), uint32_t(IN_CLOSE_WRITE | IN_MOVE_SELF), uint32_t(IN_CREATE)}) {
    const std::string name = "watched" + Text(mask);
    close(NewFile(name));
    MUST(inotify_add_watch(watches, Path(name).c_str(), mask) > 0);
  }
  const int gone = inotify_add_watch(removed, Path("plain").c_str(), IN_MODIFY);
  MUST(inotify_add_watch(removed, Path("appended").c_str(), IN_ATTRIB) > gone && inotify_rm_watch(removed, gone) == 0);
  char ignored[4096];
  MUST(read(removed, ignored, sizeof(ignored)) > 0);
  AddFile("watches", watches, &states);
  AddFile("watches, one removed", removed, &states);
  const int marks = fanotify_init(FAN_CLASS_NOTIF | FAN_NONBLOCK, O_RDONLY);
  if (marks >= 0) {
    MUST(fanotify_mark(marks, FAN_MARK_ADD, FAN_MODIFY | FAN_CLOSE_WRITE, AT_FDCWD, Path("lock0p").c_str()) == 0);
    AddFile("marks", marks, &states);
  }
  // Queues of events.
  const int inner = epoll_create1(0), outer = epoll_create1(EPOLL_CLOEXEC);
  int count = 0;
  for (const uint32_t events : {uint32_t(EPOLLIN), uint32_t(EPOLLOUT | EPOLLET), uint32_t(EPOLLIN | EPOLLONESHOT),
                                uint32_t(EPOLLIN | EPOLLEXCLUSIVE), uint32_t(EPOLLPRI | EPOLLRDHUP)}) {
    epoll_event event{events, {}};
    event.data.u64 = 0xfeedfacecafe0000 + uint64_t(count++);
    const int watched = eventfd(0, EFD_NONBLOCK);
    MUST(epoll_ctl(inner, EPOLL_CTL_ADD, watched, &event) == 0);
  }
  epoll_event event{EPOLLIN, {}};
  event.data.fd = inner;
  MUST(epoll_ctl(outer, EPOLL_CTL_ADD, inner, &event) == 0);
  AddFile("epoll", inner, &states);
  AddFile("outer epoll", outer, &states);
  // What /proc has.
  for (const char* const name :
       {"/proc/self/status", "/proc/self/fd", "/proc/self/task", "/proc/self/mem", "/proc/meminfo",
        "/proc/sys/kernel/hostname", "/proc/self/net/dev", "/proc/self", "/proc/thread-self/comm", "/proc/1/status"}) {
    const int fd = open(name, O_RDONLY);
    MUST(fd >= 0);
    states.push_back({name, [fd] {
                        char byte;
                        const ssize_t got = pread(fd, &byte, 1, 0);
                        return ReadLink("/proc/self/fd/" + Text(fd)) + " " + (got < 0 ? strerror(errno) : "");
                      }});
  }
  return states;
}

void OpenFiles() { Compare({Files}); }

// Timers.

// Whether a timer that counts in `count` goes on with its period after the restart, and not much faster. Load makes it
// seem slower.
State GoesOn(const std::string& name, std::function<uint64_t()> count, long period_ns) {
  return {name, [=]() -> std::string {
            if (!Exists(Path("go"))) return "goes on";
            timespec begin, now;
            clock_gettime(CLOCK_MONOTONIC, &begin);
            const uint64_t before = count();
            uint64_t ran = 0;
            double passed = 0;
            while (ran < 5 && passed < 20) {
              usleep(1000);
              clock_gettime(CLOCK_MONOTONIC, &now);
              passed = double(now.tv_sec - begin.tv_sec) + 1e-9 * double(now.tv_nsec - begin.tv_nsec);
              ran = count() - before;
            }
            if (ran < 5) return "ran out " + Text(ran) + " times";
            return double(ran) > 2 * passed * double(kSecond) / double(period_ns) + 20 ? "too often" : "goes on";
          }};
}

void AddTimerFile(int clock, long period, int flags, bool blocks, States* states) {
  const int fd = timerfd_create(clock, TFD_CLOEXEC | (blocks ? 0 : TFD_NONBLOCK));
  itimerspec times = {{period / kSecond, period % kSecond}, {period / kSecond, period % kSecond}};
  if ((flags & TFD_TIMER_ABSTIME) != 0) {
    clock_gettime(clock, &times.it_value);
    times.it_value.tv_sec += 1;
  }
  MUST(fd >= 0 && timerfd_settime(fd, flags, &times, nullptr) == 0);
  const std::string name = "timer of clock " + Text(clock) + ", " + Text(period) + " ns" + (flags ? ", absolute" : "");
  auto* const count = new std::atomic<uint64_t>(0);
  if (blocks) {
    Stay([=] {
      std::thread([=] {
        for (uint64_t more; read(fd, &more, sizeof(more)) == sizeof(more);) *count += more;
      }).detach();
    });
    states->push_back(GoesOn(
        name + ", a thread waits", [=] { return count->load(); }, period));
    return;
  }
  const auto read_all = [=] {
    uint64_t more = 0;
    if (read(fd, &more, sizeof(more)) == sizeof(more)) *count += more;
    return count->load();
  };
  states->push_back(GoesOn(name, read_all, period));
  states->push_back({name + ": what /proc says", [=] { return InfoOf(fd); }});
}

States TimerFiles() {
  States states;
  for (const int clock : {CLOCK_MONOTONIC, CLOCK_REALTIME, CLOCK_BOOTTIME}) {
    for (const long period : {1000000L, 5000000L, 50000000L, 200000000L, 1 * kSecond}) {
      AddTimerFile(clock, period, 0, false, &states);
      AddTimerFile(clock, period, 0, true, &states);
    }
    AddTimerFile(clock, 20000000, TFD_TIMER_ABSTIME, false, &states);
  }
  // One that is off, one that has run out once and was not read, and one for later.
  const itimerspec off = {}, once = {{0, 0}, {0, 1000}}, late = {{0, 0}, {5000, 0}};
  for (const itimerspec& times : {off, once, late}) {
    const int fd = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK);
    MUST(timerfd_settime(fd, 0, &times, nullptr) == 0);
    usleep(2000);
    states.push_back({"timer for " + Text(times.it_value.tv_sec) + " s " + Text(times.it_value.tv_nsec), [=] {
                        itimerspec now = {};
                        timerfd_gettime(fd, &now);
                        return InfoOf(fd) + Line("/proc/self/fdinfo/" + Text(fd), "ticks") +
                               (now.it_value.tv_sec > 4900 ? " late"
                                : now.it_value.tv_sec > 0  ? " soon"
                                                           : " off");
                      }});
  }
  return states;
}

std::map<int, std::atomic<uint64_t>> g_signals;

void Count(int number) {
  struct sigaction action = {};
  g_signals[number] = 0;
  action.sa_handler = [](int got) { ++g_signals[got]; };
  action.sa_flags = SA_RESTART;
  MUST(sigaction(number, &action, nullptr) == 0);
}

void Block(int number) {
  sigset_t mask;
  sigemptyset(&mask);
  sigaddset(&mask, number);
  MUST(pthread_sigmask(SIG_BLOCK, &mask, nullptr) == 0);
}

// `period`: of setitimer, in microseconds.
MakeStates Alarm(int which, long period, bool waits) {
  return [=]() -> States {
    const int number = which == ITIMER_REAL ? SIGALRM : which == ITIMER_VIRTUAL ? SIGVTALRM : SIGPROF;
    const itimerval times = {{period / 1000000, period % 1000000}, {period / 1000000, period % 1000000}};
    if (waits) {
      Block(number);
      MUST(setitimer(which, &times, nullptr) == 0);
      // Runs out, and nobody has its signal until after the restart.
      const auto count = [number] {
        static uint64_t got = 0;
        sigset_t mask;
        sigemptyset(&mask);
        sigaddset(&mask, number);
        const timespec none = {};
        got += sigtimedwait(&mask, nullptr, &none) == number ? 1 : 0;
        return got;
      };
      return {GoesOn("alarm of " + Text(period) + " us whose signal waits", count, period * 1000)};
    }
    Count(number);
    if (which != ITIMER_REAL)
      std::thread([] {
        for (volatile int i = 0;; ++i) {
        }
      }).detach();
    MUST(setitimer(which, &times, nullptr) == 0);
    return {GoesOn(
        "alarm " + Text(which) + " of " + Text(period) + " us", [=] { return g_signals[number].load(); },
        period * 1000)};
  };
}

MakeStates PosixTimers(clockid_t clock, long period) {
  return [=]() -> States {
    Count(SIGRTMIN + 1);
    Count(SIGRTMIN + 2);
    if (clock == CLOCK_PROCESS_CPUTIME_ID)
      std::thread([] {
        for (volatile int i = 0;; ++i) {
        }
      }).detach();
    sigevent event = {};
    event.sigev_notify = SIGEV_SIGNAL;
    event.sigev_signo = SIGRTMIN + 1;
    event.sigev_value.sival_int = 77;
    timer_t timer, silent, of_thread;
    MUST(timer_create(clock, &event, &timer) == 0);
    event.sigev_notify = SIGEV_NONE;
    MUST(timer_create(clock, &event, &silent) == 0);
    event.sigev_notify = SIGEV_THREAD_ID;
    event.sigev_signo = SIGRTMIN + 2;
    event._sigev_un._tid = Stay([] {});
    MUST(timer_create(clock, &event, &of_thread) == 0);
    const itimerspec times = {{period / kSecond, period % kSecond}, {period / kSecond, period % kSecond}};
    const itimerspec late = {{7, 0}, {5000, 0}};
    MUST(timer_settime(timer, 0, &times, nullptr) == 0 && timer_settime(of_thread, 0, &times, nullptr) == 0);
    MUST(timer_settime(silent, 0, &late, nullptr) == 0);
    const std::string name = "timer of clock " + Text(clock) + ", " + Text(period) + " ns";
    return {GoesOn(
                name, [] { return g_signals[SIGRTMIN + 1].load(); }, period),
            GoesOn(
                name + ", to a thread", [] { return g_signals[SIGRTMIN + 2].load(); }, period),
            {"late timer", [=] {
               itimerspec now = {};
               timer_gettime(silent, &now);
               return Text(now.it_interval.tv_sec) + (now.it_value.tv_sec > 4900 ? " late" : " soon");
             }}};
  };
}

void TimersOfFiles() { Compare({TimerFiles}); }

void TimersOfSignals() {
  Compare({Alarm(ITIMER_REAL, 1000, false), Alarm(ITIMER_REAL, 50000, false), Alarm(ITIMER_REAL, 5000, true),
           Alarm(ITIMER_VIRTUAL, 20000, false), Alarm(ITIMER_PROF, 20000, false), PosixTimers(CLOCK_MONOTONIC, 1000000),
           PosixTimers(CLOCK_REALTIME, 20000000), PosixTimers(CLOCK_BOOTTIME, 200000000),
           PosixTimers(CLOCK_PROCESS_CPUTIME_ID, 20000000)});
}

// The job's first process is told when its parent ends, and so is a child.
void DeathOfParent() {
  static volatile sig_atomic_t told;
  signal(SIGUSR1, [](int) { told = 1; });
  prctl(PR_SET_PDEATHSIG, SIGUSR1);
  const pid_t parent = Child([] {
    Child([] {
      Block(SIGTERM);
      prctl(PR_SET_PDEATHSIG, SIGTERM);
      Touch("child");
      sigset_t mask;
      sigemptyset(&mask);
      sigaddset(&mask, SIGTERM);
      if (sigwaitinfo(&mask, nullptr) == SIGTERM) Touch("told");
    });
    while (!Exists(Path("go"))) usleep(5000);
  });
  while (!Exists(Path("child"))) usleep(5000);
  Pause();
  Join(parent);
  while (!Exists(Path("told"))) usleep(5000);
  int signal = 0;
  MUST(prctl(PR_GET_PDEATHSIG, &signal) == 0 && signal == SIGUSR1 && told == 0);
}

// Mutexes in mapped files, which are held by one process while another one waits.
void HeldInFiles() {
  struct Shared {
    pthread_mutex_t mutex;
    std::atomic<int> waits, got;
  };
  std::vector<Shared*> all;
  std::vector<pid_t> children;
  for (const int protocol : {PTHREAD_PRIO_NONE, PTHREAD_PRIO_INHERIT}) {
    // The second one does not begin with its page.
    for (const size_t offset : {size_t{0}, size_t{1000} / alignof(Shared) * alignof(Shared)}) {
      const int fd = NewFile("mutex" + Text(protocol) + Text(offset));
      auto* const shared = reinterpret_cast<Shared*>(Map(4, MAP_SHARED, fd) + kPage + offset);
      pthread_mutexattr_t attributes;
      pthread_mutexattr_init(&attributes);
      pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
      pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
      pthread_mutexattr_setprotocol(&attributes, protocol);
      MUST(pthread_mutex_init(&shared->mutex, &attributes) == 0 && pthread_mutex_lock(&shared->mutex) == 0);
      shared->got = -1;
      children.push_back(Child([=] {
        shared->waits = 1;
        shared->got = pthread_mutex_lock(&shared->mutex);
      }));
      while (shared->waits == 0) usleep(1000);
      all.push_back(shared);
    }
  }
  usleep(100000);
  Pause();
  for (Shared* const shared : all) MUST(shared->got == -1 && pthread_mutex_unlock(&shared->mutex) == 0);
  for (const pid_t child : children) Join(child);
  for (Shared* const shared : all) MUST(shared->got == 0);
}

// What is refused. Each stays as it is until "go".

void Refused(int fd) {
  MUST(fd >= 0);
  prctl(PR_SET_NAME, "refused");
  Pause();
}

void FileOfThread() {
  const pid_t thread = Stay([] {});
  Refused(open(("/proc/self/task/" + Text(thread) + "/comm").c_str(), O_RDONLY));
}

void FolderOfThread() {
  const pid_t thread = Stay([] {});
  Refused(open(("/proc/self/task/" + Text(thread)).c_str(), O_RDONLY | O_DIRECTORY));
}

void DescriptorOfThread() {
  const pid_t thread = Stay([] {});
  Refused(int(syscall(SYS_pidfd_open, thread, O_EXCL)));
}

void OwnerThread() {
  int ends[2];
  const f_owner_ex owner{F_OWNER_TID, Stay([] {})};
  MUST(pipe(ends) == 0 && fcntl(ends[0], F_SETOWN_EX, &owner) == 0);
  Refused(ends[0]);
}

void DescriptorOfInit() { Refused(int(syscall(SYS_pidfd_open, 1, 0))); }

void Faults() { Refused(int(syscall(SYS_userfaultfd, O_CLOEXEC))); }

void WakingTimer() { Refused(timerfd_create(CLOCK_BOOTTIME_ALARM, 0)); }

void WatchForOneEvent() {
  const int watches = inotify_init1(0);
  MUST(inotify_add_watch(watches, "/", IN_CREATE | IN_ONESHOT) > 0);
  Refused(watches);
}

void LargeCount() {
  const int events = eventfd(0, 0);
  const uint64_t count = uint64_t{1} << 32;
  MUST(write(events, &count, sizeof(count)) == sizeof(count));
  Refused(events);
}

void UnreadEvents() {
  const int watches = inotify_init1(0);
  MUST(inotify_add_watch(watches, g_folder.c_str(), IN_CREATE) > 0);
  Touch("event");
  Refused(watches);
}

void InheritedEpoll() {
  const int queue = epoll_create1(0), events = eventfd(0, 0);
  epoll_event event{EPOLLIN, {}};
  MUST(epoll_ctl(queue, EPOLL_CTL_ADD, events, &event) == 0);
  int go[2];
  MUST(pipe(go) == 0);
  const pid_t child = Child([&] {
    char byte;
    close(events);
    close(go[1]);
    prctl(PR_SET_NAME, "refused");
    MUST(read(go[0], &byte, 1) == 0);
  });
  // Here nobody has the queue any more, and there nobody what it watches.
  close(queue);
  while (Whole("/proc/" + Text(child) + "/comm") != "refused\n") usleep(1000);
  Pause();
  close(go[1]);
  Join(child);
}

const std::map<std::string, void (*)()> kSubjects = {
    {"ControlsOfProcesses", ControlsOfProcesses},
    {"SchedulingOfProcesses", SchedulingOfProcesses},
    {"AdvisedMemory", AdvisedMemory},
    {"LockedMemory", LockedMemory},
    {"PendingSignals", PendingSignals},
    {"OpenFiles", OpenFiles},
    {"TimersOfFiles", TimersOfFiles},
    {"TimersOfSignals", TimersOfSignals},
    {"DeathOfParent", DeathOfParent},
    {"HeldInFiles", HeldInFiles},
    {"FileOfThread", FileOfThread},
    {"FolderOfThread", FolderOfThread},
    {"DescriptorOfThread", DescriptorOfThread},
    {"OwnerThread", OwnerThread},
    {"DescriptorOfInit", DescriptorOfInit},
    {"Faults", Faults},
    {"WakingTimer", WakingTimer},
    {"UnreadEvents", UnreadEvents},
    {"WatchForOneEvent", WatchForOneEvent},
    {"LargeCount", LargeCount},
    {"InheritedEpoll", InheritedEpoll},
};

// As the tools do it, through the engine.
class ProcessStateTest : public SavedTree {
 protected:
  void Save(bool stop, const std::function<absl::Status()>& still = nullptr) override {
    description_.clear();
    ASSERT_EQ(engine_.Describe(job_, {}, &description_), absl::OkStatus());
    ASSERT_EQ(engine_.Dump(job_, description_, g_folder + "/image", g_folder + "/job",
                           stop ? SnapshotEngine::After::kStop : SnapshotEngine::After::kRun),
              absl::OkStatus())
        << LastLines(g_folder + "/job/engine-dump.log");
    ASSERT_EQ(engine_.FinishFiles(), absl::OkStatus());
  }

  void Restore() override {
    job_.set_directory(g_folder + "/job");
    auto saved = engine_.Open(job_, description_, g_folder + "/image");
    ASSERT_TRUE(saved.ok()) << saved.status().message();
    ASSERT_EQ((*saved)->Check({}), absl::OkStatus());
    auto restore = (*saved)->Begin(g_folder + "/job", {}, -1);
    ASSERT_TRUE(restore.ok()) << restore.status().message();
    const absl::Status held = (*restore)->AwaitHeld();
    const absl::StatusOr<Isolated> isolated = (*restore)->Finish();
    ASSERT_TRUE(isolated.ok()) << held.message() << isolated.status().message();
    isolated_ = *isolated;
    job_.set_init_pid(isolated_.init);
    job_.set_pid(isolated_.pid);
    job_.set_pid_namespace(PidNamespace(isolated_.init));
  }

  // The job is refused while it runs, with this text and the process's name, and goes on.
  void Refuses(const std::string& subject, const std::string& text) {
    ASSERT_NO_FATAL_FAILURE(StartSubject(subject));
    std::string description;
    const std::string error(engine_.Describe(job_, {}, &description).message());
    EXPECT_NE(error.find("refused (PID "), std::string::npos) << error;
    EXPECT_NE(error.find(text), std::string::npos) << error;
    Finish();
  }

  CriuEngine engine_;
  std::string description_;
};

TEST_F(ProcessStateTest, Controls) { SaveAndRestore("ControlsOfProcesses"); }
TEST_F(ProcessStateTest, Scheduling) { SaveAndRestore("SchedulingOfProcesses"); }
TEST_F(ProcessStateTest, AdvisedMemory) { SaveAndRestore("AdvisedMemory"); }
TEST_F(ProcessStateTest, LockedMemory) { SaveAndRestore("LockedMemory"); }
TEST_F(ProcessStateTest, Signals) { SaveAndRestore("PendingSignals"); }
TEST_F(ProcessStateTest, Files) { SaveAndRestore("OpenFiles"); }
TEST_F(ProcessStateTest, TimersOfFiles) { SaveAndRestore("TimersOfFiles"); }
TEST_F(ProcessStateTest, TimersOfSignals) { SaveAndRestore("TimersOfSignals"); }
TEST_F(ProcessStateTest, DeathOfParent) { SaveAndRestore("DeathOfParent"); }
TEST_F(ProcessStateTest, MutexesInFiles) { SaveAndRestore("HeldInFiles"); }

// The job that goes on has everything, too.
TEST_F(ProcessStateTest, StateOfAJobThatGoesOn) {
  for (const char* const subject : {"ControlsOfProcesses", "LockedMemory", "TimersOfSignals", "HeldInFiles"}) {
    ASSERT_NO_FATAL_FAILURE(StartSubject(subject));
    ASSERT_NO_FATAL_FAILURE(Save(false));
    EmptyImage();
    Finish();
    ASSERT_EQ(system(("rm -f " + g_folder + "/go " + g_folder + "/ready").c_str()), 0);
  }
}

TEST_F(ProcessStateTest, AFileOfAThreadIsRefused) { Refuses("FileOfThread", "/comm open, which cannot be saved"); }
TEST_F(ProcessStateTest, AFolderOfAThreadIsRefused) { Refuses("FolderOfThread", "has /proc/"); }
TEST_F(ProcessStateTest, ADescriptorOfAThreadIsRefused) { Refuses("DescriptorOfThread", "PIDFD_THREAD"); }
TEST_F(ProcessStateTest, AFileOfWhichAThreadIsToldIsRefused) { Refuses("OwnerThread", "a thread is told by signals"); }
TEST_F(ProcessStateTest, ADescriptorOfAnotherProcessIsRefused) {
  Refuses("DescriptorOfInit", "which is not of the job");
}
TEST_F(ProcessStateTest, PageFaultsAreRefused) { Refuses("Faults", "has a userfaultfd open"); }
TEST_F(ProcessStateTest, ATimerThatWakesTheMachineIsRefused) { Refuses("WakingTimer", "that wakes the machine"); }
TEST_F(ProcessStateTest, UnreadEventsAreRefused) { Refuses("UnreadEvents", "file events (inotify)"); }
TEST_F(ProcessStateTest, AWatchForOneEventIsRefused) { Refuses("WatchForOneEvent", "IN_ONESHOT"); }
TEST_F(ProcessStateTest, ALargeCountIsRefused) { Refuses("LargeCount", "a count above"); }
TEST_F(ProcessStateTest, AnEpollOfClosedFilesIsRefused) { Refuses("InheritedEpoll", "epoll that watches a file"); }

TEST(MayLackRights, OnlyWhereTheKernelForbidsSomething) {
  EXPECT_TRUE(MayLackRights("Can't set rlimit: Operation not permitted"));
  EXPECT_TRUE(MayLackRights("Unable to set PR_SET_MM_MAP: -1"));
  EXPECT_TRUE(MayLackRights("prctl failed with -1; again"));
  EXPECT_FALSE(MayLackRights("Can't open file /data/x: No such file or directory"));
  EXPECT_FALSE(MayLackRights("connect failed with -111"));
}

}  // namespace
}  // namespace cuda_remote::checkpoint

int main(int argc, char** argv) {
  return cuda_remote::checkpoint::RunTestsOrSubject(argc, argv, cuda_remote::checkpoint::kSubjects);
}
