// SPDX-License-Identifier: Apache-2.0
#include "server/worker/session/failures.h"

#include <atomic>

namespace cuda_remote::server {
namespace {

// A worker serves one session.
std::atomic<bool> g_failed{false};

}  // namespace

void NoteResult(CUresult result) {
  switch (result) {
    case CUDA_ERROR_ECC_UNCORRECTABLE:
    case CUDA_ERROR_ILLEGAL_ADDRESS:
    case CUDA_ERROR_LAUNCH_TIMEOUT:
    case CUDA_ERROR_ASSERT:
    case CUDA_ERROR_HARDWARE_STACK_ERROR:
    case CUDA_ERROR_ILLEGAL_INSTRUCTION:
    case CUDA_ERROR_MISALIGNED_ADDRESS:
    case CUDA_ERROR_INVALID_ADDRESS_SPACE:
    case CUDA_ERROR_INVALID_PC:
    case CUDA_ERROR_LAUNCH_FAILED:
      g_failed.store(true, std::memory_order_relaxed);
      break;
    default:
      break;
  }
}

CUresult StickyError(const DriverTable& driver) {
  if (!g_failed.load(std::memory_order_relaxed)) return CUDA_SUCCESS;
  size_t free = 0, total = 0;
  const CUresult result = driver.cuMemGetInfo_v2(&free, &total);
  return result == CUDA_ERROR_INVALID_CONTEXT ? CUDA_SUCCESS : result;  // no context: nothing that could be stuck
}

}  // namespace cuda_remote::server
