// SPDX-License-Identifier: Apache-2.0
// JobTransaction against processes and an engine of the test's own. Each step of each process fails once, or the
// process ends in it; afterwards the job must be whole.
#include "checkpoint/transaction/job_transaction.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/engine/testing/fake_engine.h"

namespace cuda_remote::checkpoint {
namespace {

using ::testing::HasSubstr;

// Counts steps; one of them is to fail.
struct Faults {
  int at = -1;          // number of the step; -1: none
  bool by_end = false;  // the process ends in it, which fails it
  int count = 0;
  std::string failed;  // what it was
  std::function<void(const std::string&)> on_step = [](const std::string&) {};
  bool Now(const std::string& what) {
    on_step(what);
    if (count++ != at) return false;
    failed = what;
    return true;
  }
};

class FakeProcess final : public JobProcess, public agent::Lockable {
 public:
  FakeProcess(int number, Faults* faults) : number_(number), faults_(faults) {}

  std::string Name() const override { return "rank " + std::to_string(number_); }
  // One that ends is seen to have ended some time later.
  bool HasEnded() const override { return ended_ && unseen_-- <= 0; }
  agent::Lockable* lockable() override { return this; }

  // Lockable.
  agent::CloseResult Close(std::string* error) override {
    if (!Step("close", error)) return agent::CloseResult::kFailed;
    EXPECT_FALSE(released_);
    closed_ = true;
    return agent::CloseResult::kClosed;
  }
  bool Look(agent::Activity* activity, std::string* error) override {
    if (!Step("look", error)) return false;
    activity->answered = true;
    activity->quiet = looks_with_work-- <= 0;
    return true;
  }
  bool Admit(const agent::Admission&, bool* admitted, std::string*) override { return *admitted = false; }
  bool Settle(int, bool* settled, std::string* error) override { return *settled = Step("settle", error); }
  bool LockOld(int, std::string*) override { return false; }
  void Open() override { closed_ = false; }

  bool Take(std::string* error) override {
    if (!Step("take", error)) return false;
    EXPECT_TRUE(closed_);
    return true;
  }
  bool Release(std::string* error) override {
    if (!Step("release", error)) return false;
    EXPECT_TRUE(closed_);
    released_ = true;
    return true;
  }
  bool Switch(std::string* error) override {
    if (!Step("switch", error)) return false;
    EXPECT_TRUE(closed_);
    switched_ = true;
    return true;
  }
  bool Confirm(std::string* error) override { return Step("confirm", error); }
  bool GiveBack(std::string* error) override {
    if (!Step("give back", error)) return false;
    released_ = switched_ = false;
    return true;
  }
  bool Unlock(std::string* error) override {
    if (!Step("unlock", error)) return false;
    if (before_unlock) before_unlock();
    closed_ = false;
    return true;
  }
  void Abandon() override { abandoned_ = true; }

  void End() { ended_ = true; }
  void EndUnseen() {
    ended_ = true;
    unseen_ = 10;
  }

  // A process of the source goes on when nobody holds it.
  void Drop() { closed_ = false; }

  bool Runs() const { return !closed_ && !released_; }
  bool HasSession() const { return !released_; }
  bool switched() const { return switched_; }
  bool closed() const { return closed_; }
  bool abandoned() const { return abandoned_; }
  bool failed_to_go_on() const { return stuck_; }
  std::function<void()> before_unlock;
  int looks_with_work = 0;  // how often it is found not to be idle

 private:
  bool Step(const std::string& what, std::string* error) {
    if (ended_) {
      *error = "it has ended";
      return false;
    }
    if (!faults_->Now(Name() + ": " + what)) {
      if (ended_) *error = "it has ended";
      return !ended_;
    }
    ended_ = faults_->by_end;
    stuck_ = !ended_ && (what == "give back" || what == "unlock");
    *error = what + " was made to fail";
    return false;
  }

  const int number_;
  Faults* const faults_;
  bool closed_ = false, released_ = false, switched_ = false, abandoned_ = false, ended_ = false, stuck_ = false;
  mutable int unseen_ = 0;
};

class FakeSource final : public ProcessSource {
 public:
  FakeSource(int count, Faults* faults) : faults_(faults) {
    for (int i = 0; i < count; ++i) Add();
  }
  void Add() { all_.push_back(std::make_unique<FakeProcess>(int(all_.size()), faults_)); }

  bool Find(std::vector<JobProcess*>* processes, bool* again, std::string* error) override {
    *again = false;
    for (const auto& process : all_) process->Drop();
    found_.clear();
    if (faults_->Now("find")) {
      *error = "find was made to fail";
      return false;
    }
    for (const auto& process : all_) {
      if (!process->HasEnded()) found_.push_back(process.get());
    }
    processes->assign(found_.begin(), found_.end());
    ++finds;
    if (after_find) after_find();
    return true;
  }
  bool AreAll() override {
    std::vector<FakeProcess*> now;
    for (const auto& process : all_) {
      if (!process->HasEnded()) now.push_back(process.get());
    }
    return now == found_;
  }
  bool Pause(int, std::string* error) override {
    if (faults_->Now("pause")) {
      *error = "pause was made to fail";
      return false;
    }
    paused = true;
    return true;
  }
  void EndPause() override { paused = false; }

  const std::vector<std::unique_ptr<FakeProcess>>& all() const { return all_; }
  bool paused = false;
  int finds = 0;
  std::function<void()> after_find;

 private:
  Faults* const faults_;
  std::vector<std::unique_ptr<FakeProcess>> all_;
  std::vector<FakeProcess*> found_;
};

// Time goes on with each look at it.
agent::LockOptions Options() {
  agent::LockOptions options;
  options.timeout_ms = 1000;
  const auto now = std::make_shared<int64_t>(0);
  options.clock.now_us = [now] { return *now += 10; };
  options.clock.sleep_us = [now](int64_t us) { *now += us; };
  return options;
}

// Knows which sessions would be lost with this process.
class FakeGuard final : public SessionGuard {
 public:
  FakeGuard(FakeSource* source, Faults* faults) : source_(source), faults_(faults) {}
  bool Keep(const std::string& facts, SnapshotEngine::After, std::string* error) override {
    EXPECT_EQ(facts, "facts");
    for (const auto& process : source_->all()) EXPECT_TRUE(process->HasSession());
    keeps = true;
    if (!faults_->Now("keep")) return true;
    *error = "keep was made to fail";
    return false;
  }
  void ToEnd() override { to_end = true; }
  void Drop() override {
    keeps = false;
    for (const auto& process : source_->all()) {
      EXPECT_TRUE(process->HasSession() || process->HasEnded() || process->failed_to_go_on() || to_end);
    }
  }
  bool keeps = false, to_end = false;

 private:
  FakeSource* const source_;
  Faults* const faults_;
};

enum class Way { kKeep, kStop, kStopAndGiveUp, kMove, kHoldOnly };

struct Outcome {
  bool ok = false;
  std::string error;
};

// A whole transaction; with kStopAndGiveUp the tool finds, after the snapshot, that the image cannot be written.
Outcome Transact(Way way, FakeSource* source, FakeEngine* engine, FakeGuard* guard, Faults* faults) {
  const Job job;
  Outcome outcome;
  JobTransaction transaction(job, source, engine, guard);
  if (!transaction.Begin(Options(), &outcome.error)) return outcome;
  for (const auto& process : source->all()) {
    EXPECT_TRUE(process->closed() || process->HasEnded());
  }
  EXPECT_TRUE(source->paused);
  const bool stop = way == Way::kStop || way == Way::kStopAndGiveUp;
  switch (way) {
    case Way::kHoldOnly:
      return outcome;
    case Way::kMove:
      outcome.ok = transaction.Switch(
          [&](std::string* error) {
            for (const auto& process : source->all()) {
              EXPECT_TRUE((process->switched() && process->closed()) || process->HasEnded());
            }
            if (!faults->Now("decide")) return true;
            *error = "decide was made to fail";
            return false;
          },
          &outcome.error);
      return outcome;
    default:
      break;
  }
  const auto after = stop ? SnapshotEngine::After::kStop : SnapshotEngine::After::kRun;
  if (!transaction.Snapshot("facts", "image", "work", after, &outcome.error)) return outcome;
  if (way == Way::kKeep) outcome.ok = transaction.Resume(&outcome.error);
  if (way == Way::kStop) outcome.ok = transaction.End();
  return outcome;
}

class Steps : public testing::TestWithParam<std::tuple<Way, int, bool>> {};

TEST_P(Steps, EachMayFail) {
  const auto [way, count, by_end] = GetParam();
  bool reached = true;
  for (int at = -1; reached; ++at) {
    Faults faults;
    faults.at = at;
    faults.by_end = by_end;
    FakeSource source(count, &faults);
    // What the snapshot meets, and what is there when the first one goes on.
    FakeGuard guard(&source, &faults);
    const auto none_has_a_session = [&] {
      EXPECT_TRUE(guard.keeps);
      for (const auto& process : source.all()) EXPECT_FALSE(process->HasSession() && !process->HasEnded());
    };
    FakeEngine engine(
        [&](const std::string& step) {
          EXPECT_TRUE(step != "end" || guard.to_end);
          return !faults.Now(step);
        },
        none_has_a_session);
    for (const auto& process : source.all()) {
      process->before_unlock = [&] {
        EXPECT_FALSE(engine.stopped() && faults.failed != "resume");
        EXPECT_FALSE(source.paused);
        for (const auto& other : source.all()) {
          EXPECT_TRUE(other->HasSession() || other->HasEnded() || other->failed_to_go_on()) << faults.failed;
        }
      };
    }
    const Outcome outcome = Transact(way, &source, &engine, &guard, &faults);
    EXPECT_FALSE(guard.keeps);
    reached = at < faults.count;
    SCOPED_TRACE("step " + std::to_string(at) + " (" + faults.failed + ") failed: " + outcome.error);
    EXPECT_FALSE(source.paused);
    // Said to the user: it stands still.
    if (faults.failed == "end" || faults.failed == "resume") continue;
    EXPECT_FALSE(engine.stopped());
    if (engine.ended()) continue;
    int switched = 0, alive = 0;
    for (const auto& process : source.all()) {
      if (process->HasEnded()) continue;
      ++alive;
      switched += process->switched();
      EXPECT_FALSE(process->abandoned());
      if (!process->failed_to_go_on()) {
        EXPECT_TRUE(process->Runs());
      }
    }
    if (outcome.ok && way == Way::kMove) {
      EXPECT_EQ(switched, alive);
    } else if (faults.failed.find("give back") == std::string::npos) {
      EXPECT_EQ(switched, 0) << "one is on another server, and the others are not";
    }
    if (!outcome.ok && way != Way::kStopAndGiveUp && way != Way::kHoldOnly) {
      EXPECT_NE(outcome.error, "") << "nobody was told why";
    }
    // A process that ends by itself is no failure of the others'. In a dump the engine says what became of it.
    if (by_end && way != Way::kStopAndGiveUp && way != Way::kHoldOnly && faults.failed.find("rank") == 0) {
      EXPECT_TRUE(outcome.ok);
    }
    const bool ends_early = way == Way::kStopAndGiveUp || way == Way::kHoldOnly;
    EXPECT_TRUE(at >= 0 || ends_early || outcome.ok) << outcome.error;
  }
}

INSTANTIATE_TEST_SUITE_P(All, Steps,
                         testing::Combine(testing::Values(Way::kKeep, Way::kStop, Way::kStopAndGiveUp, Way::kMove,
                                                          Way::kHoldOnly),
                                          testing::Values(0, 1, 2, 4), testing::Bool()));

TEST(JobTransaction, NamesTheProcessThatFailed) {
  Faults faults;
  FakeSource source(3, &faults);
  FakeEngine engine([](const std::string&) { return true; });
  const Job job;
  std::string error;
  // find, close x 3, look x 3, settle x 3, pause, take x 2
  faults.at = 13;
  FakeGuard guard(&source, &faults);
  JobTransaction transaction(job, &source, &engine, &guard);
  EXPECT_FALSE(transaction.Begin(Options(), &error));
  EXPECT_EQ(faults.failed, "rank 2: take");
  EXPECT_THAT(error, HasSubstr("rank 2: take was made to fail"));
}

TEST(JobTransaction, NamesTheProcessThatEndedInTheDump) {
  Faults faults;
  FakeSource source(3, &faults);
  FakeEngine engine([&](const std::string& step) {
    if (step == "dump") source.all()[1]->End();
    return step != "dump";
  });
  const Job job;
  std::string error;
  FakeGuard guard(&source, &faults);
  JobTransaction transaction(job, &source, &engine, &guard);
  ASSERT_TRUE(transaction.Begin(Options(), &error)) << error;
  EXPECT_FALSE(transaction.Snapshot("facts", "image", "work", SnapshotEngine::After::kRun, &error));
  EXPECT_THAT(error, HasSubstr("rank 1 ended while it was saved: "));
}

TEST(JobTransaction, OneThatComesMeanwhileIsHeldToo) {
  Faults faults;
  FakeSource source(2, &faults);
  source.after_find = [&] {
    if (source.finds <= 2) source.Add();
  };
  FakeEngine engine([](const std::string&) { return true; });
  const Job job;
  std::string error;
  FakeGuard guard(&source, &faults);
  JobTransaction transaction(job, &source, &engine, &guard);
  ASSERT_TRUE(transaction.Begin(Options(), &error)) << error;
  ASSERT_EQ(source.all().size(), 4u);
  for (const auto& process : source.all()) EXPECT_TRUE(process->closed());
}

// Calls wait at the gate from the moment it closes, long before the GPU is idle.
TEST(JobTransaction, ThePauseBeginsWhenTheFirstGateCloses) {
  Faults faults;
  FakeSource source(2, &faults);
  source.all()[1]->looks_with_work = 40;
  agent::LockOptions options = Options();
  const agent::LockClock clock = options.clock;
  options.timeout_ms = 60000;
  int64_t closed_us = 0, quiet_us = 0;
  faults.on_step = [&](const std::string& what) {
    if (what == "rank 0: close" && closed_us == 0) closed_us = clock.now_us();
    if (what == "rank 0: settle") quiet_us = clock.now_us();
  };
  FakeEngine engine([](const std::string&) { return true; });
  const Job job;
  std::string error;
  FakeGuard guard(&source, &faults);
  JobTransaction transaction(job, &source, &engine, &guard);
  clock.sleep_us(5000000);  // nobody waits yet
  ASSERT_TRUE(transaction.Begin(options, &error)) << error;
  EXPECT_GT(quiet_us - closed_us, 20000);
  clock.sleep_us(3000000);
  const int64_t held_us = int64_t(transaction.HeldSeconds() * 1e6);
  const int64_t seen_us = clock.now_us() - closed_us;
  // The clock goes on a little with each look at it.
  EXPECT_NEAR(double(held_us), double(seen_us), 1000);
}

TEST(JobTransaction, ThoseThatKeepComingAreGivenUpInTheEnd) {
  Faults faults;
  FakeSource source(1, &faults);
  source.after_find = [&] { source.Add(); };
  FakeEngine engine([](const std::string&) { return true; });
  const Job job;
  std::string error;
  agent::LockOptions options = Options();
  options.timeout_ms = 20;
  FakeGuard guard(&source, &faults);
  JobTransaction transaction(job, &source, &engine, &guard);
  EXPECT_FALSE(transaction.Begin(options, &error));
  EXPECT_THAT(error, HasSubstr("keeps starting and ending"));
  EXPECT_FALSE(source.paused);
  for (const auto& process : source.all()) EXPECT_TRUE(process->Runs());
}

TEST(JobTransaction, OneThatEndsWhileItIsLockedIsLeftOut) {
  Faults faults;
  faults.by_end = true;
  faults.at = 5;  // find, close x 3, look
  FakeSource source(3, &faults);
  FakeEngine engine([](const std::string&) { return true; });
  const Job job;
  std::string error;
  FakeGuard guard(&source, &faults);
  JobTransaction transaction(job, &source, &engine, &guard);
  ASSERT_TRUE(transaction.Begin(Options(), &error)) << error;
  EXPECT_EQ(faults.failed, "rank 1: look");
  EXPECT_TRUE(source.all()[1]->HasEnded());
  EXPECT_TRUE(source.all()[0]->closed());
  EXPECT_TRUE(source.all()[2]->closed());
}

// Its connection ends before it is seen to have ended.
TEST(JobTransaction, OneThatEndsInAnyStepIsLeftOut) {
  for (const std::string step :
       {"close", "look", "settle", "take", "release", "switch", "confirm", "give back", "unlock"}) {
    SCOPED_TRACE(step);
    const bool move = step == "switch" || step == "confirm";
    Faults faults;
    FakeSource source(3, &faults);
    faults.on_step = [&](const std::string& what) {
      if (what == "rank 1: " + step && !source.all()[1]->HasEnded()) source.all()[1]->EndUnseen();
    };
    FakeEngine engine([](const std::string&) { return true; });
    const Job job;
    FakeGuard guard(&source, &faults);
    const Outcome outcome = Transact(move ? Way::kMove : Way::kKeep, &source, &engine, &guard, &faults);
    EXPECT_TRUE(outcome.ok) << outcome.error;
    EXPECT_TRUE(source.all()[1]->HasEnded());
    for (const int other : {0, 2}) EXPECT_TRUE(source.all()[size_t(other)]->Runs());
  }
}

TEST(JobTransaction, SaysThatTheProcessesAreStopped) {
  Faults faults;
  FakeSource source(2, &faults);
  FakeEngine engine([](const std::string& step) { return step != "resume"; });
  const Job job;
  std::string error;
  FakeGuard guard(&source, &faults);
  JobTransaction transaction(job, &source, &engine, &guard);
  ASSERT_TRUE(transaction.Begin(Options(), &error)) << error;
  ASSERT_TRUE(transaction.Snapshot("facts", "image", "work", SnapshotEngine::After::kStop, &error)) << error;
  EXPECT_FALSE(transaction.Resume(&error));
  EXPECT_THAT(error, HasSubstr("which are stopped"));
  for (const auto& process : source.all()) EXPECT_TRUE(process->Runs());
}

}  // namespace
}  // namespace cuda_remote::checkpoint
