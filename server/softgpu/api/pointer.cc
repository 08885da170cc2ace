// SPDX-License-Identifier: Apache-2.0
// What is known of an address: pointer attributes.
#include <cstring>

#include "server/softgpu/api/api.h"
#include "server/softgpu/core/memory_map.h"

using namespace cuda_remote::softgpu;

namespace {

CUmemorytype TypeOf(const Allocation& allocation) {
  return allocation.host() ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
}

template <typename T>
void Put(void* data, T value) {
  std::memcpy(data, &value, sizeof(value));  // NOLINT(bugprone-sizeof-expression): it may be a pointer
}

// `allocation` may be null: what cuPointerGetAttributes says of an unknown address, or *known is false.
CUresult Attribute(void* data, CUpointer_attribute attribute, CUdeviceptr address, const Allocation* a, bool* known) {
  *known = a != nullptr;
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
      Put<CUcontext>(data, a && a->kind != MemoryKind::kMapped && a->kind != MemoryKind::kPool
                               ? reinterpret_cast<CUcontext>(const_cast<Context*>(a->context))
                               : nullptr);
      break;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      Put<unsigned>(data, a ? TypeOf(*a) : 0);
      break;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
      Put<CUdeviceptr>(data, a ? address : 0);
      break;
    case CU_POINTER_ATTRIBUTE_HOST_POINTER: {
      bool host = a && (a->host() || a->kind == MemoryKind::kManaged);
      Put<uint64_t>(data, host ? address : 0);
      *known = host;
      break;
    }
    case CU_POINTER_ATTRIBUTE_P2P_TOKENS:
      return CUDA_ERROR_NOT_SUPPORTED;
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS:
      Put<unsigned>(data, a && a->sync_memops);
      break;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
      Put<unsigned long long>(data, a ? a->id : 0);
      break;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
      Put<unsigned>(data, a && a->kind == MemoryKind::kManaged);
      break;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      Put<int>(data, a ? a->device : -2);
      break;
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
      Put<unsigned>(data, a && a->kind == MemoryKind::kDevice);
      break;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
      Put<CUdeviceptr>(data, a ? a->begin : 0);
      break;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
      Put<size_t>(data, a ? a->size : 0);
      break;
    case CU_POINTER_ATTRIBUTE_MAPPED:
      Put<unsigned>(data, a && a->readable);
      break;
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
      Put<unsigned>(data, a && a->kind == MemoryKind::kMapped ? a->flags : 0);
      break;
    case CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE:
      Put<unsigned>(data, 0);
      break;
    case CU_POINTER_ATTRIBUTE_ACCESS_FLAGS:
      Put<unsigned>(data, !a || !a->readable    ? CU_MEM_ACCESS_FLAGS_PROT_NONE
                          : !a->kernel_writable ? CU_MEM_ACCESS_FLAGS_PROT_READ
                                                : CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
      break;
    case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE:
      Put<CUmemoryPool>(data, a ? a->pool : nullptr);
      break;
    case CU_POINTER_ATTRIBUTE_MAPPING_SIZE:
      Put<size_t>(data, a ? a->size : 0);
      break;
    case CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR:
      Put<CUdeviceptr>(data, a ? a->begin : 0);
      break;
    case CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID:
      Put<unsigned long long>(data, a ? a->id : 0);
      break;
    case CU_POINTER_ATTRIBUTE_IS_HW_DECOMPRESS_CAPABLE:
      Put<unsigned>(data, 0);
      break;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
  return CUDA_SUCCESS;
}

}  // namespace

SOFTGPU_API cuPointerGetAttribute(void* data, CUpointer_attribute attribute, CUdeviceptr address) {
  SOFTGPU_ENTER();
  if (data == nullptr || address == 0) return CUDA_ERROR_INVALID_VALUE;
  AllocationPtr allocation = MemoryMap::Get().Find(address);
  if (!allocation) return CUDA_ERROR_INVALID_VALUE;
  bool known;
  CUresult result = Attribute(data, attribute, address, allocation.get(), &known);
  return result == CUDA_SUCCESS && !known ? CUDA_ERROR_INVALID_VALUE : result;
}

SOFTGPU_API cuPointerGetAttributes(unsigned int count, CUpointer_attribute* attributes, void** data,
                                   CUdeviceptr address) {
  SOFTGPU_ENTER();
  if (attributes == nullptr || data == nullptr || count == 0) return CUDA_ERROR_INVALID_VALUE;
  AllocationPtr allocation = MemoryMap::Get().Find(address);
  for (unsigned i = 0; i < count; ++i) {
    bool known;
    if (CUresult result = Attribute(data[i], attributes[i], address, allocation.get(), &known);
        result != CUDA_SUCCESS) {
      return result;
    }
  }
  return CUDA_SUCCESS;
}

SOFTGPU_API cuPointerSetAttribute(const void* value, CUpointer_attribute attribute, CUdeviceptr address) {
  SOFTGPU_ENTER();
  if (value == nullptr || attribute != CU_POINTER_ATTRIBUTE_SYNC_MEMOPS) return CUDA_ERROR_INVALID_VALUE;
  AllocationPtr allocation = MemoryMap::Get().Find(address);
  if (!allocation) return CUDA_ERROR_INVALID_VALUE;
  bool on = *static_cast<const unsigned*>(value) != 0;
  MemoryMap::Get().Update(allocation, [on](Allocation& a) { a.sync_memops = on; });
  return CUDA_SUCCESS;
}
