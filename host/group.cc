// SPDX-License-Identifier: Apache-2.0
#include "host/group.h"

#include <errno.h>
#include <string.h>
#include <sys/random.h>

#include <set>
#include <sstream>

#include "checkpoint/transaction/at_step.h"
#include "host/move_source.h"
#include "proto/base/clock.h"
#include "proto/base/status_macros.h"
#include "proto/control/status_text.h"
#include "proto/errors/absl_status.h"

namespace cuda_remote::host {
namespace {

constexpr size_t kMostParts = 512;  // each has a connection of a process of root's

}  // namespace

absl::StatusOr<std::vector<GroupPart>> ParseGroup(const std::string& list, const std::string& job) {
  std::vector<GroupPart> parts;
  std::istringstream words(list);
  std::set<std::string> known;
  bool once = true;
  for (std::string word; std::getline(words, word, ',');) {
    if (word.empty()) continue;
    const size_t slash = word.find('/');
    parts.push_back({word.substr(0, slash), slash == std::string::npos ? job : word.substr(slash + 1)});
    once = once && known.insert(parts.back().host + "/" + parts.back().job).second;
  }
  if (parts.size() > kMostParts) {
    return absl::InvalidArgumentError("--hosts names " + std::to_string(parts.size()) + " parts, more than the " +
                                      std::to_string(kMostParts) + " that a job can have");
  }
  if (once && !parts.empty()) return parts;
  return absl::InvalidArgumentError(
      "--hosts takes the names of different hosts, separated by commas; of a job with several parts on a host, "
      "HOST/JOB for each");
}

absl::StatusOr<std::unique_ptr<Group>> Group::Open(const std::vector<GroupPart>& parts, const control::TlsFiles& tls) {
  std::unique_ptr<Group> save(new Group);
  for (const GroupPart& part : parts) {
    auto member = std::make_unique<Member>();
    member->host = part.host;
    member->job = part.job;
    CR_ASSIGN_OR_RETURN(const std::shared_ptr<grpc::Channel> channel, HostsChannel(part.host, tls));
    member->stub = Hosts::NewStub(channel);
    member->stream = member->stub->Save(&member->context);
    save->members_.push_back(std::move(member));
  }
  return save;
}

Group::~Group() {
  Cancel();
  for (const auto& member : members_) {
    if (!member->finished) member->stream->Finish();
  }
}

void Group::Cancel() {
  for (const auto& member : members_) member->context.TryCancel();
}

// Until the host has reached the step; SAVE_NONE: until its image has its name.
absl::Status Group::Await(Member* member, SaveStep step, const std::function<void(const std::string&)>& note) {
  SaveDown down;
  while (!member->finished && member->stream->Read(&down)) {
    if (down.kind_case() == SaveDown::kNote) {
      note(member->host + ": " + down.note());
    } else if (down.kind_case() == SaveDown::kFailed) {
      return absl::AbortedError(member->host + ": " + down.failed());
    } else if (down.kind_case() == SaveDown::kDone ? step == SAVE_NONE : down.reached() == step) {
      if (step == RESTART_HELD) member->checkpoint = down.checkpoint();
      return absl::OkStatus();
    } else {
      return absl::DataLossError(
          member->host +
          ": its cr-hostd sent an answer that this one cannot read; install the same version on all hosts");
    }
  }
  const grpc::Status status = member->finished ? grpc::Status::OK : member->stream->Finish();
  member->finished = true;
  if (status.error_code() == grpc::StatusCode::CANCELLED) return absl::CancelledError("interrupted");
  if (status.error_code() == grpc::StatusCode::PERMISSION_DENIED)
    return absl::PermissionDeniedError(member->host + ": " + status.error_message());
  return absl::UnavailableError("the cr-hostd of " + member->host + " does not answer" +
                                (status.ok() ? "" : ": " + control::StatusText(status)));
}

absl::Status Group::Reach(SaveStep step, const std::function<void(const std::string&)>& note) {
  for (const auto& member : members_) CR_RETURN_IF_ERROR(Await(member.get(), step, note));
  return absl::OkStatus();
}

absl::Status Group::GoOn(SaveStep step) {
  SaveUp up;
  up.set_go_on(step);
  absl::Status status;
  for (const auto& member : members_) {
    if (!member->finished && member->stream->Write(up)) continue;
    // Those behind it are still to hear of a decision.
    status = absl::UnavailableError("the cr-hostd of " + member->host + " does not answer");
  }
  return status;
}

// Asks all hosts to begin.
absl::Status Group::Begin(SaveBegin* begin, const std::string& image, const Key& key) {
  std::string id(16, '\0');
  if (getrandom(&id[0], id.size(), 0) != ssize_t(id.size())) return ErrnoStatus("no random numbers");
  begin->set_id(id);
  for (size_t i = 0; i < members_.size(); ++i) {
    const std::string number = std::to_string(i + 1);
    SaveBegin own = *begin;
    own.set_image(image + "/member-" + number);
    own.set_job(members_[i]->job);
    for (SaveOption& option : *own.mutable_options()) {
      const size_t at = begin->restart() ? option.value().find(kPartNumber) : std::string::npos;
      if (at != std::string::npos) option.mutable_value()->replace(at, strlen(kPartNumber), number);
    }
    SaveUp up;
    up.mutable_begin()->set_begin(own.SerializeAsString());
    up.mutable_begin()->set_code(key.CodeOf(kSaveText + up.begin().begin()));
    members_[i]->stream->Write(up);  // a failure is seen at the next step
  }
  return absl::OkStatus();
}

// To where it can be decided.
absl::Status Group::Save(const std::function<void(const std::string&)>& note) {
  checkpoint::AtStep("all hosts are ready");
  CR_RETURN_IF_ERROR(Reach(SAVE_READY, note));
  const Moment stopped = Now();
  CR_RETURN_IF_ERROR(GoOn(SAVE_READY));
  checkpoint::AtStep("all hosts are locked");
  CR_RETURN_IF_ERROR(Reach(SAVE_LOCKED, note));
  CR_RETURN_IF_ERROR(GoOn(SAVE_LOCKED));
  checkpoint::AtStep("all hosts stand still");
  CR_RETURN_IF_ERROR(Reach(SAVE_STILL, note));
  CR_RETURN_IF_ERROR(GoOn(SAVE_STILL));
  checkpoint::AtStep("all hosts are dumped");
  CR_RETURN_IF_ERROR(Reach(SAVE_DUMPED, note));
  CR_RETURN_IF_ERROR(GoOn(SAVE_DUMPED));
  paused_seconds_ = SecondsSince(stopped);
  checkpoint::AtStep("all images are complete");
  CR_RETURN_IF_ERROR(Reach(SAVE_COMPLETE, note));
  checkpoint::AtStep("decide");
  return absl::OkStatus();
}

absl::Status Group::Restart(const std::string& image, const std::function<void(const std::string&)>& note) {
  checkpoint::AtStep("all parts are restored");
  CR_RETURN_IF_ERROR(Reach(RESTART_HELD, note));
  for (size_t i = 0; i < members_.size(); ++i) {
    const std::string& checkpoint = members_[i]->checkpoint;
    if (!checkpoint.empty() && checkpoint == members_[0]->checkpoint) continue;
    const std::string first = checkpoint.empty() ? "" : image + "/member-1 on " + members_[0]->host + " and ";
    return absl::FailedPreconditionError(
        first + image + "/member-" + std::to_string(i + 1) + " on " + members_[i]->host +
        (checkpoint.empty() ? " was not saved with --hosts" : " are not of one checkpoint") +
        "; restart images that one cr-checkpoint --hosts has made");
  }
  checkpoint::AtStep("all parts run");
  CR_RETURN_IF_ERROR(GoOn(RESTART_HELD));
  checkpoint::AtStep("wait until they do");
  CR_RETURN_IF_ERROR(Reach(RESTART_RUNS, note));
  checkpoint::AtStep("decide");
  // What a host has said may be older than its end.
  CR_RETURN_IF_ERROR(GoOn(RESTART_RUNS));
  return Reach(RESTART_SURE, note);
}

absl::Status Group::Decide(const std::string& id, const char* unknown) {
  const SettleReply::State state = Settled(members_[0]->stub.get(), id, /*decide=*/true);
  if (state == SettleReply::RUNNING) return absl::OkStatus();
  if (state == SettleReply::FAILED) return absl::AbortedError("a host has lost the connection and cancelled");
  return absl::UnavailableError("the cr-hostd of " + members_[0]->host + ", where it is decided, does not answer; " +
                                unknown);
}

absl::Status Group::Run(SaveBegin begin, const std::string& image, const Key& key,
                        const std::function<void(const std::string&)>& note) {
  CR_RETURN_IF_ERROR(Begin(&begin, image, key));
  const bool restart = begin.restart();
  CR_RETURN_IF_ERROR(restart ? Restart(image, note) : Save(note));
  const char* const unknown =
      restart ? "see on each host whether the part runs (cr-ps)" : "see on each host whether there is a new image";
  CR_RETURN_IF_ERROR(Decide(begin.id(), unknown));
  // From here on it counts, also where the word does not arrive: who lacks it asks.
  GoOn(restart ? RESTART_SURE : SAVE_COMPLETE).IgnoreError();
  checkpoint::AtStep(restart ? "the parts go on" : "name the images");
  for (size_t i = 0; i < members_.size(); ++i) {
    const absl::Status named = Await(members_[i].get(), SAVE_NONE, note);
    if (named.ok()) continue;
    const std::string part = image + "/member-" + std::to_string(i + 1);
    note((restart ? "the job runs, but what has become of its part from "
                  : "the checkpoint is complete, but what has become of ") +
         part + " is not known: " + std::string(named.message()) + "; look there" +
         (restart ? " (cr-ps)" : " before you use it"));
  }
  return absl::OkStatus();
}

}  // namespace cuda_remote::host
