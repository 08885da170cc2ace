// SPDX-License-Identifier: Apache-2.0
// Launches: checks of what a caller gives, as the driver makes them.
#ifndef CUDA_REMOTE_SOFTGPU_CORE_LAUNCH_H_
#define CUDA_REMOTE_SOFTGPU_CORE_LAUNCH_H_

#include <cuda.h>

#include "softgpu/core/work.h"

namespace cuda_remote::softgpu {

struct LaunchRequest {
  CUfunction function = nullptr;
  ptx::Dim3 grid, block;
  uint32_t shared_bytes = 0;
  void** params = nullptr;
  void** extra = nullptr;
  LaunchAttributes attributes;
};

// The operation, with a copy of the parameters; or what the driver answers to a wrong launch.
CUresult MakeLaunch(const ContextPtr& context, const LaunchRequest& request, KernelWork* work);

// Replaces the attributes of an operation whose function and shape are known. What the driver answers to wrong ones;
// the operation is then as before.
CUresult SetAttributes(LaunchAttributes attributes, KernelWork* work);

// Whether the attributes ask for that.
bool Asked(const LaunchAttributes& attributes, CUlaunchAttributeID id);

// The size of clusters that a launch of the function has: the code's, the function's or that of the attributes. What
// the driver answers to a size that does not go with the grid, the function or the GPU.
CUresult ClusterSize(const Function& function, const ptx::Dim3& grid, const LaunchAttributes& attributes,
                     ptx::Dim3* size, bool* explicit_size);

}  // namespace cuda_remote::softgpu

#endif  // CUDA_REMOTE_SOFTGPU_CORE_LAUNCH_H_
