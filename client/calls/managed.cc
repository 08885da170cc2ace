// SPDX-License-Identifier: Apache-2.0
// Managed memory. Host and GPU use it at the same address, in the host arena (client/memory/host_arena.h). Its home is
// the GPU (client/memory/managed_home.h). Where that cannot be, it is host memory that the server shares and the GPU
// reaches over the bus; and over a relay both ends have their own, which are mirrored
// (client/memory/managed_mirror.h). Advice is remembered for the questions about it; that memory is mostly the host's
// also tells how much to fetch at a time.
//
// Its contents are the process's while a checkpoint is taken: a snapshot has them, and another server is given them. So
// nothing of it is in the log.

#include "client/calls/managed.h"

#include <cstring>
#include <vector>

#include "client/calls/bodies.gen.h"
#include "client/calls/copy.h"

namespace cuda_remote::client {
namespace {

// Whether the range is managed memory of one allocation or variable.
bool IsManagedLocked(Session& session, uint64_t address, size_t bytes) CR_REQUIRES_SHARED(session.memory().mutex()) {
  const auto* range = session.memory().device_ranges().Find(address);
  return range && range->value.managed && range->Contains(address, bytes);
}

// CUDA_SUCCESS for a place that this session knows, which prefetches and advice may name.
CUresult CheckPlace(const Session& session, const CUmemLocation& place) {
  switch (place.type) {
    case CU_MEM_LOCATION_TYPE_DEVICE:
      return place.id >= 0 && size_t(place.id) < session.devices().size() ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
    case CU_MEM_LOCATION_TYPE_HOST:
    case CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT:
      return CUDA_SUCCESS;
    case CU_MEM_LOCATION_TYPE_HOST_NUMA:
      return place.id >= 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
}

// A place in the way of before CUDA 12.2: a device, or the host.
CUmemLocation PlaceOf(CUdevice device) {
  CUmemLocation place{};
  place.type = device == CU_DEVICE_CPU ? CU_MEM_LOCATION_TYPE_HOST : CU_MEM_LOCATION_TYPE_DEVICE;
  place.id = device == CU_DEVICE_CPU ? 0 : device;
  return place;
}

CUresult Advise(CUdeviceptr address, size_t bytes, CUmem_advise advice, const CUmemLocation& place) {
  Call call(info::k_cuMemAdvise_v2);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  if (advice < CU_MEM_ADVISE_SET_READ_MOSTLY || advice > CU_MEM_ADVISE_UNSET_ACCESSED_BY || bytes == 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (unsigned(place.type) > CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT) return CUDA_ERROR_INVALID_VALUE;
  const bool placed = advice == CU_MEM_ADVISE_SET_PREFERRED_LOCATION || advice == CU_MEM_ADVISE_SET_ACCESSED_BY ||
                      advice == CU_MEM_ADVISE_UNSET_ACCESSED_BY;
  Session& session = call.session();
  if (placed) {
    if (const CUresult result = CheckPlace(session, place); result != CUDA_SUCCESS) return result;
  }
  const int who = place.type == CU_MEM_LOCATION_TYPE_DEVICE ? place.id : CU_DEVICE_CPU;
  WriterLock lock(&session.memory().mutex());
  if (!IsManagedLocked(session, address, bytes)) return CUDA_ERROR_INVALID_VALUE;
  session.memory().managed_advice().Update(address, bytes, [&](Advice& known) {
    switch (advice) {
      case CU_MEM_ADVISE_SET_READ_MOSTLY:
      case CU_MEM_ADVISE_UNSET_READ_MOSTLY:
        known.read_mostly = advice == CU_MEM_ADVISE_SET_READ_MOSTLY;
        break;
      case CU_MEM_ADVISE_SET_PREFERRED_LOCATION:
        known.preferred = {int(place.type), place.type == CU_MEM_LOCATION_TYPE_HOST ? 0 : place.id};
        break;
      case CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION:
        known.preferred = {};
        break;
      case CU_MEM_ADVISE_SET_ACCESSED_BY:
        known.accessed_by.insert(who);
        break;
      default:
        known.accessed_by.erase(who);
    }
  });
  lock.Unlock();
  if (advice == CU_MEM_ADVISE_SET_READ_MOSTLY || advice == CU_MEM_ADVISE_UNSET_READ_MOSTLY) return CUDA_SUCCESS;
  struct Piece {
    uint64_t begin, end;
    bool for_host;
  };
  std::vector<Piece> pieces;
  session.memory().managed_advice().VisitPieces(address, bytes, [&](uint64_t begin, uint64_t end, const Advice& known) {
    pieces.push_back({begin, end, known.IsForHost()});
  });
  for (const auto& [begin, end, for_host] : pieces) {
    session.memory().managed_home().pages().PreferHost(begin, end - begin, for_host);
  }
  return CUDA_SUCCESS;
}

// Prefetches of several ranges, each to its place; `places` may be null for ranges that are not moved.
CUresult Prefetch(const char* name, const CUdeviceptr* addresses, const size_t* sizes, size_t count,
                  const CUmemLocation* places, const size_t* first, size_t place_count, CUstream stream,
                  bool per_thread) {
  const CallInfo info = Under(info::k_cuMemPrefetchAsync_v2, name);
  if (!addresses || !sizes || count == 0) return CUDA_ERROR_INVALID_VALUE;
  Call call(info);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  uint64_t wire_stream;
  if (const CUresult result = call.StreamToWire(stream, per_thread, &wire_stream); result != CUDA_SUCCESS)
    return result;
  Session& session = call.session();
  for (size_t i = 0; i < place_count; ++i) {
    if (const CUresult result = CheckPlace(session, places[i]); result != CUDA_SUCCESS) return result;
    // Each place serves the ranges from its index up to the next one's.
    const bool rising = i == 0 ? first[0] == 0 : first[i] > first[i - 1];
    if (!rising || first[i] >= count) return CUDA_ERROR_INVALID_VALUE;
  }
  WriterLock lock(&session.memory().mutex());
  for (size_t i = 0; i < count; ++i) {
    if (sizes[i] == 0 || !IsManagedLocked(session, addresses[i], sizes[i])) return CUDA_ERROR_INVALID_VALUE;
  }
  size_t place = 0;
  std::vector<uint64_t> to_device;
  std::vector<size_t> to_host;
  for (size_t i = 0; i < count && place_count != 0; ++i) {
    while (place + 1 < place_count && first[place + 1] <= i) ++place;
    const CUmemLocation& to = places[place];
    if (to.type == CU_MEM_LOCATION_TYPE_DEVICE) {
      to_device.push_back(addresses[i]);
    } else {
      to_host.push_back(i);
    }
    session.memory().managed_advice().Update(addresses[i], sizes[i], [&to](Advice& known) {
      known.last_prefetch = {int(to.type), to.type == CU_MEM_LOCATION_TYPE_HOST ? 0 : to.id};
    });
  }
  lock.Unlock();
  ManagedPages& pages = session.memory().managed_home().pages();
  // Not at once: the work before it in the stream is not done yet.
  for (const size_t i : to_host) pages.WillUse(addresses[i], sizes[i]);
  return pages.HandOver(&session.channel(), to_device);
}

// A place as a device number.
int DeviceNumber(const Advice::Place& place) {
  if (place.type == CU_MEM_LOCATION_TYPE_INVALID) return CU_DEVICE_INVALID;
  return place.type == CU_MEM_LOCATION_TYPE_DEVICE ? place.id : CU_DEVICE_CPU;
}

// One attribute of a range that is known to be managed. Under the lock of KnownMemory.
CUresult RangeAttribute(Session& session, void* data, size_t data_bytes, CUmem_range_attribute attribute,
                        CUdeviceptr address, size_t bytes) {
  if (!data || data_bytes == 0 || data_bytes % sizeof(int) != 0) return CUDA_ERROR_INVALID_VALUE;
  if (attribute != CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY && data_bytes != sizeof(int)) return CUDA_ERROR_INVALID_VALUE;
  bool first = true, read_mostly = true;
  Advice::Place preferred, last;
  std::set<int> accessed_by;
  // What holds for all pages; where they differ, nothing does.
  session.memory().managed_advice().Visit(address, bytes, [&](const Advice& advice) {
    read_mostly = read_mostly && advice.read_mostly;
    if (first) {
      preferred = advice.preferred;
      last = advice.last_prefetch;
      accessed_by = advice.accessed_by;
    }
    if (!(preferred == advice.preferred)) preferred = {};
    if (!(last == advice.last_prefetch)) last = {};
    for (auto it = accessed_by.begin(); it != accessed_by.end();) {
      it = advice.accessed_by.count(*it) != 0 ? std::next(it) : accessed_by.erase(it);
    }
    first = false;
  });
  int value;
  switch (attribute) {
    case CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY:
      value = read_mostly;
      break;
    case CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION:
      value = DeviceNumber(preferred);
      break;
    case CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION:
      value = DeviceNumber(last);
      break;
    case CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_TYPE:
      value = preferred.type;
      break;
    case CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_ID:
      value = preferred.type == CU_MEM_LOCATION_TYPE_INVALID ? CU_DEVICE_INVALID : preferred.id;
      break;
    case CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION_TYPE:
      value = last.type;
      break;
    case CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION_ID:
      value = last.type == CU_MEM_LOCATION_TYPE_INVALID ? CU_DEVICE_INVALID : last.id;
      break;
    case CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY: {
      std::vector<int> devices(accessed_by.begin(), accessed_by.end());
      devices.resize(data_bytes / sizeof(int), CU_DEVICE_INVALID);
      memcpy(data, devices.data(), data_bytes);
      return CUDA_SUCCESS;
    }
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
  memcpy(data, &value, sizeof(value));
  return CUDA_SUCCESS;
}

// Managed memory that lies in this process's memory: the server shares it, or it is mirrored.
CUresult AllocateInHostMemory(Session& session, size_t bytes, int device, uint64_t* address) {
  void* const memory = session.memory().host_arena().Allocate(bytes);
  if (!memory) return CUDA_ERROR_OUT_OF_MEMORY;
  HostArena::KeepFromChildren(memory, bytes);
  *address = reinterpret_cast<uint64_t>(memory);
  CUresult result = session.memory().host_mappings().MapManaged(*address, bytes, device);
  if (result == CUDA_SUCCESS && !session.shared_memory()) {
    result = session.memory().managed_mirror().Add(&session.channel(), *address, bytes, *address,
                                                   ManagedMirror::Writers::kNobodyBesideTheGpu);
    if (result != CUDA_SUCCESS) session.memory().host_mappings().Unmap(*address);
  }
  if (result == CUDA_SUCCESS && session.shared_memory())
    session.memory().managed_mirror().WatchShared(*address, HostArena::RoundUp(bytes));
  if (result != CUDA_SUCCESS) session.memory().host_arena().Free(memory, bytes);
  return result;
}

}  // namespace

bool FindManaged(Session& session, uint64_t address, size_t bytes) {
  ReaderLock lock(&session.memory().mutex());
  return IsManagedLocked(session, address, bytes);
}

bool FreeManaged(Call& call, uint64_t address, CUresult* result) {
  Session& session = call.session();
  if (!session.memory().uses_managed()) return false;
  uint64_t bytes;
  {
    WriterLock lock(&session.memory().mutex());
    const auto* range = session.memory().device_ranges().At(address);
    if (!range || range->value.source != DeviceRange::kManaged) return false;
    bytes = range->bytes;
    session.memory().device_ranges().Erase(address);
    session.memory().managed_advice().Forget(address, bytes);
  }
  {
    // Graphs that copy it go from the log.
    WriterLock lock(&session.objects().mutex());
    session.objects().DropLocked({Kind::kHostMemory, address});
  }
  if (HostArena::IsManaged(address)) {
    *result = session.memory().managed_home().Free(address, bytes);
    // The program may take the free for the wait that it is.
    if (session.memory().managed_mirror().active()) session.memory().managed_mirror().Pull(&session.channel());
    return true;
  }
  session.memory().managed_mirror().Remove(address);
  session.memory().managed_mirror().UnwatchShared(address);
  // Waits for the GPU; only then may the pages go.
  *result = session.memory().host_mappings().Unmap(address);
  // The program may take the free for the wait that it is.
  if (session.memory().managed_mirror().active()) session.memory().managed_mirror().Pull(&session.channel());
  session.memory().host_arena().Free(reinterpret_cast<void*>(address), bytes);
  return true;
}

CUresult ShareVariable(Call& call, uint64_t address, uint64_t bytes, const char* name) {
  Session& session = call.session();
  ManagedMirror& mirror = session.memory().managed_mirror();
  session.memory().set_uses_managed();
  if (!mirror.MapVariable(address, bytes)) {
    return Call::Unsupported(name, "this process has something else where the driver put the __managed__ variable");
  }
  const CUresult result = mirror.AddVariable(&session.channel(), address, bytes);
  if (result != CUDA_SUCCESS) return result;
  const ChannelStatus status = mirror.Pull(&session.channel());
  return status == ChannelStatus::kOk ? CUDA_SUCCESS : session.Lose(status);
}

CUresult Custom_cuMemAllocManaged(CUdeviceptr* dptr, size_t bytesize, unsigned int flags) {
  if (!dptr || bytesize == 0 || (flags != CU_MEM_ATTACH_GLOBAL && flags != CU_MEM_ATTACH_HOST)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  Call call(info::k_cuMemAllocManaged);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  Session& session = call.session();
  session.memory().set_uses_managed();
  DeviceRange range;
  range.source = DeviceRange::kManaged;
  range.managed = range.sync_memops = true;
  range.context = call.thread().current_context();
  range.device = call.device();
  uint64_t address;
  CUresult result = session.memory().managed_home().Allocate(bytesize, range.device, &address);
  if (result == CUDA_ERROR_NOT_SUPPORTED || result == CUDA_ERROR_OUT_OF_MEMORY) {
    // Where the GPU cannot have it, or has no room for it, it is host memory.
    result = AllocateInHostMemory(session, bytesize, range.device, &address);
    if (flags == CU_MEM_ATTACH_HOST) session.memory().managed_mirror().UnwatchShared();
  } else if (result == CUDA_SUCCESS && flags == CU_MEM_ATTACH_HOST) {
    session.memory().managed_home().pages().Attach(address, bytesize, ManagedPages::kHost);
  }
  if (result != CUDA_SUCCESS) return result;
  WriterLock lock(&session.memory().mutex());
  range.buffer_id = session.memory().NextBufferIdLocked();
  session.memory().device_ranges().Insert(address, bytesize, range);
  lock.Unlock();
  // May itself lie in managed memory.
  *dptr = address;
  return CUDA_SUCCESS;
}

CUresult Custom_cuMemAdvise_v2(CUdeviceptr devPtr, size_t count, CUmem_advise advice, CUmemLocation location) {
  return Advise(devPtr, count, advice, location);
}

CUresult Custom_cuMemAdvise(CUdeviceptr devPtr, size_t count, CUmem_advise advice, CUdevice device) {
  return Advise(devPtr, count, advice, PlaceOf(device));
}

CUresult Custom_cuMemPrefetchAsync_v2(CUdeviceptr devPtr, size_t count, CUmemLocation location, unsigned int flags,
                                      CUstream hStream, bool per_thread) {
  if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
  const size_t first = 0;
  return Prefetch("cuMemPrefetchAsync", &devPtr, &count, 1, &location, &first, 1, hStream, per_thread);
}

CUresult Custom_cuMemPrefetchAsync(CUdeviceptr devPtr, size_t count, CUdevice dstDevice, CUstream hStream,
                                   bool per_thread) {
  return Custom_cuMemPrefetchAsync_v2(devPtr, count, PlaceOf(dstDevice), 0, hStream, per_thread);
}

CUresult Custom_cuMemPrefetchBatchAsync(CUdeviceptr* dptrs, size_t* sizes, size_t count, CUmemLocation* prefetchLocs,
                                        size_t* prefetchLocIdxs, size_t numPrefetchLocs, unsigned long long flags,
                                        CUstream hStream, bool per_thread) {
  if (flags != 0 || !prefetchLocs || !prefetchLocIdxs || numPrefetchLocs == 0) return CUDA_ERROR_INVALID_VALUE;
  if (IsLegacyStream(hStream, per_thread)) return CUDA_ERROR_INVALID_VALUE;
  return Prefetch("cuMemPrefetchBatchAsync", dptrs, sizes, count, prefetchLocs, prefetchLocIdxs, numPrefetchLocs,
                  hStream, per_thread);
}

// What is discarded may hold anything afterwards, also what it held before.
CUresult Custom_cuMemDiscardBatchAsync(CUdeviceptr* dptrs, size_t* sizes, size_t count, unsigned long long flags,
                                       CUstream hStream, bool per_thread) {
  if (flags != 0 || IsLegacyStream(hStream, per_thread)) return CUDA_ERROR_INVALID_VALUE;
  return Prefetch("cuMemDiscardBatchAsync", dptrs, sizes, count, nullptr, nullptr, 0, hStream, per_thread);
}

CUresult Custom_cuMemDiscardAndPrefetchBatchAsync(CUdeviceptr* dptrs, size_t* sizes, size_t count,
                                                  CUmemLocation* prefetchLocs, size_t* prefetchLocIdxs,
                                                  size_t numPrefetchLocs, unsigned long long flags, CUstream hStream,
                                                  bool per_thread) {
  return Custom_cuMemPrefetchBatchAsync(dptrs, sizes, count, prefetchLocs, prefetchLocIdxs, numPrefetchLocs, flags,
                                        hStream, per_thread);
}

// What matters here is what the host's accesses have to wait for.
CUresult Custom_cuStreamAttachMemAsync(CUstream hStream, CUdeviceptr dptr, size_t length, unsigned int flags,
                                       bool per_thread) {
  if (flags != CU_MEM_ATTACH_GLOBAL && flags != CU_MEM_ATTACH_HOST && flags != CU_MEM_ATTACH_SINGLE) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  Call call(info::k_cuStreamAttachMemAsync);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  uint64_t wire_stream;
  if (const CUresult result = call.StreamToWire(hStream, per_thread, &wire_stream); result != CUDA_SUCCESS)
    return result;
  if (flags == CU_MEM_ATTACH_SINGLE && wire_stream <= 1) return CUDA_ERROR_INVALID_VALUE;
  Session& session = call.session();
  size_t bytes;
  {
    ReaderLock lock(&session.memory().mutex());
    const auto* range = session.memory().device_ranges().At(dptr);
    if (!range || !range->value.managed || (length != 0 && length != range->bytes)) return CUDA_ERROR_INVALID_VALUE;
    bytes = range->bytes;
  }
  const uint64_t attached = flags == CU_MEM_ATTACH_GLOBAL ? ManagedPages::kGlobal
                            : flags == CU_MEM_ATTACH_HOST ? ManagedPages::kHost
                                                          : wire_stream;
  if (HostArena::IsManaged(dptr)) session.memory().managed_home().pages().Attach(dptr, bytes, attached);
  if (attached != ManagedPages::kGlobal) session.memory().managed_mirror().UnwatchShared();
  return CUDA_SUCCESS;
}

CUresult Custom_cuMemRangeGetAttribute(void* data, size_t dataSize, CUmem_range_attribute attribute, CUdeviceptr devPtr,
                                       size_t count) {
  Call call(info::k_cuMemRangeGetAttribute);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  Session& session = call.session();
  ReaderLock lock(&session.memory().mutex());
  if (count == 0 || !IsManagedLocked(session, devPtr, count)) return CUDA_ERROR_INVALID_VALUE;
  return RangeAttribute(session, data, dataSize, attribute, devPtr, count);
}

CUresult Custom_cuMemRangeGetAttributes(void** data, size_t* dataSizes, CUmem_range_attribute* attributes,
                                        size_t numAttributes, CUdeviceptr devPtr, size_t count) {
  if (!data || !dataSizes || !attributes || numAttributes == 0) return CUDA_ERROR_INVALID_VALUE;
  Call call(info::k_cuMemRangeGetAttributes);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  Session& session = call.session();
  ReaderLock lock(&session.memory().mutex());
  if (count == 0 || !IsManagedLocked(session, devPtr, count)) return CUDA_ERROR_INVALID_VALUE;
  for (size_t i = 0; i < numAttributes; ++i) {
    const CUresult result = RangeAttribute(session, data[i], dataSizes[i], attributes[i], devPtr, count);
    if (result != CUDA_SUCCESS) return result;
  }
  return CUDA_SUCCESS;
}

}  // namespace cuda_remote::client
