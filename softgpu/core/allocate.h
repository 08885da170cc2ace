// SPDX-License-Identifier: Apache-2.0
// Taking and giving device memory: what cuMemAlloc, pools and managed memory have in common.
#ifndef CUDA_REMOTE_SOFTGPU_CORE_ALLOCATE_H_
#define CUDA_REMOTE_SOFTGPU_CORE_ALLOCATE_H_

#include <cuda.h>

#include <cstdint>

#include "softgpu/core/memory_map.h"

namespace cuda_remote::softgpu {

// Memory of `kind` for a context, entered in the map, or CUDA_ERROR_OUT_OF_MEMORY. `budget`: counts against the device.
CUresult Allocate(const ContextPtr& context, uint64_t bytes, MemoryKind kind, bool budget, AllocationPtr* allocation);

// The same without entering it in the map.
CUresult AllocateUnmapped(int device, uint64_t bytes, MemoryKind kind, bool budget, AllocationPtr* allocation);

}  // namespace cuda_remote::softgpu

#endif  // CUDA_REMOTE_SOFTGPU_CORE_ALLOCATE_H_
