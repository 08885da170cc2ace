// SPDX-License-Identifier: Apache-2.0
// A part of a job over several hosts is saved: for another host's cr-hostd, which has vouched for the user.
#include <errno.h>
#include <sys/stat.h>

#include "checkpoint/job/account.h"
#include "ckptfmt/folder.h"
#include "host/requests/save.h"
#include "host/sets.h"
#include "proto/base/status_macros.h"
#include "proto/errors/absl_status.h"

namespace cuda_remote::host {
namespace {

class SavePart : public Save {
 public:
  explicit SavePart(Asked asked) : Save(std::move(asked)) { waits_ = true; }

  absl::Status Begin() override {
    CR_RETURN_IF_ERROR(ActForMember());
    CR_RETURN_IF_ERROR(FindJob());
    CR_RETURN_IF_ERROR(MakeSpool());
    CR_RETURN_IF_ERROR(MakeImagesFolder());
    CR_RETURN_IF_ERROR(ListArguments());
    Log("a part of the job is saved, image " + image_);
    return StartTool();
  }

 private:
  bool Shares() const override { return request_.member().in_set(); }
  absl::Status AwaitPublishing() override { return AwaitOthers(SAVE_COMPLETE, "", /*restarts=*/false); }

  void EndArguments() override {
    arguments_.push_back("--quiet");
    Save::EndArguments();
  }

  std::vector<std::string> PathsToShareWith() const override {
    const checkpoint::ActAs user(&peer_.account);
    const auto& sets = request_.member().earlier();
    return EarlierInSets(image_, {sets.begin(), sets.end()});
  }

  absl::StatusOr<std::string> Do(checkpoint::Step step) override {
    switch (step) {
      case checkpoint::JOB_READY:
        return AwaitAll(SAVE_READY);
      case checkpoint::JOB_LOCKED:
        return AwaitAll(SAVE_LOCKED);
      case checkpoint::JOB_STILL:
        return AwaitAll(SAVE_STILL);
      case checkpoint::JOB_DUMPED:
        return AwaitAll(SAVE_DUMPED);
      default:
        return Save::Do(step);
    }
  }

  absl::StatusOr<std::string> AwaitAll(SaveStep step) {
    CR_RETURN_IF_ERROR(AwaitOthers(step, "", /*restarts=*/false));
    return std::string();
  }

  absl::Status MakeImagesFolder();
};

absl::Status SavePart::MakeImagesFolder() {
  const checkpoint::ActAs user(&peer_.account);
  const std::string folder = image_.substr(0, image_.rfind('/'));
  std::vector<std::string> folders = {folder};
  if (ckptfmt::IsStoreImage(folder)) folders.insert(folders.begin(), folder.substr(0, folder.rfind('/')));
  for (const std::string& one : folders) {
    if (mkdir(one.c_str(), 0700) == 0) {
      // An image that is on the disk is to be found there.
      if (ckptfmt::SyncFolder(one + "/..").ok()) continue;
    } else if (errno == EEXIST) {
      continue;
    }
    return ErrnoStatus("cannot make the folder " + one);
  }
  return absl::OkStatus();
}

}  // namespace

std::unique_ptr<HostRequest> NewSavePart(Asked asked) { return std::make_unique<SavePart>(std::move(asked)); }

}  // namespace cuda_remote::host
