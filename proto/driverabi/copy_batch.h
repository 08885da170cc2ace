// SPDX-License-Identifier: Apache-2.0
// What the driver takes for a batch of copies (cuMemcpyBatchAsync).
#ifndef CUDA_REMOTE_PROTO_DRIVERABI_COPY_BATCH_H_
#define CUDA_REMOTE_PROTO_DRIVERABI_COPY_BATCH_H_

#include <cuda.h>

#include <algorithm>
#include <cstddef>

namespace cuda_remote::driverabi {

// Whether `count` copies of sizes[i] bytes, with `attribute_count` attributes that begin at the copies `firsts`, are a
// batch: no copy is empty; the first attribute begins with the first copy, and they go up. Any pointer may be null (it
// is none then). What 580 on an H200 answers.
inline bool IsBatch(const CUdeviceptr* to, const CUdeviceptr* from, const size_t* sizes, size_t count,
                    const CUmemcpyAttributes* attributes, const size_t* firsts, size_t attribute_count) {
  if (!to || !from || !sizes || !attributes || !firsts || count == 0) return false;
  if (attribute_count == 0 || attribute_count > count || firsts[0] != 0) return false;
  for (size_t i = 1; i < attribute_count; ++i) {
    if (firsts[i] <= firsts[i - 1] || firsts[i] >= count) return false;
  }
  return std::none_of(sizes, sizes + count, [](size_t bytes) { return bytes == 0; });
}

}  // namespace cuda_remote::driverabi

#endif  // CUDA_REMOTE_PROTO_DRIVERABI_COPY_BATCH_H_
