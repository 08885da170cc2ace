// SPDX-License-Identifier: Apache-2.0
// cr-checkpoint --hosts and cr-restart --hosts: a job over several hosts, whose parts this cr-hostd has saved or
// restarted together.
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <thread>

#include "checkpoint/job/account.h"
#include "checkpoint/transaction/at_step.h"
#include "host/group.h"
#include "host/report.h"
#include "host/requests/host_request.h"
#include "host/sets.h"
#include "host/wire.h"
#include "proto/base/clock.h"
#include "proto/base/status_macros.h"
#include "proto/codec/json.h"

namespace cuda_remote::host {
namespace {

constexpr int kExitInterrupted = 3;  // as cr-checkpoint's
// Of --every: how often it looks whether the user gives up, and whether the job has ended.
constexpr auto kWaitStep = std::chrono::milliseconds(100);
constexpr auto kLookForJob = std::chrono::seconds(10);

// This moment as people write it, here.
std::string TimeText() {
  const time_t now = UnixMs() / 1000;
  tm parts{};
  char text[32];
  if (!localtime_r(&now, &parts) || strftime(text, sizeof(text), "%Y-%m-%d %H:%M:%S", &parts) == 0) return "?";
  return text;
}

class GroupRequest : public HostRequest {
 public:
  GroupRequest(Asked asked, bool restarts) : HostRequest(std::move(asked)), restarts_(restarts) {}

  absl::Status Begin() override;

 private:
  struct Outcome {
    std::string image;
    double seconds = 0, paused = 0;
  };

  int Follow() override { return every_ > 0 ? RepeatGroup() : DoGroupOnce(); }

  void CancelWork() override {
    if (group_) group_->Cancel();
  }

  // A checkpoint may have been decided before.
  bool CountsWhenCancelled() const override { return group_ != nullptr; }

  absl::Status TakeOptions();
  absl::Status DoGroup(Outcome* outcome);
  void TellGroup(const Outcome& outcome);
  int DoGroupOnce();
  int RepeatGroup();
  bool GroupIsOver();

  const bool restarts_;
  std::string host_;  // all of them, as the user names them
  bool json_ = false, quiet_ = false;
  double every_ = 0;  // seconds; 0: once
  size_t keep_ = 0;   // of a store's sets; 0: it is none
  std::vector<GroupPart> parts_;
  SaveBegin begin_;
  std::unique_ptr<Sets> sets_;
  std::unique_ptr<Group> group_;
  int user_output_ = -1;
};

absl::Status GroupRequest::TakeOptions() {
  for (const Option& option : request_.options()) {
    if (option.name() == "json" || option.name() == "quiet") {
      (option.name() == "json" ? json_ : quiet_) = true;
    } else if (option.name() == "hosts") {
      host_ = option.value();
    } else if (tool_->own.count(option.name())) {
      const double value = atof(option.value().c_str());
      if (option.name() == "every") every_ = value;
      if (option.name() == "keep") keep_ = value >= 1 && value <= double(kMostKept) ? size_t(value) : 0;
      if (option.name() == "every" ? every_ > 0 : keep_ > 0) continue;
      return absl::InvalidArgumentError("--" + option.name() + " " + option.value() + " is out of range");
    } else {
      SaveOption* const passed = begin_.add_options();
      passed->set_name(option.name());
      passed->set_value(option.value());
      passed->set_flag(option.flag());
    }
  }
  return absl::OkStatus();
}

absl::Status GroupRequest::Begin() {
  if (settings_.tls.empty()) {
    return absl::FailedPreconditionError(
        "this cr-hostd saves and restarts no jobs over several hosts: it has no certificate (cr-hostd --tls-cert)");
  }
  if (!restarts_ && !IsJobName(request_.job())) {
    return absl::InvalidArgumentError("\"" + request_.job() +
                                      "\" cannot be the name of a job; with --hosts, JOB is the name that it has on "
                                      "all hosts (cr-run --name)");
  }
  CR_RETURN_IF_ERROR(TakeOptions());
  CR_ASSIGN_OR_RETURN(parts_, ParseGroup(host_, request_.job()));
  CR_ASSIGN_OR_RETURN(const checkpoint::Account named, checkpoint::FindAccount(std::to_string(peer_.account.user)));
  begin_.set_version(kVersion);
  begin_.set_decider(parts_[0].host);
  begin_.set_whole_job(request_.job());
  begin_.set_umask(request_.umask());
  begin_.set_restart(restarts_);
  if (restarts_) *begin_.mutable_environment() = request_.environment();
  begin_.mutable_user()->set_id(peer_.account.user);
  begin_.mutable_user()->set_name(named.name);
  begin_.mutable_user()->set_group(peer_.account.group);
  for (const gid_t group : peer_.account.groups) begin_.mutable_user()->add_groups(group);
  user_output_ = fcntl(fds_[1], F_DUPFD_CLOEXEC, 3);
  if (keep_ > 0 || restarts_) sets_ = std::make_unique<Sets>(parts_, settings_.tls, key_, begin_.user(), image_);
  Log(ProgramOf(*tool_) + " on the hosts " + host_ + ", image " + image_);
  return absl::OkStatus();
}
// One checkpoint, or restart, of all parts.
absl::Status GroupRequest::DoGroup(Outcome* outcome) {
  const auto begun = Now();
  const auto note = [this](const std::string& text) {
    if (!quiet_) Tell(Reply::NOTE, 0, text);
  };
  outcome->image = image_;
  if (sets_) {
    CR_RETURN_IF_ERROR(sets_->Look());
    CR_ASSIGN_OR_RETURN(outcome->image, restarts_ ? sets_->Newest() : sets_->Next());
    const std::vector<uint64_t> earlier = keep_ > 0 ? sets_->Complete(request_.job()) : std::vector<uint64_t>();
    begin_.set_in_set(keep_ > 0);
    *begin_.mutable_earlier() = {earlier.begin(), earlier.end()};
  }
  CR_ASSIGN_OR_RETURN(group_, Group::Open(parts_, settings_.tls));
  const absl::Status done = WatchFor([&] { return group_->Run(begin_, outcome->image, key_, note); });
  outcome->paused = group_->paused_seconds();
  group_.reset();
  if (done.ok() && keep_ > 0) {
    checkpoint::AtStep("remove old sets");
    if (const absl::Status pruned = sets_->Prune(request_.job(), keep_); !pruned.ok()) {
      note("the checkpoint is complete, but old ones could not be removed: " + std::string(pruned.message()) +
           "; the next one tries again");
    }
  }
  outcome->seconds = SecondsSince(begun);
  if (done.ok()) {
    Log(std::string("the parts on ") + host_ + (restarts_ ? " run" : " are saved") + ", image " + outcome->image);
  } else {
    Log(ProgramOf(*tool_) + " on " + host_ + " has failed: " + std::string(done.message()));
  }
  return done;
}

void GroupRequest::TellGroup(const Outcome& outcome) {
  if (json_) {
    JsonWriter json(JsonWriter::kSpaced);
    json.BeginOutput();
    json.Member("image", outcome.image);
    json.Member("hosts", host_);
    json.RealMember("seconds", outcome.seconds, 3);
    if (!restarts_) json.RealMember("paused_seconds", outcome.paused, 3);
    json.End('}');
    Print(user_output_, json.text());
  } else if (!quiet_) {
    char text[128];
    snprintf(text, sizeof(text), " in %.1f s (the job stood still for %.1f s)", outcome.seconds, outcome.paused);
    if (restarts_) snprintf(text, sizeof(text), " in %.1f s; the job runs", outcome.seconds);
    Tell(Reply::NOTE, 0, (every_ > 0 ? TimeText() + ": " : "") + outcome.image + "/member-N on " + host_ + text);
  }
}

// Whether no host has a part of the job any more. One that does not answer may have one.
bool GroupRequest::GroupIsOver() {
  std::vector<std::string> hosts;
  for (const GroupPart& part : parts_) hosts.push_back(part.host);
  const HostReports reports = AskHosts(hosts, settings_.tls, begin_.user());
  for (size_t i = 0; i < parts_.size(); ++i) {
    const HostReport& report = reports.hosts(int(i));
    const auto is_part = [&](const HostJob& job) { return job.running() && job.name() == parts_[i].job; };
    if (!report.error().empty() || std::any_of(report.jobs().begin(), report.jobs().end(), is_part)) return false;
  }
  return true;
}

// The exit code for the user's tool.
int GroupRequest::DoGroupOnce() {
  Outcome outcome;
  const absl::Status done = DoGroup(&outcome);
  if (done.ok()) {
    TellGroup(outcome);
    return 0;
  }
  const std::string error(done.message());
  if (restarts_) {
    Tell(Reply::NOTE, 0, "no restart of " + outcome.image + " on " + host_ + ": " + error + "; no part of it runs");
    return kExitNotRestarted;
  }
  const bool over = !cancelled_ && GroupIsOver();
  const char* const rest = over ? "" : "; the job continues";
  Tell(Reply::NOTE, 0, "no checkpoint of " + request_.job() + " on " + host_ + ": " + error + rest);
  return over ? checkpoint::kExitNoJob : checkpoint::kExitFailure;
}

// --every: what goes wrong once is said, and tried again at the next time. The exit code for the user's tool.
int GroupRequest::RepeatGroup() {
  const auto interval = std::chrono::duration_cast<Moment::duration>(std::chrono::duration<double>(every_));
  std::string last;
  for (bool first = true;; first = false) {
    Outcome outcome;
    const absl::Status status = DoGroup(&outcome);
    const bool done = status.ok();
    const std::string error(status.message());
    const Moment next = Now() + interval;
    if (done) last = outcome.image;
    if (done) TellGroup(outcome);
    bool over = !done && !cancelled_ && GroupIsOver();
    if (over && first) {
      Tell(Reply::NOTE, 0, "no checkpoint of " + request_.job() + " on " + host_ + ": " + error);
      return checkpoint::kExitNoJob;
    }
    if (!done && !over && !cancelled_) {
      Tell(Reply::NOTE, 0,
           TimeText() + ": no checkpoint of " + request_.job() + " on " + host_ + ": " + error +
               "; the job continues. " +
               (last.empty() ? "There is no image from this run yet" : last + " is still its last image") +
               "; the next try is in " + std::to_string(std::lround(every_)) + " s");
    }
    const auto wait = [&] {
      for (auto look = Now() + kLookForJob; !over && !cancelled_ && Now() < next;) {
        std::this_thread::sleep_for(std::min(interval, Moment::duration(kWaitStep)));
        if (Now() < look) continue;
        over = GroupIsOver();
        look = Now() + kLookForJob;
      }
      return absl::OkStatus();
    };
    WatchFor(wait).IgnoreError();  // cancelled_ says whether it was interrupted
    if (cancelled_) return kExitInterrupted;
    if (!over) continue;
    if (last.empty()) Tell(Reply::NOTE, 0, "the job has ended, and there is no image of it from this run");
    return last.empty() ? checkpoint::kExitFailure : 0;
  }
}

}  // namespace

std::unique_ptr<HostRequest> NewGroup(Asked asked) {
  const bool restarts = asked.tool->program == std::string("cr-restart");
  return std::make_unique<GroupRequest>(std::move(asked), restarts);
}

}  // namespace cuda_remote::host
