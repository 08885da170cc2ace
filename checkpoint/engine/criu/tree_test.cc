// SPDX-License-Identifier: Apache-2.0
// Jobs of several processes are saved by CRIU, ended and restored, with what such jobs share: memory of every kind,
// Unix sockets and pipes between them, children that have ended, sessions of their own. Needs root and a CRIU that
// works (tools/setup-criu).

#include <fcntl.h>
#include <gtest/gtest.h>
#include <limits.h>
#include <linux/futex.h>
#include <linux/io_uring.h>
#include <linux/sched.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/file.h>
#include <sys/inotify.h>
#include <sys/ipc.h>
#include <sys/mman.h>
#include <sys/msg.h>
#include <sys/prctl.h>
#include <sys/sem.h>
#include <sys/shm.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "checkpoint/engine/criu/criu.h"
#include "checkpoint/engine/criu/criu_engine.h"
#include "checkpoint/engine/criu/testing/saved_tree.h"
#include "checkpoint/job/isolation/isolate.h"
#include "checkpoint/job/job.h"
#include "proto/base/clock.h"
#include "proto/base/proc.h"
#include "proto/channel/handshake.h"

namespace cuda_remote::checkpoint {
namespace {

constexpr size_t kMegabyte = 1 << 20;

// System V shared memory, one piece with a key and one that is marked for removal, a semaphore and a message queue.
void SystemV() {
  const int kept = shmget(0x5eed, kMegabyte, IPC_CREAT | IPC_EXCL | 0600);
  const int removed = shmget(IPC_PRIVATE, 4 * kMegabyte, 0600);
  MUST(kept >= 0 && removed >= 0);
  auto* const a = static_cast<volatile int*>(shmat(kept, nullptr, 0));
  auto* const b = static_cast<volatile int*>(shmat(removed, nullptr, 0));
  MUST(a != reinterpret_cast<int*>(-1) && b != reinterpret_cast<int*>(-1));
  MUST(shmctl(removed, IPC_RMID, nullptr) == 0);
  const int semaphore = semget(IPC_PRIVATE, 2, 0600), queue = msgget(IPC_PRIVATE, 0600);
  MUST(semaphore >= 0 && queue >= 0);
  struct Message {
    long type;
    int value;
  } message = {1, 42};
  MUST(msgsnd(queue, &message, sizeof(message.value), 0) == 0);
  const pid_t child = Child([&] {
    sembuf take = {0, -1, 0};
    while (semop(semaphore, &take, 1) != 0) MUST(errno == EINTR);
    b[kMegabyte / 4] = a[5] + 1;
  });
  a[5] = 1000;
  Pause();
  MUST(a[5] == 1000);
  a[5] = 2000;
  sembuf give = {0, 1, 0};
  MUST(semop(semaphore, &give, 1) == 0);
  Join(child);
  MUST(b[kMegabyte / 4] == 2001);
  MUST(msgrcv(queue, &message, sizeof(message.value), 0, IPC_NOWAIT) == sizeof(message.value) && message.value == 42);
  MUST(shmget(0x5eed, 0, 0) == kept);
}

// Memory that two processes share, from a descriptor that is closed then.
class SharedMemory {
 public:
  SharedMemory(int fd, size_t bytes) : bytes_(bytes) {
    MUST(fd >= 0 && ftruncate(fd, off_t(bytes)) == 0);
    memory_ = static_cast<volatile int*>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0));
    MUST(memory_ != MAP_FAILED);
    close(fd);
    for (size_t i = 0; i < bytes_ / sizeof(int); i += 512) memory_[i] = int(i);
    worker_.reset(new Worker([this](int i) { return memory_[i] += 1; }));
  }
  // Whether it has kept its contents and is still the same memory for both. Once only.
  void Check() {
    for (size_t i = 0; i < bytes_ / sizeof(int); i += 512) MUST(memory_[i] == int(i));
    memory_[512] = 7;
    MUST(worker_->Ask(512) == 8 && memory_[512] == 8);
    worker_->End();
  }

 private:
  const size_t bytes_;
  volatile int* memory_;
  std::unique_ptr<Worker> worker_;
};

int NewFile(const std::string& path) { return open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0640); }

// Files whose names are gone, one of them larger than CRIU takes without being asked; a memfd; memory without any name.
void UnlinkedMemory() {
  const std::string path = "/dev/shm/tree-test-" + std::to_string(UnixMs()) + "-" + std::to_string(getpid());
  SharedMemory large(NewFile(path), 64 * kMegabyte);
  MUST(unlink(path.c_str()) == 0);
  const std::string in_folder = g_folder + "/unlinked";
  SharedMemory small(NewFile(in_folder), kMegabyte);
  MUST(unlink(in_folder.c_str()) == 0);
  SharedMemory anonymous(memfd_create("shared", MFD_CLOEXEC), kMegabyte);
  Pause();
  large.Check();
  small.Check();
  anonymous.Check();
}

// Files that keep their names. The test removes or changes them after the checkpoint.
std::string LinkedPath() { return "/dev/shm/tree-test-linked-" + g_folder.substr(g_folder.rfind('-') + 1, 6); }
void LinkedMemory() {
  SharedMemory in_dev_shm(NewFile(LinkedPath()), 3 * kMegabyte + 12345);
  MUST(mkdir((g_folder + "/session").c_str(), 0750) == 0 && mkdir((g_folder + "/session/0").c_str(), 0700) == 0);
  SharedMemory in_folder(NewFile(g_folder + "/session/0/segment"), kMegabyte);
  const int open_only = NewFile(LinkedPath() + "-open");
  MUST(write(open_only, "contents", 8) == 8);
  Pause();
  in_dev_shm.Check();
  in_folder.Check();
  char text[9] = {};
  MUST(pread(open_only, text, 8, 0) == 8 && strcmp(text, "contents") == 0);
  struct stat facts;
  MUST(stat(LinkedPath().c_str(), &facts) == 0 && (facts.st_mode & 07777) == 0640);
  MUST(stat((g_folder + "/session").c_str(), &facts) == 0 && (facts.st_mode & 07777) == 0750);
  MUST(unlink(LinkedPath().c_str()) == 0 && unlink((LinkedPath() + "-open").c_str()) == 0);
}

// Semaphores that processes share, with a name and without one. glibc opens the file of a new one under another name,
// which it then removes.
std::string SemaphoreName() { return "/tree-test-" + g_folder.substr(g_folder.rfind('-') + 1, 6); }
void Semaphores() {
  sem_t* const named = sem_open(SemaphoreName().c_str(), O_CREAT | O_EXCL, 0600, 0);
  sem_t* const nameless = sem_open((SemaphoreName() + "-gone").c_str(), O_CREAT | O_EXCL, 0600, 0);
  MUST(named != SEM_FAILED && nameless != SEM_FAILED && sem_unlink((SemaphoreName() + "-gone").c_str()) == 0);
  MUST(sem_post(named) == 0);
  Worker child([&](int n) {
    MUST(sem_wait(named) == 0);
    MUST(sem_post(nameless) == 0);
    return n;
  });
  Pause();
  MUST(child.Ask(1) == 1 && sem_wait(nameless) == 0);  // that of before
  int value = -1;
  MUST(sem_getvalue(named, &value) == 0 && value == 0);
  sem_t* const again = sem_open(SemaphoreName().c_str(), 0);
  MUST(again != SEM_FAILED && sem_post(again) == 0 && child.Ask(2) == 2 && sem_wait(nameless) == 0);
  MUST(sem_unlink(SemaphoreName().c_str()) == 0);
  child.End();
}

// Memory in a file that has lost the name under which it was opened, and has another one.
std::string RenamedFolder() { return g_folder + "/renamed"; }
void RenamedMemory() {
  const std::string before = RenamedFolder() + "/before", after = RenamedFolder() + "/after";
  MUST(mkdir(RenamedFolder().c_str(), 0700) == 0);
  SharedMemory memory(NewFile(before), kMegabyte);
  MUST(link(before.c_str(), after.c_str()) == 0 && unlink(before.c_str()) == 0);
  Pause();
  memory.Check();
}

// Unix sockets: pairs of each type, listening ones with an abstract name and with a path, connections to these, data on
// the way.
void UnixSockets() {
  Worker stream([](int n) { return n + 1; }), datagrams([](int n) { return n + 2; }, SOCK_DGRAM),
      packets([](int n) { return n + 3; }, SOCK_SEQPACKET);
  struct Name {
    sockaddr_un address = {};
    socklen_t length = 0;
  };
  Name names[2];
  for (Name& name : names) name.address.sun_family = AF_UNIX;
  const std::string abstract = "tree-test-" + g_folder, path = g_folder + "/named.sock";
  MUST(path.size() < sizeof(names[1].address.sun_path));
  memcpy(names[0].address.sun_path + 1, abstract.data(), abstract.size());
  names[0].length = socklen_t(offsetof(sockaddr_un, sun_path) + 1 + abstract.size());
  memcpy(names[1].address.sun_path, path.c_str(), path.size() + 1);
  names[1].length = sizeof(sockaddr_un);
  int near[2], far[2], listeners[2];
  for (int i = 0; i < 2; ++i) {
    listeners[i] = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    auto* const address = reinterpret_cast<sockaddr*>(&names[i].address);
    MUST(bind(listeners[i], address, names[i].length) == 0 && listen(listeners[i], 4) == 0);
    near[i] = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    MUST(connect(near[i], address, names[i].length) == 0);
    far[i] = accept4(listeners[i], nullptr, nullptr, SOCK_CLOEXEC);
    MUST(far[i] >= 0 && send(near[i], "on the way", 11, 0) == 11);
  }
  // A child has the other ends.
  Worker reader([&](int i) {
    char text[11];
    MUST(recv(far[i], text, sizeof(text), MSG_WAITALL) == 11 && strcmp(text, "on the way") == 0);
    return i;
  });
  close(far[0]);
  close(far[1]);
  stream.Send(1);
  Pause();
  MUST(stream.Receive() == 2 && stream.Ask(5) == 6 && datagrams.Ask(5) == 7 && packets.Ask(5) == 8);
  for (int i = 0; i < 2; ++i) {
    MUST(reader.Ask(i) == i);
    const int again = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    MUST(connect(again, reinterpret_cast<sockaddr*>(&names[i].address), names[i].length) == 0);
    MUST(accept(listeners[i], nullptr, nullptr) >= 0);
  }
  for (Worker* worker : {&stream, &datagrams, &packets, &reader}) worker->End();
}

// As Python's multiprocessing has it: a socket in a temporary folder of its own.
void SocketInAFolder() {
  const std::string folder = g_folder + "/sockets/private", path = folder + "/listener";
  MUST(std::filesystem::create_directories(folder) && chmod(folder.c_str(), 0710) == 0);
  const StatusOr<UniqueFd> listener = ListenUnix(path);
  MUST(listener.ok());
  Pause();
  struct stat facts;
  MUST(stat(folder.c_str(), &facts) == 0 && (facts.st_mode & 07777) == 0710);
  MUST(ConnectUnix(path).ok());
}

// Pipes with something in them, a named one, eventfd, timerfd and signalfd, an epoll over them, inotify: all shared
// with a child.
void Descriptors() {
  int ends[2];
  MUST(pipe2(ends, O_CLOEXEC) == 0 && write(ends[1], "in the pipe", 12) == 12);
  const std::string fifo = g_folder + "/fifo";
  MUST(mkfifo(fifo.c_str(), 0600) == 0);
  const int named = open(fifo.c_str(), O_RDWR | O_CLOEXEC);
  MUST(named >= 0 && write(named, "named", 6) == 6);
  const int event = eventfd(5, EFD_CLOEXEC), poller = epoll_create1(EPOLL_CLOEXEC);
  epoll_event interest = {};
  interest.events = EPOLLIN;
  interest.data.fd = event;
  MUST(epoll_ctl(poller, EPOLL_CTL_ADD, event, &interest) == 0);
  const int watch = inotify_init1(IN_CLOEXEC | IN_NONBLOCK);
  MUST(mkdir((g_folder + "/watched").c_str(), 0700) == 0);
  MUST(inotify_add_watch(watch, (g_folder + "/watched").c_str(), IN_CREATE) >= 0);
  Worker worker([&](int) {
    char text[12];
    uint64_t one = 0;
    epoll_event ready = {};
    MUST(read(ends[0], text, 12) == 12 && strcmp(text, "in the pipe") == 0);
    MUST(read(named, text, 6) == 6 && strcmp(text, "named") == 0);
    MUST(epoll_wait(poller, &ready, 1, 0) == 1 && ready.data.fd == event);
    MUST(read(event, &one, sizeof(one)) == sizeof(one) && one == 5);
    one = 3;
    MUST(write(event, &one, sizeof(one)) == sizeof(one));
    return 1;
  });
  Pause();
  MUST(worker.Ask(0) == 1);
  uint64_t left = 0;
  MUST(read(event, &left, sizeof(left)) == sizeof(left) && left == 3);
  Touch("watched/new");
  alignas(inotify_event) char events[512];
  MUST(read(watch, events, sizeof(events)) > 0);
  worker.End();
}

// CRIU does not know that each read takes 1.
void SemaphoreEvent() {
  MUST(eventfd(5, EFD_CLOEXEC | EFD_SEMAPHORE) >= 0);
  Pause();
}

// CRIU knows no such thing.
void AsyncQueue() {
  io_uring_params facts{};
  MUST(syscall(SYS_io_uring_setup, 4, &facts) >= 0);
  Pause();
}

// The job finds none: not in its first process, in a child, in a thread, nor after an exec, now or after a restart.
void NoAsyncQueue() {
  const auto refused = [] {
    io_uring_params facts{};
    return syscall(SYS_io_uring_setup, 4, &facts) < 0 && errno == ENOSYS;
  };
  Worker worker([&](int) { return refused() ? 1 : 0; });
  const auto all_refused = [&] {
    bool in_thread = false;
    std::thread([&] { in_thread = refused(); }).join();
    const std::string probe =
        "exec /usr/bin/python3 -c 'import ctypes, sys; libc = ctypes.CDLL(None, use_errno=True); "
        "sys.exit(libc.syscall(425, 4, bytes(120)) != -1 or ctypes.get_errno() != 38)'";
    return refused() && worker.Ask(0) == 1 && in_thread && system(probe.c_str()) == 0;
  };
  MUST(prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0) == 0);
  MUST(all_refused());
  Pause();
  MUST(prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0) == 0);
  MUST(all_refused());
  worker.End();
}

// As on a kernel without MPTCP. TCP works.
void NoMptcp() {
  const auto refused = [] { return socket(AF_INET, SOCK_STREAM, 262) < 0 && errno == EPROTONOSUPPORT; };
  const int plain = socket(AF_INET, SOCK_STREAM, 0);
  MUST(refused() && plain >= 0);
  Worker worker([&](int) { return refused() ? 1 : 0; });
  Pause();
  MUST(refused() && worker.Ask(0) == 1 && listen(plain, 1) == 0);
  worker.End();
}

// In a process whose parent ends: it ends with `code`.
void BeOrphan(pid_t first, int code) {
  while (getppid() != first) usleep(1000);
  const pid_t session = getsid(0), group = getpgrp();
  Touch("orphan" + std::to_string(code));
  while (!Exists(g_folder + "/go")) usleep(5000);
  MUST(getppid() == first && getsid(0) == session && getpgrp() == group);
  _exit(code);
}

// Processes whose parents have ended are children of the first program: one in its session, one in a session of its own
// as daemon(3) leaves it, and one in a group whose leader has ended.
void Orphans() {
  const pid_t first = getpid();
  Join(Child([&] { Child([&] { BeOrphan(first, 21); }); }));
  Join(Child([&] {
    Child([&] {
      MUST(setsid() == getpid());
      BeOrphan(first, 22);
    });
  }));
  Join(Child([&] {
    MUST(setpgid(0, 0) == 0);
    Child([&] { BeOrphan(first, 23); });
  }));
  for (const char* name : {"/orphan21", "/orphan22", "/orphan23"}) {
    while (!Exists(g_folder + name)) usleep(5000);
  }
  Pause();
  int codes = 0;
  for (int i = 0; i < 3; ++i) {
    int status = 0;
    MUST(waitpid(-1, &status, 0) > 0 && WIFEXITED(status));
    codes += WEXITSTATUS(status);
  }
  MUST(codes == 21 + 22 + 23);
}

// A process whose parent has ended, until its file is there.
void Orphan(bool session_too) {
  Join(Child([=] {
    if (session_too) MUST(setsid() == getpid());
    Child([] {
      prctl(PR_SET_NAME, "left-behind");
      Touch("orphan");
      while (!Exists(g_folder + "/end-orphan")) usleep(5000);
    });
  }));
  while (!Exists(g_folder + "/orphan")) usleep(5000);
  if (session_too) MUST(wait(nullptr) > 0);
  Pause();
}

// The clocks that count from the machine's start go on where they were, whatever they are outside.
void Clocks() {
  const clockid_t clocks[] = {CLOCK_MONOTONIC, CLOCK_BOOTTIME};
  double before[2];
  const auto now = [](clockid_t clock) {
    timespec time = {};
    clock_gettime(clock, &time);
    return double(time.tv_sec) + 1e-9 * double(time.tv_nsec);
  };
  for (int i = 0; i < 2; ++i) before[i] = now(clocks[i]);
  // A timer and a sleep that are to end at times of these clocks.
  Worker sleeper([&](int) {
    timespec until = {};
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += 2;
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, nullptr) == EINTR) {
    }
    return 1;
  });
  sleeper.Send(0);
  Pause();
  for (int i = 0; i < 2; ++i) {
    const double passed = now(clocks[i]) - before[i];
    if (passed < 0 || passed > 120) {
      std::ofstream(g_folder + "/failed", std::ios::app) << "clock " << i << " went on by " << passed << " s\n";
      _exit(1);
    }
  }
  MUST(sleeper.Receive() == 1);
  sleeper.End();
}

// A descriptor of a process, as asyncio has one for each child.
void ProcessDescriptor() {
  Worker worker([](int n) { return n; });
  const int fd = int(syscall(SYS_pidfd_open, worker.pid(), 0));
  MUST(fd >= 0);
  Pause();
  MUST(syscall(SYS_pidfd_send_signal, fd, 0, nullptr, 0) == 0);
  worker.End();
}

// Children that have ended and were not waited for.
void Zombies() {
  const pid_t ended = Child([] { _exit(33); }), killed = Child([] { raise(SIGKILL); });
  siginfo_t info;
  for (pid_t child : {ended, killed}) MUST(waitid(P_PID, id_t(child), &info, WEXITED | WNOWAIT) == 0);
  Pause();
  int status = 0;
  MUST(waitpid(ended, &status, 0) == ended && WIFEXITED(status) && WEXITSTATUS(status) == 33);
  MUST(waitpid(killed, &status, 0) == killed && WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
}

// A grandchild whose parent ends when it is told to.
void LosesParent() {
  const pid_t parent = Child([] {
    Child([] {
      prctl(PR_SET_NAME, "bereft");
      Touch("orphan");
      while (!Exists(g_folder + "/end-orphan")) usleep(5000);
    });
    while (!Exists(g_folder + "/leave")) usleep(5000);
  });
  while (!Exists(g_folder + "/orphan")) usleep(5000);
  Pause();
  Join(parent);
}

// A process whose main thread has ended, as by pthread_exit in main. Another one waits for `go`.
void MainThreadEnded() {
  prctl(PR_SET_NAME, "headless");
  std::thread([] {
    Pause();
    _exit(kExit);
  }).detach();
  pthread_exit(nullptr);
}

// A server that accepts nobody until it is told to.
void SlowServer() {
  const StatusOr<UniqueFd> listener = ListenUnix(g_folder + "/slow.sock");
  MUST(listener.ok());
  Touch("ready");
  while (!Exists(g_folder + "/go")) {
    usleep(5000);
    if (Exists(g_folder + "/accept") && accept(listener->get(), nullptr, nullptr) >= 0) Touch("accepted");
  }
}

// A program that has stopped a child, and would notice if somebody continued either.
void Stopped() {
  static volatile sig_atomic_t continued;
  signal(SIGCONT, [](int) { continued = 1; });
  const pid_t child = Child([] { raise(SIGSTOP); });
  siginfo_t info = {};
  MUST(waitid(P_PID, id_t(child), &info, WSTOPPED) == 0 && info.si_status == SIGSTOP);
  Pause();
  MUST(continued == 0);
  info = {};
  MUST(waitid(P_PID, id_t(child), &info, WCONTINUED | WEXITED | WNOHANG) == 0 && info.si_pid == 0);
  MUST(kill(child, SIGCONT) == 0);
  int status = 0;
  MUST(waitpid(child, &status, 0) == child && WIFEXITED(status));
}

// Threads that sleep in system calls. No signal handler runs, so no call may fail with EINTR. `all`: also those that
// fail in a process that continues, as natively after SIGSTOP and SIGCONT.
void Sleepers(bool all) {
  int ends[2];
  MUST(pipe2(ends, O_CLOEXEC) == 0);
  const int events = epoll_create1(EPOLL_CLOEXEC), semaphore = semget(IPC_PRIVATE, 1, 0600);
  epoll_event readable = {EPOLLIN, {}};
  MUST(semaphore >= 0 && epoll_ctl(events, EPOLL_CTL_ADD, ends[0], &readable) == 0);
  static int word = 0;
  const timespec brief{4, 0}, limit{600, 0};
  std::vector<std::thread> threads;
  threads.emplace_back([&] {
    pollfd pipe{ends[0], POLLIN, 0};
    MUST(poll(&pipe, 1, 600000) == 1);
  });
  threads.emplace_back([&] { MUST(nanosleep(&brief, nullptr) == 0); });
  if (all) {
    threads.emplace_back(
        [&] { MUST(syscall(SYS_futex, &word, FUTEX_WAIT, 0, &limit, nullptr, 0) == 0 || errno == EAGAIN); });
    threads.emplace_back([&] { MUST(epoll_wait(events, &readable, 1, 600000) == 1); });
    threads.emplace_back([&] {
      sembuf take{0, -1, 0};
      MUST(semtimedop(semaphore, &take, 1, &limit) == 0);
    });
  }
  usleep(200000);  // until they sleep
  Pause();
  sembuf give{0, 1, 0};
  MUST(write(ends[1], "x", 1) == 1 && semop(semaphore, &give, 1) == 0);
  word = 1;
  syscall(SYS_futex, &word, FUTEX_WAKE, 1, nullptr, nullptr, 0);
  for (std::thread& thread : threads) thread.join();
}

// A handler runs, so the call fails with EINTR.
void InterruptedSleeper() {
  static volatile sig_atomic_t handled;
  signal(SIGUSR1, [](int) { handled = 1; });
  Touch("ready");
  MUST(poll(nullptr, 0, 20000) == -1 && errno == EINTR && handled == 1);
}

// Sessions and process groups of their own, as launchers make for each rank; one group's leader has ended.
void Sessions() {
  Worker session([](int) {
    if (getsid(0) != getpid()) MUST(setsid() == getpid());
    return getsid(0) == getpid() && getpgrp() == getpid() ? 1 : 0;
  });
  MUST(session.Ask(0) == 1);
  int ends[2];
  MUST(pipe2(ends, O_CLOEXEC) == 0);
  Worker in_group([&](int leader) {
    if (leader > 0) MUST(setpgid(0, leader) == 0);
    return int(getpgrp());
  });
  const pid_t leader = Child([&] {
    char byte;
    setpgid(0, 0);
    MUST(read(ends[0], &byte, 1) == 1);
  });
  setpgid(leader, leader);
  MUST(in_group.Ask(leader) == leader && write(ends[1], "x", 1) == 1);
  Join(leader);
  Pause();
  MUST(session.Ask(0) == 1 && in_group.Ask(0) == leader);
  session.End();
  in_group.End();
}

// Threads that stay, and have the numbers that they were made with.
class Numbered {
 public:
  explicit Numbered(int count) : numbers_(size_t(count)) {
    for (std::atomic<int>& number : numbers_) {
      threads_.emplace_back([&] {
        number = int(syscall(SYS_gettid));
        while (!end_) usleep(5000);
        MUST(syscall(SYS_gettid) == number);
        ++kept_;
      });
      while (number == 0) usleep(100);
    }
  }
  int Lowest() const { return *std::min_element(numbers_.begin(), numbers_.end()); }
  int Highest() const { return *std::max_element(numbers_.begin(), numbers_.end()); }
  // Ends them.
  bool HaveTheirNumbers() {
    end_ = true;
    for (std::thread& thread : threads_) thread.join();
    return kept_ == int(numbers_.size());
  }

 private:
  std::vector<std::atomic<int>> numbers_;
  std::vector<std::thread> threads_;
  std::atomic<bool> end_ = false;
  std::atomic<int> kept_ = 0;
};

// After it was looked at for a checkpoint, it makes threads: those that stay have the numbers from 90 to 140 above
// those that it had, since nobody else makes any in its namespace.
void NewThreads() {
  Touch("ready");
  while (!Exists(g_folder + "/more")) usleep(1000);
  for (int i = 0; i < 90; ++i) std::thread([] {}).join();
  Numbered threads(50);
  Touch("made");
  Pause();
  MUST(threads.HaveTheirNumbers());
}

// Its numbers have reached the end and begun again.
void NumbersBeginAgain() {
  int limit = 0;
  std::ifstream("/proc/sys/kernel/pid_max") >> limit;
  std::ofstream last("/proc/sys/kernel/ns_last_pid");
  MUST(last << limit - 20 << std::flush);
  Numbered threads(50);
  MUST(threads.Lowest() < 1000 && threads.Highest() == limit - 1);
  Pause();
  MUST(threads.HaveTheirNumbers());
}

const std::map<std::string, void (*)()> kSubjects = {
    {"AsyncQueue", AsyncQueue},
    {"NoAsyncQueue", NoAsyncQueue},
    {"NoMptcp", NoMptcp},
    {"SystemV", SystemV},
    {"UnlinkedMemory", UnlinkedMemory},
    {"LinkedMemory", LinkedMemory},
    {"UnixSockets", UnixSockets},
    {"SocketInAFolder", SocketInAFolder},
    {"Descriptors", Descriptors},
    {"ProcessDescriptor", ProcessDescriptor},
    {"Semaphores", Semaphores},
    {"RenamedMemory", RenamedMemory},
    {"SemaphoreEvent", SemaphoreEvent},
    {"LeaderEnded", [] { Orphan(true); }},
    {"LeftToInit", [] { Orphan(false); }},
    {"Orphans", Orphans},
    {"Clocks", Clocks},
    {"Zombies", Zombies},
    {"Sessions", Sessions},
    {"Sleepers", [] { Sleepers(true); }},
    {"SleepersThatContinue", [] { Sleepers(false); }},
    {"InterruptedSleeper", InterruptedSleeper},
    {"Stopped", Stopped},
    {"LosesParent", LosesParent},
    {"MainThreadEnded", MainThreadEnded},
    {"SlowServer", SlowServer},
    {"NewThreads", NewThreads},
    {"NumbersBeginAgain", NumbersBeginAgain},
};

class TreeTest : public SavedTree {
 protected:
  void TearDown() override {
    unlink(LinkedPath().c_str());
    unlink((LinkedPath() + "-open").c_str());
    SavedTree::TearDown();
  }
};

TEST_F(TreeTest, SystemV) { SaveAndRestore("SystemV"); }

// What a restore that was killed has left is in nobody's way.
TEST_F(TreeTest, UnlinkedMemory) {
  SaveAndRestore("UnlinkedMemory", [] {
    for (int number = 0; number < 16; ++number) {
      char name[64];
      snprintf(name, sizeof(name), "unlinked.cr.%x.ghost", unsigned(number));
      Touch(name);
    }
  });
}

// On another host, or after the job's end, named files are gone; after a checkpoint of a job that went on, they are not
// what they were. What somebody else has meanwhile is not touched.
TEST_F(TreeTest, LinkedMemory) {
  int round = 0;
  SaveAndRestore("LinkedMemory", [&] {
    if (++round == 1) {
      ASSERT_EQ(unlink(LinkedPath().c_str()), 0);
      ASSERT_EQ(unlink((LinkedPath() + "-open").c_str()), 0);
      ASSERT_EQ(system(("rm -r " + g_folder + "/session").c_str()), 0);
      return;
    }
    const auto refusal = [&] {
      std::vector<std::string> command;
      std::vector<int> opened;
      const std::string image = g_folder + "/image";
      return std::string(
          RestoreCommand(job_, facts_, image, image, g_folder + "/job", -1, &command, &opened).message());
    };
    // What another user has put there is not used, though it looks the same.
    const std::string session = g_folder + "/session", away = g_folder + "/away";
    ASSERT_EQ(rename(session.c_str(), away.c_str()), 0);
    ASSERT_EQ(symlink(away.c_str(), session.c_str()), 0);
    EXPECT_NE(refusal().find(session + ", through which the job shares memory, is now another one"), std::string::npos)
        << refusal();
    ASSERT_EQ(unlink(session.c_str()), 0);
    ASSERT_EQ(rename(away.c_str(), session.c_str()), 0);
    ASSERT_EQ(chown(session.c_str(), 40001, gid_t(-1)), 0);
    EXPECT_NE(refusal().find("is now another one, of user 40001: remove it"), std::string::npos) << refusal();
    ASSERT_EQ(chown(session.c_str(), geteuid(), gid_t(-1)), 0);
    const int changed = open(LinkedPath().c_str(), O_RDWR | O_CLOEXEC);
    const std::string used = LinkedPath() + ", which has changed and is used by process " + std::to_string(getpid());
    ASSERT_EQ(fchown(changed, 40001, gid_t(-1)), 0);
    EXPECT_NE(refusal().find(used), std::string::npos) << refusal();
    ASSERT_EQ(fchown(changed, geteuid(), gid_t(-1)), 0);
    ASSERT_EQ(pwrite(changed, "changed", 7, 2048), 7);
    EXPECT_NE(refusal().find(used), std::string::npos) << refusal();
    close(changed);
  });
}
// The links that are there and stay. Those of other tests that run now go within seconds.
std::string LinksLeft() {
  std::vector<std::string> links;
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) {
    if (entry.path().filename().string().rfind("link_remap.", 0) == 0) links.push_back(entry.path().string());
  }
  const auto is_gone = [](const std::string& path) { return !Exists(path); };
  for (int i = 0; i < 6000 && !links.empty(); ++i) {
    links.erase(std::remove_if(links.begin(), links.end(), is_gone), links.end());
    if (!links.empty()) usleep(10000);
  }
  std::string found;
  for (const std::string& link : links) found += link + "\n";
  return found;
}

// They come back with their names and values, also where the files are gone.
TEST_F(TreeTest, Semaphores) {
  ASSERT_EQ(LinksLeft(), "");
  const std::string file = "/dev/shm/sem." + SemaphoreName().substr(1);
  int round = 0;
  SaveAndRestore("Semaphores", [&] {
    EXPECT_EQ(LinksLeft(), "");
    if (++round == 1) {
      ASSERT_EQ(unlink(file.c_str()), 0);
    }
  });
  EXPECT_EQ(LinksLeft(), "");
  EXPECT_FALSE(Exists(file));
}

TEST_F(TreeTest, SemaphoresOfAJobThatGoesOn) {
  ASSERT_NO_FATAL_FAILURE(StartSubject("Semaphores"));
  ASSERT_NO_FATAL_FAILURE(Save(false));
  EXPECT_EQ(LinksLeft(), "");
  Finish();
}

// All names that CRIU might take for a link to the subject's file. They are links to `file`.
constexpr int kLinkNames = 1000;
std::string LinkName(int number) { return RenamedFolder() + "/link_remap." + std::to_string(number); }
void TakeLinkNames(const std::string& file) {
  for (int i = 0; i < kLinkNames; ++i) ASSERT_EQ(link(file.c_str(), LinkName(i).c_str()), 0) << strerror(errno);
}
int LinkNamesTaken() {
  int taken = 0;
  for (int i = 0; i < kLinkNames; ++i) taken += Exists(LinkName(i));
  return taken;
}

// Dumps of two jobs at once would give their links the same names.
TEST_F(TreeTest, WaitsForLinksOfAnotherDump) {
  ASSERT_NO_FATAL_FAILURE(StartSubject("RenamedMemory"));
  const int other = open(RenamedFolder().c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  ASSERT_EQ(flock(other, LOCK_EX), 0);
  ASSERT_NO_FATAL_FAILURE(TakeLinkNames(g_folder + "/ready"));
  std::thread ends([&] {
    usleep(300000);
    for (int i = 0; i < kLinkNames; ++i) unlink(LinkName(i).c_str());
    close(other);
  });
  Save(false);
  ends.join();
  EXPECT_EQ(LinkNamesTaken(), 0);
  // Nobody has the lock any more.
  const int again = open(RenamedFolder().c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  EXPECT_EQ(flock(again, LOCK_EX | LOCK_NB), 0) << strerror(errno);
  close(again);
  Finish();
}

TEST_F(TreeTest, RemovesLinksOfAKilledDump) {
  ASSERT_NO_FATAL_FAILURE(StartSubject("RenamedMemory"));
  ASSERT_NO_FATAL_FAILURE(TakeLinkNames(RenamedFolder() + "/after"));
  Save(false);
  EXPECT_EQ(LinkNamesTaken(), 0);
  Finish();
}

TEST_F(TreeTest, LeavesLinksOfOthers) {
  ASSERT_NO_FATAL_FAILURE(StartSubject("RenamedMemory"));
  ASSERT_NO_FATAL_FAILURE(TakeLinkNames(g_folder + "/ready"));
  ASSERT_EQ(DescribeProcesses(job_, /*close_tcp=*/false, &facts_), absl::OkStatus());
  PageReceiver pages(SavedBytes(job_));
  const std::string error(
      DumpProcesses(job_, facts_, g_folder + "/image", g_folder + "/job", false, nullptr, &pages, &found_).message());
  EXPECT_NE(error.find("a file link_remap.NUMBER in the same folder is in the way"), std::string::npos) << error;
  EXPECT_EQ(LinkNamesTaken(), kLinkNames);
  for (int i = 0; i < kLinkNames; ++i) unlink(LinkName(i).c_str());
  Save(false);
  Finish();
}

// The file comes back under its name and under the one of CRIU's link, which goes again.
TEST_F(TreeTest, RenamedMemory) {
  SaveAndRestore("RenamedMemory");
  EXPECT_EQ(LinkNamesTaken(), 0);
}

TEST_F(TreeTest, UnixSockets) { SaveAndRestore("UnixSockets"); }

// On another host, or after the job has removed it at its end.
TEST_F(TreeTest, FoldersOfSocketsAreMadeAgain) {
  SaveAndRestore("SocketInAFolder", [] { std::filesystem::remove_all(g_folder + "/sockets"); });
}

TEST_F(TreeTest, Descriptors) { SaveAndRestore("Descriptors"); }
TEST_F(TreeTest, ProcessDescriptor) { SaveAndRestore("ProcessDescriptor"); }
TEST_F(TreeTest, Zombies) { SaveAndRestore("Zombies"); }
TEST_F(TreeTest, Sessions) { SaveAndRestore("Sessions"); }
TEST_F(TreeTest, Stopped) { SaveAndRestore("Stopped"); }

TEST_F(TreeTest, SleepersSleepOn) {
  ASSERT_NO_FATAL_FAILURE(StartSubject("Sleepers"));
  for (const bool stop : {false, false, true}) {
    ASSERT_NO_FATAL_FAILURE(Save(stop));
    if (!stop) EmptyImage();
    usleep(100000);
  }
  ASSERT_NO_FATAL_FAILURE(Kill());
  ASSERT_NO_FATAL_FAILURE(Restore());
  usleep(100000);
  Finish();
}

// The kernel gives the calls another number then.
TEST_F(TreeTest, SleepersThatWereStoppedBefore) {
  ASSERT_NO_FATAL_FAILURE(StartSubject("SleepersThatContinue"));
  for (const int signal : {SIGSTOP, SIGCONT}) {
    ASSERT_EQ(kill(job_.pid(), signal), 0);
    usleep(100000);
  }
  ASSERT_NO_FATAL_FAILURE(Save(false));
  EmptyImage();
  ASSERT_NO_FATAL_FAILURE(Save(true));
  ASSERT_NO_FATAL_FAILURE(Kill());
  ASSERT_NO_FATAL_FAILURE(Restore());
  usleep(100000);
  Finish();
}

TEST_F(TreeTest, ASignalDuringTheCheckpointWakesSleepers) {
  ASSERT_NO_FATAL_FAILURE(StartSubject("InterruptedSleeper"));
  for (int looks = 0; looks < 20; looks = StateOf(job_.pid()) == 'S' ? looks + 1 : 0) usleep(10000);
  ASSERT_NO_FATAL_FAILURE(Save(true));
  ASSERT_EQ(kill(job_.pid(), SIGUSR1), 0);
  EXPECT_TRUE(ContinueProcesses(job_, found_.stopped_before)) << "as after a cr-checkpoint --stop that failed";
  Finish();
}

TEST_F(TreeTest, StoppedInAJobThatContinues) {
  ASSERT_NO_FATAL_FAILURE(StartSubject("Stopped"));
  ASSERT_NO_FATAL_FAILURE(Save(true));
  EXPECT_TRUE(ContinueProcesses(job_, found_.stopped_before)) << "as after a cr-checkpoint --stop that failed";
  Finish();
}

TEST_F(TreeTest, SemaphoreEventIsRefused) {
  ASSERT_NO_FATAL_FAILURE(StartSubject("SemaphoreEvent"));
  const std::string error(DescribeProcesses(job_, /*close_tcp=*/false, &facts_).message());
  EXPECT_NE(error.find("EFD_SEMAPHORE"), std::string::npos) << error;
  Finish();
}

// CRIU cannot save it, and the kernel shows neither its memory nor its files.
TEST_F(TreeTest, ProcessWithoutMainThreadIsRefused) {
  ASSERT_NO_FATAL_FAILURE(StartSubject("MainThreadEnded"));
  // Its other thread may be ready before the main one has ended.
  const std::string status = "/proc/" + std::to_string(job_.pid()) + "/status";
  while (Contents(status).find("\nState:\tZ") == std::string::npos) usleep(5000);
  const std::string error(DescribeProcesses(job_, /*close_tcp=*/false, &facts_).message());
  EXPECT_NE(error.find("headless (PID "), std::string::npos) << error;
  EXPECT_NE(error.find("has ended its main thread while other threads run"), std::string::npos) << error;
  Finish();
}

TEST_F(TreeTest, AsyncQueueIsRefused) {
  io_uring_params facts{};
  const long ring = syscall(SYS_io_uring_setup, 4, &facts);
  if (ring < 0) GTEST_SKIP() << "this kernel, or this container, has no io_uring";
  close(int(ring));
  ASSERT_NO_FATAL_FAILURE(StartSubject("AsyncQueue", /*io_uring=*/true));
  const std::string error(DescribeProcesses(job_, /*close_tcp=*/false, &facts_).message());
  EXPECT_NE(error.find("uses io_uring, which cannot be saved"), std::string::npos) << error;
  EXPECT_NE(error.find("--io-uring"), std::string::npos) << error;
  Finish();
}

TEST_F(TreeTest, AsyncQueueIsWithheld) { SaveAndRestore("NoAsyncQueue"); }

TEST_F(TreeTest, MptcpIsWithheld) {
  const int socket_of_it = socket(AF_INET, SOCK_STREAM, 262);
  if (socket_of_it < 0) GTEST_SKIP() << "this kernel has no MPTCP";
  close(socket_of_it);
  SaveAndRestore("NoMptcp");
}

TEST_F(TreeTest, ProcessesWithoutParents) {
  adopt_ = true;
  SaveAndRestore("Orphans");
}

// After the job was looked at. CRIU knows nothing of it: an image without it would come from this dump.
TEST_F(TreeTest, ProcessThatLosesItsParentMeanwhile) {
  ASSERT_NO_FATAL_FAILURE(StartSubject("LosesParent"));
  ASSERT_EQ(DescribeProcesses(job_, /*close_tcp=*/false, &facts_), absl::OkStatus());
  Touch("leave");
  ProcessFacts now;
  for (int i = 0; i < 6000 && DescribeProcesses(job_, /*close_tcp=*/false, &now).ok(); ++i) usleep(10000);
  for (const bool stop : {false, true}) {
    found_ = {};
    PageReceiver pages(SavedBytes(job_));
    const std::string error(
        DumpProcesses(job_, facts_, g_folder + "/image", g_folder + "/job", stop, nullptr, &pages, &found_).message());
    EXPECT_NE(error.find("(bereft) of the job lost its parent"), std::string::npos) << error;
    EXPECT_TRUE(found_.failure_passes);
    EmptyImage();
  }
  // It continues, and can be saved without that process.
  Touch("end-orphan");
  for (int i = 0; i < 6000 && !DescribeProcesses(job_, /*close_tcp=*/false, &now).ok(); ++i) usleep(10000);
  ASSERT_NO_FATAL_FAILURE(Save(true));
  ASSERT_NO_FATAL_FAILURE(Kill());
  ASSERT_NO_FATAL_FAILURE(Restore());
  Finish();
}

// Whoever came from outside may have gone before he was accepted, as cr-ps of an older version does: CRIU cannot save
// that, and it passes.
TEST_F(TreeTest, ConnectionThatWasGivenUpPasses) {
  ASSERT_NO_FATAL_FAILURE(StartSubject("SlowServer"));
  ASSERT_EQ(ConnectUnix(g_folder + "/slow.sock").status().message(), "");
  ASSERT_EQ(DescribeProcesses(job_, /*close_tcp=*/false, &facts_), absl::OkStatus());
  found_ = {};
  {
    PageReceiver pages(SavedBytes(job_));
    const std::string error(
        DumpProcesses(job_, facts_, g_folder + "/image", g_folder + "/job", false, nullptr, &pages, &found_).message());
    EXPECT_NE(error.find("closed in-flight socket"), std::string::npos) << error;
    EXPECT_TRUE(found_.failure_passes);
  }
  EmptyImage();
  Touch("accept");
  for (int i = 0; i < 6000 && !Exists(g_folder + "/accepted"); ++i) usleep(10000);
  ASSERT_NO_FATAL_FAILURE(Save(true));
  ASSERT_NO_FATAL_FAILURE(Kill());
  ASSERT_NO_FATAL_FAILURE(Restore());
  EXPECT_EQ(ConnectUnix(g_folder + "/slow.sock").status().message(), "");
  Finish();
}

// What would not come back is named. Without it the job is saved.
TEST_F(TreeTest, ProcessOfInitIsRefused) {
  ASSERT_NO_FATAL_FAILURE(StartSubject("LeftToInit"));
  const std::string error(DescribeProcesses(job_, /*close_tcp=*/false, &facts_).message());
  EXPECT_NE(error.find("(left-behind) of the job has outlived"), std::string::npos) << error;
  EXPECT_NE(error.find("cr-run --adopt"), std::string::npos) << error;
  Touch("end-orphan");
  for (int i = 0; i < 6000 && !DescribeProcesses(job_, /*close_tcp=*/false, &facts_).ok(); ++i) usleep(10000);
  ASSERT_NO_FATAL_FAILURE(Save(true));
  ASSERT_NO_FATAL_FAILURE(Kill());
  ASSERT_NO_FATAL_FAILURE(Restore());
  Finish();
}

// Its session's leader has ended, too.
TEST_F(TreeTest, ProcessOfAnEndedLeaderIsRefused) {
  adopt_ = true;
  std::string error;
  ASSERT_NO_FATAL_FAILURE(Start({ReadLink("/proc/self/exe"), kSubject, "LeaderEnded", g_folder}));
  for (int i = 0; i < 6000 && !Exists(g_folder + "/orphan"); ++i) usleep(10000);
  const std::string expected =
      "(left-behind) of the job has outlived the process that started it, and the one that made its session";
  for (int i = 0; i < 6000 && error.find(expected) == std::string::npos; ++i) {
    error = std::string(DescribeProcesses(job_, /*close_tcp=*/false, &facts_).message());
    usleep(10000);
  }
  EXPECT_NE(error.find(expected), std::string::npos) << error;
  Touch("end-orphan");
  for (int i = 0; i < 6000 && !Exists(g_folder + "/ready"); ++i) usleep(10000);
  ASSERT_NO_FATAL_FAILURE(Save(true));
  ASSERT_NO_FATAL_FAILURE(Kill());
  ASSERT_NO_FATAL_FAILURE(Restore());
  Finish();
}

// CRIU's own processes have none of the numbers that the job has at the dump.
TEST_F(TreeTest, ThreadsThatWereNotThereWhenTheJobWasLookedAt) {
  ASSERT_NO_FATAL_FAILURE(StartSubject("NewThreads"));
  ASSERT_NO_FATAL_FAILURE(Save(true, [] {
    Touch("more");
    for (int i = 0; i < 3000 && !Exists(g_folder + "/made"); ++i) usleep(10000);
    return Exists(g_folder + "/made") ? absl::OkStatus() : absl::DeadlineExceededError("it makes no threads");
  }));
  ASSERT_NO_FATAL_FAILURE(Kill());
  ASSERT_NO_FATAL_FAILURE(Restore());
  Finish();
}

TEST_F(TreeTest, NumbersBeginAgain) { SaveAndRestore("NumbersBeginAgain"); }

TEST_F(TreeTest, InstructionSetsThatAreMissingAreNamed) {
  ASSERT_NO_FATAL_FAILURE(StartSubject("Zombies"));
  ASSERT_NO_FATAL_FAILURE(Save(true));
  ASSERT_NO_FATAL_FAILURE(Kill());
  // As if the image came from a later processor.
  facts_.add_instruction_sets("avx512_later");
  std::vector<std::string> command;
  std::vector<int> opened;
  const std::string image = g_folder + "/image";
  const std::string error(
      RestoreCommand(job_, facts_, image, image, g_folder + "/job", -1, &command, &opened).message());
  EXPECT_NE(error.find("lacks: avx512_later;"), std::string::npos) << error;
  facts_.mutable_instruction_sets()->RemoveLast();
  EXPECT_GT(facts_.instruction_sets_size(), 0);
  ASSERT_NO_FATAL_FAILURE(Restore());
  Finish();
}

// As after a reboot, or on another host.
TEST_F(TreeTest, ClocksGoOnWhereTheyWere) {
  ASSERT_NO_FATAL_FAILURE(StartSubject("Clocks"));
  const int own = open("/proc/self/ns/time", O_RDONLY | O_CLOEXEC);
  for (const char* offsets : {"monotonic 5000000 0\nboottime 7000000 0\n", "monotonic 1000 0\nboottime 3000 0\n"}) {
    ASSERT_NO_FATAL_FAILURE(Save(true));
    ASSERT_NO_FATAL_FAILURE(Kill());
    // For children alone.
    ASSERT_EQ(unshare(CLONE_NEWTIME), 0) << strerror(errno);
    std::ofstream("/proc/self/timens_offsets") << offsets << std::flush;
    ASSERT_NO_FATAL_FAILURE(Restore());
    ASSERT_EQ(setns(own, CLONE_NEWTIME), 0) << strerror(errno);
    // Else nothing would be proven.
    ASSERT_NE(ReadLink("/proc/" + std::to_string(isolated_.init) + "/ns/time"), ReadLink("/proc/self/ns/time"));
    usleep(100000);
    ASSERT_NO_FATAL_FAILURE(EmptyImage());
  }
  close(own);
  Finish();
}

// A command of the environment's, for tries by hand: CR_TEST_COMMAND is started by a shell, and is saved and restored
// CR_TEST_TIMES times, with a second between; the shell runs CR_TEST_MEANWHILE while it has ended.
TEST_F(TreeTest, DISABLED_Command) {
  ASSERT_NO_FATAL_FAILURE(Start({"/bin/sh", "-c", std::string("exec ") + getenv("CR_TEST_COMMAND")}));
  for (int i = 0; i < atoi(getenv("CR_TEST_TIMES")); ++i) {
    sleep(1);
    ASSERT_NO_FATAL_FAILURE(Save(true));
    ASSERT_NO_FATAL_FAILURE(Kill());
    if (const char* const meanwhile = getenv("CR_TEST_MEANWHILE")) {
      ASSERT_EQ(system(meanwhile), 0);
    }
    ASSERT_NO_FATAL_FAILURE(Restore());
    EmptyImage();
  }
  Finish(0);
  puts(Contents(g_folder + "/out").c_str());
}

}  // namespace
}  // namespace cuda_remote::checkpoint

int main(int argc, char** argv) {
  return cuda_remote::checkpoint::RunTestsOrSubject(argc, argv, cuda_remote::checkpoint::kSubjects);
}
