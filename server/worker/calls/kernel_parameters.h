// SPDX-License-Identifier: Apache-2.0
// Where a kernel's parameters lie in the block that a client sends.
#ifndef CUDA_REMOTE_SERVER_WORKER_CALLS_KERNEL_PARAMETERS_H_
#define CUDA_REMOTE_SERVER_WORKER_CALLS_KERNEL_PARAMETERS_H_

#include <cuda.h>

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

#include "server/driver/driver_table.h"

namespace cuda_remote::server {

// Offset and length of each parameter of `function`, or of `kernel` if that is null, as far as the driver tells.
inline std::vector<std::pair<size_t, size_t>> ParameterLayout(const DriverTable& driver, CUfunction function,
                                                              CUkernel kernel) {
  std::vector<std::pair<size_t, size_t>> layout;
  for (size_t i = 0; i < 4096; ++i) {
    size_t offset = 0;
    size_t bytes = 0;
    const CUresult result = function != nullptr ? driver.cuFuncGetParamInfo(function, i, &offset, &bytes)
                                                : driver.cuKernelGetParamInfo(kernel, i, &offset, &bytes);
    if (result != CUDA_SUCCESS) break;
    layout.push_back({offset, bytes});
  }
  return layout;
}

// Pointers to the parameters in a block that holds them and nothing else; false for any other, of which the driver is
// the judge. They are needed where a buffer will not do: for cooperative launches that are captured, and for nodes that
// are made cooperative later (580).
inline bool PointToParameters(const DriverTable& driver, CUfunction function, CUkernel kernel, char* block,
                              size_t block_bytes, std::vector<void*>* pointers) {
  const auto layout = ParameterLayout(driver, function, kernel);
  size_t end = 0;
  for (const auto& [offset, bytes] : layout) end = std::max(end, offset + bytes);
  if (layout.empty() || end != block_bytes) return false;
  for (const auto& [offset, bytes] : layout) pointers->push_back(block + offset);
  return true;
}

}  // namespace cuda_remote::server

#endif  // CUDA_REMOTE_SERVER_WORKER_CALLS_KERNEL_PARAMETERS_H_
