#include "proto/api/proc_address.h"

#include <cstring>

namespace cuda_remote {

CUresult FindProc(const ProcEntry* table, size_t entries, const char* name, int cuda_version, uint64_t flags,
                  int driver_version, void** address, CUdriverProcAddressQueryResult* status) {
  constexpr uint64_t kKnownFlags = CU_GET_PROC_ADDRESS_LEGACY_STREAM | CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM;
  if (name == nullptr || address == nullptr || (flags & ~kKnownFlags) != 0 || flags == kKnownFlags ||
      cuda_version > driver_version) {
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
    return CUDA_ERROR_NOT_FOUND;
  }
  const bool per_thread = (flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM) != 0;
  const ProcEntry* plain = nullptr;
  const ProcEntry* threaded = nullptr;
  for (size_t i = low; i < entries && std::strcmp(table[i].name, name) == 0; ++i) {
    const ProcEntry*& best = table[i].per_thread ? threaded : plain;
    if (best == nullptr && table[i].since <= cuda_version) best = &table[i];
  }
  const ProcEntry* found = per_thread && threaded != nullptr ? threaded : plain;
  if (found == nullptr) {
    if (status != nullptr) *status = CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT;
    return CUDA_ERROR_NOT_FOUND;
  }
  *address = found->address;
  if (status != nullptr) *status = CU_GET_PROC_ADDRESS_SUCCESS;
  return CUDA_SUCCESS;
}

}  // namespace cuda_remote
