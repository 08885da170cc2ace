// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/transaction/seen_gpus.h"

#include <unistd.h>

#include "checkpoint/gpu/gpu_host.h"
#include "checkpoint/gpu/gpu_state.h"
#include "checkpoint/job/job.h"
#include "proto/folder/this_job.h"

namespace cuda_remote::checkpoint {
namespace {

bool Ask(const std::string& server, int gpu, const std::string& folder, const Account& account,
         ckptfmt::ProcessInfo* here, std::string* error) {
  if (!OpenToUser(folder, folder, account, error)) return false;
  GpuHosts hosts(SocketFolder(folder), /*detached=*/false, account);
  const GpuHost* const host = hosts.Open(server, gpu, error);
  if (!host) return false;
  // A server of its own has the one GPU only.
  const std::vector<int> gpus = gpu >= 0 && !server.empty() ? std::vector<int>{gpu} : std::vector<int>();
  const ActAs user(&account);  // whose session it is
  const auto channel = OpenSession(host->socket_path(), uint32_t(getpid()), "cr-hostd", "", gpus, "", 0, error);
  return channel && DescribeServer(channel.get(), here, error);
}

}  // namespace

bool FindSeenGpus(const std::string& server, int gpu, const std::string& folder, const Account& account,
                  std::vector<ckptfmt::DeviceFacts>* gpus, std::string* error) {
  if (!ClaimJobFolder(folder, error)) return false;
  ckptfmt::ProcessInfo here;
  const bool asked = Ask(server, gpu, folder, account, &here, error);
  RemoveJobFolder(folder);
  *gpus = std::move(here.devices);
  return asked;
}

}  // namespace cuda_remote::checkpoint
