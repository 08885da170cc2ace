// SPDX-License-Identifier: Apache-2.0
// LockAll with processes and a clock that the tests make up: each process is a list of threads with calls to make, and
// of work on GPUs that ends after a while, or when a call has been made.

#include "checkpoint/agent/lock.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

namespace cuda_remote::agent {
namespace {

using testing::HasSubstr;
using testing::Not;

constexpr int64_t kMs = 1000;

// Work that the model's GPUs do. The last digit of a stream's number is its GPU.
struct Work {
  int stream = 0;
  int64_t us = 0;                 // how long it runs once it may
  std::function<bool()> may_end;  // null: as soon as it has run
};

struct World {
  int64_t now = 1000000;
  LockClock Clock() {
    LockClock clock;
    clock.now_us = [this] { return now; };
    clock.sleep_us = [this](int64_t us) { now += us; };
    return clock;
  }
};

class FakeProcess : public Lockable {
 public:
  FakeProcess(World* world, std::string name) : world_(world), name_(std::move(name)) {}

  struct Call {
    bool asks = false;
    int gpu = 0;
    std::vector<Work> adds;
    std::function<bool()> returns;  // null: at once
    std::function<void()> made;     // called when it returns
  };
  struct Thread {
    std::deque<Call> calls;
    int64_t host_us = 0;  // between two calls
    int64_t next_at = 0;
    bool inside = false;
    std::function<bool()> more;  // refills `calls`
  };

  std::vector<Thread> threads;
  std::map<int, std::deque<Work>> queues;  // by stream
  std::map<int, int64_t> began;
  std::set<int> added;
  bool capturing = false;
  uint64_t host_function_ms = 0;
  std::function<uint64_t()> host_function;
  bool not_settled_once = false;
  bool fail_close = false;
  int64_t silent_from = INT64_MAX;  // its server answers no more
  uint64_t last_busy_streams = 0;   // when it did
  bool open = true;
  bool settled = false;
  int opens = 0, closes = 0, admissions = 0;

  bool StreamBusy(int stream) {
    auto& queue = queues[stream];
    while (!queue.empty()) {
      if (began.find(stream) == began.end()) began[stream] = world_->now;
      const Work& first = queue.front();
      if (world_->now - began[stream] < first.us || (first.may_end && !first.may_end())) return true;
      began[stream] += first.us;
      if (first.may_end) began[stream] = world_->now;
      queue.pop_front();
    }
    began.erase(stream);
    added.erase(stream);
    return false;
  }
  bool Busy(int gpu) {
    bool busy = false;
    for (auto& [stream, queue] : queues) busy = (!IsHidden(stream) && stream % 10 == gpu && StreamBusy(stream)) || busy;
    return busy;
  }
  // A stream that was destroyed: nobody can ask for its work.
  static bool IsHidden(int stream) { return stream >= 1000; }
  bool Adding(int gpu) {
    bool adding = false;
    for (auto& [stream, queue] : queues)
      adding = (stream % 10 == gpu && StreamBusy(stream) && added.count(stream)) || adding;
    return adding;
  }
  bool AnyBusy() {
    bool any = false;
    for (auto& [stream, queue] : queues) any = StreamBusy(stream) || any;
    return any;
  }

  // Lets threads make the calls that need not wait at the gate, and end those that are inside.
  void Step() {
    for (Thread& thread : threads) {
      if (thread.inside) {
        const Call& call = thread.calls.front();
        if (call.returns && !call.returns()) continue;
        if (call.made) call.made();
        thread.calls.pop_front();
        thread.inside = false;
        thread.next_at = world_->now + thread.host_us;
      }
      if (thread.calls.empty() && thread.more) thread.more();
    }
  }
  bool AtGate(const Thread& thread) const {
    return !thread.inside && !thread.calls.empty() && thread.next_at <= world_->now;
  }

  std::string Name() const override { return name_; }
  absl::Status Close() override {
    ++closes;
    if (fail_close) return absl::UnavailableError("it has lost its server");
    open = settled = false;
    return absl::OkStatus();
  }
  absl::StatusOr<Activity> Look() override {
    EXPECT_FALSE(open);
    world_->now += 30;
    Step();
    Activity activity;
    activity.answered = world_->now < silent_from;
    activity.busy_streams = last_busy_streams;  // as it was
    if (!activity.answered) return activity;
    activity.busy_streams = 0;
    activity.has_work = AnyBusy();
    activity.capturing = capturing;
    const bool any_busy = AnyBusy();
    for (auto& [stream, queue] : queues) activity.busy_streams += !IsHidden(stream) && StreamBusy(stream);
    last_busy_streams = activity.busy_streams;
    activity.host_function_ms = host_function ? host_function() : host_function_ms;
    for (int gpu = 0; gpu < 10; ++gpu) {
      if (Busy(gpu)) activity.contexts.push_back({uint64_t(gpu), 0, true, Adding(gpu)});
    }
    for (const Thread& thread : threads) {
      activity.inside += thread.inside;
      if (!AtGate(thread)) continue;
      const Call& call = thread.calls.front();
      if (call.asks) {
        ++activity.asking;
        continue;
      }
      const auto same = [&](const Activity::Context& one) { return one.context == uint64_t(call.gpu); };
      auto& contexts = activity.contexts;
      auto at = std::find_if(contexts.begin(), contexts.end(), same);
      if (at == contexts.end()) at = contexts.insert(at, {uint64_t(call.gpu), 0, Busy(call.gpu), Adding(call.gpu)});
      ++at->calls;
    }
    activity.quiet = !any_busy && activity.inside == 0 && activity.host_function_ms == 0 && !activity.capturing;
    return activity;
  }
  absl::StatusOr<bool> Admit(const Admission& which) override {
    EXPECT_FALSE(open);
    for (Thread& thread : threads) {
      if (!AtGate(thread)) continue;
      const Call& call = thread.calls.front();
      if (call.asks != which.asks || (!call.asks && uint64_t(call.gpu) != which.context)) continue;
      for (const Work& work : call.adds) {
        queues[work.stream].push_back(work);
        added.insert(work.stream);
      }
      thread.inside = true;
      ++admissions;
      return true;
    }
    return false;
  }
  absl::StatusOr<bool> Settle(int timeout_ms) override {
    EXPECT_GE(timeout_ms, 0);
    settled = !not_settled_once;
    not_settled_once = false;
    return settled;
  }
  void Open() override {
    ++opens;
    open = true;
    settled = false;
    capturing = false;  // a capture ends soon if it may
  }

 private:
  World* const world_;
  const std::string name_;
};

class LockTest : public testing::Test {
 protected:
  absl::Status Lock(const std::vector<Lockable*>& processes, int timeout_ms = 60000) {
    LockOptions options;
    options.timeout_ms = timeout_ms;
    options.clock = world_.Clock();
    options.cancelled = cancelled_;
    began_ = world_.now;
    const absl::StatusOr<int64_t> closed_us = LockAll(processes, options);
    if (closed_us.ok()) closed_us_ = *closed_us;
    return closed_us.status();
  }
  // What is said of them after four seconds.
  std::string WhyTooLate(const std::vector<Lockable*>& processes) {
    const absl::Status locked = Lock(processes, 4000);
    EXPECT_EQ(locked.code(), absl::StatusCode::kDeadlineExceeded) << locked;
    return std::string(locked.message());
  }
  int64_t TookMs() const { return (world_.now - began_) / kMs; }

  World world_;
  int64_t began_ = 0, closed_us_ = 0;
  std::function<bool()> cancelled_;
};

TEST_F(LockTest, AnIdleProcessIsLockedAtOnce) {
  FakeProcess process(&world_, "a");
  process.threads.resize(1);
  process.threads[0].calls.push_back({});
  ASSERT_EQ(Lock({&process}), absl::OkStatus());
  EXPECT_TRUE(process.settled);
  EXPECT_EQ(process.admissions, 0);
  EXPECT_LT(TookMs(), 5);
  EXPECT_EQ(closed_us_, began_);
}

TEST_F(LockTest, WorkThatEndsByItselfIsWaitedForAndNothingIsLetThrough) {
  FakeProcess process(&world_, "a");
  process.queues[0].push_back({0, 15 * kMs, nullptr});
  process.threads.resize(2);
  for (auto& thread : process.threads) thread.calls.push_back({false, 0, {{0, 1000 * kMs, nullptr}}, nullptr, nullptr});
  ASSERT_EQ(Lock({&process}), absl::OkStatus());
  EXPECT_EQ(process.admissions, 0);
  EXPECT_LT(TookMs(), 20);
}

// A host function waits for a thread whose next call is a question.
TEST_F(LockTest, AQuestionIsLetThrough) {
  FakeProcess process(&world_, "a");
  bool released = false;
  process.queues[0].push_back({0, 0, [&] { return released; }});
  process.threads.resize(1);
  process.threads[0].calls.push_back({true, 0, {}, nullptr, [&] { released = true; }});
  ASSERT_EQ(Lock({&process}), absl::OkStatus());
  EXPECT_TRUE(released);
  EXPECT_EQ(process.admissions, 1);
  EXPECT_LT(TookMs(), 50);
}

// The same thread must make many calls that add work, to the very GPU that waits; a host function tells that it waits.
TEST_F(LockTest, ManyCallsThatAHostFunctionWaitsFor) {
  FakeProcess process(&world_, "a");
  bool released = false;
  process.queues[0].push_back({0, 0, [&] { return released; }});
  process.host_function = [&] { return released ? uint64_t(0) : uint64_t((world_.now - began_) / kMs + 1); };
  process.threads.resize(1);
  for (int i = 0; i < 500; ++i) process.threads[0].calls.push_back({false, 0, {{0, 100, nullptr}}, nullptr, nullptr});
  process.threads[0].calls.push_back({false, 0, {}, nullptr, [&] { released = true; }});
  ASSERT_EQ(Lock({&process}), absl::OkStatus());
  EXPECT_LT(TookMs(), 3000);
}

// A kernel polls memory that the host writes after some more calls: nothing tells that it does.
TEST_F(LockTest, SomeCallsThatAKernelWaitsFor) {
  FakeProcess process(&world_, "a");
  bool released = false;
  process.queues[0].push_back({0, 0, [&] { return released; }});
  process.threads.resize(1);
  for (int i = 0; i < 3; ++i) process.threads[0].calls.push_back({false, 0, {{0, 100, nullptr}}, nullptr, nullptr});
  process.threads[0].calls.push_back({true, 0, {}, nullptr, [&] { released = true; }});
  ASSERT_EQ(Lock({&process}), absl::OkStatus());
  EXPECT_LT(TookMs(), 2000);
}

// The same, but the calls put work into another stream, and that ends.
TEST_F(LockTest, ManyCallsInAnotherStreamThatAKernelWaitsFor) {
  FakeProcess process(&world_, "a");
  bool released = false;
  process.queues[0].push_back({0, 0, [&] { return released; }});
  process.threads.resize(1);
  for (int i = 0; i < 500; ++i) process.threads[0].calls.push_back({false, 0, {{10, 300, nullptr}}, nullptr, nullptr});
  process.threads[0].calls.push_back({true, 0, {}, nullptr, [&] { released = true; }});
  ASSERT_EQ(Lock({&process}), absl::OkStatus());
  EXPECT_LT(TookMs(), 3000);
}

// Work that no stream shows, since its stream was destroyed, waits for calls of a thread whose GPU seems to be idle.
TEST_F(LockTest, CallsThatHiddenWorkWaitsFor) {
  FakeProcess process(&world_, "a");
  bool released = false;
  process.queues[1000].push_back({1000, 0, [&] { return released; }});
  process.threads.resize(1);
  for (int i = 0; i < 50; ++i) process.threads[0].calls.push_back({false, 0, {{0, 300, nullptr}}, nullptr, nullptr});
  process.threads[0].calls.push_back({true, 0, {}, nullptr, [&] { released = true; }});
  ASSERT_EQ(Lock({&process}), absl::OkStatus());
  EXPECT_LT(TookMs(), 2000);
}

// One thread polls for ever; another one's calls, which add work, are what the GPU waits for.
TEST_F(LockTest, QuestionsDoNotStarveOtherCalls) {
  FakeProcess process(&world_, "a");
  bool released = false;
  process.queues[0].push_back({0, 0, [&] { return released; }});
  process.threads.resize(2);
  auto& poller = process.threads[0];
  poller.more = [&poller] {
    poller.calls.push_back({true, 0, {}, nullptr, nullptr});
    return true;
  };
  process.threads[1].calls.push_back({false, 0, {}, nullptr, [&] { released = true; }});
  ASSERT_EQ(Lock({&process}), absl::OkStatus());
  EXPECT_TRUE(released);
}

// A thread that waits inside does not keep others from being let through.
TEST_F(LockTest, ACallThatWaitsInsideDoesNotStopOthers) {
  FakeProcess process(&world_, "a");
  bool released = false;
  process.queues[0].push_back({0, 0, [&] { return released; }});
  process.threads.resize(2);
  process.threads[0].calls.push_back({true, 0, {}, [&] { return !process.Busy(0); }, nullptr});
  process.threads[1].calls.push_back({true, 0, {}, nullptr, [&] { released = true; }});
  ASSERT_EQ(Lock({&process}), absl::OkStatus());
  EXPECT_FALSE(process.threads[0].inside);
}

// A program that launches ahead of its GPU: its queue ends, since hardly anything is added to it.
TEST_F(LockTest, AQueueOfLongKernelsEnds) {
  FakeProcess process(&world_, "a");
  for (int i = 0; i < 4; ++i) process.queues[0].push_back({0, 500 * kMs, nullptr});
  process.threads.resize(1);
  auto& thread = process.threads[0];
  thread.more = [&thread] {
    thread.calls.push_back({false, 0, {{0, 500 * kMs, nullptr}}, nullptr, nullptr});
    return true;
  };
  ASSERT_EQ(Lock({&process}), absl::OkStatus());
  EXPECT_LT(process.admissions, 12);
  EXPECT_LT(TookMs(), 8000);
}

// Host functions that end by themselves are not taken for ones that wait.
TEST_F(LockTest, AQueueOfHostFunctionsEnds) {
  FakeProcess process(&world_, "a");
  constexpr int64_t kFunctionUs = 120 * kMs;
  const auto add = [&](int count) {
    for (int i = 0; i < count; ++i) process.queues[0].push_back({0, kFunctionUs, nullptr});
  };
  add(3);
  process.host_function = [&] {
    return process.Busy(0) ? uint64_t((world_.now - process.began[0]) / kMs + 1) : uint64_t(0);
  };
  process.threads.resize(1);
  auto& thread = process.threads[0];
  thread.more = [&thread] {
    thread.calls.push_back({false, 0, {{0, kFunctionUs, nullptr}}, nullptr, nullptr});
    return true;
  };
  ASSERT_EQ(Lock({&process}), absl::OkStatus());
  EXPECT_LT(TookMs(), 30000);
}

// Two GPUs with long work of their own, each with a thread that always has more.
TEST_F(LockTest, IndependentGpusComeToAnEnd) {
  FakeProcess process(&world_, "a");
  process.threads.resize(2);
  for (int gpu = 0; gpu < 2; ++gpu) {
    process.queues[gpu].push_back({gpu, (gpu + 1) * 400 * kMs, nullptr});
    auto& thread = process.threads[size_t(gpu)];
    thread.more = [&thread, gpu] {
      thread.calls.push_back({false, gpu, {{gpu, 700 * kMs, nullptr}}, nullptr, nullptr});
      return true;
    };
  }
  ASSERT_EQ(Lock({&process}), absl::OkStatus());
  EXPECT_LT(TookMs(), 20000);
}

TEST_F(LockTest, IndependentProcessesComeToAnEnd) {
  std::vector<std::unique_ptr<FakeProcess>> all;
  std::vector<Lockable*> processes;
  for (int i = 0; i < 8; ++i) {
    all.push_back(std::make_unique<FakeProcess>(&world_, "process " + std::to_string(i)));
    FakeProcess& process = *all.back();
    process.threads.resize(1);
    const int64_t us = (100 + 250 * i) * kMs;
    process.queues[0].push_back({0, us, nullptr});
    auto& thread = process.threads[0];
    thread.more = [&thread, us] {
      thread.calls.push_back({false, 0, {{0, us, nullptr}}, nullptr, nullptr});
      return true;
    };
    processes.push_back(&process);
  }
  ASSERT_EQ(Lock(processes), absl::OkStatus());
  EXPECT_LT(TookMs(), 30000);
}

// Short and long work in turn.
TEST_F(LockTest, IndependentProcessesWithAllKindsOfWorkComeToAnEnd) {
  std::mt19937 random(5);
  int64_t longest = 0;
  for (int round = 0; round < 10; ++round) {
    std::vector<std::unique_ptr<FakeProcess>> all;
    std::vector<Lockable*> processes;
    for (int i = 0; i < 4; ++i) {
      all.push_back(std::make_unique<FakeProcess>(&world_, "process " + std::to_string(i)));
      FakeProcess& process = *all.back();
      process.threads.resize(1);
      process.queues[0].push_back({0, 1000 * kMs, nullptr});
      auto& thread = process.threads[0];
      thread.more = [&thread, &random] {
        thread.calls.push_back({false, 0, {{0, int64_t(10 + random() % 1500) * kMs, nullptr}}, nullptr, nullptr});
        return true;
      };
      processes.push_back(&process);
    }
    ASSERT_EQ(Lock(processes), absl::OkStatus()) << round;
    longest = std::max(longest, TookMs());
  }
  EXPECT_LT(longest, 40000);
}

// One process, two GPUs, a thread for each: one GPU's collective waits until the other thread has launched its own.
TEST_F(LockTest, CollectivesOfOneProcessEnd) {
  FakeProcess process(&world_, "a");
  bool launched = false;
  process.queues[0].push_back({0, 0, [&] { return launched; }});
  process.threads.resize(2);
  process.threads[0].calls.push_back({false, 0, {}, nullptr, nullptr});
  for (int i = 0; i < 300; ++i) process.threads[1].calls.push_back({false, 1, {{1, 200, nullptr}}, nullptr, nullptr});
  process.threads[1].calls.push_back({false, 1, {{1, 0, nullptr}}, nullptr, [&] { launched = true; }});
  ASSERT_EQ(Lock({&process}), absl::OkStatus());
  EXPECT_LT(TookMs(), 2000);
}

// Ranks whose collectives wait for each other: every rank has launched a different number of them.
TEST_F(LockTest, CollectivesOfSeveralProcessesEnd) {
  std::mt19937 random(7);
  int admissions = 0;
  for (int round = 0; round < 20; ++round) {
    constexpr int kRanks = 8;
    std::vector<std::unique_ptr<FakeProcess>> ranks;
    std::vector<int> launched(kRanks, 0);
    const auto add_step = [&](int rank) {
      FakeProcess& process = *ranks[size_t(rank)];
      auto& thread = process.threads[0];
      for (int i = 0; i < 30; ++i) {
        thread.calls.push_back({false, 0, {{0, int64_t(random() % 300), nullptr}}, nullptr, nullptr});
      }
      const int number = launched[size_t(rank)] + 1;
      thread.calls.push_back({false,
                              0,
                              {{0, 50,
                                [&launched, number] {
                                  for (const int others : launched) {
                                    if (others < number) return false;
                                  }
                                  return true;
                                }}},
                              nullptr,
                              [&launched, rank, number] { launched[size_t(rank)] = number; }});
      thread.calls.push_back({true, 0, {}, [&process] { return !process.Busy(0); }, nullptr});
    };
    for (int rank = 0; rank < kRanks; ++rank) {
      ranks.push_back(std::make_unique<FakeProcess>(&world_, "rank " + std::to_string(rank)));
      ranks.back()->threads.resize(1);
      ranks.back()->threads[0].host_us = random() % 500;
      ranks.back()->threads[0].more = [&add_step, rank] {
        add_step(rank);
        return true;
      };
      add_step(rank);
      // Some are in the middle of a step, some have launched its collective.
      auto& calls = ranks.back()->threads[0].calls;
      size_t made = random() % 2 ? calls.size() - 1 : random() % calls.size();
      for (; made > 0; --made) {
        for (const Work& work : calls.front().adds) ranks.back()->queues[0].push_back(work);
        if (calls.front().made) calls.front().made();
        calls.pop_front();
      }
    }
    std::vector<Lockable*> all;
    for (auto& rank : ranks) all.push_back(rank.get());
    ASSERT_EQ(Lock(all), absl::OkStatus()) << round;
    for (auto& rank : ranks) EXPECT_TRUE(rank->settled);
    EXPECT_LT(TookMs(), 5000) << round;
    for (auto& rank : ranks) admissions += rank->admissions;
  }
  // Calls of ranks that were behind, and about as many as they were behind.
  EXPECT_GT(admissions, 20 * 30);
  EXPECT_LT(admissions, 20 * 8 * 2 * 32);
}

// The same where every collective takes long, as on a busy machine, and so does the program between two of them: the
// ranks that are held because their calls took long must not make others' calls take long.
TEST_F(LockTest, SlowCollectivesOfSeveralProcessesEnd) {
  std::mt19937 random(11);
  int64_t longest = 0;
  for (int round = 0; round < 40; ++round) {
    const int count = 2 + round % 7;
    std::vector<std::unique_ptr<FakeProcess>> ranks;
    std::vector<int> launched(size_t(count), 0), added(size_t(count), 0);
    const auto add_collective = [&](size_t rank) {
      FakeProcess& process = *ranks[rank];
      const int number = ++added[rank];
      const auto all_launched = [&launched, number] {
        return std::all_of(launched.begin(), launched.end(), [number](int others) { return others >= number; });
      };
      process.threads[0].calls.push_back(
          {false, 0, {{0, int64_t(50 + random() % 500) * kMs, all_launched}}, nullptr, [&launched, rank, number] {
             launched[rank] = number;
           }});
      // In two of three steps of two collectives.
      if (number % 2 == 0 && size_t(number / 2) % 3 != rank % 3) {
        process.threads[0].calls.push_back({true, 0, {}, [&process] { return !process.Busy(0); }, nullptr});
      }
    };
    for (size_t rank = 0; rank < size_t(count); ++rank) {
      ranks.push_back(std::make_unique<FakeProcess>(&world_, "rank " + std::to_string(rank)));
      ranks.back()->threads.resize(1);
      auto& thread = ranks.back()->threads[0];
      thread.host_us = rank == 0 ? 300 * kMs : 0;
      thread.more = [&add_collective, rank] {
        add_collective(rank);
        return true;
      };
      for (int ahead = int(random() % 11); ahead > 0; --ahead) {
        add_collective(rank);
        const auto& call = thread.calls.front();
        if (call.asks) break;
        ranks.back()->queues[0].push_back(call.adds[0]);
        call.made();
        thread.calls.pop_front();
      }
    }
    std::vector<Lockable*> all;
    for (auto& rank : ranks) all.push_back(rank.get());
    ASSERT_EQ(Lock(all), absl::OkStatus()) << round;
    longest = std::max(longest, TookMs());
  }
  EXPECT_LT(longest, 20000);
}

TEST_F(LockTest, TheDeadlineNamesWhoWasNotIdleAndWhy) {
  FakeProcess idle(&world_, "the idle one"), busy(&world_, "the busy one");
  busy.queues[0].push_back({0, 0, [] { return false; }});
  busy.host_function = [&] { return uint64_t((world_.now - began_) / kMs + 1); };
  const std::string why = WhyTooLate({&idle, &busy});
  EXPECT_GE(TookMs(), 4000);
  EXPECT_LT(TookMs(), 4050);
  EXPECT_THAT(why, HasSubstr("the busy one did not become idle in 4.0 s: a host function (cudaLaunchHostFunc) has been "
                             "running for 4.0 s, 1 stream has work"));
  EXPECT_THAT(why, Not(HasSubstr("the idle one")));
  EXPECT_TRUE(idle.open);
  EXPECT_TRUE(busy.open);
}

TEST_F(LockTest, OneWhoseServerIsSlowIsNotNamedBesideOneThatIsBusy) {
  FakeProcess slow(&world_, "the slow one"), silent(&world_, "the silent one"), busy(&world_, "the busy one");
  busy.queues[0].push_back({0, 0, [] { return false; }});
  slow.silent_from = world_.now + 3500 * kMs;
  silent.silent_from = world_.now + 1000 * kMs;
  const std::string why = WhyTooLate({&slow, &silent, &busy});
  EXPECT_THAT(why, Not(HasSubstr("the slow one")));
  EXPECT_THAT(why, HasSubstr("the silent one did not become idle in 4.0 s: its GPU server does not answer"));
  EXPECT_THAT(why, HasSubstr("the busy one did not become idle in 4.0 s: 1 stream has work"));
  // But if it had work when it answered last.
  FakeProcess had(&world_, "the one with work"), other(&world_, "the other one");
  for (FakeProcess* const process : {&had, &other}) process->queues[0].push_back({0, 0, [] { return false; }});
  had.silent_from = world_.now + 3500 * kMs;
  const std::string both = WhyTooLate({&had, &other});
  EXPECT_THAT(both, HasSubstr("the one with work did not become idle in 4.0 s"));
  EXPECT_THAT(both, HasSubstr("the other one did not become idle in 4.0 s"));
  // Alone it is the one.
  FakeProcess alone(&world_, "the only one");
  alone.silent_from = world_.now + 3500 * kMs;
  alone.queues[0].push_back({0, 3600 * kMs, {}});
  EXPECT_THAT(WhyTooLate({&alone}), HasSubstr("the only one did not become idle in 4.0 s: 1 stream has work, its GPU "
                                              "server does not answer"));
}

TEST_F(LockTest, ACaptureGoesOnWithTheGateOpen) {
  FakeProcess capturing(&world_, "a"), other(&world_, "b");
  capturing.capturing = true;
  ASSERT_EQ(Lock({&capturing, &other}), absl::OkStatus());
  EXPECT_EQ(capturing.opens, 1);
  EXPECT_EQ(capturing.closes, 2);
  EXPECT_EQ(other.opens, 0);
}

TEST_F(LockTest, OneThatIsNotQuietAfterAllIsWaitedFor) {
  FakeProcess first(&world_, "a"), second(&world_, "b");
  second.not_settled_once = true;
  ASSERT_EQ(Lock({&first, &second}), absl::OkStatus());
  EXPECT_TRUE(first.settled);
  EXPECT_TRUE(second.settled);
  EXPECT_EQ(first.closes, 2);
}

TEST_F(LockTest, AFailureOpensAll) {
  FakeProcess first(&world_, "a"), second(&world_, "b");
  second.fail_close = true;
  EXPECT_EQ(Lock({&first, &second}), absl::UnavailableError("b: it has lost its server"));
  EXPECT_TRUE(first.open);
  EXPECT_EQ(first.opens, 1);
}

TEST_F(LockTest, CancelledOpensAll) {
  FakeProcess process(&world_, "a");
  process.queues[0].push_back({0, 0, [] { return false; }});
  cancelled_ = [this] { return world_.now - began_ > 100 * kMs; };
  EXPECT_EQ(Lock({&process}), absl::CancelledError("interrupted"));
  EXPECT_TRUE(process.open);
  EXPECT_LT(TookMs(), 110);
}

}  // namespace
}  // namespace cuda_remote::agent
