// SPDX-License-Identifier: Apache-2.0
#include "proto/base/mappings.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <sys/ioctl.h>

#include <fstream>

#include "proto/base/unique_fd.h"

namespace cuda_remote {
namespace {

// PROCMAP_QUERY of linux/fs.h, which may be of an older kernel.
struct MapQuery {
  uint64_t size;
  uint64_t flags;
  uint64_t address;
  uint64_t begin, end;
  uint64_t rights;
  uint64_t page_size;
  uint64_t offset;
  uint64_t inode;
  uint32_t major, minor;
  uint32_t name_bytes;
  uint32_t build_id_bytes;
  uint64_t name;
  uint64_t build_id;
};
constexpr unsigned long kQuery = _IOWR('f', 17, MapQuery);
constexpr uint64_t kReadable = 1, kWritable = 2, kShared = 8, kThisOrNext = 16;

// What ForEachMapping does, without the lines before `from`. False, if nothing has been given to `each` yet and the
// kernel or its rules do not allow the question.
bool ForEachFrom(const std::string& process, const std::function<bool(const Mapping&)>& each, uint64_t from) {
  const UniqueFd maps(open((process + "/maps").c_str(), O_RDONLY | O_CLOEXEC));
  for (bool first = true;; first = false) {
    char name[PATH_MAX] = "";
    MapQuery query{};
    query.size = sizeof(query);
    query.flags = kThisOrNext;
    query.address = from;
    query.name = reinterpret_cast<uint64_t>(name);
    query.name_bytes = sizeof(name);
    // Without one that lies there or behind, the answer is ENOENT.
    if (ioctl(maps.get(), kQuery, &query) != 0) return !first || errno == ENOENT;
    Mapping mapping;
    mapping.begin = query.begin;
    mapping.end = query.end;
    mapping.readable = (query.rights & kReadable) != 0;
    mapping.writable = (query.rights & kWritable) != 0;
    mapping.shared = (query.rights & kShared) != 0;
    mapping.offset = query.offset;
    mapping.major = query.major;
    mapping.minor = query.minor;
    mapping.inode = query.inode;
    if (query.name_bytes != 0) mapping.name = name;
    if (!each(mapping)) return true;
    from = query.end;
  }
}

}  // namespace

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

bool ForEachMapping(const std::string& process, const std::function<bool(const Mapping&)>& each, uint64_t from) {
  if (from != 0 && ForEachFrom(process, each, from)) return true;
  std::ifstream maps(process + "/maps");
  if (!maps) return false;
  Mapping mapping;
  for (std::string line; std::getline(maps, line);) {
    if (ParseMapping(line, &mapping) && mapping.end > from && !each(mapping)) break;
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
