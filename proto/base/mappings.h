// SPDX-License-Identifier: Apache-2.0
// The one reader of /proc/PID/maps (proc_pid_maps(5)).
//
// Thread-safe. Part of the client library.
#ifndef CUDA_REMOTE_PROTO_BASE_MAPPINGS_H_
#define CUDA_REMOTE_PROTO_BASE_MAPPINGS_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace cuda_remote {

// One mapping of a process: the addresses [begin, end).
struct Mapping {
  uint64_t begin = 0, end = 0;
  bool readable = false, writable = false;
  bool shared = false;            // MAP_SHARED; else a private copy
  uint64_t offset = 0;            // of `begin` in the file
  unsigned major = 0, minor = 0;  // the file's device
  uint64_t inode = 0;             // the file's; 0 if there is none
  std::string name;               // the file's path, or what the kernel calls it ("[stack]"); else empty
};

// Calls `each` for the mappings of a process, lowest addresses first, until it returns false. `process`: its folder in
// /proc, "/proc/self" for this one. False if the file cannot be read: the process has ended, or is another user's.
// Mappings that change meanwhile may come or not. Those that end at `from` or before it are left out; from Linux 6.11
// on that takes no time, however many they are.
bool ForEachMapping(const std::string& process, const std::function<bool(const Mapping&)>& each, uint64_t from = 0);

// All of them; empty if the file cannot be read. The kernel takes milliseconds for a process that has many libraries.
std::vector<Mapping> MappingsOf(const std::string& process);

// The kernel's own link to the mapped file (proc_pid_map_files(5)).
std::string MapFile(const std::string& process, const Mapping& mapping);

// Reads one line of the file. False if it is none.
bool ParseMapping(const std::string& line, Mapping* mapping);

}  // namespace cuda_remote

#endif  // CUDA_REMOTE_PROTO_BASE_MAPPINGS_H_
