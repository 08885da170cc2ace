// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/gpu/placement.h"

#include <algorithm>

namespace cuda_remote::checkpoint {
namespace {

constexpr size_t kMostDigits = 9;
constexpr uint32_t kMostGpu = 255;
constexpr char kUnix[] = "unix:";
constexpr char kPid[] = "pid:";

bool ToNumber(const std::string& text, uint32_t* number) {
  if (text.empty() || text.size() > kMostDigits || text.find_first_not_of("0123456789") != std::string::npos) {
    return false;
  }
  *number = uint32_t(std::stoul(text));
  return true;
}

bool StartsWith(const std::string& text, const std::string& start) { return text.compare(0, start.size(), start) == 0; }

// "0,2": ordinals, each once.
bool ToGpus(const std::string& text, std::vector<int>* gpus) {
  for (size_t at = 0; at <= text.size();) {
    const size_t comma = std::min(text.find(',', at), text.size());
    uint32_t gpu;
    if (!ToNumber(text.substr(at, comma - at), &gpu) || gpu > kMostGpu) return false;
    if (std::find(gpus->begin(), gpus->end(), int(gpu)) != gpus->end()) return false;
    gpus->push_back(int(gpu));
    at = comma + 1;
  }
  return !gpus->empty();
}

// Whether nothing is missing in this address, so that what follows it are GPUs: gpu8:7070, [::1]:7070, unix:/run/x.
bool IsWhole(const std::string& address) {
  if (address.empty()) return true;
  if (StartsWith(address, kUnix)) return address.size() + 1 > sizeof(kUnix);
  const size_t bracket = address.rfind(']');
  return address.find(':', bracket == std::string::npos ? 0 : bracket) != std::string::npos;
}

bool ToPlace(const std::string& text, Place* place) {
  const size_t colon = text.rfind(':');
  if (colon != std::string::npos && IsWhole(text.substr(0, colon)) &&
      (colon == 0 || text.find_first_not_of("0123456789,", colon + 1) == std::string::npos)) {
    place->server = text.substr(0, colon);
    return ToGpus(text.substr(colon + 1), &place->gpus);
  }
  place->server = text;
  return IsWhole(text) && !text.empty();
}

bool ToWho(const std::string& text, PlacementRule* rule) {
  rule->by_pid = StartsWith(text, kPid);
  const std::string numbers = rule->by_pid ? text.substr(sizeof(kPid) - 1) : text;
  const size_t dash = rule->by_pid ? std::string::npos : numbers.find('-');
  if (!ToNumber(numbers.substr(0, dash), &rule->first)) return false;
  rule->last = rule->first;
  return dash == std::string::npos || (ToNumber(numbers.substr(dash + 1), &rule->last) && rule->first <= rule->last);
}

std::string Listed(const std::vector<PlacedProcess>& processes, const std::vector<int>& ranks) {
  std::string text;
  for (size_t i = 0; i < processes.size(); ++i) {
    text += (i == 0 ? "" : ", ") + (ranks[i] < 0 ? std::string("without a rank") : "rank " + std::to_string(ranks[i])) +
            ": " + processes[i].name + ", pid:" + std::to_string(processes[i].pid);
  }
  return text.empty() ? "the job has no process with CUDA" : "the job's processes with CUDA are " + text;
}

}  // namespace

absl::StatusOr<std::vector<PlacementRule>> ParsePlacement(const std::vector<std::string>& words) {
  std::vector<PlacementRule> rules;
  for (const std::string& word : words) {
    PlacementRule rule;
    rule.text = word;
    const size_t equals = word.find('=');
    if (equals == std::string::npos || !ToWho(word.substr(0, equals), &rule) ||
        !ToPlace(word.substr(equals + 1), &rule.place)) {
      return absl::InvalidArgumentError(
          "--map " + word +
          " is not understood: it is RANK=SERVER, RANK=SERVER:GPU,... or RANK=:GPU,..., with a rank (2), ranks (0-3) "
          "or pid:N, and unix:PATH or HOST:PORT as the server");
    }
    rules.push_back(std::move(rule));
  }
  return rules;
}

absl::StatusOr<std::vector<Place>> PlaceProcesses(const std::vector<PlacementRule>& rules, const Place& otherwise,
                                                  const std::vector<PlacedProcess>& processes) {
  std::vector<int> ranks;
  for (const PlacedProcess& process : processes) ranks.push_back(process.rank);
  if (std::all_of(ranks.begin(), ranks.end(), [](int rank) { return rank < 0; })) {
    // Not in the order of the list: the system may have started a restarted job's processes in another one.
    for (size_t i = 0; i < ranks.size(); ++i) {
      ranks[i] = int(std::count_if(processes.begin(), processes.end(),
                                   [&](const PlacedProcess& other) { return other.pid < processes[i].pid; }));
    }
  }
  std::vector<Place> places(processes.size(), otherwise);
  std::vector<const PlacementRule*> by(processes.size(), nullptr);
  for (const PlacementRule& rule : rules) {
    for (uint32_t number = rule.first; number <= rule.last; ++number) {
      bool found = false;
      for (size_t i = 0; i < processes.size(); ++i) {
        if (rule.by_pid ? processes[i].pid != number : ranks[i] != int(number)) continue;
        found = true;
        if (by[i]) {
          return absl::InvalidArgumentError("--map " + by[i]->text + " and --map " + rule.text + " both place " +
                                            processes[i].name);
        }
        by[i] = &rule;
        places[i] = rule.place;
        if (rule.place.server.empty()) places[i].server = otherwise.server;
      }
      if (found) continue;
      return absl::InvalidArgumentError("--map " + rule.text + ": there is no " + (rule.by_pid ? "process " : "rank ") +
                                        std::to_string(number) + "; " + Listed(processes, ranks));
    }
  }
  return places;
}

std::string ToText(const Place& place) {
  std::string numbers;
  for (const int gpu : place.gpus) numbers += (numbers.empty() ? "" : ",") + std::to_string(gpu);
  const std::string server = place.server.empty() ? "a server of the job's own" : place.server;
  if (numbers.empty()) return server;
  return (place.gpus.size() == 1 ? "GPU " : "GPUs ") + numbers + " of " + server;
}

}  // namespace cuda_remote::checkpoint
