// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/transaction/job_transaction.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "checkpoint/transaction/at_step.h"

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
  std::string ignored;
  if (state_ != State::kRunning && state_ != State::kOver) Resume(&ignored);
}

double JobTransaction::HeldSeconds() const { return double(clock_.now_us() - closed_us_) / 1e6; }

bool JobTransaction::Begin(const agent::LockOptions& options, std::string* error) {
  clock_ = options.clock;
  const int64_t end = clock_.now_us() + int64_t(options.timeout_ms) * 1000;
  while (true) {
    agent::LockOptions left = options;
    left.timeout_ms = int(std::max<int64_t>(1, (end - clock_.now_us()) / 1000));
    processes_.clear();
    closed_us_ = clock_.now_us();
    bool again = false;
    AtStep("find processes");
    bool ok = source_->Find(&processes_, &again, error);
    std::vector<agent::Lockable*> lockables;
    for (JobProcess* process : processes_) lockables.push_back(process->lockable());
    if (ok && !lockables.empty()) {
      AtStep("lock");
      ok = agent::LockAll(lockables, left, &closed_us_, error);
      again = !ok && EndsNow(processes_);
    }
    // From here to the end there are no others.
    if (ok) {
      state_ = State::kHeld;
      AtStep("keep others from connecting");
      if (!source_->Pause(left.timeout_ms, error)) break;
      bool ended = false;
      if (source_->AreAll()) {
        if (!ForEach("take", &JobProcess::Take, &ended, error)) break;
        if (!ended) return true;
      }
      again = true;
      *error = "the job keeps starting and ending processes that use CUDA";
    }
    // Those that are locked go on meanwhile: what they wait for may be the one that has come.
    std::string ignored;
    if (state_ == State::kHeld) Resume(&ignored);
    state_ = State::kRunning;
    if (!again || clock_.now_us() >= end) return false;
    if (options.cancelled && options.cancelled()) {
      *error = "interrupted";
      return false;
    }
  }
  std::string ignored;
  Resume(&ignored);
  return false;
}

bool JobTransaction::ForEach(const char* name, bool (JobProcess::*step)(std::string*), bool* ended,
                             std::string* error) {
  *ended = false;
  for (size_t i = 0; i < processes_.size(); ++i) {
    JobProcess* const process = processes_[i];
    std::string problem;
    AtStep(name, i, processes_.size());
    if ((process->*step)(&problem)) continue;
    if (EndsNow({process})) {
      *ended = true;
      continue;
    }
    *error = processes_.size() > 1 ? process->Name() + ": " + problem : problem;
    return false;
  }
  return true;
}

bool JobTransaction::Snapshot(const std::string& facts, const std::string& image, const std::string& work,
                              SnapshotEngine::After after, std::string* error) {
  AtStep("keep the sessions");
  bool ended = false;
  // What a process that has ended meanwhile had is saved, and nobody takes it after a restart.
  if (!guard_->Keep(facts, after, error) || !ForEach("release", &JobProcess::Release, &ended, error)) return false;
  std::vector<const JobProcess*> running;
  for (const JobProcess* process : processes_) {
    if (!process->HasEnded()) running.push_back(process);
  }
  AtStep("save processes");
  if (!engine_->Dump(job_, facts, image, work, after, error)) {
    // An engine may not know how the job's processes are called. If one has ended in the middle of a dump, another one
    // may end when it goes on, with the engine's code still in it.
    const auto has_ended = [](const JobProcess* process) { return process->HasEnded(); };
    if (std::any_of(running.begin(), running.end(), has_ended)) std::this_thread::sleep_for(kOthersEnd);
    for (const JobProcess* process : running) {
      if (process->HasEnded()) *error = process->Name() + " ended while it was saved: " + *error;
    }
    return false;
  }
  facts_ = facts;
  state_ = after == SnapshotEngine::After::kStop ? State::kStopped : State::kSaved;
  return true;
}

bool JobTransaction::Resume(std::string* error) {
  AtStep("resume");
  bool ok = state_ != State::kStopped || engine_->Resume(job_, facts_);
  state_ = State::kOver;
  if (!ok) *error = "cannot resume the processes, which are stopped";
  const auto each = [&](const char* name, bool (JobProcess::*step)(std::string*)) {
    for (size_t i = 0; i < processes_.size(); ++i) {
      JobProcess* const process = processes_[i];
      std::string problem;
      AtStep(name, i, processes_.size());
      if ((process->*step)(&problem) || EndsNow({process})) continue;
      if (ok) *error = process->Name() + " cannot continue: " + problem;
      ok = false;
    }
  };
  // First all have a session, then all go on: what one does next may need another.
  each("give back", &JobProcess::GiveBack);
  if (guard_) guard_->Drop();
  source_->EndPause();
  each("unlock", &JobProcess::Unlock);
  return ok;
}

bool JobTransaction::Switch(const std::function<bool(std::string*)>& decide, std::string* error) {
  for (size_t i = 0; i < processes_.size(); ++i) {
    JobProcess* const process = processes_[i];
    std::string problem;
    AtStep("switch", i, processes_.size());
    if (process->Switch(&problem) || EndsNow({process})) continue;
    *error = process->Name() + " did not take its new session: " + problem;
    return false;
  }
  AtStep("decide");
  // What a process has done on its new session is not on the old one: afterwards there is no way back.
  for (JobProcess* process : processes_) {
    std::string problem;
    if (process->Confirm(&problem) || EndsNow({process})) continue;
    *error = process->Name() + " cannot continue with its new session: " + problem;
    return false;
  }
  if (!decide(error)) return false;
  state_ = State::kOver;
  source_->EndPause();
  for (size_t i = 0; i < processes_.size(); ++i) {
    std::string ignored;
    AtStep("unlock", i, processes_.size());
    processes_[i]->Unlock(&ignored);
  }
  return true;
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
