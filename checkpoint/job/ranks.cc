// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/job/ranks.h"

#include <algorithm>
#include <set>

#include "proto/base/read_file.h"

namespace cuda_remote::checkpoint {
namespace {

// Ranks in the whole job before those on one machine.
constexpr const char* kVariables[] = {"OMPI_COMM_WORLD_RANK",       "PMIX_RANK", "PMI_RANK",
                                      "MV2_COMM_WORLD_RANK",        "RANK",      "SLURM_PROCID",
                                      "OMPI_COMM_WORLD_LOCAL_RANK", "LOCAL_RANK"};
constexpr size_t kMostDigits = 6;

// The number that `variable` has; -1: none.
int NumberIn(const std::string& environment, const std::string& variable) {
  const std::string start = variable + "=";
  size_t at = environment.compare(0, start.size(), start) == 0 ? 0 : environment.find('\0' + start);
  if (at == std::string::npos) return -1;
  at += start.size() + (environment[at] == '\0' ? 1 : 0);
  const std::string value = environment.substr(at, environment.find('\0', at) - at);
  const bool number =
      !value.empty() && value.size() <= kMostDigits && value.find_first_not_of("0123456789") == std::string::npos;
  return number ? std::stoi(value) : -1;
}

}  // namespace

std::vector<int> RanksIn(const std::vector<std::string>& environments) {
  for (const char* variable : kVariables) {
    std::vector<int> ranks;
    std::set<int> seen;
    bool apart = true;
    for (const std::string& environment : environments) {
      ranks.push_back(NumberIn(environment, variable));
      apart = apart && (ranks.back() < 0 || seen.insert(ranks.back()).second);
    }
    if (apart && !seen.empty()) return ranks;
  }
  return std::vector<int>(environments.size(), -1);
}

std::vector<int> RanksOf(const std::vector<int>& pids) {
  std::vector<std::string> environments;
  for (const int pid : pids) {
    environments.emplace_back();
    ReadWholeFile("/proc/" + std::to_string(pid) + "/environ", &environments.back());
  }
  return RanksIn(environments);
}

}  // namespace cuda_remote::checkpoint
