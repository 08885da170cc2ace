// SPDX-License-Identifier: Apache-2.0
// What is behind a pointer: answered from the client's own address maps, because libraries ask at every call.

#include "client/calls/pointer.h"

#include <cuda.h>

#include <algorithm>
#include <cstring>

#include "client/calls/bodies.gen.h"
#include "client/calls/runtime.h"
#include "client/core/call.h"
#include "client/core/session.h"
#include "proto/codec/codec.h"
#include "proto/codec/decode_as.h"

namespace cuda_remote::client {
namespace {

struct Facts {
  bool known = false;
  bool device = false;
  uint64_t start = 0;
  uint64_t bytes = 0;
  uint64_t context = 0;
  int ordinal = 0;
  uint64_t buffer_id = 0;
  bool mapped = false;
  uint64_t device_address = 0;  // of `mapped` memory
  uint64_t host_address = 0;
  bool allocated = false;  // by cuMemAlloc and its kind
  bool stream_ordered = false;
  bool of_pool = false;
  uint64_t pool = 0;  // of a pool's memory; 0: the device's default, which may have no handle yet
  bool managed = false;
  bool sync_memops = false;
  unsigned handle_types = 0;
  bool own_mapping = false;  // by cuMemMap
  uint64_t block_id = 0;
  unsigned access = CU_POINTER_ATTRIBUTE_ACCESS_FLAG_READWRITE;  // of the current context's device
  // What CU_POINTER_ATTRIBUTE_RANGE_* say, also where nothing is mapped in a reservation. bytes 0: nothing.
  uint64_t range_start = 0;
  uint64_t range_bytes = 0;
  bool has_context = false;  // the calling thread has a current one
  bool of_other = false;     // a variable of another context than that one
};

Facts Look(Call& call, uint64_t address) {
  Session& session = call.session();
  Facts facts;
  facts.has_context = call.thread().current_context() != 0;
  {
    ReaderLock lock(&session.memory().mutex());
    if (const auto* range = session.memory().device_ranges().Find(address)) {
      facts.known = facts.device = true;
      facts.start = range->start;
      facts.bytes = range->bytes;
      facts.context = range->value.context;
      facts.ordinal = range->value.device;
      facts.buffer_id = range->value.buffer_id;
      facts.own_mapping = range->value.source == DeviceRange::kMapped;
      if (facts.own_mapping) facts.access = range->value.access.Of(std::max(0, call.device()));
      facts.allocated = range->value.source == DeviceRange::kAllocation;
      facts.stream_ordered = range->value.source == DeviceRange::kStreamOrdered ||
                             range->value.source == DeviceRange::kPoolImported ||
                             range->value.source == DeviceRange::kGraph;
      facts.of_pool = facts.stream_ordered && range->value.source != DeviceRange::kGraph;
      facts.pool = range->value.pool;
      facts.managed = range->value.managed;
      // A managed variable is of no context.
      if (range->value.source == DeviceRange::kGlobal) {
        const uint64_t current = call.thread().current_context();
        facts.of_other = !facts.managed && KindOf(current) == Kind::kContext &&
                         KindOf(facts.context) == Kind::kContext && current != facts.context;
        if (facts.managed) facts.context = 0;
      }
      facts.sync_memops = range->value.sync_memops;
      facts.handle_types = range->value.handle_types;
    } else if (const auto* range = session.memory().host_ranges().Find(address)) {
      facts.known = true;
      facts.start = range->start;
      facts.bytes = range->bytes;
      facts.context = range->value.context;
      facts.buffer_id = range->value.buffer_id;
      facts.sync_memops = range->value.sync_memops;
      if (range->value.registered && (range->value.flags & CU_MEMHOSTREGISTER_READ_ONLY)) {
        facts.access = CU_POINTER_ATTRIBUTE_ACCESS_FLAG_READ;
      }
      // Pinned memory comes to the GPU when a kernel is given it, wherever the GPU is.
      facts.mapped = true;
      const uint64_t offset = address - range->start;
      facts.device_address = range->value.on_device ? range->value.device + offset : address;
      facts.host_address = range->value.alias_of ? range->value.alias_of + offset : address;
      facts.ordinal = range->value.ordinal;
    }
  }
  facts.range_start = facts.start;
  facts.range_bytes = facts.bytes;
  facts.block_id = facts.buffer_id;
  if (!facts.known || facts.own_mapping) {
    session.memory().virtual_memory().FindReservation(address, &facts.range_start, &facts.range_bytes);
  }
  if (facts.own_mapping) facts.block_id = session.memory().virtual_memory().MemoryAt(address);
  return facts;
}

// What memory of the application's own pool can be exported as; 0 for other pools.
unsigned HandleTypesOf(Session& session, uint64_t pool) {
  ReaderLock lock(&session.objects().mutex());
  const replay::Record* const record = session.objects().log().Find({Kind::kMemoryPool, pool});
  wire::cuMemPoolCreate_Request made;
  CUmemPoolProps properties{};
  if (!record || !wire::DecodeAs(record->header.call, record->message, &made)) return 0;
  return TakeExactly(made.poolProps, &properties, sizeof properties) ? properties.handleTypes : 0;
}

template <typename T>
void Store(void* data, T value) {
  memcpy(data, &value, sizeof(value));  // NOLINT(bugprone-sizeof-expression): it may be a pointer
}

// One attribute of a known pointer. Like the driver, it gives 0 where it refuses an address.
CUresult Answer(Session& session, const Facts& facts, uint64_t address, CUpointer_attribute attribute, void* data) {
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
      Store(data, reinterpret_cast<CUcontext>(facts.stream_ordered ? 0 : facts.context));
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      Store(data, unsigned(facts.device ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST));
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
      Store(data, CUdeviceptr{0});
      if (!facts.has_context) return CUDA_ERROR_INVALID_CONTEXT;
      if (facts.access == 0 || facts.of_other || (!facts.device && !facts.mapped)) return CUDA_ERROR_INVALID_VALUE;
      Store(data, CUdeviceptr(facts.device ? address : facts.device_address));
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
      Store(data, uint64_t{0});
      if (facts.device && !facts.managed) return CUDA_ERROR_INVALID_VALUE;
      Store(data, reinterpret_cast<void*>(facts.device ? address : facts.host_address));
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
      Store(data, facts.buffer_id);
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID:
      Store(data, facts.block_id);
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
      Store(data, int(facts.managed));
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
      Store(data, int(facts.allocated));  // cuIpcGetMemHandle takes it
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE:
    case CU_POINTER_ATTRIBUTE_IS_HW_DECOMPRESS_CAPABLE:
      Store(data, 0);
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      Store(data, facts.ordinal);
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
      Store(data, CUdeviceptr(facts.range_start));
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR:
      Store(data, CUdeviceptr(facts.start));
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
      Store(data, size_t(facts.range_bytes));
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MAPPING_SIZE:
      Store(data, size_t(facts.bytes));
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MAPPED:
      Store(data, int(facts.device || facts.mapped));
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
      Store(data, uint64_t(facts.of_pool ? HandleTypesOf(session, facts.pool) : facts.handle_types));
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_ACCESS_FLAGS:
      Store(data, facts.access);
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE:
      Store(data, facts.pool);
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS:
      Store(data, int(facts.sync_memops));
      return CUDA_SUCCESS;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
}

// Bytes that an attribute takes, for clearing the answers about unknown pointers; 0 for an unknown attribute.
size_t AnswerBytes(CUpointer_attribute attribute) {
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS:
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
    case CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE:
    case CU_POINTER_ATTRIBUTE_MAPPED:
    case CU_POINTER_ATTRIBUTE_ACCESS_FLAGS:
    case CU_POINTER_ATTRIBUTE_IS_HW_DECOMPRESS_CAPABLE:
      return sizeof(int);
    case CU_POINTER_ATTRIBUTE_CONTEXT:
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
    case CU_POINTER_ATTRIBUTE_MAPPING_SIZE:
    case CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR:
    case CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID:
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
    case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE:
      return sizeof(uint64_t);
    default:
      return 0;
  }
}

// What the list of attributes has of an address that is no memory of CUDA's: zero, but -2 for the device, and the
// address itself for the host's. The range is that of the reservation; without one the driver leaves *data alone.
void AnswerUnknown(const Facts& facts, uint64_t address, CUpointer_attribute attribute, size_t bytes, void* data) {
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      return Store(data, -2);
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
      return Store(data, address);
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
      if (facts.range_bytes != 0) Store(data, facts.range_start);
      return;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
      if (facts.range_bytes != 0) Store(data, facts.range_bytes);
      return;
    default:
      memset(data, 0, bytes);
  }
}

// The pool that an address was allocated from. A device's default pool may have no handle yet: the server names it, in
// a call of its own.
CUresult PoolOf(const CallInfo& info, uint64_t address, void* data) {
  Facts facts;
  {
    Call call(info);
    if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
    facts = Look(call, address);
  }
  if (!facts.known) return CUDA_ERROR_INVALID_VALUE;
  CUmemoryPool pool = reinterpret_cast<CUmemoryPool>(facts.pool);
  if (facts.of_pool && !pool) {
    const CUresult result = Custom_cuDeviceGetDefaultMemPool(&pool, facts.ordinal);
    if (result != CUDA_SUCCESS) return result;
  }
  Store(data, pool);
  return CUDA_SUCCESS;
}

}  // namespace

bool IsDevicePointer(Session& session, uint64_t address) {
  ReaderLock lock(&session.memory().mutex());
  return session.memory().device_ranges().Find(address) != nullptr;
}

CUresult Custom_cuPointerGetAttribute(void* data, CUpointer_attribute attribute, CUdeviceptr ptr) {
  const CallInfo& kInfo = info::k_cuPointerGetAttribute;
  if (!data) return CUDA_ERROR_INVALID_VALUE;
  if (attribute == CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE) return PoolOf(kInfo, ptr, data);
  Call call(kInfo);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  const Facts facts = Look(call, ptr);
  if (!facts.known) return CUDA_ERROR_INVALID_VALUE;  // ordinary host memory, as natively
  return Answer(call.session(), facts, ptr, attribute, data);
}

CUresult Custom_cuPointerGetAttributes(unsigned int numAttributes, CUpointer_attribute* attributes, void** data,
                                       CUdeviceptr ptr) {
  const CallInfo& kInfo = info::k_cuPointerGetAttributes;
  if (numAttributes == 0 || !attributes || !data) return CUDA_ERROR_INVALID_VALUE;
  void* pool = nullptr;  // where the handle of a default pool goes
  {
    Call call(kInfo);
    if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
    const Facts facts = Look(call, ptr);
    for (unsigned i = 0; i < numAttributes; ++i) {
      if (!data[i]) return CUDA_ERROR_INVALID_VALUE;
      const size_t bytes = AnswerBytes(attributes[i]);
      if (bytes == 0) return CUDA_ERROR_INVALID_VALUE;
      // This call, unlike the single one, succeeds for unknown pointers.
      if (!facts.known) {
        AnswerUnknown(facts, ptr, attributes[i], bytes, data[i]);
        continue;
      }
      memset(data[i], 0, bytes);
      Answer(call.session(), facts, ptr, attributes[i], data[i]);
      if (attributes[i] == CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE && facts.of_pool && !facts.pool) pool = data[i];
    }
  }
  return pool ? PoolOf(kInfo, ptr, pool) : CUDA_SUCCESS;
}

CUresult Custom_cuPointerSetAttribute(const void* value, CUpointer_attribute attribute, CUdeviceptr ptr) {
  if (!value) return CUDA_ERROR_INVALID_VALUE;
  Call call(info::k_cuPointerSetAttribute);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  unsigned is_set;
  memcpy(&is_set, value, sizeof is_set);
  WriterLock lock(&call.session().memory().mutex());
  auto* const device = call.session().memory().device_ranges().Find(ptr);
  auto* const host = device ? nullptr : call.session().memory().host_ranges().Find(ptr);
  if (!device && !host) return CUDA_ERROR_INVALID_VALUE;
  if (device && device->value.source == DeviceRange::kMapped) return CUDA_ERROR_NOT_SUPPORTED;  // as natively
  if (attribute != CU_POINTER_ATTRIBUTE_SYNC_MEMOPS) return CUDA_ERROR_INVALID_VALUE;
  // Copies through the channel are already as synchronous as this asks for: it is only noted.
  (device ? device->value.sync_memops : host->value.sync_memops) = is_set != 0;
  return CUDA_SUCCESS;
}

CUresult Custom_cuMemGetAddressRange_v2(CUdeviceptr* pbase, size_t* psize, CUdeviceptr dptr) {
  if (!pbase && !psize) return Session::Get() ? CUDA_SUCCESS : CUDA_ERROR_NOT_INITIALIZED;
  if (pbase) *pbase = 0;
  if (psize) *psize = 0;
  Call call(info::k_cuMemGetAddressRange_v2);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  const Facts facts = Look(call, dptr);
  if (!facts.known || facts.of_other || (facts.own_mapping && facts.access == 0)) return CUDA_ERROR_NOT_FOUND;
  if (pbase) *pbase = facts.start;
  if (psize) *psize = facts.bytes;
  return CUDA_SUCCESS;
}

}  // namespace cuda_remote::client
