// SPDX-License-Identifier: Apache-2.0
// cr-restart: root's tool reads the user's image from the request's folder.
#include "host/exchange.h"
#include "host/requests/host_request.h"
#include "proto/base/status_macros.h"

namespace cuda_remote::host {
namespace {

class Restart : public HostRequest {
 public:
  using HostRequest::HostRequest;

  absl::Status Begin() override {
    CR_RETURN_IF_ERROR(CheckImageIsNamed());
    CR_RETURN_IF_ERROR(CheckAccepts());
    // A restarted job has the name that it had, if it gets no other one.
    CR_RETURN_IF_ERROR(request_.job().empty() ? MakeJobsFolder() : FindJob());
    CR_RETURN_IF_ERROR(MakeSpool());
    CR_RETURN_IF_ERROR(TakeImage(peer_.account, key_, spool_ + kImage, &image_, nullptr));
    CR_RETURN_IF_ERROR(ListArguments());
    Log(ProgramOf(*tool_) + ", image " + image_);
    return StartTool();
  }

 private:
  void EndArguments() override { arguments_.push_back(spool_ + kImage); }

  absl::StatusOr<std::string> Do(checkpoint::Step step) override {
    if (step != checkpoint::IMAGE_USED) return HostRequest::Do(step);
    RemoveSpool();
    return std::string();
  }
};

}  // namespace

std::unique_ptr<HostRequest> NewRestart(Asked asked) { return std::make_unique<Restart>(std::move(asked)); }

}  // namespace cuda_remote::host
