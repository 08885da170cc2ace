// SPDX-License-Identifier: Apache-2.0
// What the copy calls and the graph calls with copies in them share.
#ifndef CUDA_REMOTE_SOFTGPU_CORE_COPY_H_
#define CUDA_REMOTE_SOFTGPU_CORE_COPY_H_

#include <cuda.h>

#include "softgpu/core/work.h"

namespace cuda_remote::softgpu {

// Checks a copy in its general form and makes the operation of it. *pageable_from and *pageable_to say which of the
// sides is ordinary host memory.
CUresult MakeCopy(const CUDA_MEMCPY3D& copy, CopyWork* work, bool* pageable_from, bool* pageable_to);

// Checks a fill and makes the operation of it. `element` is 1, 2 or 4.
CUresult MakeMemset(CUdeviceptr to, size_t pitch, uint32_t value, uint32_t element, size_t width, size_t height,
                    MemsetWork* work);

}  // namespace cuda_remote::softgpu

#endif  // CUDA_REMOTE_SOFTGPU_CORE_COPY_H_
