// SPDX-License-Identifier: Apache-2.0
// Memory: device, pinned, registered and managed; what is known of an address.
#include <errno.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "softgpu/api/api.h"
#include "softgpu/core/advice.h"
#include "softgpu/core/allocate.h"
#include "softgpu/core/graph.h"
#include "softgpu/core/memory_map.h"
#include "softgpu/core/pool.h"
#include "softgpu/core/settings.h"
#include "softgpu/core/stream.h"

using namespace cuda_remote::softgpu;

namespace {

// What new managed memory holds: nothing that a program may build upon.
constexpr int kUnclearedByte = 0xcd;
constexpr size_t kUncleared = 1 << 20;  // so much of it; the rest is new pages, zero

bool CanFree(const Allocation& allocation) {
  if (allocation.of_graph) return false;
  return (allocation.kind == MemoryKind::kDevice && allocation.flags != kDeviceHeapFlag) ||
         allocation.kind == MemoryKind::kManaged || allocation.kind == MemoryKind::kPool;
}

// Frees need no current context, but one that is gone or failed is said.
CUresult CheckCurrent() {
  const ContextPtr current = CurrentContext();
  return current ? Usable(current) : CUDA_SUCCESS;
}

}  // namespace

SOFTGPU_API cuMemGetInfo_v2(size_t* free_bytes, size_t* total) {
  SOFTGPU_ENTER_CONTEXT(context);
  Device* device = GetDevice(context->device());
  const uint64_t used = device->used() + IdleInPools(context->device());
  if (total != nullptr) *total = device->total();
  if (free_bytes != nullptr) *free_bytes = used < device->total() ? device->total() - used : 0;
  return CUDA_SUCCESS;
}

SOFTGPU_API cuMemAlloc_v2(CUdeviceptr* address, size_t bytes) {
  SOFTGPU_ENTER_CONTEXT(context);
  if (address == nullptr || bytes == 0) return CUDA_ERROR_INVALID_VALUE;
  AllocationPtr allocation;
  if (CUresult result = Allocate(context, bytes, MemoryKind::kDevice, true, &allocation); result != CUDA_SUCCESS) {
    return result;
  }
  *address = allocation->begin;
  return CUDA_SUCCESS;
}

SOFTGPU_API cuMemAllocPitch_v2(CUdeviceptr* address, size_t* pitch, size_t width, size_t height, unsigned int element) {
  SOFTGPU_ENTER_CONTEXT(context);
  if (address == nullptr || pitch == nullptr || width == 0 || height == 0) return CUDA_ERROR_INVALID_VALUE;
  if (element != 4 && element != 8 && element != 16) return CUDA_ERROR_INVALID_VALUE;
  size_t row = (width + kPitchAlignment - 1) / kPitchAlignment * kPitchAlignment;
  size_t bytes;
  if (row < width || __builtin_mul_overflow(row, height, &bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
  AllocationPtr allocation;
  if (CUresult result = Allocate(context, bytes, MemoryKind::kDevice, true, &allocation); result != CUDA_SUCCESS) {
    return result;
  }
  *address = allocation->begin;
  *pitch = row;
  return CUDA_SUCCESS;
}

SOFTGPU_API cuMemAllocManaged(CUdeviceptr* address, size_t bytes, unsigned int flags) {
  SOFTGPU_ENTER_CONTEXT(context);
  if (address == nullptr || bytes == 0) return CUDA_ERROR_INVALID_VALUE;
  if (flags != CU_MEM_ATTACH_GLOBAL && flags != CU_MEM_ATTACH_HOST) return CUDA_ERROR_INVALID_VALUE;
  AllocationPtr allocation;
  // There may be more of it than the device has.
  if (CUresult result = Allocate(context, bytes, MemoryKind::kManaged, false, &allocation); result != CUDA_SUCCESS) {
    return result;
  }
  // New memory is not cleared, and on real systems often is memory that was freed before.
  std::memset(reinterpret_cast<void*>(allocation->begin), kUnclearedByte, std::min(bytes, kUncleared));
  ForgetAdvice(allocation->begin, bytes);
  *address = allocation->begin;
  return CUDA_SUCCESS;
}

SOFTGPU_API cuMemFree_v2(CUdeviceptr address) {
  SOFTGPU_ENTER();
  if (CUresult result = CheckCurrent(); result != CUDA_SUCCESS) return result;
  if (address == 0) return CUDA_SUCCESS;
  AllocationPtr allocation = MemoryMap::Get().Find(address);
  GraphAllocations gone;
  if (CUresult result; FreeOfGraph(address, &result, &gone)) {
    if (result == CUDA_SUCCESS && allocation) SynchronizeAllContexts();
    return result;
  }
  if (!allocation || allocation->begin != address || !CanFree(*allocation)) return CUDA_ERROR_INVALID_VALUE;
  // A kernel on another device may wait for what the program does next.
  if (allocation->kind == MemoryKind::kManaged) {
    SynchronizeAllContexts();
  } else {
    SynchronizeUsersOf(allocation->device);
  }
  allocation = MemoryMap::Get().RemoveIf(address, CanFree);
  if (!allocation) return CUDA_ERROR_INVALID_VALUE;
  GiveBack(std::move(allocation));
  return CUDA_SUCCESS;
}

SOFTGPU_API cuMemGetAddressRange_v2(CUdeviceptr* base, size_t* size, CUdeviceptr address) {
  SOFTGPU_ENTER();
  if (base == nullptr && size == nullptr) return CUDA_SUCCESS;  // so says driver 580, also without a context
  if (base != nullptr) *base = 0;
  if (size != nullptr) *size = 0;
  ContextPtr context;
  if (CUresult result = UsableContext(&context); result != CUDA_SUCCESS) return result;
  AllocationPtr allocation = MemoryMap::Get().Find(address);
  const bool mapped = allocation && allocation->kind == MemoryKind::kMapped;
  if (!allocation || (mapped && !allocation->mapped_for(context->device())) ||
      allocation->IsVariableOfOther(context.get())) {
    return CUDA_ERROR_NOT_FOUND;
  }
  if (base != nullptr) *base = allocation->begin;
  if (size != nullptr) *size = allocation->size;
  return CUDA_SUCCESS;
}

SOFTGPU_API cuMemHostAlloc(void** host, size_t bytes, unsigned int flags) {
  SOFTGPU_ENTER_CONTEXT(context);
  constexpr unsigned kKnown = CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP | CU_MEMHOSTALLOC_WRITECOMBINED;
  if (host == nullptr || (flags & ~kKnown) != 0) return CUDA_ERROR_INVALID_VALUE;
  if (bytes == 0) {
    *host = nullptr;
    return CUDA_SUCCESS;
  }
  // Not touched here, but what is more than the machine has could never be pinned.
  if (bytes / sysconf(_SC_PAGESIZE) > size_t(sysconf(_SC_PHYS_PAGES))) return CUDA_ERROR_OUT_OF_MEMORY;
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  auto allocation = std::make_shared<Allocation>();
  allocation->begin = reinterpret_cast<uint64_t>(memory);
  allocation->size = bytes;
  allocation->kind = MemoryKind::kPinned;
  allocation->device = context->device();
  allocation->context = context.get();
  allocation->flags = flags | CU_MEMHOSTALLOC_DEVICEMAP;  // unified addressing: always
  allocation->release = [memory, bytes] { munmap(memory, bytes); };
  MemoryMap::Get().Add(allocation);
  *host = memory;
  return CUDA_SUCCESS;
}

SOFTGPU_API cuMemAllocHost_v2(void** host, size_t bytes) { return cuMemHostAlloc(host, bytes, 0); }

SOFTGPU_API cuMemFreeHost(void* host) {
  SOFTGPU_ENTER();
  if (CUresult result = CheckCurrent(); result != CUDA_SUCCESS) return result;
  if (host == nullptr) return CUDA_SUCCESS;
  auto pinned = [](const Allocation& allocation) { return allocation.kind == MemoryKind::kPinned; };
  auto address = reinterpret_cast<uint64_t>(host);
  AllocationPtr allocation = MemoryMap::Get().Find(address);
  if (!allocation || allocation->begin != address || !pinned(*allocation)) return CUDA_ERROR_INVALID_VALUE;
  SynchronizeAllContexts();
  MemoryMap::Get().Release(MemoryMap::Get().RemoveIf(address, pinned));
  return CUDA_SUCCESS;
}

SOFTGPU_API cuMemHostRegister_v2(void* host, size_t bytes, unsigned int flags) {
  SOFTGPU_ENTER_CONTEXT(context);
  constexpr unsigned kKnown = CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP | CU_MEMHOSTREGISTER_READ_ONLY;
  if (flags & CU_MEMHOSTREGISTER_IOMEMORY) return CUDA_ERROR_NOT_SUPPORTED;
  if (host == nullptr || bytes == 0 || (flags & ~kKnown) != 0) return CUDA_ERROR_INVALID_VALUE;
  auto begin = reinterpret_cast<uint64_t>(host);
  // All of it must be mapped, which msync finds out without touching it.
  uint64_t page = sysconf(_SC_PAGESIZE), first = begin / page * page;
  uint64_t last = (begin + bytes + page - 1) / page * page;
  if (begin + bytes < begin ||
      (msync(reinterpret_cast<void*>(first), last - first, MS_ASYNC) != 0 && errno == ENOMEM)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  auto allocation = std::make_shared<Allocation>();
  allocation->begin = begin;
  allocation->size = bytes;
  allocation->kind = MemoryKind::kRegistered;
  allocation->device = context->device();
  allocation->context = context.get();
  allocation->flags = flags | CU_MEMHOSTREGISTER_DEVICEMAP;
  allocation->kernel_writable = (flags & CU_MEMHOSTREGISTER_READ_ONLY) == 0;
  if (MemoryMap::Get().Add(allocation)) return CUDA_SUCCESS;
  AllocationPtr there = MemoryMap::Get().Find(begin);
  // What the driver allocated itself is a wrong value.
  return there && there->kind != MemoryKind::kRegistered ? CUDA_ERROR_INVALID_VALUE
                                                         : CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
}
SOFTGPU_API cuMemHostRegister(void* host, size_t bytes, unsigned int flags) {
  return cuMemHostRegister_v2(host, bytes, flags);
}

SOFTGPU_API cuMemHostUnregister(void* host) {
  SOFTGPU_ENTER();
  if (CUresult result = CheckCurrent(); result != CUDA_SUCCESS) return result;
  auto registered = [](const Allocation& allocation) { return allocation.kind == MemoryKind::kRegistered; };
  auto address = reinterpret_cast<uint64_t>(host);
  AllocationPtr allocation = MemoryMap::Get().Find(address);
  // So says driver 580: the middle of a registration is a wrong value, and its end is not registered.
  if (host == nullptr || (allocation && (!registered(*allocation) || allocation->begin != address))) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (!allocation) return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
  // Nothing says that the driver waits for copies here.
  if (GetSettings().late_ms == 0) SynchronizeAllContexts();
  MemoryMap::Get().RemoveIf(address, registered);
  return CUDA_SUCCESS;
}

SOFTGPU_API cuMemHostGetDevicePointer_v2(CUdeviceptr* address, void* host, unsigned int flags) {
  SOFTGPU_ENTER();
  if (address == nullptr || flags != 0) return CUDA_ERROR_INVALID_VALUE;
  *address = 0;
  ContextPtr context;
  if (CUresult result = UsableContext(&context); result != CUDA_SUCCESS) return result;
  AllocationPtr allocation = MemoryMap::Get().Find(reinterpret_cast<uint64_t>(host));
  if (!allocation || !(allocation->host() || allocation->mapped_for(context->device()))) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  // So says driver 580: of a mapping always its start.
  *address = allocation->host() ? reinterpret_cast<CUdeviceptr>(host) : allocation->begin;
  return CUDA_SUCCESS;
}

SOFTGPU_API cuMemHostGetFlags(unsigned int* flags, void* host) {
  SOFTGPU_ENTER_CONTEXT(context);
  if (flags == nullptr) return CUDA_ERROR_INVALID_VALUE;
  AllocationPtr allocation = MemoryMap::Get().Find(reinterpret_cast<uint64_t>(host));
  if (!allocation) return CUDA_ERROR_INVALID_VALUE;
  // Unified addressing: always mapped. Which of the other flags driver 580 gives back depends on the kind.
  if (allocation->kind == MemoryKind::kPinned) {
    *flags = (allocation->flags & CU_MEMHOSTALLOC_WRITECOMBINED) | CU_MEMHOSTALLOC_DEVICEMAP;
  } else if (allocation->kind == MemoryKind::kRegistered) {
    *flags = (allocation->flags & CU_MEMHOSTREGISTER_PORTABLE) | CU_MEMHOSTALLOC_DEVICEMAP;
  } else if (allocation->kind == MemoryKind::kManaged) {
    *flags = CU_MEMHOSTALLOC_DEVICEMAP;
  } else if (allocation->mapped_for(context->device())) {
    *flags = CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP;
  } else {
    return CUDA_ERROR_INVALID_VALUE;
  }
  return CUDA_SUCCESS;
}
