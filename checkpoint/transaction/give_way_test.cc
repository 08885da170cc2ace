// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/transaction/give_way.h"

#include <errno.h>
#include <grp.h>
#include <gtest/gtest.h>
#include <linux/capability.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <functional>
#include <future>
#include <set>
#include <string>

#include "checkpoint/job/account.h"

namespace cuda_remote::checkpoint {
namespace {

// Longer than any test, so that a busy machine changes nothing.
constexpr std::chrono::hours kNever(1);

// Whatever else this machine does.
bool NotBusy() { return false; }
// Nobody's.
constexpr uid_t kUser = 64321;

// Of all threads of a process. 0 stands for this one.
std::set<int> Policies(pid_t process) {
  std::set<int> policies;
  const std::string threads = "/proc/" + std::to_string(process ? process : getpid()) + "/task";
  for (const auto& thread : std::filesystem::directory_iterator(threads)) {
    policies.insert(sched_getscheduler(std::stoi(thread.path().filename())));
  }
  return policies;
}

// Without the one that watches.
size_t Count(int policy) {
  size_t count = 0;
  for (const auto& thread : std::filesystem::directory_iterator("/proc/self/task")) {
    count += sched_getscheduler(std::stoi(thread.path().filename())) == policy ? 1 : 0;
  }
  return count;
}

// A process that runs `work`, and is killed at the end.
class Child {
 public:
  explicit Child(const std::function<int()>& work) : pid_(fork()) {
    if (pid_ != 0) return;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    _exit(work());
  }
  ~Child() {
    if (pid_ <= 0) return;
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  pid_t pid() const { return pid_; }
  int ExitCode() {
    int status = 0;
    while (waitpid(pid_, &status, 0) < 0 && errno == EINTR) {
    }
    pid_ = 0;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }

 private:
  pid_t pid_;
};

// Why nothing can be tested here; empty: it can.
std::string Missing() {
  if (geteuid() != 0) return "needs root";
  const auto try_it = [] {
    const sched_param none{};
    return sched_setscheduler(0, SCHED_IDLE, &none) == 0 && sched_setscheduler(0, SCHED_OTHER, &none) == 0 ? 0 : 1;
  };
  if (Child(try_it).ExitCode() != 0) return "this process may not end SCHED_IDLE: it needs CAP_SYS_NICE";
  unsigned long long ran = 0, waited = 0, begun = 0;
  std::ifstream("/proc/self/schedstat") >> ran >> waited >> begun;
  return begun == 0 ? "this kernel does not tell how long threads wait" : "";
}

int Sleep() {
  while (true) pause();
}

// Runs all the time, and notes whether its parent gives way.
int Spin(std::atomic<bool>* seen) {
  while (true) {
    if (sched_getscheduler(getppid()) == SCHED_IDLE) *seen = true;
  }
}

// What processes share.
std::atomic<bool>* Shared() {
  void* const memory = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  return memory == MAP_FAILED ? nullptr : new (memory) std::atomic<bool>(false);
}

// A thread that waits.
class Waiting {
 public:
  ~Waiting() {
    end_.set_value();
    thread_.join();
  }

 private:
  std::promise<void> end_;
  std::thread thread_{[this] { end_.get_future().wait(); }};
};

TEST(StarveTest, IsToGetLittleOfMuch) {
  // Twelve threads that work share four processors, or one. Others have them.
  EXPECT_FALSE(Starve(4, 8, 1));
  EXPECT_TRUE(Starve(1, 11, 1));
  EXPECT_TRUE(Starve(0, 12, 1));
  EXPECT_TRUE(Starve(0, 1, 1));
  // They sleep, or have little to do.
  EXPECT_FALSE(Starve(0, 0, 1));
  EXPECT_FALSE(Starve(0.01, 0.4, 1));
  // They have a processor whenever they want one.
  EXPECT_FALSE(Starve(12, 0, 1));
}

class GiveWayTest : public testing::Test {
 protected:
  void SetUp() override {
    if (const std::string missing = Missing(); !missing.empty()) GTEST_SKIP() << missing;
    ASSERT_EQ(sched_getscheduler(0), SCHED_OTHER);
  }
};

TEST_F(GiveWayTest, AllThreadsGiveWayUntilItEnds) {
  const Waiting one, two;
  {
    GiveWay give_way(kNever, NotBusy);
    EXPECT_EQ(Policies(0), std::set{SCHED_OTHER});
    give_way.Begin();
    EXPECT_TRUE(give_way.active());
    EXPECT_EQ(Count(SCHED_IDLE), 3);
    EXPECT_EQ(Count(SCHED_OTHER), 1);  // the one that watches
    // A thread that begins meanwhile.
    int policy = -1;
    std::thread([&] { policy = sched_getscheduler(0); }).join();
    EXPECT_EQ(policy, SCHED_IDLE);
  }
  EXPECT_EQ(Policies(0), std::set{SCHED_OTHER});
}

TEST_F(GiveWayTest, NothingChangesWhereProcessorsAreBusy) {
  bool busy = true;
  GiveWay give_way(kNever, [&] { return busy; });
  give_way.Begin();
  EXPECT_FALSE(give_way.active());
  EXPECT_EQ(Policies(0), std::set{SCHED_OTHER});
  busy = false;
  give_way.Begin();
  EXPECT_TRUE(give_way.active());
  give_way.End();
  busy = true;
  give_way.Begin();
  EXPECT_FALSE(give_way.active());
}

TEST_F(GiveWayTest, HelpersAreRememberedWhereProcessorsAreBusy) {
  const Child helper(Sleep);
  bool busy = true;
  GiveWay give_way(kNever, [&] { return busy; });
  give_way.Begin({helper.pid()});
  EXPECT_EQ(Policies(helper.pid()), std::set{SCHED_OTHER});
  busy = false;
  give_way.Begin();
  EXPECT_EQ(Policies(helper.pid()), std::set{SCHED_IDLE});
  give_way.End();
  EXPECT_EQ(Policies(helper.pid()), std::set{SCHED_OTHER});
}

TEST(ProcessorsAreBusyTest, SoTheyAreWithMoreThreadsThanProcessors) {
  std::atomic<bool> over{false};
  std::vector<std::thread> threads;
  for (long i = 0; i < sysconf(_SC_NPROCESSORS_ONLN) + 2; ++i) {
    threads.emplace_back([&] {
      while (!over) {
      }
    });
  }
  bool busy = false;
  for (int tries = 0; tries < 100 && !busy; ++tries) busy = ProcessorsAreBusy();
  over = true;
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(busy);
}

TEST_F(GiveWayTest, AThreadThatBeginsMeanwhileComesBack) {
  GiveWay give_way(kNever, NotBusy);
  for (int i = 0; i < 3; ++i) {
    give_way.Begin();
    const Waiting later;
    EXPECT_EQ(Count(SCHED_IDLE), 2);
    give_way.End();
    EXPECT_FALSE(give_way.active());
    EXPECT_EQ(Policies(0), std::set{SCHED_OTHER});
  }
}

TEST_F(GiveWayTest, ThreadsThatStartOthersAllTheTimeComeBack) {
  std::atomic<bool> stop{false};
  // Each ends when it has started the next.
  std::function<void(int)> generation = [&](int left) {
    if (!stop && left > 0) std::thread(generation, left - 1).join();
  };
  std::thread starts([&] {
    while (!stop) generation(5);
  });
  for (int i = 0; i < 20; ++i) {
    GiveWay give_way(std::chrono::milliseconds(2), NotBusy);
    give_way.Begin();
    give_way.End();
    // One that was just being started.
    while (Policies(0).count(SCHED_IDLE) != 0) usleep(1000);
  }
  stop = true;
  starts.join();
}

TEST_F(GiveWayTest, HelpersGiveWayToo) {
  const Child helper(Sleep), other(Sleep);
  {
    GiveWay give_way(kNever, NotBusy);
    give_way.Begin({helper.pid()});
    EXPECT_EQ(Policies(helper.pid()), std::set{SCHED_IDLE});
    EXPECT_EQ(Policies(other.pid()), std::set{SCHED_OTHER});
  }
  EXPECT_EQ(Policies(helper.pid()), std::set{SCHED_OTHER});
}

TEST_F(GiveWayTest, TheNextEndFindsWhatAHelperWasStarting) {
  const Child helper(Sleep);
  GiveWay give_way(kNever, NotBusy);
  give_way.Begin({helper.pid()});
  give_way.End();
  const sched_param none{};
  ASSERT_EQ(sched_setscheduler(helper.pid(), SCHED_IDLE, &none), 0);
  give_way.End();
  EXPECT_EQ(Policies(helper.pid()), std::set{SCHED_OTHER});
}

TEST_F(GiveWayTest, AHelperThatEndsMeanwhileIsNoProblem) {
  Child helper(Sleep);
  {
    GiveWay give_way(kNever, NotBusy);
    give_way.Begin({helper.pid()});
    kill(helper.pid(), SIGKILL);
    helper.ExitCode();
  }
  EXPECT_EQ(Policies(0), std::set{SCHED_OTHER});
}

TEST_F(GiveWayTest, AChildDoesNotGiveWay) {
  GiveWay give_way(kNever, NotBusy);
  give_way.Begin();
  EXPECT_EQ(Child([] { return sched_getscheduler(0); }).ExitCode(), SCHED_OTHER);
  // Also of a thread that acts as another user.
  Account account;
  account.user = account.group = kUser;
  const ActAs user(&account);
  EXPECT_EQ(Child([] { return sched_getscheduler(0) + 10 * (geteuid() == kUser ? 1 : 0); }).ExitCode(),
            SCHED_OTHER + 10);
}

TEST_F(GiveWayTest, AToolThatActsAsAUserComesBack) {
  Account account;
  account.user = account.group = kUser;
  const ActAs user(&account);
  {
    GiveWay give_way(kNever, NotBusy);
    give_way.Begin();
    EXPECT_TRUE(give_way.active());
    EXPECT_EQ(sched_getscheduler(0), SCHED_IDLE);
  }
  EXPECT_EQ(Policies(0), std::set{SCHED_OTHER});
  EXPECT_EQ(geteuid(), kUser);
}

// In a child: what GiveWay does there. 1: all threads give way; 0: none does; 2: one does not come back.
int Try() {
  const Waiting other;
  const size_t before = Count(SCHED_OTHER);
  size_t given = 0;
  {
    GiveWay give_way(kNever, NotBusy);
    give_way.Begin();
    given = Count(SCHED_IDLE);
    if (give_way.active() != (given > 0)) return 3;
  }
  if (Count(SCHED_OTHER) != before) return 2;
  return given == before ? 1 : given == 0 ? 0 : 4;
}

bool LoseRights() {
  return setgroups(0, nullptr) == 0 && setresgid(kUser, kUser, kUser) == 0 && setresuid(kUser, kUser, kUser) == 0;
}

TEST_F(GiveWayTest, NothingChangesThatCannotBeTakenBack) {
  EXPECT_EQ(Child([] {
              const rlimit none{0, 0};
              return setrlimit(RLIMIT_NICE, &none) == 0 && LoseRights() ? Try() : 9;
            }).ExitCode(),
            0);
}

TEST_F(GiveWayTest, ALimitMayAllowIt) {
  if (const std::string missing = MissingCapability({{CAP_SYS_RESOURCE, "SYS_RESOURCE"}}); !missing.empty()) {
    GTEST_SKIP() << missing;
  }
  EXPECT_EQ(Child([] {
              const rlimit usual{20, 20};  // nice values from 0
              return setrlimit(RLIMIT_NICE, &usual) == 0 && LoseRights() ? Try() : 9;
            }).ExitCode(),
            1);
}

TEST_F(GiveWayTest, TheUsersPolicyStays) {
  for (const int policy : {SCHED_BATCH, SCHED_IDLE}) {
    EXPECT_EQ(Child([policy] {
                const sched_param none{};
                if (sched_setscheduler(0, policy, &none) != 0) return 9;
                const Waiting other;
                GiveWay give_way(kNever, NotBusy);
                give_way.Begin();
                return !give_way.active() && Policies(0) == std::set{policy} ? 0 : 1;
              }).ExitCode(),
              0)
        << policy;
  }
}

TEST_F(GiveWayTest, TheUsersNiceValueStays) {
  EXPECT_EQ(Child([] {
              if (setpriority(PRIO_PROCESS, 0, 7) != 0) return 9;
              {
                GiveWay give_way(kNever, NotBusy);
                give_way.Begin();
              }
              return getpriority(PRIO_PROCESS, 0) == 7 && Policies(0) == std::set{SCHED_OTHER} ? 0 : 1;
            }).ExitCode(),
            0);
}

bool StayOnOneProcessor() {
  cpu_set_t all, one;
  if (sched_getaffinity(0, sizeof(all), &all) != 0) return false;
  int first = 0;
  while (!CPU_ISSET(first, &all)) ++first;
  CPU_ZERO(&one);
  CPU_SET(first, &one);
  return sched_setaffinity(0, sizeof(one), &one) == 0;
}

// How sessions share time: "/autogroup-12 nice 0". Empty: they do not.
std::string Autogroup(pid_t process) {
  std::string text;
  std::getline(std::ifstream("/proc/" + std::to_string(process) + "/autogroup"), text);
  return text.substr(std::min(text.size(), text.find(' ')));
}

TEST_F(GiveWayTest, ASessionOfItsOwnGivesWay) {
  if (Autogroup(getpid()).empty()) GTEST_SKIP() << "this kernel has no groups by session";
  if (const std::string missing = MissingCapability({{CAP_SYS_ADMIN, "SYS_ADMIN"}}); !missing.empty()) {
    GTEST_SKIP() << missing;
  }
  const Child helper([] { return setsid() > 0 ? Sleep() : 9; });
  while (getsid(helper.pid()) != helper.pid()) usleep(1000);
  EXPECT_EQ(Child([&] {
              if (setsid() < 0) return 9;
              GiveWay give_way(kNever, NotBusy);
              for (int i = 0; i < 2; ++i) {
                give_way.Begin(i == 0 ? std::vector<pid_t>{helper.pid()} : std::vector<pid_t>{});
                if (Autogroup(getpid()) != " nice 19" || Autogroup(helper.pid()) != " nice 19") return 1;
                give_way.End();
                if (Autogroup(getpid()) != " nice 0" || Autogroup(helper.pid()) != " nice 0") return 2;
              }
              return 0;
            }).ExitCode(),
            0);
}

TEST_F(GiveWayTest, ASessionWithOthersDoesNotGiveWay) {
  const std::string before = Autogroup(getpid());
  EXPECT_EQ(Child([&] {
              if (setsid() < 0) return 9;
              const Child other(Sleep);
              GiveWay give_way(kNever, NotBusy);
              give_way.Begin({other.pid()});
              return give_way.active() && Autogroup(getpid()) == before ? 0 : 1;
            }).ExitCode(),
            0);
}

// What would be waited for in vain ends by the test's own limit.
void AwaitUsual(const GiveWay& give_way) {
  while (give_way.active()) usleep(10000);
}

TEST_F(GiveWayTest, ThreadsThatStarveGetTheUsualPolicyBack) {
  // On one processor, with processes that always run.
  EXPECT_EQ(Child([] {
              if (!StayOnOneProcessor()) return 9;
              std::atomic<bool>* const seen = Shared();
              const auto spin = [seen] { return Spin(seen); };
              const Child busy(spin), busy_too(spin);
              GiveWay give_way(std::chrono::milliseconds(100), NotBusy);
              give_way.Begin();
              std::atomic<bool> end{false};
              std::thread work([&] {
                while (!end) {
                }
              });
              AwaitUsual(give_way);
              const bool usual = Policies(0) == std::set{SCHED_OTHER};
              end = true;
              work.join();
              return !usual ? 1 : !*seen ? 2 : 0;
            }).ExitCode(),
            0);
}

TEST_F(GiveWayTest, AHelperThatStarvesGetsTheUsualPolicyBack) {
  EXPECT_EQ(Child([] {
              if (!StayOnOneProcessor()) return 9;
              std::atomic<bool>* const seen = Shared();
              const auto spin = [seen] { return Spin(seen); };
              const Child busy(spin), busy_too(spin), helper(spin);
              GiveWay give_way(std::chrono::milliseconds(100), NotBusy);
              give_way.Begin({helper.pid()});
              AwaitUsual(give_way);
              return Policies(helper.pid()) != std::set{SCHED_OTHER} ? 1 : !*seen ? 2 : 0;
            }).ExitCode(),
            0);
}

}  // namespace
}  // namespace cuda_remote::checkpoint
