// SPDX-License-Identifier: Apache-2.0
// What is known of an address: pointer attributes.
#include <cstring>

#include "softgpu/api/api.h"
#include "softgpu/core/memory_map.h"
#include "softgpu/core/pool.h"
#include "softgpu/core/registry.h"

using namespace cuda_remote::softgpu;

namespace {

CUmemorytype TypeOf(const Allocation& allocation) {
  return allocation.host() ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
}

template <typename T>
void Put(void* data, T value) {
  std::memcpy(data, &value, sizeof(value));  // NOLINT(bugprone-sizeof-expression): it may be a pointer
}

// What an address's memory can be exported as.
unsigned HandleTypes(const Allocation& a) {
  if (a.kind == MemoryKind::kMapped) return a.flags;
  const std::shared_ptr<Pool> pool = a.pool != nullptr ? Registry<Pool>::Get().Find(a.pool) : nullptr;
  return pool && !pool->is_default ? pool->props.handleTypes : CU_MEM_HANDLE_TYPE_NONE;
}

unsigned AccessFlags(const Allocation& a, int device) {
  if (a.kind == MemoryKind::kSymbol) return CU_MEM_ACCESS_FLAGS_PROT_READWRITE;  // of constants, too
  if (a.kind == MemoryKind::kMapped && !a.mapped_for(device)) return CU_MEM_ACCESS_FLAGS_PROT_NONE;
  return a.kernel_writable ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE : CU_MEM_ACCESS_FLAGS_PROT_READ;
}

// `range_begin` and `range_size` are what CU_POINTER_ATTRIBUTE_RANGE_* say; a size of 0: nothing.
struct Asked {
  CUdeviceptr address = 0;
  AllocationPtr allocation;
  uint64_t range_begin = 0;
  uint64_t range_size = 0;
};

Asked Ask(CUdeviceptr address) {
  Asked asked;
  asked.address = address;
  asked.allocation = MemoryMap::Get().Find(address);
  if (!FindReservation(address, &asked.range_begin, &asked.range_size) && asked.allocation) {
    asked.range_begin = asked.allocation->begin;
    asked.range_size = asked.allocation->size;
  }
  return asked;
}

// What cuPointerGetAttributes says of an address that is not known. Like driver 580, it leaves a range alone that there
// is not.
CUresult AttributeOfUnknown(void* data, CUpointer_attribute attribute, const Asked& asked) {
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
    case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE:
    case CU_POINTER_ATTRIBUTE_MAPPING_SIZE:
    case CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR:
    case CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID:
      Put<uint64_t>(data, 0);
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS:
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
    case CU_POINTER_ATTRIBUTE_MAPPED:
    case CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE:
    case CU_POINTER_ATTRIBUTE_ACCESS_FLAGS:
    case CU_POINTER_ATTRIBUTE_IS_HW_DECOMPRESS_CAPABLE:
      Put<unsigned>(data, 0);
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      Put<int>(data, -2);
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
      Put<uint64_t>(data, asked.address);
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
      if (asked.range_size != 0) Put<CUdeviceptr>(data, asked.range_begin);
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
      if (asked.range_size != 0) Put<size_t>(data, asked.range_size);
      return CUDA_SUCCESS;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
}

// What cuPointerGetAttribute says of a known address. Where it refuses one, it gives 0, like driver 580.
CUresult Attribute(void* data, CUpointer_attribute attribute, const Asked& asked) {
  const Allocation& a = *asked.allocation;
  const ContextPtr current = CurrentContext();
  const int device = current ? current->device() : 0;
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
      Put<CUcontext>(data, a.kind != MemoryKind::kMapped && a.kind != MemoryKind::kPool && !a.of_variable
                               ? reinterpret_cast<CUcontext>(const_cast<Context*>(a.context))
                               : nullptr);
      break;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      Put<unsigned>(data, TypeOf(a));
      break;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
      Put<CUdeviceptr>(data, 0);
      if (!current) return CUDA_ERROR_INVALID_CONTEXT;
      if (AccessFlags(a, device) == 0 || a.IsVariableOfOther(current.get())) return CUDA_ERROR_INVALID_VALUE;
      Put<CUdeviceptr>(data, asked.address);
      break;
    case CU_POINTER_ATTRIBUTE_HOST_POINTER: {
      const bool host = a.host() || a.kind == MemoryKind::kManaged;
      Put<uint64_t>(data, host ? asked.address : 0);
      return host ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    }
    case CU_POINTER_ATTRIBUTE_P2P_TOKENS:
      return CUDA_ERROR_NOT_SUPPORTED;
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS:
      Put<unsigned>(data, a.sync_memops);
      break;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
      Put<unsigned long long>(data, a.id);
      break;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
      Put<unsigned>(data, a.kind == MemoryKind::kManaged);
      break;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      Put<int>(data, a.device);
      break;
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
      Put<unsigned>(data, a.kind == MemoryKind::kDevice);
      break;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
      Put<CUdeviceptr>(data, asked.range_begin);
      break;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
      Put<size_t>(data, asked.range_size);
      break;
    case CU_POINTER_ATTRIBUTE_MAPPED:
      Put<unsigned>(data, 1);
      break;
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
      Put<uint64_t>(data, HandleTypes(a));
      break;
    case CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE:
    case CU_POINTER_ATTRIBUTE_IS_HW_DECOMPRESS_CAPABLE:
      Put<unsigned>(data, 0);
      break;
    case CU_POINTER_ATTRIBUTE_ACCESS_FLAGS:
      Put<unsigned>(data, AccessFlags(a, device));
      break;
    case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE:
      Put<CUmemoryPool>(data, a.pool);
      break;
    case CU_POINTER_ATTRIBUTE_MAPPING_SIZE:
      Put<size_t>(data, a.size);
      break;
    case CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR:
      Put<CUdeviceptr>(data, a.begin);
      break;
    case CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID:
      Put<unsigned long long>(data, a.block_id != 0 ? a.block_id : a.id);
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
  const Asked asked = Ask(address);
  return asked.allocation ? Attribute(data, attribute, asked) : CUDA_ERROR_INVALID_VALUE;
}

SOFTGPU_API cuPointerGetAttributes(unsigned int count, CUpointer_attribute* attributes, void** data,
                                   CUdeviceptr address) {
  SOFTGPU_ENTER();
  if (attributes == nullptr || data == nullptr || count == 0) return CUDA_ERROR_INVALID_VALUE;
  const Asked asked = Ask(address);
  alignas(16) char unused[16];
  for (unsigned i = 0; i < count; ++i) {
    if (data[i] == nullptr) return CUDA_ERROR_INVALID_VALUE;
    // Tokens, and what is no attribute, cannot be in a list.
    if (const CUresult result = AttributeOfUnknown(unused, attributes[i], asked); result != CUDA_SUCCESS) return result;
    if (asked.allocation) {
      Attribute(data[i], attributes[i], asked);
    } else {
      AttributeOfUnknown(data[i], attributes[i], asked);
    }
  }
  return CUDA_SUCCESS;
}

SOFTGPU_API cuPointerSetAttribute(const void* value, CUpointer_attribute attribute, CUdeviceptr address) {
  SOFTGPU_ENTER();
  if (value == nullptr) return CUDA_ERROR_INVALID_VALUE;
  AllocationPtr allocation = MemoryMap::Get().Find(address);
  if (!allocation) return CUDA_ERROR_INVALID_VALUE;
  if (allocation->kind == MemoryKind::kMapped) return CUDA_ERROR_NOT_SUPPORTED;  // so says driver 580
  if (attribute != CU_POINTER_ATTRIBUTE_SYNC_MEMOPS) return CUDA_ERROR_INVALID_VALUE;
  bool on = *static_cast<const unsigned*>(value) != 0;
  MemoryMap::Get().Update(allocation, [on](Allocation& a) { a.sync_memops = on; });
  return CUDA_SUCCESS;
}
