// SPDX-License-Identifier: Apache-2.0
// Contexts: primary ones, made ones, the thread's stack.
#include <algorithm>

#include "proto/driverabi/export_tables.h"
#include "proto/threads/mutex.h"
#include "softgpu/api/api.h"
#include "softgpu/core/cleanup.h"
#include "softgpu/core/graph.h"
#include "softgpu/core/pool.h"
#include "softgpu/core/stream.h"
#include "softgpu/core/thread_state.h"

using namespace cuda_remote::softgpu;

namespace {

constexpr unsigned kFlagsMask = CU_CTX_SCHED_MASK | CU_CTX_MAP_HOST | CU_CTX_LMEM_RESIZE_TO_MAX |
                                CU_CTX_COREDUMP_ENABLE | CU_CTX_USER_COREDUMP_ENABLE | CU_CTX_SYNC_MEMOPS;

bool ValidFlags(unsigned flags) {
  unsigned schedule = flags & CU_CTX_SCHED_MASK;
  return (flags & ~kFlagsMask) == 0 && (schedule & (schedule - 1)) == 0;
}

CUresult CreateContext(CUcontext* out, unsigned flags, CUdevice device, unsigned version) {
  if (out == nullptr || !ValidFlags(flags)) return CUDA_ERROR_INVALID_VALUE;
  if (GetDevice(device) == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  ContextPtr context = Context::Create(device, flags, false);
  context->api_version = version;
  Registry<Context>::Get().Add(context);
  GetThreadState().contexts.push_back(context);
  *out = context->handle();
  return CUDA_SUCCESS;
}

}  // namespace

SOFTGPU_API cuDevicePrimaryCtxRetain(CUcontext* out, CUdevice ordinal) {
  SOFTGPU_ENTER();
  Device* device = GetDevice(ordinal);
  if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (device == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  RecursiveMutexLock lock(&device->primary_mutex);
  device->primary()->Activate();
  ++device->primary_retained;
  *out = device->primary()->handle();
  return CUDA_SUCCESS;
}

SOFTGPU_API cuDevicePrimaryCtxRelease_v2(CUdevice ordinal) {
  SOFTGPU_ENTER();
  Device* device = GetDevice(ordinal);
  if (device == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  RecursiveMutexLock lock(&device->primary_mutex);
  if (device->primary_retained == 0) return CUDA_ERROR_INVALID_CONTEXT;
  if (--device->primary_retained == 0) device->primary()->Deactivate();
  return CUDA_SUCCESS;
}
SOFTGPU_API cuDevicePrimaryCtxRelease(CUdevice ordinal) { return cuDevicePrimaryCtxRelease_v2(ordinal); }

SOFTGPU_API cuDevicePrimaryCtxReset_v2(CUdevice ordinal) {
  SOFTGPU_ENTER();
  Device* device = GetDevice(ordinal);
  if (device == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  RecursiveMutexLock lock(&device->primary_mutex);
  // Those who retained it must still release it, but to go on they have to retain it once more, as with the real
  // driver.
  device->primary()->Deactivate();
  return CUDA_SUCCESS;
}
SOFTGPU_API cuDevicePrimaryCtxReset(CUdevice ordinal) { return cuDevicePrimaryCtxReset_v2(ordinal); }

SOFTGPU_API cuDevicePrimaryCtxGetState(CUdevice ordinal, unsigned int* flags, int* active) {
  SOFTGPU_ENTER();
  Device* device = GetDevice(ordinal);
  if (flags == nullptr || active == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (device == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  *flags = device->primary()->flags;
  *active = device->primary()->active();
  return CUDA_SUCCESS;
}

SOFTGPU_API cuDevicePrimaryCtxSetFlags_v2(CUdevice ordinal, unsigned int flags) {
  SOFTGPU_ENTER();
  Device* device = GetDevice(ordinal);
  if (!ValidFlags(flags)) return CUDA_ERROR_INVALID_VALUE;
  if (device == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  device->primary()->flags = flags;
  return CUDA_SUCCESS;
}
SOFTGPU_API cuDevicePrimaryCtxSetFlags(CUdevice ordinal, unsigned int flags) {
  SOFTGPU_ENTER();
  Device* device = GetDevice(ordinal);
  if (ValidFlags(flags) && device != nullptr && device->primary()->active()) return CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE;
  return cuDevicePrimaryCtxSetFlags_v2(ordinal, flags);
}

SOFTGPU_API cuCtxCreate(CUcontext* out, unsigned int flags, CUdevice device) {
  SOFTGPU_ENTER();
  return CreateContext(out, flags, device, 3010);
}
SOFTGPU_API cuCtxCreate_v2(CUcontext* out, unsigned int flags, CUdevice device) {
  SOFTGPU_ENTER();
  return CreateContext(out, flags, device, 3020);
}
SOFTGPU_API cuCtxCreate_v3(CUcontext* out, CUexecAffinityParam*, int count, unsigned int flags, CUdevice device) {
  SOFTGPU_ENTER();
  if (count != 0) return CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY;
  return CreateContext(out, flags, device, 3020);
}
SOFTGPU_API cuCtxCreate_v4(CUcontext* out, CUctxCreateParams* params, unsigned int flags, CUdevice device) {
  SOFTGPU_ENTER();
  if (params != nullptr && (params->numExecAffinityParams != 0 || params->cigParams != nullptr)) {
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  return CreateContext(out, flags, device, 3020);
}

SOFTGPU_API cuCtxDestroy_v2(CUcontext handle) {
  SOFTGPU_ENTER();
  if (handle == nullptr) return CUDA_ERROR_INVALID_VALUE;
  ContextPtr context = Registry<Context>::Get().Find(handle);
  if (!context || context->primary()) return CUDA_ERROR_INVALID_CONTEXT;
  if (!Registry<Context>::Get().Remove(handle)) return CUDA_ERROR_INVALID_CONTEXT;
  context->Deactivate();
  std::vector<ContextPtr>& stack = GetThreadState().contexts;
  if (!stack.empty() && stack.back() == context) stack.pop_back();
  return CUDA_SUCCESS;
}
SOFTGPU_API cuCtxDestroy(CUcontext handle) { return cuCtxDestroy_v2(handle); }

SOFTGPU_API cuCtxPushCurrent_v2(CUcontext handle) {
  SOFTGPU_ENTER();
  if (handle == nullptr) return CUDA_ERROR_INVALID_VALUE;
  ContextPtr context = Registry<Context>::Get().Find(handle);
  if (!context || !context->active()) return CUDA_ERROR_INVALID_CONTEXT;
  GetThreadState().contexts.push_back(context);
  return CUDA_SUCCESS;
}
SOFTGPU_API cuCtxPushCurrent(CUcontext handle) { return cuCtxPushCurrent_v2(handle); }

SOFTGPU_API cuCtxPopCurrent_v2(CUcontext* out) {
  SOFTGPU_ENTER();
  std::vector<ContextPtr>& stack = GetThreadState().contexts;
  if (stack.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  if (out != nullptr) *out = stack.back()->handle();
  stack.pop_back();
  return CUDA_SUCCESS;
}
SOFTGPU_API cuCtxPopCurrent(CUcontext* out) { return cuCtxPopCurrent_v2(out); }

SOFTGPU_API cuCtxSetCurrent(CUcontext handle) {
  SOFTGPU_ENTER();
  std::vector<ContextPtr>& stack = GetThreadState().contexts;
  if (handle == nullptr) {
    if (!stack.empty()) stack.pop_back();
    return CUDA_SUCCESS;
  }
  ContextPtr context = Registry<Context>::Get().Find(handle);
  if (!context) return CUDA_ERROR_INVALID_CONTEXT;
  if (stack.empty()) {
    stack.push_back(context);
  } else {
    stack.back() = context;
  }
  return CUDA_SUCCESS;
}

SOFTGPU_API cuCtxGetCurrent(CUcontext* out) {
  SOFTGPU_ENTER();
  if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  ContextPtr context = CurrentContext();
  *out = context ? context->handle() : nullptr;
  return CUDA_SUCCESS;
}

SOFTGPU_API cuCtxGetDevice(CUdevice* device) {
  SOFTGPU_ENTER();
  if (device == nullptr) return CUDA_ERROR_INVALID_VALUE;
  ContextPtr context = CurrentContext();
  if (!context) return CUDA_ERROR_INVALID_CONTEXT;
  *device = context->device();
  return CUDA_SUCCESS;
}

SOFTGPU_API cuCtxGetDevice_v2(CUdevice* device, CUcontext handle) {
  SOFTGPU_ENTER();
  if (handle == nullptr) return cuCtxGetDevice(device);
  if (device == nullptr) return CUDA_ERROR_INVALID_VALUE;
  ContextPtr context = Registry<Context>::Get().Find(handle);
  if (!context) return CUDA_ERROR_INVALID_CONTEXT;
  *device = context->device();
  return CUDA_SUCCESS;
}

SOFTGPU_API cuCtxSynchronize() {
  SOFTGPU_ENTER_CONTEXT(context);
  if (CUresult result = CheckContextCapture(context); result != CUDA_SUCCESS) return result;
  const CUresult result = context->Synchronize();
  NotePoolsWaited();
  return result;
}

SOFTGPU_API cuCtxSynchronize_v2(CUcontext handle) {
  SOFTGPU_ENTER();
  ContextPtr context;
  if (CUresult result = ContextFor(handle, &context); result != CUDA_SUCCESS) return result;
  if (CUresult result = CheckContextCapture(context); result != CUDA_SUCCESS) return result;
  const CUresult result = context->Synchronize();
  NotePoolsWaited();
  return result;
}

SOFTGPU_API cuCtxGetFlags(unsigned int* flags) {
  SOFTGPU_ENTER_CONTEXT(context);
  if (flags == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *flags = context->flags;
  return CUDA_SUCCESS;
}

SOFTGPU_API cuCtxSetFlags(unsigned int flags) {
  SOFTGPU_ENTER_CONTEXT(context);
  if (!ValidFlags(flags)) return CUDA_ERROR_INVALID_VALUE;
  context->flags = flags;
  return CUDA_SUCCESS;
}

SOFTGPU_API cuCtxGetId(CUcontext handle, unsigned long long* id) {
  SOFTGPU_ENTER();
  if (id == nullptr) return CUDA_ERROR_INVALID_VALUE;
  ContextPtr context;
  if (CUresult result = ContextFor(handle, &context); result != CUDA_SUCCESS) return result;
  *id = context->id();
  return CUDA_SUCCESS;
}

SOFTGPU_API cuCtxGetApiVersion(CUcontext handle, unsigned int* version) {
  SOFTGPU_ENTER();
  if (version == nullptr) return CUDA_ERROR_INVALID_VALUE;
  ContextPtr context;
  if (CUresult result = ContextFor(handle, &context); result != CUDA_SUCCESS) return result;
  *version = context->api_version;
  return CUDA_SUCCESS;
}

SOFTGPU_API cuCtxSetLimit(CUlimit limit, size_t value) {
  SOFTGPU_ENTER_CONTEXT(context);
  if (limit < 0 || limit >= CU_LIMIT_MAX) return CUDA_ERROR_INVALID_VALUE;
  switch (limit) {
    case CU_LIMIT_DEV_RUNTIME_SYNC_DEPTH:
    case CU_LIMIT_SHMEM_SIZE:
    case CU_LIMIT_CIG_ENABLED:
    case CU_LIMIT_CIG_SHMEM_FALLBACK_ENABLED:
      return CUDA_ERROR_UNSUPPORTED_LIMIT;
    case CU_LIMIT_MALLOC_HEAP_SIZE: {
      const ContextPtr home = context->Home();
      if (home->heap.begun()) return CUDA_ERROR_INVALID_VALUE;
      // As the driver (580) rounds it.
      constexpr size_t kLeast = 4 << 20, kUnit = 64 << 10;
      if (value > SIZE_MAX - kUnit) return CUDA_ERROR_OUT_OF_MEMORY;
      home->limits[limit] = std::max(kLeast, (value + kUnit - 1) / kUnit * kUnit);
      return CUDA_SUCCESS;
    }
    default:
      break;
  }
  context->limits[limit] = value;
  return CUDA_SUCCESS;
}

SOFTGPU_API cuCtxGetLimit(size_t* value, CUlimit limit) {
  SOFTGPU_ENTER_CONTEXT(context);
  if (value == nullptr || limit < 0 || limit >= CU_LIMIT_MAX) return CUDA_ERROR_INVALID_VALUE;
  if (limit >= CU_LIMIT_SHMEM_SIZE) {
    *value = 0;
    return CUDA_SUCCESS;
  }
  // A green context's kernels have the heap of the primary one's.
  *value = (limit == CU_LIMIT_MALLOC_HEAP_SIZE ? context->Home() : context)->limits[limit];
  return CUDA_SUCCESS;
}

SOFTGPU_API cuCtxGetCacheConfig(CUfunc_cache* config) {
  SOFTGPU_ENTER_CONTEXT(context);
  if (config == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *config = context->cache_config;
  return CUDA_SUCCESS;
}

SOFTGPU_API cuCtxSetCacheConfig(CUfunc_cache config) {
  SOFTGPU_ENTER_CONTEXT(context);
  context->cache_config = config;
  return CUDA_SUCCESS;
}

SOFTGPU_API cuCtxGetSharedMemConfig(CUsharedconfig* config) {
  SOFTGPU_ENTER_CONTEXT(context);
  if (config == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *config = CU_SHARED_MEM_CONFIG_FOUR_BYTE_BANK_SIZE;
  return CUDA_SUCCESS;
}

SOFTGPU_API cuCtxSetSharedMemConfig(CUsharedconfig) {
  SOFTGPU_ENTER_CONTEXT(context);
  return CUDA_SUCCESS;
}

SOFTGPU_API cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  SOFTGPU_ENTER_CONTEXT(context);
  if (least != nullptr) *least = 0;
  if (greatest != nullptr) *greatest = -5;
  return CUDA_SUCCESS;
}

SOFTGPU_API cuCtxResetPersistingL2Cache() {
  SOFTGPU_ENTER_CONTEXT(context);
  return CUDA_SUCCESS;
}

SOFTGPU_API cuCtxGetExecAffinity(CUexecAffinityParam* affinity, CUexecAffinityType) {
  SOFTGPU_ENTER_CONTEXT(context);
  if (affinity == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY;
}

SOFTGPU_API cuCtxEnablePeerAccess(CUcontext peer, unsigned int flags) {
  SOFTGPU_ENTER_CONTEXT(context);
  if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
  ContextPtr other = Registry<Context>::Get().Find(peer);
  if (!other) return CUDA_ERROR_INVALID_CONTEXT;
  if (other->device() == context->device()) return CUDA_ERROR_INVALID_DEVICE;
  NoteReach(context->device(), other->device());
  return context->EnablePeer(other->id()) ? CUDA_SUCCESS : CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED;
}

SOFTGPU_API cuCtxDisablePeerAccess(CUcontext peer) {
  SOFTGPU_ENTER_CONTEXT(context);
  ContextPtr other = Registry<Context>::Get().Find(peer);
  if (!other) return CUDA_ERROR_INVALID_CONTEXT;
  return context->DisablePeer(other->id()) ? CUDA_SUCCESS : CUDA_ERROR_PEER_ACCESS_NOT_ENABLED;
}
