// SPDX-License-Identifier: Apache-2.0
// Stream-ordered allocation: cuMemAllocAsync and memory pools.
//
// An allocation is made when the call is made, so its address is usable at once; a free takes effect in the stream's
// order.
#include "softgpu/core/pool.h"

#include <algorithm>
#include <vector>

#include "proto/threads/mutex.h"
#include "softgpu/api/api.h"
#include "softgpu/core/allocate.h"
#include "softgpu/core/graph.h"
#include "softgpu/core/stream.h"

using namespace cuda_remote::softgpu;
using PoolPtr = std::shared_ptr<Pool>;

namespace {

struct DevicePools {
  PoolPtr default_pool;
  PoolPtr current;
};

Mutex g_pools_mutex;

DevicePools& PoolsOf(int device) CR_REQUIRES(g_pools_mutex) {
  static auto* pools = new std::vector<DevicePools>(DeviceCount());
  DevicePools& entry = (*pools)[device];
  if (!entry.default_pool) {
    entry.default_pool = std::make_shared<Pool>();
    entry.default_pool->device = device;
    entry.default_pool->is_default = true;
    Registry<Pool>::Get().Add(entry.default_pool);
  }
  if (!entry.current) entry.current = entry.default_pool;
  return entry;
}

CUresult AllocateFrom(const ContextPtr& context, const PoolPtr& pool, size_t bytes, CUstream handle,
                      CUdeviceptr* address) {
  if (address == nullptr) return CUDA_ERROR_INVALID_VALUE;
  StreamPtr stream;
  if (CUresult result = ResolveStream(context, handle, &stream); result != CUDA_SUCCESS) return result;
  if (bytes == 0) {
    *address = 0;
    return CUDA_SUCCESS;
  }
  if (std::shared_ptr<Capture> capture = CaptureOf(stream)) {
    return CaptureAllocation(stream, capture, pool->device, bytes, address);
  }
  {
    MutexLock lock(&pool->mutex);
    const uint64_t used = pool->figures.used();
    if (!cuda_remote::driverabi::PoolFigures::Fits(pool->props.maxSize, used, bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
  }
  AllocationPtr allocation;
  if (CUresult result = AllocateUnmapped(pool->device, bytes, MemoryKind::kPool, true, &allocation);
      result != CUDA_SUCCESS) {
    // Frees that are still queued may make room.
    context->Synchronize();
    result = AllocateUnmapped(pool->device, bytes, MemoryKind::kPool, true, &allocation);
    if (result != CUDA_SUCCESS) return result;
  }
  allocation->context = context.get();
  allocation->pool = pool->handle();
  {
    MutexLock lock(&pool->mutex);
    pool->figures.Allocated(bytes);
  }
  MemoryMap::Get().Add(allocation);
  *address = allocation->begin;
  return CUDA_SUCCESS;
}

bool IsPoolMemory(const Allocation& allocation) {
  return !allocation.of_graph && (allocation.kind == MemoryKind::kPool || allocation.kind == MemoryKind::kDevice);
}

}  // namespace

SOFTGPU_API cuMemAllocAsync(CUdeviceptr* address, size_t bytes, CUstream stream) {
  SOFTGPU_ENTER_CONTEXT_OF(context, stream);
  PoolPtr pool;
  {
    MutexLock lock(&g_pools_mutex);
    pool = PoolsOf(context->device()).current;
  }
  return AllocateFrom(context, pool, bytes, stream, address);
}

SOFTGPU_API cuMemAllocFromPoolAsync(CUdeviceptr* address, size_t bytes, CUmemoryPool handle, CUstream stream) {
  SOFTGPU_ENTER_CONTEXT_OF(context, stream);
  PoolPtr pool = Registry<Pool>::Get().Find(handle);
  if (!pool) return CUDA_ERROR_INVALID_VALUE;
  return AllocateFrom(context, pool, bytes, stream, address);
}

SOFTGPU_API cuMemFreeAsync(CUdeviceptr address, CUstream handle) {
  SOFTGPU_ENTER();
  ContextPtr context;
  StreamPtr stream;
  if (CUresult result = ResolveStream(handle, &context, &stream); result != CUDA_SUCCESS) return result;
  if (address == 0) return CUDA_SUCCESS;  // so says driver 580
  if (std::shared_ptr<Capture> capture = CaptureOf(stream)) return CaptureFree(stream, capture, address);
  GraphAllocations gone;
  if (CUresult result; FreeOfGraph(address, &result, &gone)) {
    // In the stream's order: what runs before it may still use the memory.
    if (!gone.empty()) stream->Submit([gone = std::move(gone)] { return CUDA_SUCCESS; }, {}, true);
    return result;
  }
  AllocationPtr allocation = MemoryMap::Get().Find(address);
  if (!allocation || allocation->begin != address) return CUDA_ERROR_INVALID_VALUE;
  if (allocation->kind == MemoryKind::kManaged && !allocation->of_variable) return CUDA_ERROR_NOT_SUPPORTED;
  if (!IsPoolMemory(*allocation)) return CUDA_ERROR_INVALID_VALUE;
  MemoryMap::Get().Update(allocation, [](Allocation& a) { a.freed = true; });
  SettlePool(allocation, false);
  stream->Submit(
      [address] {
        GiveBack(MemoryMap::Get().RemoveIf(address, IsPoolMemory));
        return CUDA_SUCCESS;
      },
      {}, true);
  return CUDA_SUCCESS;
}

SOFTGPU_API cuMemPoolCreate(CUmemoryPool* out, const CUmemPoolProps* props) {
  SOFTGPU_ENTER();
  if (out == nullptr || props == nullptr || props->allocType != CU_MEM_ALLOCATION_TYPE_PINNED) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if ((props->handleTypes & ~unsigned{CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR}) != 0 ||
      props->location.type != CU_MEM_LOCATION_TYPE_DEVICE) {
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  if (GetDevice(props->location.id) == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  auto pool = std::make_shared<Pool>();
  pool->device = props->location.id;
  pool->props = *props;
  *out = Registry<Pool>::Get().Add(pool)->handle();
  return CUDA_SUCCESS;
}

SOFTGPU_API cuMemPoolDestroy(CUmemoryPool handle) {
  SOFTGPU_ENTER();
  PoolPtr pool = Registry<Pool>::Get().Find(handle);
  if (!pool || pool->is_default) return CUDA_ERROR_INVALID_VALUE;
  Registry<Pool>::Get().Remove(handle);
  MutexLock lock(&g_pools_mutex);
  DevicePools& pools = PoolsOf(pool->device);
  if (pools.current == pool) pools.current = pools.default_pool;
  return CUDA_SUCCESS;
}

SOFTGPU_API cuDeviceGetDefaultMemPool(CUmemoryPool* out, CUdevice device) {
  SOFTGPU_ENTER();
  if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (GetDevice(device) == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  MutexLock lock(&g_pools_mutex);
  *out = PoolsOf(device).default_pool->handle();
  return CUDA_SUCCESS;
}

SOFTGPU_API cuDeviceGetMemPool(CUmemoryPool* out, CUdevice device) {
  SOFTGPU_ENTER();
  if (out == nullptr || GetDevice(device) == nullptr) return CUDA_ERROR_INVALID_VALUE;  // so says driver 580
  MutexLock lock(&g_pools_mutex);
  *out = PoolsOf(device).current->handle();
  return CUDA_SUCCESS;
}

SOFTGPU_API cuDeviceSetMemPool(CUdevice device, CUmemoryPool handle) {
  SOFTGPU_ENTER();
  PoolPtr pool = Registry<Pool>::Get().Find(handle);
  if (!pool || GetDevice(device) == nullptr) return CUDA_ERROR_INVALID_VALUE;  // so says driver 580
  if (pool->device != device) return CUDA_ERROR_INVALID_DEVICE;
  MutexLock lock(&g_pools_mutex);
  PoolsOf(device).current = pool;
  return CUDA_SUCCESS;
}

SOFTGPU_API cuMemPoolTrimTo(CUmemoryPool handle, size_t keep) {
  SOFTGPU_ENTER();
  PoolPtr pool = Registry<Pool>::Get().Find(handle);
  if (!pool) return CUDA_ERROR_INVALID_VALUE;
  MutexLock lock(&pool->mutex);
  pool->figures.TrimTo(keep);
  return CUDA_SUCCESS;
}

SOFTGPU_API cuMemPoolGetAttribute(CUmemoryPool handle, CUmemPool_attribute attribute, void* value) {
  SOFTGPU_ENTER();
  PoolPtr pool = Registry<Pool>::Get().Find(handle);
  if (!pool || value == nullptr) return CUDA_ERROR_INVALID_VALUE;
  auto* number = static_cast<int*>(value);
  auto* wide = static_cast<cuuint64_t*>(value);
  MutexLock lock(&pool->mutex);
  switch (attribute) {
    case CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES:
      *number = pool->reuse[0];
      break;
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC:
      *number = pool->reuse[1];
      break;
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES:
      *number = pool->reuse[2];
      break;
    case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD:
      *wide = pool->figures.threshold();
      break;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT:
      *wide = pool->figures.reserved();
      break;
    case CU_MEMPOOL_ATTR_USED_MEM_CURRENT:
      *wide = pool->figures.used();
      break;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
      *wide = pool->figures.reserved_high();
      break;
    case CU_MEMPOOL_ATTR_USED_MEM_HIGH:
      *wide = pool->figures.used_high();
      break;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
  return CUDA_SUCCESS;
}

SOFTGPU_API cuMemPoolSetAttribute(CUmemoryPool handle, CUmemPool_attribute attribute, void* value) {
  SOFTGPU_ENTER();
  PoolPtr pool = Registry<Pool>::Get().Find(handle);
  if (!pool || value == nullptr) return CUDA_ERROR_INVALID_VALUE;
  MutexLock lock(&pool->mutex);
  switch (attribute) {
    case CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES:
      pool->reuse[0] = *static_cast<int*>(value);
      break;
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC:
      pool->reuse[1] = *static_cast<int*>(value);
      break;
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES:
      pool->reuse[2] = *static_cast<int*>(value);
      break;
    case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD:
      pool->figures.set_threshold(*static_cast<cuuint64_t*>(value));
      break;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
      if (*static_cast<cuuint64_t*>(value) != 0) return CUDA_ERROR_INVALID_VALUE;
      pool->figures.ResetReservedHigh();
      break;
    case CU_MEMPOOL_ATTR_USED_MEM_HIGH:
      if (*static_cast<cuuint64_t*>(value) != 0) return CUDA_ERROR_INVALID_VALUE;
      pool->figures.ResetUsedHigh();
      break;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
  return CUDA_SUCCESS;
}

SOFTGPU_API cuMemPoolSetAccess(CUmemoryPool handle, const CUmemAccessDesc* list, size_t count) {
  SOFTGPU_ENTER();
  PoolPtr pool = Registry<Pool>::Get().Find(handle);
  if (!pool || (list == nullptr && count != 0)) return CUDA_ERROR_INVALID_VALUE;
  MutexLock lock(&pool->mutex);
  for (size_t i = 0; i < count; ++i) {
    if (list[i].location.type != CU_MEM_LOCATION_TYPE_DEVICE) return CUDA_ERROR_INVALID_VALUE;
    if (GetDevice(list[i].location.id) == nullptr) return CUDA_ERROR_INVALID_DEVICE;
    pool->access[list[i].location.id] = list[i].flags;
    NoteReach(list[i].location.id, pool->device);
  }
  return CUDA_SUCCESS;
}

SOFTGPU_API cuMemPoolGetAccess(CUmemAccess_flags* flags, CUmemoryPool handle, CUmemLocation* location) {
  SOFTGPU_ENTER();
  PoolPtr pool = Registry<Pool>::Get().Find(handle);
  if (!pool || flags == nullptr || location == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (location->type != CU_MEM_LOCATION_TYPE_DEVICE) return CUDA_ERROR_INVALID_VALUE;
  if (GetDevice(location->id) == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  MutexLock lock(&pool->mutex);
  *flags = location->id == pool->device ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE : pool->access[location->id];
  return CUDA_SUCCESS;
}
