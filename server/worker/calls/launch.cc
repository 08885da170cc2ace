// SPDX-License-Identifier: Apache-2.0
// Kernel launches: the hot path.

#include <cuda.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "proto/codec/launch.gen.h"
#include "server/dispatch/malformed.h"
#include "server/dispatch/runtime.h"
#include "server/worker/calls/handlers.gen.h"
#include "server/worker/calls/kernel_parameters.h"
#include "server/worker/memory/managed_memory.h"
#include "server/worker/session/driver_hooks.h"
#include "server/worker/session/worker_session.h"

namespace cuda_remote::server {
namespace {

// The largest parameter block that CUDA allows.
constexpr size_t kMaxParameters = 32764;

// Handlers run on one thread. Twice as long as any kernel's parameters: a driver that reads on behind a block that is
// shorter than the kernel's, which 580 does not, reads in here.
char g_parameters[2 * (kMaxParameters + 4)];

// Events inside attributes are virtual handles. Attributes that hand memory of this process to the driver are refused.
CUresult TranslateAttributes(Session& session, std::vector<CUlaunchAttribute>* attributes) {
  for (CUlaunchAttribute& attribute : *attributes) {
    CUevent* event = nullptr;
    switch (attribute.id) {
      case CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT:
        event = &attribute.value.programmaticEvent.event;
        break;
      case CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT:
        event = &attribute.value.launchCompletionEvent.event;
        break;
      case CU_LAUNCH_ATTRIBUTE_DEVICE_UPDATABLE_KERNEL_NODE:
        return CUDA_ERROR_NOT_SUPPORTED;
      default:
        continue;
    }
    if (!session.Real(Kind::kEvent, reinterpret_cast<uint64_t>(*event), event)) return CUDA_ERROR_INVALID_HANDLE;
  }
  return CUDA_SUCCESS;
}

}  // namespace

CUresult Custom_cuLaunchKernel(WorkerSession& session, const Request&, const wire::cuLaunchKernel_Request& in,
                               wire::cuLaunchKernel_Reply*, ReplyBuilder*) {
  // A kernel may stand for its function.
  const HandleMap::Entry* entry = session.handles().Find(Kind::kFunction, in.f);
  if (entry == nullptr) entry = session.handles().Find(Kind::kKernel, in.f);
  if (entry == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  const CUfunction function = reinterpret_cast<CUfunction>(entry->real);
  session.modules().BeforeLaunch(entry->parent);
  CUstream stream;
  if (!session.RealStream(in.stream, &stream)) return CUDA_ERROR_INVALID_HANDLE;
  if (in.params.size() > kMaxParameters) return CUDA_ERROR_INVALID_VALUE;
  if (ManagedMemory& managed = session.managed_memory(); managed.flushing()) {
    // A captured stream must not wait for what is not captured.
    const CUresult result =
        CapturesInProgress() == 0 ? managed.OrderBehindFlush(stream, IsBlocking(stream)) : managed.AwaitFlush();
    if (result != CUDA_SUCCESS) return result;
  }
  if (!in.params.empty()) std::memcpy(g_parameters, in.params.data(), in.params.size());
  size_t bytes = in.params.size();
  void* extra[] = {CU_LAUNCH_PARAM_BUFFER_POINTER, g_parameters, CU_LAUNCH_PARAM_BUFFER_SIZE, &bytes,
                   CU_LAUNCH_PARAM_END};
  const DriverTable& driver = session.driver();
  if (in.attributes.empty()) {
    return driver.cuLaunchKernel(function, in.grid_x, in.grid_y, in.grid_z, in.block_x, in.block_y, in.block_z,
                                 in.shared_bytes, stream, nullptr, bytes != 0 ? extra : nullptr);
  }
  std::vector<CUlaunchAttribute> attributes;
  if (!CopyArray(in.attributes, in.attributes.size() / sizeof(CUlaunchAttribute), &attributes))
    return kMalformedRequest;
  if (const CUresult result = TranslateAttributes(session, &attributes); result != CUDA_SUCCESS) return result;
  CUlaunchConfig config = {};
  config.gridDimX = in.grid_x;
  config.gridDimY = in.grid_y;
  config.gridDimZ = in.grid_z;
  config.blockDimX = in.block_x;
  config.blockDimY = in.block_y;
  config.blockDimZ = in.block_z;
  config.sharedMemBytes = in.shared_bytes;
  config.hStream = stream;
  config.attrs = attributes.data();
  config.numAttrs = unsigned(attributes.size());
  // With its parameters in a buffer, 580 has answered CUDA_ERROR_INVALID_VALUE to one that was captured.
  const bool cooperative = std::any_of(attributes.begin(), attributes.end(), [](const CUlaunchAttribute& attribute) {
    return attribute.id == CU_LAUNCH_ATTRIBUTE_COOPERATIVE && attribute.value.cooperative != 0;
  });
  std::vector<void*> pointers;
  const bool is_kernel = KindOf(entry->handle) == Kind::kKernel;
  const CUkernel kernel = is_kernel ? reinterpret_cast<CUkernel>(entry->real) : nullptr;
  if (cooperative &&
      PointToParameters(driver, is_kernel ? nullptr : function, kernel, g_parameters, bytes, &pointers)) {
    return driver.cuLaunchKernelEx(&config, function, pointers.data(), nullptr);
  }
  return driver.cuLaunchKernelEx(&config, function, nullptr, bytes != 0 ? extra : nullptr);
}

}  // namespace cuda_remote::server
