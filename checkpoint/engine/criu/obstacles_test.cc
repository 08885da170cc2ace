// SPDX-License-Identifier: Apache-2.0
// What a process has open that cannot be saved: each case is a child that has it.

#include "checkpoint/engine/criu/obstacles.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/io_uring.h>
#include <mqueue.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>
#include <thread>

namespace cuda_remote::checkpoint {
namespace {

// A child that has done `act` and waits; ended with this object.
class Child {
 public:
  explicit Child(const std::function<bool()>& act) {
    int ready[2];
    EXPECT_EQ(pipe(ready), 0);
    pid_ = fork();
    if (pid_ == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      close(ready[0]);
      if (act() && write(ready[1], "x", 1) == 1) pause();
      _exit(1);
    }
    close(ready[1]);
    char byte;
    did_ = read(ready[0], &byte, 1) == 1;
    close(ready[0]);
  }
  ~Child() {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  int pid() const { return pid_; }
  bool did() const { return did_; }

 private:
  int pid_;
  bool did_ = false;
};

std::vector<Obstacle> Obstacles(const std::vector<int>& pids) {
  return FindObstacles([&pids] { return pids; }, /*held=*/false);
}

std::string Texts(const std::vector<Obstacle>& obstacles) {
  std::string text;
  for (const Obstacle& obstacle : obstacles) text += ToText(obstacle) + "\n";
  return text;
}

TEST(Obstacles, OrdinaryProcessesHaveNone) {
  const Child child([] {
    int pair[2];
    return open("/dev/null", O_RDWR) >= 0 && open("/dev/urandom", O_RDONLY) >= 0 && memfd_create("memory", 0) >= 0 &&
           socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0 && pipe(pair) == 0;
  });
  ASSERT_TRUE(child.did());
  EXPECT_EQ(Texts(Obstacles({child.pid()})), "");
}

TEST(Obstacles, AConnectionWithAnotherProgramIsNamed) {
  for (const int type : {SOCK_STREAM, SOCK_SEQPACKET}) {
    int pair[2];
    ASSERT_EQ(socketpair(AF_UNIX, type, 0, pair), 0);
    {
      const Child child([&] {
        close(pair[0]);
        return true;
      });
      ASSERT_TRUE(child.did());
      const std::string text = Texts(Obstacles({child.pid()}));
      EXPECT_NE(text.find("has a connection to"), std::string::npos) << text;
      const std::string other = "(PID " + std::to_string(getpid()) + "), which is not of the job";
      EXPECT_NE(text.find(other), std::string::npos) << text;
      EXPECT_NE(text.find("close the connection"), std::string::npos) << text;
      // Both ends are in the job.
      EXPECT_EQ(Texts(Obstacles({child.pid(), getpid()})), "");
    }
    close(pair[0]);
    close(pair[1]);
  }
}

TEST(Obstacles, TheServersSocketIsLetGoOf) {
  char folder[] = "/tmp/obstacles-XXXXXX";
  ASSERT_NE(mkdtemp(folder), nullptr);
  for (const char* name : {"/session.sock", "/other.sock"}) {
    const std::string path = std::string(folder) + name;
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    strcpy(address.sun_path, path.c_str());
    const int listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    ASSERT_EQ(bind(listener, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    ASSERT_EQ(listen(listener, 1), 0);
    {
      const Child child([&] {
        close(listener);
        return connect(socket(AF_UNIX, SOCK_SEQPACKET, 0), reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0;
      });
      ASSERT_TRUE(child.did());
      const int accepted = accept(listener, nullptr, nullptr);
      const std::string text = Texts(Obstacles({child.pid()}));
      EXPECT_EQ(text.find("at " + path) == std::string::npos, path.find("session") != std::string::npos) << text;
      close(accepted);
    }
    close(listener);
  }
  ASSERT_EQ(system((std::string("rm -r ") + folder).c_str()), 0);
}

TEST(Obstacles, IoUring) {
  const Child child([] {
    io_uring_params parameters{};
    return syscall(SYS_io_uring_setup, 4, &parameters) >= 0;
  });
  if (!child.did()) GTEST_SKIP() << "io_uring is not allowed here";
  EXPECT_NE(Texts(Obstacles({child.pid()})).find("uses io_uring, which cannot be saved"), std::string::npos);
}

TEST(Obstacles, AMessageQueue) {
  const std::string name = "/obstacles-test-" + std::to_string(getpid());
  const Child child([&] { return mq_open(name.c_str(), O_CREAT | O_RDWR, 0600, nullptr) >= 0; });
  mq_unlink(name.c_str());
  ASSERT_TRUE(child.did());
  const std::string text = Texts(Obstacles({child.pid()}));
  EXPECT_NE(text.find("has a POSIX message queue open, which cannot be saved; have the program use"), std::string::npos)
      << text;
}

TEST(Obstacles, ADevice) {
  std::string device;
  const char* const devices[] = {"/dev/fuse", "/dev/kvm",          "/dev/cpu_dma_latency",
                                 "/dev/rtc0", "/dev/loop-control", "/dev/vhost-net"};
  for (const char* path : devices) {
    const int fd = device.empty() ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (fd < 0) continue;
    device = path;
    close(fd);
  }
  if (device.empty()) GTEST_SKIP() << "no device here that can be opened";
  const Child child([&] { return open(device.c_str(), O_RDONLY) >= 0; });
  ASSERT_TRUE(child.did());
  const std::string text = Texts(Obstacles({child.pid()}));
  EXPECT_NE(text.find("has the device " + device + " open"), std::string::npos) << text;
}

TEST(Obstacles, ADebugger) {
  const Child child([] { return true; });
  ASSERT_TRUE(child.did());
  ASSERT_EQ(ptrace(PTRACE_SEIZE, child.pid(), nullptr, nullptr), 0);
  const std::string text = Texts(Obstacles({child.pid()}));
  EXPECT_NE(text.find("is traced by"), std::string::npos) << text;
  EXPECT_NE(text.find("(PID " + std::to_string(getpid()) + ")"), std::string::npos) << text;
}

TEST(Obstacles, TheCriuOfAToolThatWasKilledIsWaitedFor) {
  const Child child([] { return true; });
  ASSERT_TRUE(child.did());
  const Child criu([&] {
    if (prctl(PR_SET_NAME, "criu") != 0 || ptrace(PTRACE_SEIZE, child.pid(), nullptr, nullptr) != 0) return false;
    std::thread([] {
      usleep(300000);
      _exit(0);
    }).detach();
    return true;
  });
  ASSERT_TRUE(criu.did());
  EXPECT_EQ(Texts(Obstacles({child.pid()})), "");
}

TEST(Obstacles, ASemaphoreOfEvents) {
  const Child plain([] { return eventfd(1, 0) >= 0; }), semaphore([] { return eventfd(1, EFD_SEMAPHORE) >= 0; });
  ASSERT_TRUE(plain.did() && semaphore.did());
  EXPECT_EQ(Texts(Obstacles({plain.pid()})), "");
  const std::string text = Texts(Obstacles({semaphore.pid()}));
  EXPECT_NE(text.find("has an eventfd with EFD_SEMAPHORE"), std::string::npos) << text;
}

}  // namespace
}  // namespace cuda_remote::checkpoint
