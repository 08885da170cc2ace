// SPDX-License-Identifier: Apache-2.0
#include "programs/slurm/part_plan.h"

#include <arpa/inet.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <sstream>

#include "ckptfmt/folder.h"
#include "programs/slurm/step.h"
#include "proto/base/status_macros.h"

namespace cuda_remote::client::slurm {
namespace {

bool AddressNumber(const std::string& text, uint32_t* number) {
  in_addr address;
  if (inet_pton(AF_INET, text.c_str(), &address) != 1) return false;
  *number = ntohl(address.s_addr);
  return true;
}

std::string AddressText(uint32_t number) {
  const in_addr address{htonl(number)};
  char text[INET_ADDRSTRLEN];
  return inet_ntop(AF_INET, &address, text, sizeof(text));
}

// The value of NAME=VALUE among the words of a line.
std::string Word(const std::string& line, const std::string& name) {
  std::istringstream words(line);
  for (std::string word; words >> word;) {
    if (word.compare(0, name.size() + 1, name + "=") == 0) return word.substr(name.size() + 1);
  }
  return "";
}

}  // namespace

absl::StatusOr<std::vector<Node>> ParseNodes(const std::string& text, const std::vector<std::string>& names) {
  std::vector<Node> nodes;
  for (const std::string& name : names) {
    std::istringstream lines(text);
    std::string line, address;
    while (address.empty() && std::getline(lines, line)) {
      if (Word(line, "NodeName") == name) address = Word(line, "NodeAddr");
    }
    if (address.empty()) return absl::NotFoundError("scontrol names no address of the node " + name);
    nodes.push_back({name, address});
  }
  return nodes;
}

std::vector<int> ParseTasks(const std::string& text) {
  std::vector<int> tasks;
  for (const std::string& one : Divided(text)) {
    char* end = nullptr;
    const long count = strtol(one.c_str(), &end, 10);
    long times = 1;
    const std::string rest = end;
    if (rest.compare(0, 2, "(x") == 0) times = strtol(end + 2, &end, 10);
    const bool ended = rest.empty() || std::string(end) == ")";
    if (count < 1 || count > 100000 || times < 1 || times > 100000 || !ended) return {};
    tasks.insert(tasks.end(), size_t(times), int(count));
  }
  return tasks;
}

absl::StatusOr<std::vector<mpi::Part>> PlanParts(const std::string& range, const std::string& job_id,
                                                 const std::vector<int>& tasks) {
  const size_t end = std::min(range.find_first_of("/@"), range.size());
  const size_t dash = range.find('-');
  uint32_t first = 0, last = 0;
  if (dash == std::string::npos || dash > end || !AddressNumber(range.substr(0, dash), &first) ||
      !AddressNumber(range.substr(dash + 1, end - dash - 1), &last) || last < first) {
    return absl::InvalidArgumentError(
        "--checkpoint-addresses: \"" + range +
        "\" is not FIRST-LAST[/PREFIX][@INTERFACE] of IPv4, such as 10.9.0.50-10.9.0.250");
  }
  const uint64_t size = uint64_t(last) - first + 1, places = size / std::max<size_t>(tasks.size(), 1);
  if (places == 0) {
    return absl::InvalidArgumentError("--checkpoint-addresses: " + range + " has " + std::to_string(size) +
                                      " addresses, and the job has " + std::to_string(tasks.size()) + " nodes");
  }
  std::vector<mpi::Part> parts;
  uint64_t next = first + (strtoull(job_id.c_str(), nullptr, 10) % places) * tasks.size();
  for (const int count : tasks) {
    const std::string address = AddressText(uint32_t(next++)) + range.substr(end);
    CR_ASSIGN_OR_RETURN(parts.emplace_back(), mpi::ParsePart("part=" + address + ":" + std::to_string(count)));
  }
  return parts;
}

std::string PartsText(const std::vector<mpi::Part>& parts) {
  std::string text;
  for (const mpi::Part& part : parts) text += part.address + ":" + std::to_string(part.ranks) + "\n";
  return text;
}

absl::StatusOr<std::vector<mpi::Part>> ParsePartsText(const std::string& text) {
  std::vector<mpi::Part> parts;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    CR_ASSIGN_OR_RETURN(parts.emplace_back(), mpi::ParsePart("part=" + line));
  }
  if (parts.empty()) return absl::InvalidArgumentError("it names no parts");
  return parts;
}

std::vector<PlacedPart> PlaceParts(const std::vector<mpi::Part>& parts, const std::vector<Node>& nodes,
                                   const std::string& name) {
  std::vector<PlacedPart> placed;
  const size_t used = std::min(parts.size(), nodes.size());
  for (size_t i = 0; i < parts.size(); ++i) {
    const size_t node = i * used / parts.size();
    const bool same = !placed.empty() && placed.back().node.name == nodes[node].name;
    const int index = same ? placed.back().index + 1 : 0;
    const int number = int(i) + 1;
    placed.push_back(
        {parts[i], number, nodes[node], index == 0 ? name : name + "-" + std::to_string(number), index, 1});
  }
  for (PlacedPart& one : placed) {
    one.count = int(std::count_if(placed.begin(), placed.end(),
                                  [&](const PlacedPart& other) { return other.node.name == one.node.name; }));
  }
  return placed;
}

std::string HostsOf(const std::vector<PlacedPart>& parts) {
  std::string hosts;
  for (const PlacedPart& part : parts) hosts += (hosts.empty() ? "" : ",") + part.node.address + "/" + part.name;
  return hosts;
}

std::string NewestSetIn(const std::string& folder, size_t parts) {
  std::string newest;
  uint64_t highest = 0;
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator(folder, ignored)) {
    bool partial = false;
    const uint64_t number = ckptfmt::StoreImageNumber(entry.path().filename().string(), &partial);
    bool complete = number > highest && !partial;
    for (size_t i = 1; complete && i <= parts; ++i) {
      complete = ckptfmt::IsImage(entry.path().string() + "/member-" + std::to_string(i));
    }
    if (!complete) continue;
    highest = number;
    newest = entry.path().string();
  }
  return newest;
}

std::string ShareOfGpus(const std::string& assigned, int index, int count) {
  const std::vector<std::string> all = Divided(assigned);
  const size_t share = all.size() / size_t(std::max(count, 1));
  if (share == 0) return assigned;
  std::string text;
  for (size_t i = size_t(index) * share; i < (size_t(index) + 1) * share; ++i)
    text += (text.empty() ? "" : ",") + all[i];
  return text;
}

}  // namespace cuda_remote::client::slurm
