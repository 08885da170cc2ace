// Launches: checks of what a caller gives, as the driver makes them.
#ifndef CUDA_REMOTE_SERVER_SOFTGPU_LAUNCH_H_
#define CUDA_REMOTE_SERVER_SOFTGPU_LAUNCH_H_

#include <cuda.h>

#include "server/softgpu/work.h"

namespace cuda_remote::softgpu {

struct LaunchRequest {
  CUfunction function = nullptr;
  ptx::Dim3 grid, block;
  uint32_t shared_bytes = 0;
  void** params = nullptr;
  void** extra = nullptr;
  bool cooperative = false;
};

// The operation, with a copy of the parameters; or what the driver answers to a wrong launch.
CUresult MakeLaunch(const ContextPtr& context, const LaunchRequest& request, KernelWork* work);

}  // namespace cuda_remote::softgpu

#endif  // CUDA_REMOTE_SERVER_SOFTGPU_LAUNCH_H_
