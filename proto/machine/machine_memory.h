// SPDX-License-Identifier: Apache-2.0
// How much memory this machine has to give.
//
// This header is part of the client library: no libprotobuf, no abseil, no logging.
#ifndef CUDA_REMOTE_PROTO_MACHINE_MACHINE_MEMORY_H_
#define CUDA_REMOTE_PROTO_MACHINE_MACHINE_MEMORY_H_

#include <cstdint>
#include <string>

namespace cuda_remote {

// Bytes that can be taken without anybody being killed for it: what the kernel calls available, of the memory control
// groups of this process too. UINT64_MAX if the kernel does not say. Reads some files: for what is large or rare.
uint64_t AvailableMemory();

// The parts of it, for tests. MemAvailable of a /proc/meminfo; UINT64_MAX if it does not say.
uint64_t AvailableIn(const std::string& meminfo);
// What a control group's folder, and those above it up to `root`, leave: their limit less what is in use, page cache
// that can go not counted. `old_names`: of version 1. UINT64_MAX: no limit.
uint64_t LeftInGroup(std::string folder, const std::string& root, bool old_names);

}  // namespace cuda_remote

#endif  // CUDA_REMOTE_PROTO_MACHINE_MACHINE_MEMORY_H_
