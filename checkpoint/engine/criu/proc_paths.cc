// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/engine/criu/proc_paths.h"

#include "proto/base/proc.h"

namespace cuda_remote::checkpoint {
namespace {

constexpr std::string_view kProcesses = "/proc/", kThreads = "task";
constexpr std::string_view kMade[] = {"fdinfo", "fd", "map_files"};

// Takes the part before the next slash off the front.
std::string_view TakePart(std::string_view* path) {
  const size_t end = path->find('/');
  const std::string_view part = path->substr(0, end);
  path->remove_prefix(end == std::string_view::npos ? path->size() : end + 1);
  return part;
}

}  // namespace

bool IsGoneInRestore(std::string_view path) {
  if (path.substr(0, kProcesses.size()) != kProcesses) return false;
  path.remove_prefix(kProcesses.size());
  const std::string_view process = TakePart(&path);
  if (!IsNumber(process)) return false;
  std::string_view entry = TakePart(&path);
  if (entry == kThreads && !path.empty()) {
    if (TakePart(&path) != process) return true;
    entry = TakePart(&path);
  }
  for (const std::string_view made : kMade) {
    if (entry == made) return !path.empty();
  }
  return false;
}

}  // namespace cuda_remote::checkpoint
