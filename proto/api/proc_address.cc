// SPDX-License-Identifier: Apache-2.0
#include "proto/api/proc_address.h"

#include <cstring>

namespace cuda_remote {

CUresult FindProc(const ProcEntry* table, size_t entries, const char* name, int cuda_version, uint64_t flags,
                  int driver_version, void** address, CUdriverProcAddressQueryResult* status) {
  constexpr uint64_t kKnownFlags = CU_GET_PROC_ADDRESS_LEGACY_STREAM | CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM;
  if (name == nullptr || address == nullptr || (flags & ~kKnownFlags) != 0 || cuda_version > driver_version) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  *address = nullptr;
  size_t low = 0;
  size_t high = entries;
  while (low < high) {
    const size_t middle = (low + high) / 2;
    if (std::strcmp(table[middle].name, name) < 0) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  if (low == entries || std::strcmp(table[low].name, name) != 0) {
    if (status != nullptr) *status = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return CUDA_SUCCESS;
  }
  const bool per_thread = (flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM) != 0;
  const ProcEntry* plain = nullptr;
  const ProcEntry* threaded = nullptr;
  bool any_threaded = false;
  for (size_t i = low; i < entries && std::strcmp(table[i].name, name) == 0; ++i) {
    any_threaded = any_threaded || table[i].per_thread;
    const ProcEntry*& best = table[i].per_thread ? threaded : plain;
    if (best == nullptr && table[i].since <= cuda_version) best = &table[i];
  }
  // A call that has per-thread variants is not found as of a version from before them: the driver does not fall back.
  const ProcEntry* found = per_thread && any_threaded ? threaded : plain;
  if (found == nullptr) {
    if (status != nullptr) *status = CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT;
    return CUDA_SUCCESS;
  }
  *address = found->address;
  if (status != nullptr) *status = CU_GET_PROC_ADDRESS_SUCCESS;
  return CUDA_SUCCESS;
}

CUresult FindProcFirstVersion(const ProcEntry* table, size_t entries, const char* name, int cuda_version,
                              uint64_t flags, int driver_version, void** address) {
  if (address == nullptr) return CUDA_ERROR_INVALID_VALUE;
  void* found = nullptr;
  const CUresult result = FindProc(table, entries, name, cuda_version, flags, driver_version, &found, nullptr);
  if (result != CUDA_SUCCESS) return result;
  if (found == nullptr) return CUDA_ERROR_NOT_FOUND;
  *address = found;
  return CUDA_SUCCESS;
}

}  // namespace cuda_remote
