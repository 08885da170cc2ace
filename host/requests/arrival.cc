// SPDX-License-Identifier: Apache-2.0
// A job comes from another host, whose cr-hostd has vouched for the user: it is restarted from what has arrived in the
// request's folder. And before that, the GPUs that it would see here.
#include <fcntl.h>
#include <unistd.h>

#include <filesystem>
#include <system_error>

#include "checkpoint/job/hostd_places.h"
#include "checkpoint/job/job.h"
#include "host/move_state.h"
#include "host/requests/host_request.h"
#include "host/wire.h"
#include "proto/base/proc.h"
#include "proto/base/status_macros.h"

namespace cuda_remote::host {
namespace {

class Arrival : public HostRequest {
 public:
  explicit Arrival(Asked asked) : HostRequest(std::move(asked)) { holds_ = true; }

  absl::Status Begin() override {
    const ArrivedJob& arrived = request_.arrived();
    CR_RETURN_IF_ERROR(ActFor(arrived.user(), arrived.group(), arrived.groups()));
    CR_RETURN_IF_ERROR(FindSpool());
    CR_RETURN_IF_ERROR(FindJob());
    CR_RETURN_IF_ERROR(ListArguments());
    Log("the job arrives from another host, " + image_);
    return StartTool();
  }

 private:
  int Follow() override {
    const int code = FollowTool();
    if (!running_) SetMoveState(settings_.moves, request_.arrived().id(), kMoveFailed);
    return code;
  }

  bool EndsWithPeer() const override { return !goes_on_; }
  void EndArguments() override { arguments_.insert(arguments_.end(), {"--append", "--quiet", spool_ + kImage}); }

  absl::StatusOr<std::string> Do(checkpoint::Step step) override {
    if (step == checkpoint::IMAGE_RESTORED) {
      CR_RETURN_IF_ERROR(AwaitGoOn());
      return std::string();
    }
    if (step != checkpoint::IMAGE_USED) return HostRequest::Do(step);
    RemoveSpool();
    running_ = true;
    SetMoveState(settings_.moves, request_.arrived().id(), kMoveRuns);
    Tell(Reply::RUNNING, 0);
    return std::string();
  }

  absl::Status FindSpool();
  absl::Status AwaitGoOn();

  bool goes_on_ = false;  // the source has let it go on
  bool running_ = false;
};

absl::Status Arrival::FindSpool() {
  const std::string folder = ReadLink("/proc/self/fd/" + std::to_string(fds_[3]));
  std::error_code ignored;
  if (folder.substr(0, folder.rfind('/')) != std::filesystem::canonical(settings_.spool, ignored))
    return absl::InvalidArgumentError("what has arrived is not in cr-hostd's folder");
  spool_ = folder;
  spool_fd_ = fcntl(fds_[3], F_DUPFD_CLOEXEC, 3);  // with its lock
  return absl::OkStatus();
}

// The job waits, restored, until the source lets it go on.
absl::Status Arrival::AwaitGoOn() {
  const absl::Status not_released = absl::CancelledError("the source host has not released the job");
  Tell(Reply::RESTORED, 0);
  Control control;
  if (!Receive(socket_, &control) || !control.go_on()) {
    peer_gone_ = true;
    return not_released;
  }
  CR_RETURN_IF_ERROR(CheckAccepts());
  // Not if the source was told meanwhile that it is too late.
  goes_on_ = BeginMoveState(settings_.moves, request_.arrived().id(), kMoveGoesOn);
  return goes_on_ ? absl::OkStatus() : not_released;
}

class Gpus : public HostRequest {
 public:
  using HostRequest::HostRequest;

  absl::Status Begin() override {
    const ArrivedJob& arrived = request_.arrived();
    CR_RETURN_IF_ERROR(ActFor(arrived.user(), arrived.group(), arrived.groups()));
    // Of no job; a name that none can have.
    job_folder_ = checkpoint::UserJobsFolder(settings_.socket, arrived.user()) + "/.gpus-" + std::to_string(getpid());
    CR_RETURN_IF_ERROR(MakeJobsFolder());
    CR_RETURN_IF_ERROR(ListArguments());
    return StartTool();
  }

 private:
  int Follow() override {
    const int code = FollowTool();
    // If the tool was killed, as when nobody waits for its answer any more.
    checkpoint::RemoveJobFolder(job_folder_);
    return code;
  }

  void EndArguments() override { arguments_.insert(arguments_.end(), {"--describe-gpus", "--job-dir", job_folder_}); }
};

}  // namespace

std::unique_ptr<HostRequest> NewArrival(Asked asked) { return std::make_unique<Arrival>(std::move(asked)); }
std::unique_ptr<HostRequest> NewGpus(Asked asked) { return std::make_unique<Gpus>(std::move(asked)); }

}  // namespace cuda_remote::host
