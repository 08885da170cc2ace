// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/transaction/seen_gpus.h"

#include <unistd.h>

#include "checkpoint/gpu/gpu_host.h"
#include "checkpoint/gpu/gpu_state.h"
#include "checkpoint/job/job.h"
#include "proto/base/status_macros.h"
#include "proto/folder/this_job.h"

namespace cuda_remote::checkpoint {
namespace {

absl::StatusOr<std::vector<ckptfmt::DeviceFacts>> Ask(const std::string& server, int gpu, const std::string& folder,
                                                      const Caller& caller) {
  CR_RETURN_IF_ERROR(OpenToUser(folder, folder, caller.account()));
  GpuHosts hosts({SocketFolder(folder), /*detached=*/false, caller.account(), &caller.environment()});
  CR_ASSIGN_OR_RETURN(const GpuHost* const host, hosts.Open(server, gpu));
  // A server of its own has the one GPU only.
  const std::vector<int> gpus = gpu >= 0 && !server.empty() ? std::vector<int>{gpu} : std::vector<int>();
  const ActAs user(&caller.account());  // whose session it is
  CR_ASSIGN_OR_RETURN(const auto channel,
                      OpenSession(host->socket_path(), uint32_t(getpid()), "cr-hostd", "", gpus, ""));
  ckptfmt::ProcessInfo here;
  CR_RETURN_IF_ERROR(DescribeServer(channel.get(), &here));
  return here.devices;
}

}  // namespace

absl::StatusOr<std::vector<ckptfmt::DeviceFacts>> FindSeenGpus(const std::string& server, int gpu,
                                                               const std::string& folder, const Caller& caller) {
  CR_RETURN_IF_ERROR(ClaimJobFolder(folder));
  auto gpus = Ask(server, gpu, folder, caller);
  RemoveJobFolder(folder);
  return gpus;
}

}  // namespace cuda_remote::checkpoint
