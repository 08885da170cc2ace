// SPDX-License-Identifier: Apache-2.0
#include "softgpu/core/allocate.h"

#include <stdlib.h>
#include <sys/mman.h>

#include "softgpu/core/device.h"

namespace cuda_remote::softgpu {
namespace {

// From this size on, memory that is not in a device's file is mapped by itself: it costs nothing until it is touched,
// and goes back at once.
constexpr uint64_t kMapFrom = 1 << 20;

}  // namespace

CUresult AllocateUnmapped(int ordinal, uint64_t bytes, MemoryKind kind, bool budget, AllocationPtr* out) {
  Device* device = GetDevice(ordinal);
  uint64_t rounded = (bytes + kAllocationAlignment - 1) / kAllocationAlignment * kAllocationAlignment;
  if (rounded < bytes) return CUDA_ERROR_OUT_OF_MEMORY;
  if (budget && !device->TakeMemory(rounded)) return CUDA_ERROR_OUT_OF_MEMORY;
  auto allocation = std::make_shared<Allocation>();
  void* memory = nullptr;
  if (kind == MemoryKind::kDevice) memory = MapDeviceMemory(ordinal, rounded, &allocation->file);
  if (memory != nullptr) {
    const FileRange file = allocation->file;
    allocation->release = [ordinal, memory, rounded, file] { UnmapDeviceMemory(ordinal, memory, rounded, file); };
  } else if (rounded >= kMapFrom) {
    memory = mmap(nullptr, rounded, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) memory = nullptr;
    allocation->release = [memory, rounded] { munmap(memory, rounded); };
  } else {
    if (posix_memalign(&memory, kAllocationAlignment, rounded) != 0) memory = nullptr;
    allocation->release = [memory] { free(memory); };
  }
  if (memory == nullptr) {
    if (budget) device->GiveMemory(rounded);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  allocation->begin = reinterpret_cast<uint64_t>(memory);
  allocation->size = bytes;
  allocation->kind = kind;
  allocation->device = ordinal;
  allocation->budget = budget ? rounded : 0;
  *out = std::move(allocation);
  return CUDA_SUCCESS;
}

CUresult Allocate(const ContextPtr& context, uint64_t bytes, MemoryKind kind, bool budget, AllocationPtr* out) {
  if (CUresult result = AllocateUnmapped(context->device(), bytes, kind, budget, out); result != CUDA_SUCCESS) {
    return result;
  }
  (*out)->context = context.get();
  MemoryMap::Get().Add(*out);
  return CUDA_SUCCESS;
}

}  // namespace cuda_remote::softgpu
