// SPDX-License-Identifier: Apache-2.0
// Which process of a job goes to which server and GPUs: --map of cr-restart and cr-migrate.
//
//     --map WHO=PLACE        may be given several times
//     WHO     N or N-M: ranks; pid:N: the process that the job knows as N
//     PLACE   SERVER, SERVER:GPU,... or :GPU,...
//
// A process's device 0 is the first GPU of its list, and so on. Without a list it has all GPUs of the server; without a
// server, the one that is the job's. Processes that nobody maps go to the job's server.
//
// Ranks are those of the launcher (checkpoint/job/ranks.h); if no process has one, the processes are counted from 0, by
// the numbers that the job knows, which a restart does not change.
//
// No state.
#ifndef CUDA_REMOTE_CHECKPOINT_GPU_PLACEMENT_H_
#define CUDA_REMOTE_CHECKPOINT_GPU_PLACEMENT_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace cuda_remote::checkpoint {

struct Place {
  std::string server;     // as a person names it; empty: the job's
  std::vector<int> gpus;  // ordinals there; empty: all

  bool operator==(const Place& other) const { return server == other.server && gpus == other.gpus; }
};

struct PlacedProcess {
  uint32_t pid = 0;  // as the job knows it
  int rank = -1;
  std::string name;  // for messages: "python3 (PID 12)"
};

struct PlacementRule {
  std::string text;  // as it was given
  bool by_pid = false;
  uint32_t first = 0, last = 0;
  Place place;
};

// `words`: what stands behind each --map.
absl::StatusOr<std::vector<PlacementRule>> ParsePlacement(const std::vector<std::string>& words);

// The place of each process: of the rules that name it, else `otherwise`. Fails, with a list of the processes, if a
// rule names no process, or two name the same one.
absl::StatusOr<std::vector<Place>> PlaceProcesses(const std::vector<PlacementRule>& rules, const Place& otherwise,
                                                  const std::vector<PlacedProcess>& processes);

// "gpu8:7070", "GPU 1 of gpu8:7070": for messages.
std::string ToText(const Place& place);

}  // namespace cuda_remote::checkpoint

#endif  // CUDA_REMOTE_CHECKPOINT_GPU_PLACEMENT_H_
