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
#include "proto/control/status_text.h"

namespace cuda_remote::host {

bool ParseGroup(const std::string& list, const std::string& job, std::vector<GroupPart>* parts, std::string* error) {
  std::istringstream words(list);
  std::set<std::string> known;
  bool once = true;
  for (std::string word; std::getline(words, word, ',');) {
    if (word.empty()) continue;
    const size_t slash = word.find('/');
    parts->push_back({word.substr(0, slash), slash == std::string::npos ? job : word.substr(slash + 1)});
    once = once && known.insert(parts->back().host + "/" + parts->back().job).second;
  }
  if (once && !parts->empty()) return true;
  *error =
      "--hosts takes the names of different hosts, separated by commas; of a job with several parts on a host, "
      "HOST/JOB for each";
  return false;
}

std::unique_ptr<Group> Group::Open(const std::vector<GroupPart>& parts, const control::TlsFiles& tls,
                                   std::string* error) {
  std::unique_ptr<Group> save(new Group);
  for (const GroupPart& part : parts) {
    auto member = std::make_unique<Member>();
    member->host = part.host;
    member->job = part.job;
    const auto channel = HostsChannel(part.host, tls, error);
    if (!channel) return nullptr;
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
bool Group::Await(Member* member, SaveStep step, const std::function<void(const std::string&)>& note,
                  std::string* error) {
  SaveDown down;
  while (!member->finished && member->stream->Read(&down)) {
    if (down.kind_case() == SaveDown::kNote) {
      note(member->host + ": " + down.note());
    } else if (down.kind_case() == SaveDown::kFailed) {
      *error = member->host + ": " + down.failed();
      return false;
    } else if (down.kind_case() == SaveDown::kDone ? step == SAVE_NONE : down.reached() == step) {
      if (step == RESTART_HELD) member->checkpoint = down.checkpoint();
      return true;
    } else {
      *error = member->host +
               ": its cr-hostd sent an answer that this one cannot read; install the same version on all hosts";
      return false;
    }
  }
  const grpc::Status status = member->finished ? grpc::Status::OK : member->stream->Finish();
  member->finished = true;
  if (status.error_code() == grpc::StatusCode::CANCELLED) {
    *error = "interrupted";
  } else if (status.error_code() == grpc::StatusCode::PERMISSION_DENIED) {
    *error = member->host + ": " + status.error_message();
  } else {
    *error = "the cr-hostd of " + member->host + " does not answer" +
             (status.ok() ? "" : ": " + control::StatusText(status));
  }
  return false;
}

bool Group::Reach(SaveStep step, const std::function<void(const std::string&)>& note, std::string* error) {
  for (const auto& member : members_) {
    if (!Await(member.get(), step, note, error)) return false;
  }
  return true;
}

bool Group::GoOn(SaveStep step, std::string* error) {
  SaveUp up;
  up.set_go_on(step);
  bool ok = true;
  for (const auto& member : members_) {
    if (!member->finished && member->stream->Write(up)) continue;
    // Those behind it are still to hear of a decision.
    *error = "the cr-hostd of " + member->host + " does not answer";
    ok = false;
  }
  return ok;
}

// Asks all hosts to begin.
bool Group::Begin(SaveBegin* begin, const std::string& image, const Key& key, std::string* error) {
  std::string id(16, '\0');
  if (getrandom(&id[0], id.size(), 0) != ssize_t(id.size())) {
    *error = std::string("no random numbers: ") + strerror(errno);
    return false;
  }
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
  return true;
}

// To where it can be decided.
bool Group::Save(const std::function<void(const std::string&)>& note, std::string* error) {
  checkpoint::AtStep("all hosts are ready");
  if (!Reach(SAVE_READY, note, error)) return false;
  const Moment stopped = Now();
  if (!GoOn(SAVE_READY, error)) return false;
  checkpoint::AtStep("all hosts are locked");
  if (!Reach(SAVE_LOCKED, note, error) || !GoOn(SAVE_LOCKED, error)) return false;
  checkpoint::AtStep("all hosts stand still");
  if (!Reach(SAVE_STILL, note, error) || !GoOn(SAVE_STILL, error)) return false;
  checkpoint::AtStep("all hosts are dumped");
  if (!Reach(SAVE_DUMPED, note, error) || !GoOn(SAVE_DUMPED, error)) return false;
  paused_seconds_ = SecondsSince(stopped);
  checkpoint::AtStep("all images are complete");
  if (!Reach(SAVE_COMPLETE, note, error)) return false;
  checkpoint::AtStep("decide");
  return true;
}

bool Group::Restart(const std::string& image, const std::function<void(const std::string&)>& note, std::string* error) {
  checkpoint::AtStep("all parts are restored");
  if (!Reach(RESTART_HELD, note, error)) return false;
  for (size_t i = 0; i < members_.size(); ++i) {
    const std::string& checkpoint = members_[i]->checkpoint;
    if (!checkpoint.empty() && checkpoint == members_[0]->checkpoint) continue;
    *error = checkpoint.empty() ? "" : image + "/member-1 on " + members_[0]->host + " and ";
    *error += image + "/member-" + std::to_string(i + 1) + " on " + members_[i]->host +
              (checkpoint.empty() ? " was not saved with --hosts" : " are not of one checkpoint") +
              "; restart images that one cr-checkpoint --hosts has made";
    return false;
  }
  checkpoint::AtStep("all parts run");
  if (!GoOn(RESTART_HELD, error)) return false;
  checkpoint::AtStep("wait until they do");
  if (!Reach(RESTART_RUNS, note, error)) return false;
  checkpoint::AtStep("decide");
  // What a host has said may be older than its end.
  return GoOn(RESTART_RUNS, error) && Reach(RESTART_SURE, note, error);
}

bool Group::Decide(const std::string& id, const char* unknown, std::string* error) {
  const SettleReply::State state = Settled(members_[0]->stub.get(), id, /*decide=*/true);
  if (state == SettleReply::RUNNING) return true;
  *error = state == SettleReply::FAILED
               ? "a host has lost the connection and cancelled"
               : "the cr-hostd of " + members_[0]->host + ", where it is decided, does not answer; " + unknown;
  return false;
}

bool Group::Run(SaveBegin begin, const std::string& image, const Key& key,
                const std::function<void(const std::string&)>& note, std::string* error) {
  if (!Begin(&begin, image, key, error)) return false;
  const bool restart = begin.restart();
  if (restart ? !Restart(image, note, error) : !Save(note, error)) return false;
  const char* const unknown =
      restart ? "see on each host whether the part runs (cr-ps)" : "see on each host whether there is a new image";
  if (!Decide(begin.id(), unknown, error)) return false;
  // From here on it counts, also where the word does not arrive: who lacks it asks.
  std::string problem;
  GoOn(restart ? RESTART_SURE : SAVE_COMPLETE, &problem);
  checkpoint::AtStep(restart ? "the parts go on" : "name the images");
  for (size_t i = 0; i < members_.size(); ++i) {
    if (Await(members_[i].get(), SAVE_NONE, note, &problem)) continue;
    const std::string part = image + "/member-" + std::to_string(i + 1);
    note((restart ? "the job runs, but what has become of its part from "
                  : "the checkpoint is complete, but what has become of ") +
         part + " is not known: " + problem + "; look there" + (restart ? " (cr-ps)" : " before you use it"));
  }
  return true;
}

}  // namespace cuda_remote::host
