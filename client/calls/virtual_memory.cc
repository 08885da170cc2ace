// SPDX-License-Identifier: Apache-2.0
// Virtual memory management by the application itself: reservations, physical memory, and mappings between them.
//
// In the log a reservation and a mapping are objects named by their address. A mapping depends on its reservation and
// its physical memory, and carries the access rights as modifications. Physical memory that the application has
// released stays recorded while it is mapped, as it stays alive natively: the release is a modification of it.

#include <cuda.h>

#include <cstring>
#include <string_view>
#include <vector>

#include "client/calls/bodies.gen.h"
#include "client/core/call.h"
#include "client/core/session.h"
#include "client/core/setting_keys.h"
#include "proto/codec/codec.h"
#include "proto/codec/decode_as.h"
#include "proto/codec/wire.h"
#include "proto/threads/mutex.h"

namespace cuda_remote::client {
namespace {

// The driver gives a free address to the next reservation, perhaps before the first thread has the answer: they are
// made and freed one at a time, up to their place in the tables and the log.
Mutex g_order;

// The physical memory is gone for good when its last mapping goes after the application's release.
void DropIfUnusedLocked(Session& session, uint64_t handle) CR_REQUIRES(session.objects().mutex()) {
  Object* memory = session.objects().handles().Find(Kind::kPhysicalMemory, handle);
  if (memory && memory->released && memory->mappings == 0)
    session.objects().DropLocked({Kind::kPhysicalMemory, handle});
}

// What physical memory was made with, or imported as; zeros if the log does not say. What was imported cannot be
// exported, so it has no handle types.
CUmemAllocationProp PropertiesLocked(Session& session, uint64_t handle) CR_REQUIRES_SHARED(session.objects().mutex()) {
  CUmemAllocationProp properties{};
  const replay::Record* const record = session.objects().log().Find({Kind::kPhysicalMemory, handle});
  if (!record) return properties;
  wire::cuMemCreate_Request made;
  wire::cuMemImportFromShareableHandle_Request imported;
  std::string_view bytes;
  if (wire::DecodeAs(record->header.call, record->message, &made)) bytes = made.prop;
  if (wire::DecodeAs(record->header.call, record->message, &imported)) bytes = imported.prop;
  if (bytes.size() == sizeof(properties)) memcpy(&properties, bytes.data(), sizeof(properties));
  if (bytes.data() == imported.prop.data()) properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_NONE;
  return properties;
}

}  // namespace

CUresult Custom_cuMemAddressReserve(CUdeviceptr* ptr, size_t size, size_t alignment, CUdeviceptr addr,
                                    unsigned long long flags) {
  // The driver ignores wishes that it cannot fulfil, but refuses an address in the middle of a page.
  if (!ptr || addr % HostArena::kPage != 0) return CUDA_ERROR_INVALID_VALUE;
  Call call(info::k_cuMemAddressReserve);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  wire::cuMemAddressReserve_Request request;
  request.size = size;
  request.alignment = alignment;
  request.address = addr;
  request.flags = flags;
  request.Encode(&call.message());
  MutexLock lock(&g_order);
  if (const CUresult result = call.Transact(); result != CUDA_SUCCESS) return result;
  wire::cuMemAddressReserve_Reply reply;
  if (!reply.Decode(call.reply())) return call.session().Lose(ChannelStatus::kProtocolError);
  request.address = reply.address;
  call.message().clear();
  request.Encode(&call.message());
  call.Created({Kind::kReservation, reply.address});
  call.session().memory().virtual_memory().Reserve(reply.address, size);
  *ptr = reply.address;
  return CUDA_SUCCESS;
}

CUresult Custom_cuMemAddressFree(CUdeviceptr ptr, size_t size) {
  Call call(info::k_cuMemAddressFree);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  wire::cuMemAddressFree_Request request;
  request.ptr = ptr;
  request.size = size;
  request.Encode(&call.message());
  MutexLock lock(&g_order);
  const CUresult result = call.Transact();
  if (result != CUDA_SUCCESS) return result;
  call.Destroyed({Kind::kReservation, ptr});
  call.session().memory().virtual_memory().Free(ptr);
  return CUDA_SUCCESS;
}

CUresult Custom_cuMemMap(CUdeviceptr ptr, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                         unsigned long long flags) {
  Call call(info::k_cuMemMap);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  Session& session = call.session();
  uint64_t reservation;
  {
    ReaderLock lock(&session.objects().mutex());
    const Object* memory = session.objects().handles().Find(Kind::kPhysicalMemory, handle);
    reservation = session.memory().virtual_memory().ReservationOf(ptr, size);
    if (!memory || memory->released || !reservation) return CUDA_ERROR_INVALID_VALUE;
  }
  wire::cuMemMap_Request request;
  request.ptr = ptr;
  request.size = size;
  request.offset = offset;
  request.handle = handle;
  request.flags = flags;
  request.Encode(&call.message());
  if (const CUresult result = call.Transact(); result != CUDA_SUCCESS) return result;
  call.Created({Kind::kMapping, ptr}, {{Kind::kReservation, reservation}, {Kind::kPhysicalMemory, handle}});
  CUmemAllocationProp properties;
  {
    WriterLock lock(&session.objects().mutex());
    if (Object* memory = session.objects().handles().Find(Kind::kPhysicalMemory, handle)) ++memory->mappings;
    session.memory().virtual_memory().Map({ptr, size, handle});
    properties = PropertiesLocked(session, handle);
  }
  DeviceRange range;
  range.source = DeviceRange::kMapped;
  range.device = properties.location.id;
  range.handle_types = properties.requestedHandleTypes;
  WriterLock lock(&session.memory().mutex());
  range.buffer_id = session.memory().NextBufferIdLocked();
  session.memory().device_ranges().Insert(ptr, size, range);
  return CUDA_SUCCESS;
}

CUresult Custom_cuMemUnmap(CUdeviceptr ptr, size_t size) {
  Call call(info::k_cuMemUnmap);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  wire::cuMemUnmap_Request request;
  request.ptr = ptr;
  request.size = size;
  request.Encode(&call.message());
  const CUresult result = call.Transact();
  if (result != CUDA_SUCCESS) return result;
  // The driver has accepted the range, so it holds whole mappings: one or several.
  Session& session = call.session();
  WriterLock lock(&session.objects().mutex());
  for (const VirtualMemoryMap::Mapping& gone : session.memory().virtual_memory().Unmap(ptr, size)) {
    {
      WriterLock memory_lock(&session.memory().mutex());
      session.memory().device_ranges().Erase(gone.start);
    }
    session.objects().DropLocked({Kind::kMapping, gone.start});
    if (Object* memory = session.objects().handles().Find(Kind::kPhysicalMemory, gone.memory)) --memory->mappings;
    DropIfUnusedLocked(session, gone.memory);
  }
  return CUDA_SUCCESS;
}

CUresult Custom_cuMemSetAccess(CUdeviceptr ptr, size_t size, const CUmemAccessDesc* desc, size_t count) {
  if (!desc || count == 0) return CUDA_ERROR_INVALID_VALUE;
  Call call(info::k_cuMemSetAccess);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  wire::cuMemSetAccess_Request request;
  request.ptr = ptr;
  request.size = size;
  request.desc = std::string_view(reinterpret_cast<const char*>(desc), count * sizeof(*desc));
  request.count = count;
  request.Encode(&call.message());
  const CUresult result = call.Transact();
  if (result != CUDA_SUCCESS) return result;
  // One record for each mapping, so that it goes when that mapping goes.
  for (const VirtualMemoryMap::Mapping& mapping : call.session().memory().virtual_memory().In(ptr, size)) {
    request.ptr = mapping.start;
    request.size = mapping.bytes;
    call.message().clear();
    request.Encode(&call.message());
    call.Modified({Kind::kMapping, mapping.start}, PlacesKey(desc, count));
    WriterLock lock(&call.session().memory().mutex());
    auto* const range = call.session().memory().device_ranges().At(mapping.start);
    for (size_t i = 0; range && i < count; ++i) {
      if (desc[i].location.type == CU_MEM_LOCATION_TYPE_DEVICE) {
        range->value.access.Set(desc[i].location.id, desc[i].flags);
      }
    }
  }
  return CUDA_SUCCESS;
}

// Memory that the application has not mapped itself has no access rights to ask for: the driver says 0. For its own
// mappings the client knows what the application has set; a checkpoint may have made more accessible on the server.
CUresult Custom_cuMemGetAccess(unsigned long long* flags, const CUmemLocation* location, CUdeviceptr ptr) {
  if (!flags || !location || ptr == 0) return CUDA_ERROR_INVALID_VALUE;
  *flags = 0;
  Call call(info::k_cuMemGetAccess);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  {
    ReaderLock lock(&call.session().memory().mutex());
    const auto* const range = call.session().memory().device_ranges().Find(ptr);
    if (!range) {
      return call.session().memory().host_ranges().Find(ptr) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    }
    if (range->value.source != DeviceRange::kMapped) return CUDA_SUCCESS;
    if (location->type == CU_MEM_LOCATION_TYPE_DEVICE && location->id >= 0 &&
        size_t(location->id) < call.session().devices().size()) {
      *flags = range->value.access.Of(location->id);
      return CUDA_SUCCESS;
    }
  }
  wire::cuMemGetAccess_Request request;
  request.location = wire::BytesOf(*location);
  request.ptr = ptr;
  request.Encode(&call.message());
  if (const CUresult result = call.Transact(); result != CUDA_SUCCESS) return result;
  wire::cuMemGetAccess_Reply reply;
  if (!reply.Decode(call.reply())) return call.session().Lose(ChannelStatus::kProtocolError);
  *flags = reply.flags;
  return CUDA_SUCCESS;
}

// The handle of the memory behind an address, which is then to be released once more. One that the application has
// released for good comes back to life: that is told to the server, and recorded after the release.
CUresult Custom_cuMemRetainAllocationHandle(CUmemGenericAllocationHandle* handle, void* addr) {
  if (!handle) return CUDA_ERROR_INVALID_VALUE;
  Call call(info::k_cuMemRetainAllocationHandle);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  Session& session = call.session();
  wire::cuMemRetainAllocationHandle_Request request;
  {
    WriterLock lock(&session.objects().mutex());
    request.handle = session.memory().virtual_memory().MemoryAt(reinterpret_cast<uint64_t>(addr));
    Object* memory = request.handle ? session.objects().handles().Find(Kind::kPhysicalMemory, request.handle) : nullptr;
    if (!memory) return CUDA_ERROR_INVALID_VALUE;
    if (!memory->released) {
      ++memory->retained;
      *handle = request.handle;
      return CUDA_SUCCESS;
    }
  }
  request.Encode(&call.message());
  if (const CUresult result = call.Transact(); result != CUDA_SUCCESS) return result;
  call.Modified({Kind::kPhysicalMemory, request.handle}, 0);
  WriterLock lock(&session.objects().mutex());
  if (Object* memory = session.objects().handles().Find(Kind::kPhysicalMemory, request.handle))
    memory->released = false;
  *handle = request.handle;
  return CUDA_SUCCESS;
}

CUresult Custom_cuMemRelease(CUmemGenericAllocationHandle handle) {
  Call call(info::k_cuMemRelease);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  Session& session = call.session();
  {
    WriterLock lock(&session.objects().mutex());
    Object* memory = session.objects().handles().Find(Kind::kPhysicalMemory, handle);
    if (!memory || memory->released) return CUDA_ERROR_INVALID_VALUE;
    if (memory->retained > 0) {
      --memory->retained;
      return CUDA_SUCCESS;
    }
  }
  wire::cuMemRelease_Request request;
  request.handle = handle;
  request.Encode(&call.message());
  const CUresult result = call.Transact();
  if (result != CUDA_SUCCESS) return result;
  call.Modified({Kind::kPhysicalMemory, handle}, 0);
  WriterLock lock(&session.objects().mutex());
  if (Object* memory = session.objects().handles().Find(Kind::kPhysicalMemory, handle)) memory->released = true;
  DropIfUnusedLocked(session, handle);
  return CUDA_SUCCESS;
}

}  // namespace cuda_remote::client
