// SPDX-License-Identifier: Apache-2.0
#include "host/requests/save.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>

#include "checkpoint/job/account.h"
#include "ckptfmt/folder.h"
#include "proto/base/status_macros.h"
#include "proto/errors/absl_status.h"

namespace cuda_remote::host {

Save::Save(Asked asked) : HostRequest(std::move(asked)) { fills_spool_ = true; }

// What it copies is in the request's folder.
Save::~Save() { giver_.reset(); }

absl::Status Save::Begin() {
  CR_RETURN_IF_ERROR(CheckImageIsNamed());
  CR_RETURN_IF_ERROR(FindJob());
  CR_RETURN_IF_ERROR(MakeSpool());
  CR_RETURN_IF_ERROR(ListArguments());
  Log(ProgramOf(*tool_) + ", image " + image_);
  return StartTool();
}

// --keep
absl::Status Save::TakeOwnOption(const Option& option) {
  keep_ = option.flag() ? 0 : size_t(strtoul(option.value().c_str(), nullptr, 10));
  if (keep_ >= 1 && keep_ <= kMostKept) return absl::OkStatus();
  return absl::InvalidArgumentError("--" + option.name() + " takes a number from 1 to " + std::to_string(kMostKept));
}

void Save::EndArguments() {
  // Which of the user's images stay is not the tool's to say.
  if (Shares()) arguments_.push_back("--keep=1");
  arguments_.insert(arguments_.end(), {job_folder_, spool_ + (Shares() ? kImages : kImage)});
}

std::vector<std::string> Save::PathsToShareWith() const {
  const checkpoint::ActAs user(&peer_.account);
  return ckptfmt::ImagesIn(ckptfmt::ParentOf(giver_->dir()));
}

// Something that waits for the user's process. The tool, which waits for the answer, hears of a signal, too.
absl::Status Save::WatchGiver(const std::function<absl::Status()>& work) {
  const absl::Status done = WatchFor(work);
  if (cancelled_) kill(child_, SIGTERM);
  return done;
}

// The user gets a folder for the image; and the tool, if it is one of several, the earlier ones to share with.
absl::StatusOr<std::string> Save::BeginImage() {
  giver_.reset();
  earlier_.reset();
  CR_ASSIGN_OR_RETURN(
      giver_, ImageGiver::Begin(peer_.account, spool_fd_, image_, keep_, [this] { return cancelled_ || peer_gone_; }));
  CR_RETURN_IF_ERROR(WatchGiver([&] { return giver_->AwaitPlace(); }));
  if (!Shares()) return image_;
  RemoveOwnFolder(spool_ + kImages);
  CR_ASSIGN_OR_RETURN(earlier_,
                      EarlierImages::Take(peer_.account, key_, PathsToShareWith(), giver_->dir(), spool_ + kImages));
  if (const absl::Status& sharing = earlier_->sharing(); !sharing.ok()) {
    Tell(Reply::NOTE, 0, "the image shares nothing with earlier ones: " + std::string(sharing.message()));
  }
  return giver_->dir();
}

// The image is complete: from the spool to the user.
absl::Status Save::GiveImage() {
  if (earlier_ && rename(ckptfmt::NewestImageIn(spool_ + kImages).c_str(), (spool_ + kImage).c_str()) != 0) {
    return ErrnoStatus("cannot find the image");
  }
  CR_ASSIGN_OR_RETURN(const ckptfmt::OpenedFolder folder, ckptfmt::OpenedFolder::Open(spool_ + kImage));
  const PartOf part = {request_.member().id(), request_.member().whole_job()};
  CR_RETURN_IF_ERROR(SignImage(folder, key_, peer_.account.user, part, earlier_ ? &earlier_->chunks() : nullptr));
  if (earlier_) CR_RETURN_IF_ERROR(earlier_->PlaceFiles(folder));
  CR_RETURN_IF_ERROR(GiveFiles(peer_.account, spool_fd_));
  CR_RETURN_IF_ERROR(WatchGiver([&] { return giver_->Copy(); }));
  CR_RETURN_IF_ERROR(AwaitPublishing());
  std::string note;
  CR_RETURN_IF_ERROR(WatchGiver([&] {
    CR_ASSIGN_OR_RETURN(note, giver_->Publish());
    return absl::OkStatus();
  }));
  if (!note.empty()) Tell(Reply::NOTE, 0, note);
  return absl::OkStatus();
}

absl::StatusOr<std::string> Save::Do(checkpoint::Step step) {
  if (step == checkpoint::IMAGE_BEGINS) return BeginImage();
  if (step != checkpoint::IMAGE_COMPLETE || !giver_) return HostRequest::Do(step);
  const absl::Status given = GiveImage();
  giver_.reset();
  RemoveOwnFolder(spool_ + kImage);
  if (earlier_) RemoveOwnFolder(spool_ + kImages);
  earlier_.reset();
  CR_RETURN_IF_ERROR(given);
  return std::string();
}

std::unique_ptr<HostRequest> NewSave(Asked asked) { return std::make_unique<Save>(std::move(asked)); }

}  // namespace cuda_remote::host
