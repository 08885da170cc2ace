// SPDX-License-Identifier: Apache-2.0
// RestartJob with an engine and GPU sessions of the test's own, and an image, a folder and processes as they are. Each
// step of each process fails once; afterwards either all of the job runs, or nothing is left of it.
#include "checkpoint/transaction/restart_job.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/engine/testing/fake_engine.h"
#include "checkpoint/job/caller.h"
#include "checkpoint/transaction/testing/fakes.h"
#include "ckptfmt/image_writer.h"
#include "proto/base/status_macros.h"
#include "proto/frame/frame.h"

namespace cuda_remote::checkpoint {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Steps by their names, in the order in which they came; one of them fails. Any thread.
class Faults {
 public:
  explicit Faults(std::string at = "") : at_(std::move(at)) {}
  // Whether this step goes well.
  bool Passes(const std::string& step) {
    const std::lock_guard<std::mutex> lock(mutex_);
    steps_.push_back(step);
    return step != at_;
  }
  absl::Status Take(const std::string& step) {
    return Passes(step) ? absl::OkStatus() : absl::InternalError(step + " was made to fail");
  }
  std::vector<std::string> steps() const { return steps_; }

 private:
  const std::string at_;
  std::mutex mutex_;
  std::vector<std::string> steps_;
};

// Knows which sessions are open, and who has got one.
class FakeSessions final : public SavedSessions {
 public:
  FakeSessions(Faults* faults, const FakeEngine** engine) : faults_(faults), engine_(engine) {}

  absl::Status Plan(const SavedJob& saved) override {
    count = saved.logs.size();
    return faults_->Take("plan");
  }
  absl::Status OpenHosts(const std::string& folder, const std::optional<Account>&) override {
    hosts_open = true;
    EXPECT_TRUE(fs::is_directory(folder));
    return faults_->Take("open hosts");
  }
  std::string server() const override { return "unix:/nowhere"; }
  absl::Status CheckPlaces() override { return faults_->Take("check places"); }
  absl::Status Open(size_t process, const std::string& scope) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    EXPECT_TRUE(hosts_open);
    EXPECT_EQ(scope.size(), 16u);
    CR_RETURN_IF_ERROR(faults_->Take("open " + std::to_string(process)));
    open.insert(process);
    return absl::OkStatus();
  }
  absl::Status LoadMemory(size_t process, const Continue& go_on) override {
    EXPECT_EQ(open.size(), count);
    EXPECT_TRUE(go_on(0, 0));
    CR_RETURN_IF_ERROR(faults_->Take("load " + std::to_string(process)));
    loaded.insert(process);
    return absl::OkStatus();
  }
  absl::Status Give(size_t process, const std::string&, const std::function<bool()>& ended) override {
    // All is there before a process may run.
    EXPECT_EQ(loaded.size(), count);
    EXPECT_EQ((*engine_)->restored().size(), 1u);
    if (before_give) before_give();
    if (ended()) return absl::UnavailableError("it has ended");
    CR_RETURN_IF_ERROR(faults_->Take("give " + std::to_string(process)));
    given.insert(process);
    return absl::OkStatus();
  }
  void NoteSaved(size_t, uint64_t unix_ms, uint64_t bytes) override {
    EXPECT_NE(unix_ms, 0u);
    EXPECT_NE(bytes, 0u);
  }
  void Unlock() override { unlocked = true; }
  void LetGo() override { open.clear(); }
  std::unique_ptr<GpuHosts> TakeHosts() override {
    hosts_open = false;
    return nullptr;
  }

  size_t count = 0;
  bool hosts_open = false, unlocked = false;
  std::set<size_t> open, loaded, given;
  std::function<void()> before_give;

 private:
  Faults* const faults_;
  const FakeEngine** const engine_;
  std::mutex mutex_;
};

// Files and their contents, and links.
std::map<std::string, std::string> ContentsOf(const std::string& folder) {
  std::map<std::string, std::string> contents;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    if (!entry.is_regular_file()) continue;
    std::ostringstream text;
    text << std::ifstream(entry.path()).rdbuf();
    contents[entry.path()] = text.str();
  }
  return contents;
}

// A restart of an image, with all that it meets. What it has restored ends with it.
struct Attempt {
  explicit Attempt(const std::string& image, const std::string& fault = "", bool changes_files = false,
                   const Caller* caller = nullptr)
      : faults(fault), sessions(&faults, &engine) {
    RestartJobOptions options;
    options.image = image;
    options.caller = caller;
    const auto find_engine = [this, changes_files](const ckptfmt::ImageInfo& info, std::string* facts) {
      EXPECT_EQ(info.engine, "fake");
      *facts = info.client_info.at(info.engine);
      auto made = std::make_unique<FakeEngine>([this](const std::string& step) { return faults.Passes(step); });
      made->set_changes_files(changes_files);
      engine = made.get();
      return made;
    };
    restart = std::make_unique<RestartJob>(options, find_engine, &sessions, &report);
  }
  ~Attempt() { End(); }

  bool Run() {
    const absl::Status status = restart->Run();
    error = std::string(status.message());
    return ok = status.ok();
  }
  // The job ends, if it runs.
  void End() {
    if (!std::exchange(ok, false)) return;
    for (const pid_t init : engine->restored()) {
      kill(init, SIGKILL);
      waitpid(init, nullptr, 0);
    }
    sessions.TakeHosts();
    restart->Clean(true);
  }

  Faults faults;
  QuietReport report;
  const FakeEngine* engine = nullptr;
  FakeSessions sessions;
  std::unique_ptr<RestartJob> restart;
  bool ok = false;
  std::string error;
};

// What cr-hostd says of a user, and its part in the restart. `waits`: of a job on several hosts.
struct Hostd {
  Hostd(const Account& user, bool waits, Step refused = STEP_UNKNOWN) {
    CallerFacts facts;
    facts.set_group(user.group);
    facts.set_image(FakeGate::kUsersImage);
    facts.set_holds(true);
    facts.set_waits(waits);
    auto made = std::make_unique<FakeGate>(refused);
    gate = made.get();
    caller = std::make_unique<const Caller>(facts, user, std::move(made));
  }

  FakeGate* gate;
  std::unique_ptr<const Caller> caller;
};

class RestartJobTest : public testing::Test {
 protected:
  void SetUp() override {
    // Where a job's user may enter.
    std::string pattern = "/tmp/restartXXXXXX";
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    ASSERT_EQ(chmod(pattern.c_str(), 0755), 0);
    root_ = pattern;
  }
  void TearDown() override {
    UnblockInChild();
    fs::remove_all(root_);
  }

  std::string image() const { return root_ + "/image"; }
  std::string folder() const { return root_ + "/job"; }

  // An image of a job with so many processes. They have the number of this process, so they seem to run.
  void WriteImage(size_t processes, uint32_t pid = uint32_t(getpid())) {
    fs::remove_all(image());
    auto writer = ckptfmt::ImageWriter::Create(image());
    ASSERT_TRUE(writer.ok()) << writer.status();
    Job job;
    job.set_name("train");
    job.set_directory(folder());
    job.set_inner_pid(int(pid));
    if (user_) SetAccount(*user_, &job);
    ckptfmt::ImageInfo info;
    info.engine = "fake";
    info.job = "train";
    info.client_info["job"] = JobToJson(job, /*one_line=*/true);
    info.client_info["fake"] = "facts";
    for (size_t i = 0; i < processes; ++i) {
      ckptfmt::ProcessInfo process;
      process.pid = pid;
      process.program = "rank" + std::to_string(i);
      process.wire_version = kWireVersion;
      info.processes.push_back(process);
      std::string log;
      replay::Log().Serialize(&log);
      ASSERT_TRUE((*writer)->WriteLog(log).ok());
    }
    std::ofstream((*writer)->client_dir() + "/memory") << "of the processes";
    const absl::Status committed = (*writer)->Commit(info);
    ASSERT_TRUE(committed.ok()) << committed;
  }

  // All of the job runs, each process with its session.
  void ExpectWhole(const Attempt& attempt) {
    EXPECT_TRUE(attempt.ok) << attempt.error;
    if (!attempt.ok) return;
    EXPECT_EQ(attempt.sessions.given.size(), attempt.sessions.count);
    EXPECT_TRUE(attempt.sessions.unlocked && attempt.sessions.hosts_open);
    ASSERT_EQ(attempt.engine->restored().size(), 1u);
    EXPECT_EQ(kill(attempt.engine->restored()[0], 0), 0);
    const absl::StatusOr<Job> job = ReadJob(folder());
    ASSERT_TRUE(job.ok()) << job.status();
    EXPECT_EQ(job->init_pid(), attempt.engine->restored()[0]);
  }

  // Nothing has run, and nothing is left.
  void ExpectNothing(const Attempt& attempt) {
    EXPECT_FALSE(attempt.ok);
    EXPECT_FALSE(attempt.sessions.unlocked || attempt.sessions.hosts_open);
    EXPECT_TRUE(attempt.sessions.open.empty());
    EXPECT_EQ(attempt.engine->restoring(), 0);
    for (const pid_t init : attempt.engine->restored()) EXPECT_NE(kill(init, 0), 0) << "a restored process is left";
    EXPECT_FALSE(fs::exists(folder())) << "its folder is left";
  }

  std::string root_;
  std::optional<Account> user_;  // whose job it is
};

TEST_F(RestartJobTest, EachStepOfEachProcessMayFail) {
  for (const bool changes_files : {false, true}) {
    for (const size_t count : {0, 1, 2}) {
      ASSERT_NO_FATAL_FAILURE(WriteImage(count));
      const auto before = ContentsOf(image());
      Attempt whole(image(), "", changes_files);
      whole.Run();
      ExpectWhole(whole);
      whole.End();
      // usable, open, check, begin, finish; plan, hosts, places; and three of each process.
      EXPECT_EQ(whole.faults.steps().size(), 8 + 3 * count);
      for (const std::string& step : whole.faults.steps()) {
        SCOPED_TRACE(step + " fails, of " + std::to_string(count) + " processes");
        Attempt failing(image(), step, changes_files);
        failing.Run();
        EXPECT_THAT(failing.error, HasSubstr(step + " was made to fail"));
        ExpectNothing(failing);
        EXPECT_EQ(ContentsOf(image()), before);
        Attempt again(image(), "", changes_files);
        again.Run();
        ExpectWhole(again);
      }
    }
  }
}

TEST_F(RestartJobTest, FilesAreChangedOnlyWhenTheMemoryIsThere) {
  WriteImage(2);
  for (const bool changes_files : {false, true}) {
    Attempt attempt(image(), "", changes_files);
    ASSERT_TRUE(attempt.Run()) << attempt.error;
    const std::vector<std::string> steps = attempt.faults.steps();
    const auto at = [&](const std::string& step) {
      return std::find(steps.begin(), steps.end(), step) - steps.begin();
    };
    EXPECT_EQ(at("begin") > at("load 1"), changes_files);
    EXPECT_LT(at("load 1"), at("finish"));
    EXPECT_LT(at("finish"), at("give 0"));
  }
}

TEST_F(RestartJobTest, NamesTheProcessThatFailed) {
  WriteImage(2);
  const std::string pid = " (PID " + std::to_string(getpid()) + ")";
  const auto error_of = [this](const std::string& step) {
    Attempt attempt(image(), step);
    attempt.Run();
    return attempt.error;
  };
  EXPECT_EQ(error_of("open 1"), "rank1" + pid + ": open 1 was made to fail");
  EXPECT_EQ(error_of("load 0"), "rank0" + pid + ": load 0 was made to fail");
  EXPECT_EQ(error_of("give 1"),
            "the restored process rank1" + pid + " did not take its GPU session: give 1 was made to fail");
}

// As one may whose last call was made before the checkpoint.
TEST_F(RestartJobTest, AProcessThatHasEndedNeedsNoSession) {
  WriteImage(2, /*pid=*/0x7ffffff0);
  Attempt attempt(image());
  EXPECT_TRUE(attempt.Run()) << attempt.error;
  EXPECT_TRUE(attempt.sessions.given.empty());
  EXPECT_TRUE(attempt.sessions.unlocked);
}

TEST_F(RestartJobTest, AJobThatEndsAtOnceIsNoFailure) {
  WriteImage(2);
  Attempt attempt(image());
  attempt.sessions.before_give = [&] {
    const pid_t init = attempt.engine->restored()[0];
    siginfo_t ended;
    kill(init, SIGKILL);
    waitid(P_PID, id_t(init), &ended, WEXITED | WNOWAIT);
  };
  EXPECT_TRUE(attempt.Run()) << attempt.error;
  EXPECT_THAT(attempt.report.said, HasSubstr("the job ended before it had its GPU session again"));
  EXPECT_TRUE(attempt.sessions.open.empty());
  attempt.End();
  EXPECT_FALSE(fs::exists(folder()));
}

TEST_F(RestartJobTest, HostdDoesItsPart) {
  // Root is no user whose jobs cr-hostd starts.
  user_.emplace();
  user_->user = geteuid() != 0 ? geteuid() : 65533;
  user_->group = geteuid() != 0 ? getegid() : 65533;
  WriteImage(1);
  for (const bool waits : {false, true}) {
    Hostd hostd(*user_, waits);
    Attempt whole(image(), "", false, hostd.caller.get());
    hostd.gate->on_step = [&whole](Step step) {
      EXPECT_EQ(whole.engine->restored().size(), step == IMAGE_USED ? 1u : 0u) << "runs before it may";
    };
    whole.Run();
    ExpectWhole(whole);
    EXPECT_THAT(hostd.gate->steps, ElementsAre(IMAGE_RESTORED, IMAGE_USED));
    EXPECT_EQ(whole.restart->job().image(), FakeGate::kUsersImage);
    whole.End();
    for (const Step step : {IMAGE_RESTORED, IMAGE_USED}) {
      const Hostd refusing(*user_, waits, step);
      Attempt attempt(image(), "", false, refusing.caller.get());
      attempt.Run();
      const std::string refusal = Step_Name(step) + " was refused";
      // A copy of the image that cannot be removed ends no job.
      if (step == IMAGE_USED && !waits) {
        ExpectWhole(attempt);
        EXPECT_EQ(attempt.report.said, refusal + "\n");
      } else {
        EXPECT_EQ(attempt.error, refusal);
        // One whose other parts may have failed has run for a moment.
        EXPECT_EQ(std::exchange(attempt.sessions.unlocked, false), step == IMAGE_USED);
        ExpectNothing(attempt);
      }
    }
  }
}

TEST_F(RestartJobTest, OneJobInOneFolder) {
  WriteImage(1);
  Attempt first(image());
  ASSERT_TRUE(first.Run()) << first.error;
  {
    Attempt second(image());
    EXPECT_FALSE(second.Run());
    EXPECT_THAT(second.error, HasSubstr("there is a running job in " + folder()));
    EXPECT_TRUE(second.engine->restored().empty());
  }
  ExpectWhole(first);
}

}  // namespace
}  // namespace cuda_remote::checkpoint
