// SPDX-License-Identifier: Apache-2.0
// Virtual memory management by the application itself. Its reservations get addresses from a range of their own, chosen
// here, so that a restarted job gets them again.

#include <cuda.h>

#include <vector>

#include "proto/codec/virtual.gen.h"
#include "server/dispatch/malformed.h"
#include "server/worker/calls/handlers.gen.h"
#include "server/worker/session/driver_hooks.h"
#include "server/worker/session/worker_session.h"

namespace cuda_remote::server {
namespace {

// Whether the application reserved all of [address, address + bytes).
bool IsReserved(WorkerSession& session, uint64_t address, uint64_t bytes) {
  auto& reservations = session.reservations();
  auto it = reservations.upper_bound(address);
  if (it == reservations.begin()) return false;
  --it;
  const uint64_t offset = address - it->first;
  return offset < it->second && bytes <= it->second - offset;
}

// Whether anything is mapped in [address, address + bytes).
bool HasMappings(WorkerSession& session, uint64_t address, uint64_t bytes) {
  const auto& all = session.ranges().all();
  const auto it = all.lower_bound(address);
  return it != all.end() && it->first < address + bytes;
}

// The physical memory's last user is gone.
void ReleaseIfUnused(WorkerSession& session, uint64_t handle) {
  const auto it = session.physical().find(handle);
  if (it == session.physical().end()) return;
  const PhysicalFacts& memory = it->second;
  if (!memory.released || memory.mappings != 0 || memory.keep_unmapped) return;
  session.driver().cuMemRelease(memory.real);
  PhysicalMemoryReleased(memory.real);
  session.physical().erase(it);
  session.Unbind(handle);
}

}  // namespace

CUresult Custom_cuMemAddressReserve(WorkerSession& session, const Request& request,
                                    const wire::cuMemAddressReserve_Request& in, wire::cuMemAddressReserve_Reply* out,
                                    ReplyBuilder*) {
  constexpr uint64_t kPage = DeviceArena::kPage;
  if (in.size == 0 || in.size % kPage != 0 || (in.alignment & (in.alignment - 1)) != 0) return CUDA_ERROR_INVALID_VALUE;
  if (in.flags != 0) return CUDA_ERROR_INVALID_VALUE;  // there are none, and the driver is not asked any more
  AddressSpace* const space = session.ReservationSpace();
  if (space == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
  // A hint elsewhere is a wish that the driver need not grant either.
  if (in.address != 0 && in.address % kPage == 0 && space->TakeAt(in.address, in.size)) {
    out->address = in.address;
  } else if (!request.replay()) {
    out->address = space->Take(in.size, in.alignment);
  }
  if (out->address == 0) return CUDA_ERROR_OUT_OF_MEMORY;
  session.reservations()[out->address] = in.size;
  return CUDA_SUCCESS;
}

CUresult Custom_cuMemAddressFree(WorkerSession& session, const Request&, const wire::cuMemAddressFree_Request& in,
                                 wire::cuMemAddressFree_Reply*, ReplyBuilder*) {
  const auto it = session.reservations().find(in.ptr);
  if (it == session.reservations().end() || it->second != in.size) return CUDA_ERROR_INVALID_VALUE;
  if (HasMappings(session, in.ptr, in.size)) return CUDA_ERROR_INVALID_VALUE;
  session.reservations().erase(it);
  session.ReservationSpace()->Give(in.ptr, in.size);
  return CUDA_SUCCESS;
}

CUresult Custom_cuMemMap(WorkerSession& session, const Request& request, const wire::cuMemMap_Request& in,
                         wire::cuMemMap_Reply*, ReplyBuilder*) {
  const auto memory = session.physical().find(in.handle);
  CUmemGenericAllocationHandle real;
  if (memory == session.physical().end() || !session.Real(Kind::kPhysicalMemory, in.handle, &real)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  // In a replay the release may come before the mapping that it once followed.
  if (memory->second.released && !request.replay()) return CUDA_ERROR_INVALID_VALUE;
  if (in.size == 0 || !IsReserved(session, in.ptr, in.size)) return CUDA_ERROR_INVALID_VALUE;
  const CUresult result = session.driver().cuMemMap(in.ptr, in.size, in.offset, real, in.flags);
  if (result != CUDA_SUCCESS) return result;
  ++memory->second.mappings;
  memory->second.used = true;
  memory->second.keep_unmapped = false;
  DeviceRange range;
  range.kind = DeviceRange::kMapped;
  range.bytes = in.size;
  range.owner = in.handle;
  range.offset = in.offset;
  CUmemAllocationProp prop = {};
  if (session.driver().cuMemGetAllocationPropertiesFromHandle(&prop, real) == CUDA_SUCCESS &&
      prop.location.type == CU_MEM_LOCATION_TYPE_DEVICE) {
    range.device = prop.location.id;
  } else if (const ContextInfo* const context = session.contexts().Find(session.CurrentContext())) {
    range.device = context->device;
  }
  session.ranges().Insert(in.ptr, range);
  return CUDA_SUCCESS;
}

CUresult Custom_cuMemUnmap(WorkerSession& session, const Request&, const wire::cuMemUnmap_Request& in,
                           wire::cuMemUnmap_Reply*, ReplyBuilder*) {
  if (in.size == 0 || !IsReserved(session, in.ptr, in.size)) return CUDA_ERROR_INVALID_VALUE;
  const CUresult result = session.driver().cuMemUnmap(in.ptr, in.size);
  if (result != CUDA_SUCCESS) return result;
  std::vector<std::pair<uint64_t, uint64_t>> gone;  // address, physical memory
  const auto& all = session.ranges().all();
  for (auto it = all.lower_bound(in.ptr); it != all.end() && it->first < in.ptr + in.size; ++it) {
    if (it->second.kind == DeviceRange::kMapped) gone.emplace_back(it->first, it->second.owner);
  }
  for (const auto& [address, handle] : gone) {
    session.ranges().Erase(address);
    session.ipc().Forget(address);  // an offer of it
    const auto memory = session.physical().find(handle);
    if (memory != session.physical().end() && memory->second.mappings != 0) --memory->second.mappings;
    ReleaseIfUnused(session, handle);
  }
  return CUDA_SUCCESS;
}

CUresult Custom_cuMemRetainAllocationHandle(WorkerSession& session, const Request&,
                                            const wire::cuMemRetainAllocationHandle_Request& in,
                                            wire::cuMemRetainAllocationHandle_Reply*, ReplyBuilder*) {
  const auto memory = session.physical().find(in.handle);
  if (memory == session.physical().end()) return CUDA_ERROR_INVALID_VALUE;
  // The driver's own handle was kept for the sake of its mappings, so there is nothing to ask the driver for.
  memory->second.released = false;
  memory->second.keep_unmapped = false;
  return CUDA_SUCCESS;
}

CUresult Custom_cuMemRelease(WorkerSession& session, const Request& request, const wire::cuMemRelease_Request& in,
                             wire::cuMemRelease_Reply*, ReplyBuilder*) {
  const auto memory = session.physical().find(in.handle);
  if (memory == session.physical().end() || memory->second.released) return CUDA_ERROR_INVALID_VALUE;
  // The driver keeps the memory until its last mapping is gone. So do we, with its handle: a replay may still need it.
  memory->second.released = true;
  memory->second.keep_unmapped = request.replay() && memory->second.mappings == 0;
  ReleaseIfUnused(session, in.handle);
  return CUDA_SUCCESS;
}

}  // namespace cuda_remote::server
