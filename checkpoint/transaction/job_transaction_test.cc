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
#include <utility>
#include <vector>

#include "checkpoint/engine/testing/fake_engine.h"
#include "proto/base/status_macros.h"

namespace cuda_remote::checkpoint {
namespace {

using ::testing::HasSubstr;

std::string Message(const absl::Status& status) { return std::string(status.message()); }

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

absl::Status MadeToFail(const std::string& what) { return absl::InternalError(what + " was made to fail"); }

class FakeProcess final : public JobProcess, public agent::Lockable {
 public:
  FakeProcess(int number, Faults* faults) : number_(number), faults_(faults) {}

  std::string Name() const override { return "rank " + std::to_string(number_); }
  // One that ends is seen to have ended some time later.
  bool HasEnded() const override { return ended_ && unseen_-- <= 0; }
  agent::Lockable* lockable() override { return this; }

  // Lockable.
  absl::Status Close() override {
    CR_RETURN_IF_ERROR(Step("close"));
    EXPECT_FALSE(released_);
    closed_ = true;
    return absl::OkStatus();
  }
  absl::StatusOr<agent::Activity> Look() override {
    CR_RETURN_IF_ERROR(Step("look"));
    agent::Activity activity;
    activity.answered = true;
    activity.quiet = looks_with_work-- <= 0;
    return activity;
  }
  absl::StatusOr<bool> Admit(const agent::Admission&) override { return absl::InternalError(""); }
  absl::StatusOr<bool> Settle(int) override {
    CR_RETURN_IF_ERROR(Step("settle"));
    return true;
  }
  void Open() override { closed_ = false; }

  absl::Status Take() override {
    CR_RETURN_IF_ERROR(Step("take"));
    EXPECT_TRUE(closed_);
    return absl::OkStatus();
  }
  absl::Status Release() override {
    CR_RETURN_IF_ERROR(Step("release"));
    EXPECT_TRUE(closed_);
    released_ = true;
    return absl::OkStatus();
  }
  absl::Status Switch() override {
    CR_RETURN_IF_ERROR(Step("switch"));
    EXPECT_TRUE(closed_);
    switched_ = true;
    return absl::OkStatus();
  }
  absl::Status Confirm() override { return Step("confirm"); }
  absl::Status GiveBack() override {
    CR_RETURN_IF_ERROR(Step("give back"));
    released_ = switched_ = false;
    return absl::OkStatus();
  }
  absl::Status Unlock() override {
    CR_RETURN_IF_ERROR(Step("unlock"));
    if (before_unlock) before_unlock();
    closed_ = false;
    return absl::OkStatus();
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
  absl::Status Step(const std::string& what) {
    const absl::Status ended = absl::UnavailableError("it has ended");
    if (ended_) return ended;
    if (!faults_->Now(Name() + ": " + what)) return ended_ ? ended : absl::OkStatus();
    ended_ = faults_->by_end;
    stuck_ = !ended_ && (what == "give back" || what == "unlock");
    return MadeToFail(what);
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

  absl::StatusOr<std::vector<JobProcess*>> Find() override {
    for (const auto& process : all_) process->Drop();
    found_.clear();
    if (faults_->Now("find")) return MadeToFail("find");
    CR_RETURN_IF_ERROR(std::exchange(next_find, absl::OkStatus()));
    for (const auto& process : all_) {
      if (!process->HasEnded()) found_.push_back(process.get());
    }
    ++finds;
    const std::vector<JobProcess*> found(found_.begin(), found_.end());
    if (after_find) after_find();
    return found;
  }
  bool AreAll() override {
    std::vector<FakeProcess*> now;
    for (const auto& process : all_) {
      if (!process->HasEnded()) now.push_back(process.get());
    }
    return now == found_;
  }
  absl::Status Pause(int) override {
    if (faults_->Now("pause")) return MadeToFail("pause");
    paused = true;
    return absl::OkStatus();
  }
  void EndPause() override { paused = false; }

  const std::vector<std::unique_ptr<FakeProcess>>& all() const { return all_; }
  bool paused = false;
  int finds = 0;
  absl::Status next_find;
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
  absl::Status Keep(const std::string& facts, SnapshotEngine::After) override {
    EXPECT_EQ(facts, "facts");
    for (const auto& process : source_->all()) EXPECT_TRUE(process->HasSession());
    keeps = true;
    return faults_->Now("keep") ? MadeToFail("keep") : absl::OkStatus();
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

// A whole transaction; with kStopAndGiveUp the tool finds, after the snapshot, that the image cannot be written.
absl::Status Transact(Way way, FakeSource* source, FakeEngine* engine, FakeGuard* guard, Faults* faults) {
  const Job job;
  JobTransaction transaction(job, source, engine, guard);
  CR_RETURN_IF_ERROR(transaction.Begin(Options()));
  for (const auto& process : source->all()) {
    EXPECT_TRUE(process->closed() || process->HasEnded());
  }
  EXPECT_TRUE(source->paused);
  const bool stop = way == Way::kStop || way == Way::kStopAndGiveUp;
  switch (way) {
    case Way::kHoldOnly:
      return absl::OkStatus();
    case Way::kMove:
      return transaction.Switch([&] {
        for (const auto& process : source->all()) {
          EXPECT_TRUE((process->switched() && process->closed()) || process->HasEnded());
        }
        return faults->Now("decide") ? MadeToFail("decide") : absl::OkStatus();
      });
    default:
      break;
  }
  const auto after = stop ? SnapshotEngine::After::kStop : SnapshotEngine::After::kRun;
  CR_RETURN_IF_ERROR(transaction.Snapshot("facts", "image", "work", after));
  if (way == Way::kKeep) return transaction.Resume();
  if (way == Way::kStop && !transaction.End()) return absl::InternalError("");
  return absl::OkStatus();
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
    const absl::Status outcome = Transact(way, &source, &engine, &guard, &faults);
    EXPECT_FALSE(guard.keeps);
    reached = at < faults.count;
    SCOPED_TRACE("step " + std::to_string(at) + " (" + faults.failed + ") failed: " + Message(outcome));
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
    if (outcome.ok() && way == Way::kMove) {
      EXPECT_EQ(switched, alive);
    } else if (faults.failed.find("give back") == std::string::npos) {
      EXPECT_EQ(switched, 0) << "one is on another server, and the others are not";
    }
    if (!outcome.ok() && way != Way::kStopAndGiveUp && way != Way::kHoldOnly) {
      EXPECT_NE(Message(outcome), "") << "nobody was told why";
    }
    // A process that ends by itself is no failure of the others'. In a dump the engine says what became of it.
    if (by_end && way != Way::kStopAndGiveUp && way != Way::kHoldOnly && faults.failed.find("rank") == 0) {
      EXPECT_TRUE(outcome.ok());
    }
    const bool ends_early = way == Way::kStopAndGiveUp || way == Way::kHoldOnly;
    EXPECT_TRUE(at >= 0 || ends_early || outcome.ok()) << outcome.message();
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
  // find, close x 3, look x 3, settle x 3, pause, take x 2
  faults.at = 13;
  FakeGuard guard(&source, &faults);
  JobTransaction transaction(job, &source, &engine, &guard);
  EXPECT_THAT(Message(transaction.Begin(Options())), HasSubstr("rank 2: take was made to fail"));
  EXPECT_EQ(faults.failed, "rank 2: take");
}

TEST(JobTransaction, NamesTheProcessThatEndedInTheDump) {
  Faults faults;
  FakeSource source(3, &faults);
  FakeEngine engine([&](const std::string& step) {
    if (step == "dump") source.all()[1]->End();
    return step != "dump";
  });
  const Job job;
  FakeGuard guard(&source, &faults);
  JobTransaction transaction(job, &source, &engine, &guard);
  ASSERT_EQ(transaction.Begin(Options()), absl::OkStatus());
  EXPECT_THAT(Message(transaction.Snapshot("facts", "image", "work", SnapshotEngine::After::kRun)),
              HasSubstr("rank 1 ended while it was saved: "));
}

TEST(JobTransaction, OneThatComesMeanwhileIsHeldToo) {
  Faults faults;
  FakeSource source(2, &faults);
  source.after_find = [&] {
    if (source.finds <= 2) source.Add();
  };
  FakeEngine engine([](const std::string&) { return true; });
  const Job job;
  FakeGuard guard(&source, &faults);
  JobTransaction transaction(job, &source, &engine, &guard);
  ASSERT_EQ(transaction.Begin(Options()), absl::OkStatus());
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
  FakeGuard guard(&source, &faults);
  JobTransaction transaction(job, &source, &engine, &guard);
  clock.sleep_us(5000000);  // nobody waits yet
  ASSERT_EQ(transaction.Begin(options), absl::OkStatus());
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
  agent::LockOptions options = Options();
  options.timeout_ms = 20;
  FakeGuard guard(&source, &faults);
  JobTransaction transaction(job, &source, &engine, &guard);
  EXPECT_THAT(Message(transaction.Begin(options)), HasSubstr("keeps starting and ending"));
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
  FakeGuard guard(&source, &faults);
  JobTransaction transaction(job, &source, &engine, &guard);
  ASSERT_EQ(transaction.Begin(Options()), absl::OkStatus());
  EXPECT_EQ(faults.failed, "rank 1: look");
  EXPECT_TRUE(source.all()[1]->HasEnded());
  EXPECT_TRUE(source.all()[0]->closed());
  EXPECT_TRUE(source.all()[2]->closed());
}

TEST(JobTransaction, OneThatEndsWhileItIsFoundIsLookedForAgain) {
  Faults faults;
  FakeSource source(2, &faults);
  FakeEngine engine([](const std::string&) { return true; });
  const Job job;
  FakeGuard guard(&source, &faults);
  for (const bool ended : {true, false}) {
    JobTransaction transaction(job, &source, &engine, &guard);
    const absl::Status problem = absl::InternalError("rank 1 cannot be stopped");
    source.next_find = ended ? absl::AbortedError("rank 1 ended") : problem;
    EXPECT_EQ(transaction.Begin(Options()), ended ? absl::OkStatus() : problem);
  }
  EXPECT_EQ(source.finds, 1) << "the other reason was no reason to look again";
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
    const absl::Status outcome = Transact(move ? Way::kMove : Way::kKeep, &source, &engine, &guard, &faults);
    EXPECT_TRUE(outcome.ok()) << outcome.message();
    EXPECT_TRUE(source.all()[1]->HasEnded());
    for (const int other : {0, 2}) EXPECT_TRUE(source.all()[size_t(other)]->Runs());
  }
}

TEST(JobTransaction, SaysThatTheProcessesAreStopped) {
  Faults faults;
  FakeSource source(2, &faults);
  FakeEngine engine([](const std::string& step) { return step != "resume"; });
  const Job job;
  FakeGuard guard(&source, &faults);
  JobTransaction transaction(job, &source, &engine, &guard);
  ASSERT_EQ(transaction.Begin(Options()), absl::OkStatus());
  ASSERT_EQ(transaction.Snapshot("facts", "image", "work", SnapshotEngine::After::kStop), absl::OkStatus());
  EXPECT_THAT(Message(transaction.Resume()), HasSubstr("which are stopped"));
  for (const auto& process : source.all()) EXPECT_TRUE(process->Runs());
}

}  // namespace
}  // namespace cuda_remote::checkpoint
