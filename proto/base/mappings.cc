// SPDX-License-Identifier: Apache-2.0
#include "proto/base/mappings.h"

#include <inttypes.h>
#include <stdio.h>

#include <fstream>

namespace cuda_remote {

bool ParseMapping(const std::string& line, Mapping* mapping) {
  Mapping found;
  char rights[5] = "";
  int name = -1;
  const int fields = sscanf(line.c_str(), "%" SCNx64 "-%" SCNx64 " %4s %" SCNx64 " %x:%x %" SCNu64 " %n", &found.begin,
                            &found.end, rights, &found.offset, &found.major, &found.minor, &found.inode, &name);
  if (fields < 7 || name < 0 || found.end <= found.begin) return false;
  found.readable = rights[0] == 'r';
  found.writable = rights[1] == 'w';
  found.shared = rights[3] == 's';
  found.name = line.substr(size_t(name));
  *mapping = std::move(found);
  return true;
}

std::string MapFile(const std::string& process, const Mapping& mapping) {
  char range[40];
  snprintf(range, sizeof(range), "%" PRIx64 "-%" PRIx64, mapping.begin, mapping.end);
  return process + "/map_files/" + range;
}

bool ForEachMapping(const std::string& process, const std::function<bool(const Mapping&)>& each) {
  std::ifstream maps(process + "/maps");
  if (!maps) return false;
  Mapping mapping;
  for (std::string line; std::getline(maps, line);) {
    if (ParseMapping(line, &mapping) && !each(mapping)) break;
  }
  return true;
}

std::vector<Mapping> MappingsOf(const std::string& process) {
  std::vector<Mapping> mappings;
  ForEachMapping(process, [&](const Mapping& mapping) {
    mappings.push_back(mapping);
    return true;
  });
  return mappings;
}

}  // namespace cuda_remote
