// SPDX-License-Identifier: Apache-2.0
// Device memory. The server chooses addresses in its arena; the record of an allocation asks for exactly the address
// that it got, so that a restart puts the same bytes at the same place.

#include <cuda.h>

#include <algorithm>
#include <vector>

#include "client/calls/bodies.gen.h"
#include "client/calls/graph_memory.h"
#include "client/calls/ipc.h"
#include "client/calls/managed.h"
#include "client/core/call.h"
#include "client/core/session.h"
#include "proto/codec/codec.h"
#include "proto/driverabi/requests.h"

namespace cuda_remote::client {
namespace {

using driverabi::kAllocateStreamOrdered;

// What freed_memory.h keeps is one stream's own; both names of the legacy default stream are the same stream. Captured
// allocations and frees are nodes of a graph, and with CUDA_REMOTE_SYNC every call is to reach the server.
bool MayKeepFreed(Session& session) { return !session.graphs().captures().active() && !session.settings().sync; }
uint64_t KeptStream(uint64_t stream) { return stream == 1 ? 0 : stream; }

// Says which device and pool the allocation comes from (the request names a pool, or none: the current one), and takes
// it from what the same stream has freed. True if there was such memory.
bool TakeFreed(Call& call, wire::OpMemAlloc_Request* request, CUdeviceptr* dptr) {
  Session& session = call.session();
  const bool may_keep = MayKeepFreed(session);
  FreedMemory::Block wanted;
  wanted.bytes = request->bytes;
  wanted.stream = KeptStream(request->stream);
  wanted.context = call.thread().current_context();
  const int device = call.device();
  WriterLock lock(&session.memory().mutex());
  const PoolAccounts::Place place = session.memory().pools().PlaceOf(request->pool, device);
  wanted.device = request->device = place.device;
  wanted.pool = request->pool = place.pool;
  if (!may_keep || session.memory().freed().empty()) return false;
  const uint64_t address = session.memory().freed().Take(wanted);
  if (address == 0) return false;
  DeviceRange range;
  range.source = DeviceRange::kStreamOrdered;
  range.device = wanted.device;
  range.context = wanted.context;
  range.pool = wanted.pool;
  range.buffer_id = session.memory().NextBufferIdLocked();
  session.memory().InsertPoolMemoryLocked(address, wanted.bytes, range);
  *dptr = address;
  return true;
}

// Keeps freed memory for the stream's next allocation. False if it is not of the kind that can be kept.
bool KeepFreed(Call& call, CUdeviceptr dptr, uint64_t stream) {
  Session& session = call.session();
  if (!MayKeepFreed(session)) return false;
  std::vector<FreedMemory::Block> out;
  {
    WriterLock lock(&session.memory().mutex());
    const auto* const range = session.memory().device_ranges().At(dptr);
    if (!range || range->value.source != DeviceRange::kStreamOrdered ||
        range->value.context != call.thread().current_context()) {
      return false;
    }
    FreedMemory::Block block;
    block.address = dptr;
    block.bytes = range->bytes;
    block.stream = KeptStream(stream);
    block.context = range->value.context;
    block.pool = range->value.pool;
    block.device = range->value.device;
    session.memory().EraseDeviceRangeLocked(dptr);
    session.memory().freed().Keep(block, &out);
  }
  session.memory().GiveBack(out);
  return true;
}

// Sends the request, records it with the address it got, and makes the range known.
CUresult Allocate(Call& call, wire::OpMemAlloc_Request& request, CUdeviceptr* dptr, size_t* pitch,
                  bool for_graph = false) {
  Session& session = call.session();
  request.Encode(&call.message());
  if (const CUresult result = call.Transact(); result != CUDA_SUCCESS) return result;
  wire::OpMemAlloc_Reply reply;
  if (!reply.Decode(call.reply())) return session.Lose(ChannelStatus::kProtocolError);
  *dptr = reply.address;
  if (pitch) *pitch = reply.pitch;
  DeviceRange range;
  range.source = request.flags & kAllocateStreamOrdered ? DeviceRange::kStreamOrdered : DeviceRange::kAllocation;
  if (for_graph) range.source = DeviceRange::kGraph;
  range.device = request.device;
  range.context = call.thread().current_context();
  range.pool = request.pool;
  {
    WriterLock lock(&session.memory().mutex());
    range.buffer_id = session.memory().NextBufferIdLocked();
    if (range.source == DeviceRange::kStreamOrdered) {
      session.memory().InsertPoolMemoryLocked(reply.address, reply.bytes, range);
    } else {
      session.memory().device_ranges().Insert(reply.address, reply.bytes, range);
    }
  }
  request.at = reply.address;
  request.stream = 0;  // the stream may be gone by the time of a restart, and then there is nothing to be in order with
  call.message().clear();
  request.Encode(&call.message());
  call.Created({Kind::kDeviceMemory, reply.address});
  return CUDA_SUCCESS;
}

CUresult AllocateStreamOrdered(const CallInfo& info, CUdeviceptr* dptr, size_t bytesize, CUmemoryPool pool,
                               CUstream hStream, bool per_thread) {
  if (!dptr) return CUDA_ERROR_INVALID_VALUE;
  Call call(info);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  wire::OpMemAlloc_Request request;
  request.bytes = bytesize;
  request.flags = kAllocateStreamOrdered;
  if (const CUresult result = call.StreamToWire(hStream, per_thread, &request.stream); result != CUDA_SUCCESS) {
    return result;
  }
  if (pool) {
    request.pool = reinterpret_cast<uint64_t>(pool);
    if (!call.Valid(Kind::kMemoryPool, request.pool)) return CUDA_ERROR_INVALID_HANDLE;
  }
  if (bytesize == 0) {
    *dptr = 0;
    return CUDA_SUCCESS;
  }
  if (call.session().graphs().captures().IsCaptured(request.stream)) {
    return CaptureAllocation(call, request.stream, bytesize, request.pool, dptr);
  }
  if (TakeFreed(call, &request, dptr)) return CUDA_SUCCESS;
  return Allocate(call, request, dptr, nullptr);
}

// Whether `address` is the start of a live allocation, and, where that is asked, whether of a pool.
bool IsAllocation(Session& session, uint64_t address, bool* of_pool = nullptr) {
  ReaderLock lock(&session.memory().mutex());
  const auto* range = session.memory().device_ranges().At(address);
  const bool pool = range && range->value.source == DeviceRange::kStreamOrdered;
  if (of_pool) *of_pool = pool;
  return pool || (range && range->value.source == DeviceRange::kAllocation);
}

}  // namespace

CUresult AllocateForGraph(const CallInfo& info, uint64_t bytes, int device, CUdeviceptr* dptr) {
  Call call(info);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  call.set_id(kOpMemAlloc);
  wire::OpMemAlloc_Request request;
  request.bytes = bytes;
  request.device = device;
  return Allocate(call, request, dptr, nullptr, true);
}

CUresult Custom_cuMemAlloc_v2(CUdeviceptr* dptr, size_t bytesize) {
  if (!dptr || bytesize == 0) return CUDA_ERROR_INVALID_VALUE;
  Call call(info::k_cuMemAlloc_v2);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  wire::OpMemAlloc_Request request;
  request.bytes = bytesize;
  request.device = call.device();
  return Allocate(call, request, dptr, nullptr);
}

CUresult Custom_cuMemAllocPitch_v2(CUdeviceptr* dptr, size_t* pPitch, size_t WidthInBytes, size_t Height,
                                   unsigned int ElementSizeBytes) {
  if (!dptr || !pPitch || WidthInBytes == 0 || Height == 0) return CUDA_ERROR_INVALID_VALUE;
  if (ElementSizeBytes != 4 && ElementSizeBytes != 8 && ElementSizeBytes != 16) return CUDA_ERROR_INVALID_VALUE;
  Call call(info::k_cuMemAllocPitch_v2);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  wire::OpMemAlloc_Request request;
  request.pitch_width = WidthInBytes;
  request.pitch_height = Height;
  request.device = call.device();
  return Allocate(call, request, dptr, pPitch);
}

CUresult Custom_cuMemFree_v2(CUdeviceptr dptr) {
  if (IsPoolImport(dptr)) return CloseImport(dptr);
  Call call(info::k_cuMemFree_v2);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  if (dptr == 0) return CUDA_SUCCESS;
  if (CUresult result; FreeManaged(call, dptr, &result)) return result;
  if (CUresult result; FreeOfGraph(call.session(), dptr, &result)) {
    // As natively, all work is done when the call returns.
    return result == CUDA_SUCCESS ? Call_cuCtxSynchronize() : result;
  }
  bool of_pool = false;
  if (!IsAllocation(call.session(), dptr, &of_pool)) return CUDA_ERROR_INVALID_VALUE;
  wire::OpMemFree_Request request;
  request.address = dptr;
  request.Encode(&call.message());
  // Before the server frees it: from then on another thread may be given the same address.
  call.Destroyed({Kind::kDeviceMemory, dptr});
  const CUresult result = call.Transact();
  if (result == CUDA_SUCCESS && of_pool) call.session().memory().NoteWaited();
  return result;
}

CUresult Custom_cuMemAllocAsync(CUdeviceptr* dptr, size_t bytesize, CUstream hStream, bool per_thread) {
  return AllocateStreamOrdered(info::k_cuMemAllocAsync, dptr, bytesize, nullptr, hStream, per_thread);
}

CUresult Custom_cuMemAllocFromPoolAsync(CUdeviceptr* dptr, size_t bytesize, CUmemoryPool pool, CUstream hStream,
                                        bool per_thread) {
  if (!pool) return CUDA_ERROR_INVALID_VALUE;
  return AllocateStreamOrdered(info::k_cuMemAllocFromPoolAsync, dptr, bytesize, pool, hStream, per_thread);
}

CUresult Custom_cuMemGetInfo_v2(size_t* free, size_t* total) {
  Call call(info::k_cuMemGetInfo_v2);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  // What the application has freed is free.
  call.session().memory().GiveBackFreed();
  wire::cuMemGetInfo_v2_Request{}.Encode(&call.message());
  if (const CUresult result = call.Transact(); result != CUDA_SUCCESS) return result;
  wire::cuMemGetInfo_v2_Reply reply;
  if (!reply.Decode(call.reply())) return call.session().Lose(ChannelStatus::kProtocolError);
  if (free) {
    Session& session = call.session();
    const int device = call.device();
    ReaderLock lock(&session.memory().mutex());
    // What pools keep by their threshold is theirs, though nothing holds it: an allocation that needs it has it.
    *free = size_t(reply.free - std::min(reply.free, session.memory().pools().IdleOn(device)));
  }
  if (total) *total = size_t(reply.total);
  return CUDA_SUCCESS;
}

CUresult Custom_cuMemFreeAsync(CUdeviceptr dptr, CUstream hStream, bool per_thread) {
  if (IsPoolImport(dptr)) {
    // Another session's memory: it is let go of at once, after the stream.
    const CUresult result = Custom_cuStreamSynchronize(hStream, per_thread);
    return result == CUDA_SUCCESS ? CloseImport(dptr) : result;
  }
  Call call(info::k_cuMemFreeAsync);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  if (dptr == 0) return CUDA_SUCCESS;
  wire::OpMemFree_Request request;
  request.address = dptr;
  request.stream_ordered = true;
  if (const CUresult result = call.StreamToWire(hStream, per_thread, &request.stream); result != CUDA_SUCCESS) {
    return result;
  }
  if (call.session().graphs().captures().IsCaptured(request.stream)) return CaptureFree(call, request.stream, dptr);
  if (CUresult result; FreeOfGraph(call.session(), dptr, &result)) return result;
  if (KeepFreed(call, dptr, request.stream)) return CUDA_SUCCESS;
  if (!IsAllocation(call.session(), dptr)) {
    // Managed memory cannot be freed in a stream, as natively.
    ReaderLock lock(&call.session().memory().mutex());
    const auto* const range = call.session().memory().device_ranges().At(dptr);
    const bool managed = range && range->value.source == DeviceRange::kManaged;
    return managed ? CUDA_ERROR_NOT_SUPPORTED : CUDA_ERROR_INVALID_VALUE;
  }
  request.Encode(&call.message());
  // As in cuMemFree, but the driver may refuse while a stream is captured: then the memory stays the application's. A
  // checkpoint drains the streams first, so by then the memory is free in the stream's order too.
  const bool may_stay = call.session().graphs().captures().active();
  if (!may_stay) call.Destroyed({Kind::kDeviceMemory, dptr});
  const CUresult result = call.Transact();
  if (may_stay && result == CUDA_SUCCESS) call.Destroyed({Kind::kDeviceMemory, dptr});
  return result;
}

}  // namespace cuda_remote::client
