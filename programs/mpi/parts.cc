// SPDX-License-Identifier: Apache-2.0
#include "programs/mpi/parts.h"

#include <dirent.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <fstream>
#include <iterator>

#include "checkpoint/job/isolation/network.h"
#include "proto/base/status_macros.h"
#include "proto/errors/absl_status.h"

namespace cuda_remote::client::mpi {
namespace {

constexpr int kMostRanks = 100000;
constexpr char kNew[] = "new-", kLaunch[] = "launch-";

}  // namespace

absl::StatusOr<Part> ParsePart(const std::string& text) {
  const size_t equals = text.find('=');
  const size_t colon = text.rfind(':');
  const std::string ranks = colon == std::string::npos ? "1" : text.substr(colon + 1);
  const bool counted =
      !ranks.empty() && ranks.size() <= 6 && ranks.find_first_not_of("0123456789") == std::string::npos;
  Part part;
  part.ranks = counted ? std::stoi(ranks) : 0;
  if (equals == std::string::npos || equals == 0 || text[0] == '-' || part.ranks < 1 || part.ranks > kMostRanks) {
    return absl::InvalidArgumentError(
        "\"" + text + "\" is not a HOST=ADDRESS[/PREFIX][@INTERFACE][:RANKS], such as node7=10.9.0.50:4");
  }
  if (text.find(':') != colon) {
    return absl::InvalidArgumentError(text.substr(equals + 1) +
                                      " is an address of IPv6; cr-mpirun takes those of IPv4 only");
  }
  part.host = text.substr(0, equals);
  part.address = text.substr(equals + 1, colon == std::string::npos ? colon : colon - equals - 1);
  CR_ASSIGN_OR_RETURN(const checkpoint::JobNetwork network, checkpoint::ParseNetwork(part.address));
  part.ip = network.address();
  return part;
}

std::string OpenMpiHosts(const std::vector<Part>& parts) {
  std::string text;
  for (const Part& part : parts) text += part.ip + " slots=" + std::to_string(part.ranks) + "\n";
  return text;
}

std::string HydraHosts(const std::vector<Part>& parts) {
  std::string text;
  for (const Part& part : parts) text += part.ip + ":" + std::to_string(part.ranks) + "\n";
  return text;
}

void SetMpirunVariables(const std::string& agent, const std::string& folder) {
  // Open MPI 4: mpirun itself starts all others, and they stay in the foreground of their parts.
  setenv("OMPI_MCA_plm", "rsh", 1);
  setenv("OMPI_MCA_plm_rsh_agent", agent.c_str(), 1);
  setenv("OMPI_MCA_plm_rsh_no_tree_spawn", "1", 1);
  setenv("OMPI_MCA_orte_leave_session_attached", "1", 1);
  setenv("OMPI_MCA_orte_default_hostfile", (folder + "/openmpi").c_str(), 1);
  // MPICH.
  setenv("HYDRA_LAUNCHER", "rsh", 1);
  setenv("HYDRA_LAUNCHER_EXEC", agent.c_str(), 1);
  setenv("HYDRA_HOST_FILE", (folder + "/hydra").c_str(), 1);
  setenv("HYDRA_RMK", "user", 1);
  // System V memory of a user's job cannot be saved.
  setenv("UCX_TLS", "^sysv", 0);
}

std::string Quoted(const std::string& word) {
  std::string text = "'";
  for (const char c : word) {
    if (c == '\'') {
      text += "'\\''";
    } else {
      text += c;
    }
  }
  return text + "'";
}

absl::StatusOr<Launch> ParseLaunch(const std::vector<std::string>& words) {
  size_t at = 0;
  // Such as ssh's -x.
  while (at < words.size() && !words[at].empty() && words[at][0] == '-') ++at;
  if (at + 1 >= words.size()) return absl::InvalidArgumentError("no host or no command is named");
  Launch launch;
  launch.ip = words[at];
  // As ssh does.
  for (++at; at < words.size(); ++at) launch.command += (launch.command.empty() ? "" : " ") + words[at];
  return launch;
}

absl::Status WriteLaunch(const std::string& folder, const Launch& launch) {
  const std::string name = std::to_string(getpid()), fresh = folder + "/" + kNew + name;
  std::ofstream file(fresh, std::ios::binary);
  file << launch.ip << "\n" << launch.command;
  file.close();
  if (file && rename(fresh.c_str(), (folder + "/" + kLaunch + name).c_str()) == 0) return absl::OkStatus();
  return ErrnoStatus("cannot write to " + folder + ", the folder of the cr-mpirun that started this job");
}

std::vector<Launch> TakeLaunches(const std::string& folder) {
  std::vector<Launch> all;
  DIR* const list = opendir(folder.c_str());
  while (const dirent* const entry = list ? readdir(list) : nullptr) {
    if (strncmp(entry->d_name, kLaunch, strlen(kLaunch)) != 0) continue;
    const std::string path = folder + "/" + entry->d_name;
    std::ifstream file(path, std::ios::binary);
    Launch launch;
    std::getline(file, launch.ip);
    launch.command.assign(std::istreambuf_iterator<char>(file), {});
    unlink(path.c_str());
    all.push_back(std::move(launch));
  }
  if (list) closedir(list);
  return all;
}

}  // namespace cuda_remote::client::mpi
