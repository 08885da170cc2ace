// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/transaction/give_way.h"

#include <dirent.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <fstream>
#include <future>
#include <utility>

#include "checkpoint/job/account.h"
#include "proto/base/proc.h"
#include "proto/base/unique_fd.h"
#include "proto/threads/start_thread.h"

namespace cuda_remote::checkpoint {
namespace {

constexpr int kLooksAtOnce = 4;
constexpr double kLeastShare = 0.1, kLeastAsked = 0.5;
constexpr int kBusyLooks = 5;
constexpr auto kBusyPause = std::chrono::milliseconds(2);

// Threads of this process that give way were given the policy here.
std::atomic<bool> g_used{false};

bool SetPolicy(pid_t thread, int policy) {
  const sched_param none{};
  return sched_setscheduler(thread, policy, &none) == 0;
}

void AfterForkInChild() {
  if (!g_used || sched_getscheduler(0) != SCHED_IDLE) return;
  const AsRoot root;
  SetPolicy(0, SCHED_OTHER);
}

// Tries it with a thread that does nothing else: this one would have to wait for a processor then.
bool CanBeTakenBack() {
  std::promise<pid_t> number;
  std::promise<void> end;
  std::thread tried = StartThread([&] {
    number.set_value(gettid());
    end.get_future().wait();
  });
  if (!tried.joinable()) return false;
  const pid_t thread = number.get_future().get();
  const bool can = SetPolicy(thread, SCHED_IDLE) && SetPolicy(thread, SCHED_OTHER);
  end.set_value();
  tried.join();
  return can;
}

// Whether this is the only process of its session, whose share of time (proc(5), autogroup) is the usual one and can be
// changed back at once.
bool HasSessionForItself(pid_t process, const std::string& autogroup) {
  const pid_t session = getsid(process);
  if (session < 0 || autogroup.find(" nice 0\n") == std::string::npos) return false;
  if (!MissingCapability({{CAP_SYS_ADMIN, "SYS_ADMIN"}}).empty()) return false;
  const std::vector<int> all = AllProcesses();
  const bool alone =
      std::none_of(all.begin(), all.end(), [&](pid_t other) { return other != process && getsid(other) == session; });
  return !all.empty() && alone;
}

// Empty if it cannot be read, or is longer.
std::string ReadSmall(int folder, const std::string& name) {
  const UniqueFd file(openat(folder, name.c_str(), O_RDONLY | O_CLOEXEC));
  char text[1024];
  const ssize_t got = file.ok() ? read(file.get(), text, sizeof(text)) : -1;
  return got > 0 && size_t(got) < sizeof(text) ? std::string(text, size_t(got)) : std::string();
}

}  // namespace

bool Starve(double ran, double waited, double seconds) {
  const double asked = ran + waited;
  return ran < asked * kLeastShare && asked > seconds * kLeastAsked;
}

bool ProcessorsAreBusy() {
  const long processors = sysconf(_SC_NPROCESSORS_ONLN);
  int busy = 0;
  for (int look = 0; look < kBusyLooks; ++look) {
    if (look > 0) std::this_thread::sleep_for(kBusyPause);
    std::ifstream stat("/proc/stat");
    long running = 0;
    for (std::string line; std::getline(stat, line);) {
      if (sscanf(line.c_str(), "procs_running %ld", &running) == 1) break;
    }
    // This thread is one of them.
    if (running > processors) ++busy;
  }
  return 2 * busy > kBusyLooks;
}

// A process and its threads: none once it has ended, whoever gets its number then.
class GiveWay::Process {
 public:
  explicit Process(pid_t process) : list_(opendir(("/proc/" + std::to_string(process) + "/task").c_str())) {
    has_session_ = list_ && HasSessionForItself(process, ReadSmall(dirfd(list_), kAutogroup));
  }
  ~Process() {
    if (list_) closedir(list_);
  }
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  // Tries again each time what has failed.
  void SetShareOfSession(bool least) {
    if (!has_session_ || least == least_) return;
    const UniqueFd file(openat(dirfd(list_), kAutogroup, O_WRONLY | O_CLOEXEC));
    const std::string nice = least ? "19" : "0";
    if (write(file.get(), nice.data(), nice.size()) == ssize_t(nice.size())) least_ = least;
  }

  template <typename Each>
  void ForEach(const Each& each) const {
    if (!list_) return;
    rewinddir(list_);
    while (const dirent* const entry = readdir(list_)) {
      if (const pid_t thread = atoi(entry->d_name); thread > 0) each(thread);
    }
  }

  // False if the kernel does not tell, or the thread has ended.
  bool Read(pid_t thread, Times* times) const {
    const std::string text = list_ ? ReadSmall(dirfd(list_), std::to_string(thread) + "/schedstat") : std::string();
    unsigned long long ran = 0, waited = 0, begun = 0;
    if (sscanf(text.c_str(), "%llu %llu %llu", &ran, &waited, &begun) != 3 || begun == 0) return false;
    *times = {ran, waited, begun};
    return true;
  }
  // Whether it runs, or would run if there were a processor.
  bool WantsToRun(pid_t thread) const {
    const std::string text = ReadSmall(dirfd(list_), std::to_string(thread) + "/stat");
    return text.find(") R ", text.rfind(')')) != std::string::npos;
  }

 private:
  static constexpr char kAutogroup[] = "../autogroup";
  DIR* const list_;
  bool has_session_ = false, least_ = false;
};

GiveWay::GiveWay(std::chrono::milliseconds look_every, std::function<bool()> busy)
    : look_every_(look_every), busy_(std::move(busy)) {}

GiveWay::~GiveWay() {
  if (!watcher_.joinable()) return;
  {
    MutexLock lock(&mutex_);
    over_ = true;
  }
  changed_.NotifyAll();
  watcher_.join();
}

void GiveWay::Begin(const std::vector<pid_t>& helpers) {
  if (busy_()) {
    MutexLock lock(&mutex_);
    new_.insert(new_.end(), helpers.begin(), helpers.end());  // for the next call
    return;
  }
  if (!watcher_.joinable()) {
    // The watcher keeps these rights.
    const AsRoot root;
    if (!IsPossible()) return;
    g_used = true;
    watcher_ = StartThread([this] { Watch(); });
    if (!watcher_.joinable()) return;  // as without the right to do it
  }
  Ask(true, helpers);
}

void GiveWay::End() {
  if (watcher_.joinable()) Ask(false, {});
}

bool GiveWay::active() const {
  MutexLock lock(&mutex_);
  return active_;
}

bool GiveWay::IsPossible() const {
  static const bool forks = pthread_atfork(nullptr, nullptr, AfterForkInChild) == 0;
  Times times;
  return forks && sched_getscheduler(0) == SCHED_OTHER && Process(getpid()).Read(gettid(), &times) && CanBeTakenBack();
}

void GiveWay::Ask(bool give_way, const std::vector<pid_t>& helpers) {
  MutexLock lock(&mutex_);
  wanted_ = give_way;
  new_.insert(new_.end(), helpers.begin(), helpers.end());
  const uint64_t number = ++asked_;
  changed_.NotifyAll();
  while (answered_ < number) changed_.Wait(&mutex_);
}

void GiveWay::Watch() {
  processes_.emplace_back(getpid());
  Moment next = Now();
  MutexLock lock(&mutex_);
  for (bool over = false; !over;) {
    while (!over_ && asked_ == answered_ && Now() < next) changed_.WaitUntil(&mutex_, next);
    over = over_;
    const bool is_new = asked_ != answered_;
    const uint64_t asked = asked_;
    bool gives_way = !over && (is_new ? wanted_ : active_);
    for (const pid_t helper : std::exchange(new_, {})) processes_.emplace_back(helper);
    lock.Unlock();

    const Moment now = Now();
    if (is_new) {
      since_ = now;
      looks_ = 0;
      last_.clear();
    }
    if (gives_way) gives_way = !Starved(now);
    Change(gives_way);
    next = now + look_every_;

    lock.Lock();
    active_ = gives_way;
    answered_ = asked;
    changed_.NotifyAll();
  }
}

// New threads have the policy of those that start them, so it looks until it finds none any more.
void GiveWay::Change(bool gives_way) {
  const int from = gives_way ? SCHED_OTHER : SCHED_IDLE, to = gives_way ? SCHED_IDLE : SCHED_OTHER;
  const pid_t own = gettid();
  for (Process& of : processes_) of.SetShareOfSession(gives_way);
  for (bool changed = true; changed;) {
    changed = false;
    for (const Process& of : processes_) {
      of.ForEach([&](pid_t thread) {
        if (thread != own && sched_getscheduler(thread) == from && SetPolicy(thread, to)) changed = true;
      });
    }
  }
}

void GiveWay::Look(Moment now) {
  std::map<pid_t, Times> found;
  const uint64_t between = uint64_t((now - looked_) / std::chrono::nanoseconds(1));
  for (const Process& of : processes_) {
    of.ForEach([&](pid_t thread) {
      Times times, before;
      if (!of.Read(thread, &times)) return;
      if (const auto known = last_.find(thread); known != last_.end() && known->second.begun <= times.begun) {
        before = known->second;
        // The kernel counts a wait when it ends.
        const bool waits = times.begun == before.begun && times.ran == before.ran && of.WantsToRun(thread);
        times.waited = std::max(times.waited, before.waited + (waits ? between : 0));
      }
      ran_ += times.ran - std::min(times.ran, before.ran);
      waited_ += times.waited - before.waited;
      found[thread] = times;
    });
  }
  // What threads did before they gave way.
  if (last_.empty()) ran_ = waited_ = 0;
  last_.swap(found);
  looked_ = now;
}

bool GiveWay::Starved(Moment now) {
  Look(now);
  if (looks_++ == 0 || looks_ % kLooksAtOnce != 1) return false;
  const double seconds = std::chrono::duration<double>(now - std::exchange(since_, now)).count();
  return Starve(double(std::exchange(ran_, 0)) / 1e9, double(std::exchange(waited_, 0)) / 1e9, seconds);
}

}  // namespace cuda_remote::checkpoint
