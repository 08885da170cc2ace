// SPDX-License-Identifier: Apache-2.0
// The parts of an MPI job on several hosts, and how mpirun hears of them.
//
// No state.
#ifndef CUDA_REMOTE_PROGRAMS_MPI_PARTS_H_
#define CUDA_REMOTE_PROGRAMS_MPI_PARTS_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace cuda_remote::client::mpi {

// Names the folder in which cr-mpi-agent leaves what mpirun wants to have started (WriteLaunch).
inline constexpr char kLaunchFolder[] = "CUDA_REMOTE_MPI_LAUNCHES";

struct Part {
  std::string host;     // as the launch agent knows it
  std::string address;  // as cr-run --address takes it
  std::string ip;       // the address alone, by which mpirun knows the part
  int ranks = 1;
};

// From "HOST=ADDRESS[/PREFIX][@INTERFACE][:RANKS]".
absl::StatusOr<Part> ParsePart(const std::string& text);

// The parts as each mpirun reads them.
std::string OpenMpiHosts(const std::vector<Part>& parts);
std::string HydraHosts(const std::vector<Part>& parts);

// Has mpirun of Open MPI 4 and of MPICH, which this process is about to start, start its processes in the parts, by
// `agent` in the place of ssh. `folder` has what OpenMpiHosts and HydraHosts give, as "openmpi" and "hydra".
void SetMpirunVariables(const std::string& agent, const std::string& folder);

// One word for a shell.
std::string Quoted(const std::string& word);

// What is to be started on another host: its name for mpirun, and a command for a shell.
struct Launch {
  std::string ip, command;
};

// From the words with which mpirun calls its remote shell: [OPTIONS] HOST COMMAND...
absl::StatusOr<Launch> ParseLaunch(const std::vector<std::string>& words);

// Leaves it in the folder, in one step.
absl::Status WriteLaunch(const std::string& folder, const Launch& launch);
// Takes what was left there.
std::vector<Launch> TakeLaunches(const std::string& folder);

}  // namespace cuda_remote::client::mpi

#endif  // CUDA_REMOTE_PROGRAMS_MPI_PARTS_H_
