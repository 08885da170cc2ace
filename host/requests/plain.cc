// SPDX-License-Identifier: Apache-2.0
// Tools that cr-hostd does nothing for but to start them: cr-run, cr-migrate and cr-drain.
#include <stdlib.h>

#include "host/requests/host_request.h"
#include "proto/base/status_macros.h"

namespace cuda_remote::host {
namespace {

class Plain : public HostRequest {
 public:
  using HostRequest::HostRequest;

  absl::Status Begin() override {
    CR_RETURN_IF_ERROR(CheckAccepts());
    CR_RETURN_IF_ERROR(FindJob());
    CR_RETURN_IF_ERROR(ListArguments());
    Log(ProgramOf(*tool_));
    return StartTool();
  }

 private:
  void EndArguments() override {
    if (!tool_->runs_job) arguments_.push_back(job_folder_);
  }
};

// An operator asks for it.
class Drain : public HostRequest {
 public:
  using HostRequest::HostRequest;

  absl::Status Begin() override {
    Log("cr-drain");
    CR_RETURN_IF_ERROR(ListArguments());
    return StartTool();
  }

 private:
  // It works on the jobs of this cr-hostd, and not on those of one user.
  void SetToolsVariables() const override { setenv("CUDA_REMOTE_HOSTD", settings_.socket.c_str(), 1); }
};

}  // namespace

std::unique_ptr<HostRequest> NewPlain(Asked asked) { return std::make_unique<Plain>(std::move(asked)); }
std::unique_ptr<HostRequest> NewDrain(Asked asked) { return std::make_unique<Drain>(std::move(asked)); }

}  // namespace cuda_remote::host
