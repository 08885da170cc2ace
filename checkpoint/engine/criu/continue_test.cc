// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/engine/criu/continue.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "checkpoint/job/job.h"
#include "proto/base/unique_fd.h"

namespace cuda_remote::checkpoint {
namespace {

int g_says = -1;  // of a child: where it writes

void Say(char letter) { (void)!write(g_says, &letter, 1); }

sigset_t Only(int signal) {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, signal);
  return set;
}

// A child process that runs `program`, which reads commands of a letter from its first descriptor and says letters.
class Child {
 public:
  explicit Child(const std::function<void(int commands)>& program) {
    int commands[2], says[2];
    EXPECT_EQ(pipe(commands), 0);
    EXPECT_EQ(pipe(says), 0);
    pid_ = fork();
    if (pid_ == 0) {
      g_says = says[1];
      close(commands[1]);  // so that it ends with this test
      program(commands[0]);
      _exit(0);
    }
    close(commands[0]);
    close(says[1]);
    commands_.Reset(commands[1]);
    says_.Reset(says[0]);
    process_.Reset(int(syscall(SYS_pidfd_open, pid_, 0u)));
  }
  ~Child() {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  pid_t pid() const { return pid_; }
  void Command(char letter) { EXPECT_EQ(write(commands_.get(), &letter, 1), 1); }
  // The next letter that it says; '-' if none comes.
  char Hear(int wait_ms = 20000) {
    pollfd waiting = {says_.get(), POLLIN, 0};
    char letter = '-';
    if (poll(&waiting, 1, wait_ms) == 1 && read(says_.get(), &letter, 1) != 1) return '-';
    return letter;
  }
  void Stop() {
    int status = 0;
    EXPECT_EQ(kill(pid_, SIGSTOP), 0);
    EXPECT_EQ(waitpid(pid_, &status, WUNTRACED), pid_);
    EXPECT_TRUE(WIFSTOPPED(status));
  }
  // Also waits until it is told that the child runs on.
  void RunOn() {
    int status = 0;
    EXPECT_TRUE(ContinueUnnoticed(pid_, process_.get()));
    EXPECT_EQ(waitpid(pid_, &status, WCONTINUED), pid_);
    EXPECT_TRUE(WIFCONTINUED(status));
  }
  std::vector<uint64_t> Mask() const { return StatusNumbers(pid_, "SigBlk", 16); }

 private:
  pid_t pid_ = -1;
  UniqueFd commands_, says_, process_;
};

// Answers each command with its letter.
void Echo(int commands) {
  for (char letter; read(commands, &letter, 1) == 1;) Say(letter);
}

void SayWhenContinued() {
  struct sigaction action = {};
  action.sa_handler = [](int) { Say('!'); };
  action.sa_flags = SA_RESTART;
  sigaction(SIGCONT, &action, nullptr);
}

TEST(Continue, WithoutAHandler) {
  Child child(Echo);
  child.Stop();
  child.Command('a');
  EXPECT_EQ(child.Hear(100), '-');
  child.RunOn();
  EXPECT_EQ(child.Hear(), 'a');
}

TEST(Continue, TheHandlerDoesNotRun) {
  Child child([](int commands) {
    SayWhenContinued();
    Say('.');
    Echo(commands);
  });
  EXPECT_EQ(child.Hear(), '.');
  const std::vector<uint64_t> mask = child.Mask();
  for (char letter = 'a'; letter <= 'z'; ++letter) {
    child.Stop();
    child.RunOn();
    child.Command(letter);
    EXPECT_EQ(child.Hear(), letter);
  }
  EXPECT_EQ(child.Mask(), mask);
  // It is still there.
  child.Stop();
  kill(child.pid(), SIGCONT);
  EXPECT_EQ(child.Hear(), '!');
}

// As a program that asks for it by sigwait or signalfd.
TEST(Continue, NoneWaitsWhereItIsBlocked) {
  Child child([](int commands) {
    const sigset_t only = Only(SIGCONT);
    sigprocmask(SIG_BLOCK, &only, nullptr);
    Say('.');
    for (char letter; read(commands, &letter, 1) == 1;) {
      sigset_t pending;
      sigpending(&pending);
      Say(sigismember(&pending, SIGCONT) ? '!' : 'n');
    }
  });
  EXPECT_EQ(child.Hear(), '.');
  const std::vector<uint64_t> mask = child.Mask();
  child.Stop();
  child.RunOn();
  child.Command('?');
  EXPECT_EQ(child.Hear(), 'n');
  EXPECT_EQ(child.Mask(), mask);
  child.Stop();
  kill(child.pid(), SIGCONT);
  child.Command('?');
  EXPECT_EQ(child.Hear(), '!');
}

// Calls that change the mask while they wait, and what else has come meanwhile.
TEST(Continue, OtherSignalsAreDelivered) {
  Child child([](int) {
    SayWhenContinued();
    signal(SIGUSR1, [](int) { Say('u'); });
    signal(SIGCHLD, [](int) { Say('c'); });  // a lower number: the kernel delivers it first
    const sigset_t only = Only(SIGUSR1);
    sigset_t none, before;
    sigprocmask(SIG_BLOCK, &only, nullptr);
    sigemptyset(&none);
    Say('.');
    for (;;) {
      sigsuspend(&none);
      sigprocmask(SIG_SETMASK, nullptr, &before);
      Say(sigismember(&before, SIGUSR1) && !sigismember(&before, SIGCONT) ? 's' : 'x');
    }
  });
  EXPECT_EQ(child.Hear(), '.');
  for (int i = 0; i < 20; ++i) {
    child.Stop();
    child.RunOn();
    kill(child.pid(), SIGUSR1);
    EXPECT_EQ(child.Hear(), 'u');
    EXPECT_EQ(child.Hear(), 's');
    child.Stop();
    kill(child.pid(), SIGUSR1);
    kill(child.pid(), SIGCHLD);
    child.RunOn();
    std::string said;
    // The call may return between the two.
    const auto count = [&](char letter) { return std::count(said.begin(), said.end(), letter); };
    while (count('u') + count('c') < 2 || said.back() != 's') said += child.Hear();
    EXPECT_EQ(count('u'), 1) << said;
    EXPECT_EQ(count('c'), 1) << said;
    EXPECT_EQ(count('-') + count('x') + count('!'), 0) << said;
    if (HasFailure()) break;
  }
}

TEST(Continue, AllThreadsRunOn) {
  Child child([](int commands) {
    SayWhenContinued();
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([commands, i] {
        const sigset_t only = Only(SIGCONT);
        if (i % 2 == 0) pthread_sigmask(SIG_BLOCK, &only, nullptr);
        Say('.');
        Echo(commands);
      });
    }
    // As a Fortran or Go program may do: its first thread has ended.
    syscall(SYS_exit, 0);
  });
  for (int i = 0; i < 4; ++i) EXPECT_EQ(child.Hear(), '.');
  for (int i = 0; i < 20; ++i) {
    child.Stop();
    child.RunOn();
    for (char letter = 'a'; letter < 'i'; ++letter) {
      child.Command(letter);
      EXPECT_EQ(child.Hear(), letter);
    }
  }
}

// Nobody waits until each of its threads stops, which with so many takes longer than a test may.
TEST(Continue, OneThatRuns) {
  constexpr int kThreads = 80;
  Child child([](int commands) {
    SayWhenContinued();
    std::vector<std::thread> threads;
    for (int i = 0; i < kThreads; ++i) {
      threads.emplace_back([commands] {
        Say('.');
        Echo(commands);
      });
    }
    for (std::thread& thread : threads) thread.join();
  });
  for (int i = 0; i < kThreads; ++i) EXPECT_EQ(child.Hear(), '.');
  const UniqueFd process(int(syscall(SYS_pidfd_open, child.pid(), 0u)));
  EXPECT_TRUE(ContinueUnnoticed(child.pid(), process.get()));
  EXPECT_EQ(child.Hear(), '!');
  child.Command('a');
  EXPECT_EQ(child.Hear(), 'a');
}

TEST(Continue, OneThatHasEnded) {
  Child child([](int) {
    SayWhenContinued();
    Say('.');
  });
  EXPECT_EQ(child.Hear(), '.');
  const UniqueFd process(int(syscall(SYS_pidfd_open, child.pid(), 0u)));
  ASSERT_EQ(waitpid(child.pid(), nullptr, 0), child.pid());
  EXPECT_TRUE(ContinueUnnoticed(child.pid(), process.get()));
}

// It is told then, rather than left alone.
TEST(Continue, OneThatSomebodyElseTraces) {
  Child child([](int commands) {
    SayWhenContinued();
    Say('.');
    Echo(commands);
  });
  EXPECT_EQ(child.Hear(), '.');
  const pid_t tracer = fork();
  if (tracer == 0) {
    if (syscall(SYS_ptrace, 0x4206 /* PTRACE_SEIZE */, child.pid(), 0, 0) != 0) _exit(1);
    for (int status; waitpid(child.pid(), &status, __WALL) == child.pid();) {
      const int signal = status >> 16 == 0 ? WSTOPSIG(status) : 0;
      // A stop that has begun goes on (PTRACE_LISTEN).
      const bool listens = status >> 16 != 0 && WSTOPSIG(status) == SIGSTOP;
      syscall(SYS_ptrace, listens ? 0x4208 : 7 /* PTRACE_CONT */, child.pid(), 0, signal);
    }
    _exit(0);
  }
  // Until it is traced.
  while (StatusNumbers(child.pid(), "TracerPid", 10) != std::vector<uint64_t>{uint64_t(tracer)}) usleep(1000);
  const UniqueFd process(int(syscall(SYS_pidfd_open, child.pid(), 0u)));
  kill(child.pid(), SIGSTOP);
  usleep(50000);
  EXPECT_TRUE(ContinueUnnoticed(child.pid(), process.get()));
  EXPECT_EQ(child.Hear(), '!');
  child.Command('a');
  EXPECT_EQ(child.Hear(), 'a');
  kill(tracer, SIGKILL);
  waitpid(tracer, nullptr, 0);
}

}  // namespace
}  // namespace cuda_remote::checkpoint
