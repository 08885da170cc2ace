// SPDX-License-Identifier: Apache-2.0
#include "host/group_save.h"

#include <errno.h>
#include <string.h>
#include <sys/random.h>

#include <chrono>
#include <set>
#include <sstream>

#include "checkpoint/transaction/at_step.h"
#include "host/move_source.h"

namespace cuda_remote::host {

using std::chrono::steady_clock;

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

std::unique_ptr<GroupSave> GroupSave::Open(const std::vector<GroupPart>& parts, const control::TlsFiles& tls,
                                           std::string* error) {
  std::unique_ptr<GroupSave> save(new GroupSave);
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

GroupSave::~GroupSave() {
  Cancel();
  for (const auto& member : members_) {
    if (!member->finished) member->stream->Finish();
  }
}

void GroupSave::Cancel() {
  for (const auto& member : members_) member->context.TryCancel();
}

// Until the host has reached the step; SAVE_NONE: until its image has its name.
bool GroupSave::Await(Member* member, SaveStep step, const std::function<void(const std::string&)>& note,
                      std::string* error) {
  SaveDown down;
  while (!member->finished && member->stream->Read(&down)) {
    if (down.kind_case() == SaveDown::kNote) {
      note(member->host + ": " + down.note());
    } else if (down.kind_case() == SaveDown::kFailed) {
      *error = member->host + ": " + down.failed();
      return false;
    } else if (down.kind_case() == SaveDown::kDone ? step == SAVE_NONE : down.reached() == step) {
      return true;
    } else {
      *error = member->host + ": its cr-hostd has answered something else; install the same version on all hosts";
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
    *error =
        "the cr-hostd of " + member->host + " does not answer" + (status.ok() ? "" : ": " + status.error_message());
  }
  return false;
}

bool GroupSave::Reach(SaveStep step, const std::function<void(const std::string&)>& note, std::string* error) {
  for (const auto& member : members_) {
    if (!Await(member.get(), step, note, error)) return false;
  }
  return true;
}

bool GroupSave::GoOn(SaveStep step, std::string* error) {
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

bool GroupSave::Run(SaveBegin begin, const std::string& image, const Key& key,
                    const std::function<void(const std::string&)>& note, std::string* error) {
  std::string id(16, '\0');
  if (getrandom(&id[0], id.size(), 0) != ssize_t(id.size())) {
    *error = std::string("no random numbers: ") + strerror(errno);
    return false;
  }
  begin.set_id(id);
  for (size_t i = 0; i < members_.size(); ++i) {
    begin.set_image(image + "/member-" + std::to_string(i + 1));
    begin.set_job(members_[i]->job);
    SaveUp up;
    up.mutable_begin()->set_begin(begin.SerializeAsString());
    up.mutable_begin()->set_code(key.CodeOf(kSaveText + up.begin().begin()));
    members_[i]->stream->Write(up);  // a failure is seen at the next step
  }
  checkpoint::AtStep("all hosts are ready");
  if (!Reach(SAVE_READY, note, error)) return false;
  const steady_clock::time_point stopped = steady_clock::now();
  if (!GoOn(SAVE_READY, error)) return false;
  checkpoint::AtStep("all hosts are locked");
  if (!Reach(SAVE_LOCKED, note, error) || !GoOn(SAVE_LOCKED, error)) return false;
  checkpoint::AtStep("all hosts are dumped");
  if (!Reach(SAVE_DUMPED, note, error) || !GoOn(SAVE_DUMPED, error)) return false;
  paused_seconds_ = std::chrono::duration<double>(steady_clock::now() - stopped).count();
  checkpoint::AtStep("all images are complete");
  if (!Reach(SAVE_COMPLETE, note, error)) return false;
  checkpoint::AtStep("decide");
  const SettleReply::State state = Settled(members_[0]->stub.get(), id, /*decide=*/true);
  if (state != SettleReply::RUNNING) {
    *error = state == SettleReply::FAILED
                 ? "a host has lost the connection, and the checkpoint was given up"
                 : "the cr-hostd of " + members_[0]->host +
                       ", where it is decided, does not answer; see on each host whether there is a new image";
    return false;
  }
  // From here on the images count, also where the word does not arrive: who lacks it asks.
  std::string problem;
  GoOn(SAVE_COMPLETE, &problem);
  checkpoint::AtStep("name the images");
  for (size_t i = 0; i < members_.size(); ++i) {
    if (Await(members_[i].get(), SAVE_NONE, note, &problem)) continue;
    note("the checkpoint is complete, but what has become of " + image + "/member-" + std::to_string(i + 1) +
         " is not known: " + problem + "; look there before you use it");
  }
  return true;
}

}  // namespace cuda_remote::host
