// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/transaction/seen_gpus.h"

#include <unistd.h>

#include "checkpoint/gpu/gpu_host.h"
#include "checkpoint/gpu/gpu_state.h"
#include "checkpoint/job/job.h"
#include "proto/folder/this_job.h"

namespace cuda_remote::checkpoint {
namespace {

absl::StatusOr<std::vector<ckptfmt::DeviceFacts>> Ask(const std::string& server, int gpu, const std::string& folder,
                                                      const Account& account) {
  std::string error;  // Until OpenToUser, GpuHosts and gpu_state.h give a status.
  if (!OpenToUser(folder, folder, account, &error)) return absl::FailedPreconditionError(error);
  GpuHosts hosts(SocketFolder(folder), /*detached=*/false, account);
  const GpuHost* const host = hosts.Open(server, gpu, &error);
  if (!host) return absl::FailedPreconditionError(error);
  // A server of its own has the one GPU only.
  const std::vector<int> gpus = gpu >= 0 && !server.empty() ? std::vector<int>{gpu} : std::vector<int>();
  const ActAs user(&account);  // whose session it is
  const auto channel = OpenSession(host->socket_path(), uint32_t(getpid()), "cr-hostd", "", gpus, "", 0, &error);
  ckptfmt::ProcessInfo here;
  if (!channel || !DescribeServer(channel.get(), &here, &error)) return absl::FailedPreconditionError(error);
  return here.devices;
}

}  // namespace

absl::StatusOr<std::vector<ckptfmt::DeviceFacts>> FindSeenGpus(const std::string& server, int gpu,
                                                               const std::string& folder, const Account& account) {
  std::string error;  // Until ClaimJobFolder gives a status.
  if (!ClaimJobFolder(folder, &error)) return absl::FailedPreconditionError(error);
  auto gpus = Ask(server, gpu, folder, account);
  RemoveJobFolder(folder);
  return gpus;
}

}  // namespace cuda_remote::checkpoint
