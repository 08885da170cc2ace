// SPDX-License-Identifier: Apache-2.0
// A kernel's parameters as one block, in the two ways in which programs give them: for launches and for nodes of
// graphs.
#ifndef CUDA_REMOTE_CLIENT_CALLS_KERNEL_PARAMS_H_
#define CUDA_REMOTE_CLIENT_CALLS_KERNEL_PARAMS_H_

#include <cuda.h>

#include <cstring>
#include <string>

#include "client/core/objects.h"

namespace cuda_remote::client {

// Longest parameter block of any kernel.
inline constexpr size_t kMaxParameterBytes = 32764;

// memcpy for the sizes that parameters have, which the compiler then makes moves of.
inline void CopyParameter(char* to, const void* from, uint32_t bytes) {
  if (bytes == 8) {
    memcpy(to, from, 8);
  } else if (bytes == 4) {
    memcpy(to, from, 4);
  } else {
    memcpy(to, from, bytes);
  }
}

// Gathers the parameters into *block as the kernel sees them; it keeps its storage. CUDA_ERROR_INVALID_VALUE for what
// the driver refuses so. A buffer in `extra` may be shorter than the parameters, as NCCL's are: the driver takes it
// (seen with 580.159.04), and the rest, which then is mostly zero, always is zero here. A longer one, up to what any
// kernel may have, is left as it is: *block is then longer than info.params_bytes, and no launch takes it.
inline CUresult PackParameters(const FunctionInfo& info, void** kernel_params, void** extra, std::string* block) {
  block->clear();
  if (kernel_params) {
    if (extra) return CUDA_ERROR_INVALID_VALUE;  // one way or the other
    block->resize(info.params_bytes);
    char* const to = block->data();
    for (const KernelParam& param : info.params) {
      const void* const from = *kernel_params++;
      if (!from) return CUDA_ERROR_INVALID_VALUE;
      CopyParameter(to + param.offset, from, param.bytes);
    }
    return CUDA_SUCCESS;
  }
  const void* buffer = nullptr;
  size_t bytes = 0;
  for (void** item = extra; item && *item != CU_LAUNCH_PARAM_END; item += 2) {
    if (item[0] == CU_LAUNCH_PARAM_BUFFER_POINTER) {
      buffer = item[1];
    } else if (item[0] == CU_LAUNCH_PARAM_BUFFER_SIZE) {
      bytes = item[1] ? *static_cast<const size_t*>(item[1]) : 0;
    } else {
      return CUDA_ERROR_INVALID_VALUE;
    }
  }
  if (bytes > kMaxParameterBytes) return CUDA_ERROR_INVALID_VALUE;
  if (buffer) block->assign(static_cast<const char*>(buffer), bytes);
  if (block->empty() && info.params_bytes != 0) return CUDA_ERROR_INVALID_VALUE;
  if (block->size() < info.params_bytes) block->resize(info.params_bytes);
  return CUDA_SUCCESS;
}

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_CALLS_KERNEL_PARAMS_H_
