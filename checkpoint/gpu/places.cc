// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/gpu/places.h"

#include <algorithm>
#include <cstdio>
#include <map>
#include <utility>

#include "checkpoint/gpu/gpu_state.h"
#include "proto/base/text.h"
#include "replay/replayer/sharing_groups.h"

namespace cuda_remote::checkpoint {
absl::Status CheckSharing(const std::vector<Placed>& placed, const std::vector<const replay::Log*>& logs) {
  const std::vector<size_t> groups = replay::SharingGroups(logs);
  for (size_t i = 0; i < placed.size(); ++i) {
    const Placed &one = placed[groups[i]], &other = placed[i];
    if (one.host == other.host) continue;
    return absl::FailedPreconditionError(
        one.name + " and " + other.name +
        " share GPU memory, events or pools, directly or through others, and need one server, but they are to go to " +
        one.place.server + " and " + other.place.server);
  }
  return absl::OkStatus();
}

absl::Status CheckRoom(const std::vector<Placed>& placed, const std::vector<std::vector<ckptfmt::Region>>& regions) {
  struct Need {
    Place gpu;
    uint64_t bytes = 0;
    std::string names;
  };
  std::map<std::pair<const GpuHost*, int>, Need> needs;
  for (size_t i = 0; i < placed.size(); ++i) {
    std::map<int, uint64_t> bytes;  // by the process's own number of the GPU
    for (const ckptfmt::Region& region : regions[i]) bytes[region.device] += region.bytes;
    const Place& place = placed[i].place;
    for (const auto& [device, own] : bytes) {
      const int gpu = place.gpus.empty() ? device : device < int(place.gpus.size()) ? place.gpus[size_t(device)] : -1;
      if (gpu < 0) continue;
      Need& need = needs[{placed[i].host, gpu}];
      need.gpu = {place.server, {gpu}};
      need.bytes += own;
      need.names += (need.names.empty() ? "" : ", ") + placed[i].name + " (" + ByteText(double(own)) + ")";
    }
  }
  for (const auto& [where, need] : needs) {
    uint64_t free = 0;
    if (!AskFreeMemory(where.first->server(), where.second, &free) || need.bytes <= free) continue;
    return absl::ResourceExhaustedError(ToText(need.gpu) + " has " + ByteText(double(free)) +
                                        " of free memory, too little for " + ByteText(double(need.bytes)) + " of " +
                                        need.names + "; " + ByteText(double(need.bytes - free)) + " more are needed");
  }
  return absl::OkStatus();
}

std::string ServersOf(const std::vector<Placed>& placed) {
  std::string text;
  std::vector<const GpuHost*> said;
  for (const Placed& one : placed) {
    if (std::find(said.begin(), said.end(), one.host) != said.end()) continue;
    said.push_back(one.host);
    text += (text.empty() ? "" : ", ") + one.place.server;
  }
  return text;
}

}  // namespace cuda_remote::checkpoint
