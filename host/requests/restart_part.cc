// SPDX-License-Identifier: Apache-2.0
// A part of a job over several hosts is restarted: for another host's cr-hostd, which has vouched for the user.
#include "checkpoint/job/job.h"
#include "host/exchange.h"
#include "host/requests/host_request.h"
#include "proto/base/status_macros.h"

namespace cuda_remote::host {
namespace {

class RestartPart : public HostRequest {
 public:
  explicit RestartPart(Asked asked) : HostRequest(std::move(asked)) { holds_ = waits_ = true; }

  absl::Status Begin() override {
    CR_RETURN_IF_ERROR(ActForMember());
    CR_RETURN_IF_ERROR(MakeSpool());
    CR_RETURN_IF_ERROR(TakePartsImage());
    CR_RETURN_IF_ERROR(ListArguments());
    Log("a part of the job is restarted, image " + image_);
    return StartTool();
  }

 private:
  // A part that runs ends by its tool: killed, it would leave the address in use by what its connections have to send.
  bool EndsWithPeer() const override { return !released_; }

  absl::Status TakeOwnOption(const Option& option) override {
    (option.name() == "output" ? output_ : error_output_) = option.value();
    return absl::OkStatus();
  }

  void EndArguments() override {
    constexpr char kNowhere[] = "/dev/null";
    if (lost_output_ && output_.empty()) output_ = kNowhere;
    // As 2>&1 has it.
    if (lost_error_ && error_output_.empty()) error_output_ = one_stream_ ? output_ : kNowhere;
    if (!output_.empty()) arguments_.push_back("--output=" + output_);
    if (!error_output_.empty()) arguments_.push_back("--error=" + error_output_);
    arguments_.insert(arguments_.end(), {"--quiet", spool_ + kImage});
  }

  absl::Status Await(SaveStep step) { return AwaitOthers(step, checkpoint_, /*restarts=*/true); }

  absl::StatusOr<std::string> Do(checkpoint::Step step) override {
    if (step == checkpoint::IMAGE_RESTORED) {
      const absl::Status held = Await(RESTART_HELD);
      released_ = held.ok();
      CR_RETURN_IF_ERROR(held);
      return std::string();
    }
    if (step != checkpoint::IMAGE_USED) return HostRequest::Do(step);
    CR_RETURN_IF_ERROR(Await(RESTART_RUNS));
    if (!peer_gone_) CR_RETURN_IF_ERROR(Await(RESTART_SURE));
    RemoveSpool();
    Tell(Reply::RUNNING, 0);
    return std::string();
  }

  absl::Status TakePartsImage();

  std::string output_, error_output_;  // files that the streams are to be; empty: those that they were
  // The streams were a pipe or a terminal, and the same one.
  bool lost_output_ = false, lost_error_ = false, one_stream_ = false;
  std::string checkpoint_;  // of which the image is
  bool released_ = false;   // its processes may run, and end by its tool unless all do
};

// The image of a part that is restarted, and what the part's name is to be.
absl::Status RestartPart::TakePartsImage() {
  CR_RETURN_IF_ERROR(CheckAccepts());
  checkpoint::SavedSummary saved;
  checkpoint::Job job;
  CR_RETURN_IF_ERROR(TakeImage(peer_.account, key_, spool_ + kImage, &image_, &checkpoint_));
  CR_ASSIGN_OR_RETURN(const std::unique_ptr<ckptfmt::ImageReader> image, ReadFacts(spool_ + kImage, &saved));
  const auto about = image->info().client_info.find("job");
  if (request_.job().empty() && about != image->info().client_info.end() &&
      checkpoint::JobFromJson(about->second, &job)) {
    request_.set_job(job.directory().substr(job.directory().rfind('/') + 1));
  }
  // Nobody listens at a pipe or a terminal any more.
  std::string first;
  for (const checkpoint::SavedSummary::Stream& stream : saved.streams) {
    if (!stream.stays) continue;
    if (stream.fd == 1) lost_output_ = true, first = stream.target;
    if (stream.fd == 2) lost_error_ = true, one_stream_ = stream.target == first;
  }
  return FindJob();
}

}  // namespace

std::unique_ptr<HostRequest> NewRestartPart(Asked asked) { return std::make_unique<RestartPart>(std::move(asked)); }

}  // namespace cuda_remote::host
