// SPDX-License-Identifier: Apache-2.0
// The logic of cuGetProcAddress, for everything that stands in for the driver: the client library and the software GPU.
//
// Each of them makes its own table from CUDA_REMOTE_PROC_ADDRESSES (entry_points.gen.h), with the addresses of its own
// functions, and asks FindProc. Thread-safe: nothing here has state.
//
// This header is part of the client library: no libprotobuf, no abseil, no logging.
#ifndef CUDA_REMOTE_PROTO_API_PROC_ADDRESS_H_
#define CUDA_REMOTE_PROTO_API_PROC_ADDRESS_H_

#include <cuda.h>

#include <cstddef>
#include <cstdint>

namespace cuda_remote {

// One version of an entry point. Tables are sorted by name, then newest version first.
struct ProcEntry {
  const char* name;  // base name, without version and suffix
  int since;         // CUDA version from which on this one is meant
  bool per_thread;   // the per-thread default stream variant
  void* address;
};

// What cuGetProcAddress_v2 answers for `name` as of `cuda_version`. Sets *address (null if there is none) and *status
// (may be null). Returns CUDA_SUCCESS even if there is no such function, as the driver does, or
// CUDA_ERROR_INVALID_VALUE for bad arguments (null pointers, unknown flags, a version newer than the driver's).
CUresult FindProc(const ProcEntry* table, size_t entries, const char* name, int cuda_version, uint64_t flags,
                  int driver_version, void** address, CUdriverProcAddressQueryResult* status);

// The first version of the call: CUDA_ERROR_NOT_FOUND where there is no function, and *address is left alone then.
CUresult FindProcFirstVersion(const ProcEntry* table, size_t entries, const char* name, int cuda_version,
                              uint64_t flags, int driver_version, void** address);

}  // namespace cuda_remote

#endif  // CUDA_REMOTE_PROTO_API_PROC_ADDRESS_H_
