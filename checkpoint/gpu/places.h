// SPDX-License-Identifier: Apache-2.0
// Whether the processes of a job can go to the places that are meant for them (placement.h), asked before anything is
// restored or moved. Failures name the processes. Not thread-safe.
#ifndef CUDA_REMOTE_CHECKPOINT_GPU_PLACES_H_
#define CUDA_REMOTE_CHECKPOINT_GPU_PLACES_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "checkpoint/gpu/gpu_host.h"
#include "checkpoint/gpu/placement.h"
#include "ckptfmt/types.h"
#include "replay/log/log.h"

namespace cuda_remote::checkpoint {

// A process on its way.
struct Placed {
  std::string name;  // for messages
  Place place;
  const GpuHost* host = nullptr;  // the way to place.server
};

// What processes share on the GPU must be on one server.
absl::Status CheckSharing(const std::vector<Placed>& placed, const std::vector<const replay::Log*>& logs);

// Each GPU has room for the memory of all processes that go there, as far as its server says how much is free.
// `regions`: of each process.
absl::Status CheckRoom(const std::vector<Placed>& placed, const std::vector<std::vector<ckptfmt::Region>>& regions);

// The servers, each once: for messages.
std::string ServersOf(const std::vector<Placed>& placed);

}  // namespace cuda_remote::checkpoint

#endif  // CUDA_REMOTE_CHECKPOINT_GPU_PLACES_H_
