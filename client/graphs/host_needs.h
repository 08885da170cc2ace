// SPDX-License-Identifier: Apache-2.0
// Which host memory a request names that a graph keeps: a replay can make it only when the process is there again.
#ifndef CUDA_REMOTE_CLIENT_GRAPHS_HOST_NEEDS_H_
#define CUDA_REMOTE_CLIENT_GRAPHS_HOST_NEEDS_H_

#include <cstdint>
#include <string_view>
#include <vector>

#include "client/memory/memory.h"
#include "replay/log/log.h"

namespace cuda_remote::client {

// What the log calls the memory in which an address lies that a graph names: pinned and managed memory is
// Kind::kHostMemory. Id 0: unknown. From then on pinned memory is the GPU's wherever the job goes. Locks KnownMemory.
replay::ObjectKey MemoryAt(Memory* memory, uint64_t address);

// The addresses of memory that a request names by the tables of proto/api; empty if it names none. Kernels are not
// looked into: what they are given is nobody's business.
std::vector<uint64_t> AddressesOf(uint32_t call, std::string_view message);

// Appends the pinned and managed memory that a graph's node, or a captured request, copies, fills, waits for or writes
// values to. Each once. Locks KnownMemory.
void AddHostNeeds(Memory* memory, uint32_t call, std::string_view message, std::vector<replay::ObjectKey>* needs);

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_GRAPHS_HOST_NEEDS_H_
