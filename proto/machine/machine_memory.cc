// SPDX-License-Identifier: Apache-2.0
#include "proto/machine/machine_memory.h"

#include <stdlib.h>

#include <algorithm>
#include <cstdio>

namespace cuda_remote {
namespace {

// All of a small file; nothing if it cannot be read.
std::string Contents(const std::string& path) {
  std::string text;
  FILE* const file = fopen(path.c_str(), "re");
  if (!file) return text;
  char part[4096];
  while (const size_t bytes = fread(part, 1, sizeof(part), file)) text.append(part, bytes);
  fclose(file);
  return text;
}

// The number that `text` begins with; `none` if it does not.
uint64_t Number(const char* text, uint64_t none) {
  char* end;
  const uint64_t number = strtoull(text, &end, 10);
  return end == text ? none : number;
}

// The number after `key` in a text of "key number" lines; `none` if it is not there.
uint64_t NumberAfter(const std::string& text, const std::string& key, uint64_t none) {
  for (size_t line = 0; line < text.size();) {
    if (text.compare(line, key.size(), key) == 0 &&
        (text[line + key.size()] == ' ' || text[line + key.size()] == '\t')) {
      return Number(text.c_str() + line + key.size(), none);
    }
    line = text.find('\n', line);
    if (line == std::string::npos) break;
    ++line;
  }
  return none;
}

// A file with one number; "max" and nothing at all are `none`.
uint64_t NumberIn(const std::string& path, uint64_t none) { return Number(Contents(path).c_str(), none); }

}  // namespace

uint64_t AvailableIn(const std::string& meminfo) {
  const uint64_t kib = NumberAfter(meminfo, "MemAvailable:", UINT64_MAX);
  return kib == UINT64_MAX ? kib : kib * 1024;
}

uint64_t LeftInGroup(std::string folder, const std::string& root, bool old_names) {
  const char* const limit_name = old_names ? "/memory.limit_in_bytes" : "/memory.max";
  const char* const used_name = old_names ? "/memory.usage_in_bytes" : "/memory.current";
  const char* const cache_name = old_names ? "total_inactive_file" : "inactive_file";
  uint64_t left = UINT64_MAX;
  while (folder.size() >= root.size()) {
    const uint64_t limit = NumberIn(folder + limit_name, UINT64_MAX);
    // Version 1 writes "no limit" as a number near 2^63.
    if (limit < uint64_t{1} << 62) {
      const uint64_t used = NumberIn(folder + used_name, 0);
      const uint64_t cache = NumberAfter(Contents(folder + "/memory.stat"), cache_name, 0);
      const uint64_t needed = used > cache ? used - cache : 0;
      left = std::min(left, limit > needed ? limit - needed : 0);
    }
    const size_t slash = folder.rfind('/');
    if (slash == std::string::npos || slash == 0) break;
    folder.resize(slash);
  }
  return left;
}

uint64_t AvailableMemory() {
  uint64_t left = AvailableIn(Contents("/proc/meminfo"));
  // "0::/a/b" (version 2) or "5:memory:/a/b".
  const std::string groups = Contents("/proc/self/cgroup");
  for (size_t begin = 0; begin < groups.size();) {
    const size_t end = std::min(groups.find('\n', begin), groups.size());
    const std::string line = groups.substr(begin, end - begin);
    begin = end + 1;
    const size_t first = line.find(':');
    const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    std::string path = line.substr(second + 1);
    if (path == "/") path.clear();
    if (controllers.empty()) left = std::min(left, LeftInGroup("/sys/fs/cgroup" + path, "/sys/fs/cgroup", false));
    if (controllers == "memory") {
      left = std::min(left, LeftInGroup("/sys/fs/cgroup/memory" + path, "/sys/fs/cgroup/memory", true));
    }
  }
  return left;
}

}  // namespace cuda_remote
