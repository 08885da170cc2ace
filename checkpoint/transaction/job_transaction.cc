// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/transaction/job_transaction.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "checkpoint/transaction/at_step.h"
#include "proto/base/status_macros.h"
#include "proto/errors/annotate.h"

namespace cuda_remote::checkpoint {
namespace {

// After one process has ended in the middle of a dump.
constexpr std::chrono::milliseconds kOthersEnd(500);

// As EndsNow of job.h: how long to wait for the end of a process, and how often to look.
constexpr int64_t kEndUs = 1000000, kLookUs = 5000;

}  // namespace

bool JobTransaction::EndsNow(const std::vector<JobProcess*>& processes) {
  const int64_t give_up = clock_.now_us() + kEndUs;
  const auto ended = [](const JobProcess* process) { return process->HasEnded(); };
  while (std::none_of(processes.begin(), processes.end(), ended)) {
    if (clock_.now_us() >= give_up) return false;
    clock_.sleep_us(kLookUs);
  }
  return true;
}

JobTransaction::~JobTransaction() {
  if (state_ != State::kRunning && state_ != State::kOver) Resume().IgnoreError();
}

double JobTransaction::HeldSeconds() const { return double(clock_.now_us() - closed_us_) / 1e6; }

absl::Status JobTransaction::Begin(const agent::LockOptions& options) {
  clock_ = options.clock;
  const int64_t end = clock_.now_us() + int64_t(options.timeout_ms) * 1000;
  while (true) {
    agent::LockOptions left = options;
    left.timeout_ms = int(std::max<int64_t>(1, (end - clock_.now_us()) / 1000));
    processes_.clear();
    closed_us_ = clock_.now_us();
    AtStep("find processes");
    absl::StatusOr<std::vector<JobProcess*>> found = source_->Find();
    if (found.ok()) processes_ = *found;
    absl::Status problem = found.status();
    bool again = absl::IsAborted(problem);
    std::vector<agent::Lockable*> lockables;
    for (JobProcess* process : processes_) lockables.push_back(process->lockable());
    if (problem.ok() && !lockables.empty()) {
      AtStep("lock");
      const absl::StatusOr<int64_t> closed_us = agent::LockAll(lockables, left);
      if (closed_us.ok()) closed_us_ = *closed_us;
      problem = closed_us.status();
      again = !problem.ok() && EndsNow(processes_);
    }
    // From here to the end there are no others.
    if (problem.ok()) {
      state_ = State::kHeld;
      AtStep("keep others from connecting");
      problem = source_->Pause(left.timeout_ms);
      if (problem.ok() && source_->AreAll()) {
        bool ended = false;
        problem = ForEach("take", &JobProcess::Take, &ended);
        if (problem.ok() && !ended) return absl::OkStatus();
      }
      if (!problem.ok()) {
        Resume().IgnoreError();
        return problem;
      }
      again = true;
      problem = absl::FailedPreconditionError("the job keeps starting and ending processes that use CUDA");
    }
    // Those that are locked go on meanwhile: what they wait for may be the one that has come.
    if (state_ == State::kHeld) Resume().IgnoreError();
    state_ = State::kRunning;
    if (!again || clock_.now_us() >= end) return problem;
    if (options.cancelled && options.cancelled()) return absl::CancelledError("interrupted");
  }
}

absl::Status JobTransaction::ForEach(const char* name, absl::Status (JobProcess::*step)(), bool* ended) {
  *ended = false;
  for (size_t i = 0; i < processes_.size(); ++i) {
    JobProcess* const process = processes_[i];
    AtStep(name, i, processes_.size());
    const absl::Status status = (process->*step)();
    if (status.ok()) continue;
    if (EndsNow({process})) {
      *ended = true;
      continue;
    }
    return AnnotateOneOf(processes_.size(), process->Name(), status);
  }
  return absl::OkStatus();
}

absl::Status JobTransaction::Snapshot(const std::string& facts, const std::string& image, const std::string& work,
                                      SnapshotEngine::After after) {
  AtStep("keep the sessions");
  bool ended = false;
  // What a process that has ended meanwhile had is saved, and nobody takes it after a restart.
  CR_RETURN_IF_ERROR(guard_->Keep(facts, after));
  CR_RETURN_IF_ERROR(ForEach("release", &JobProcess::Release, &ended));
  std::vector<const JobProcess*> running;
  for (const JobProcess* process : processes_) {
    if (!process->HasEnded()) running.push_back(process);
  }
  AtStep("save processes");
  absl::Status problem = engine_->Dump(job_, facts, image, work, after);
  if (!problem.ok()) {
    // An engine may not know how the job's processes are called. If one has ended in the middle of a dump, another one
    // may end when it goes on, with the engine's code still in it.
    const auto has_ended = [](const JobProcess* process) { return process->HasEnded(); };
    if (std::any_of(running.begin(), running.end(), has_ended)) std::this_thread::sleep_for(kOthersEnd);
    for (const JobProcess* process : running) {
      if (process->HasEnded()) problem = Annotate(process->Name() + " ended while it was saved: ", problem);
    }
    return problem;
  }
  facts_ = facts;
  state_ = after == SnapshotEngine::After::kStop ? State::kStopped : State::kSaved;
  return absl::OkStatus();
}

absl::Status JobTransaction::Resume() {
  AtStep("resume");
  absl::Status first;
  if (state_ == State::kStopped && !engine_->Resume(job_, facts_)) {
    first = absl::InternalError("cannot resume the processes, which are stopped");
  }
  state_ = State::kOver;
  const auto each = [&](const char* name, absl::Status (JobProcess::*step)()) {
    for (size_t i = 0; i < processes_.size(); ++i) {
      JobProcess* const process = processes_[i];
      AtStep(name, i, processes_.size());
      const absl::Status status = (process->*step)();
      if (status.ok() || EndsNow({process})) continue;
      first.Update(Annotate(process->Name() + " cannot continue: ", status));
    }
  };
  // First all have a session, then all go on: what one does next may need another.
  each("give back", &JobProcess::GiveBack);
  if (guard_) guard_->Drop();
  source_->EndPause();
  each("unlock", &JobProcess::Unlock);
  return first;
}

absl::Status JobTransaction::Switch(const std::function<absl::Status()>& decide) {
  for (size_t i = 0; i < processes_.size(); ++i) {
    JobProcess* const process = processes_[i];
    AtStep("switch", i, processes_.size());
    const absl::Status status = process->Switch();
    if (status.ok() || EndsNow({process})) continue;
    return Annotate(process->Name() + " did not take its new session: ", status);
  }
  AtStep("decide");
  // What a process has done on its new session is not on the old one: afterwards there is no way back.
  for (JobProcess* process : processes_) {
    const absl::Status status = process->Confirm();
    if (status.ok() || EndsNow({process})) continue;
    return Annotate(process->Name() + " cannot continue with its new session: ", status);
  }
  CR_RETURN_IF_ERROR(decide());
  state_ = State::kOver;
  source_->EndPause();
  for (size_t i = 0; i < processes_.size(); ++i) {
    AtStep("unlock", i, processes_.size());
    processes_[i]->Unlock().IgnoreError();  // there is no way back
  }
  return absl::OkStatus();
}

bool JobTransaction::End() {
  AtStep("end the job");
  guard_->ToEnd();
  const bool ended = engine_->End(job_, facts_);
  state_ = State::kOver;
  source_->EndPause();
  for (JobProcess* process : processes_) process->Abandon();
  guard_->Drop();
  return ended;
}

}  // namespace cuda_remote::checkpoint
