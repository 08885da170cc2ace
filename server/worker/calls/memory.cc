// SPDX-License-Identifier: Apache-2.0
// Device memory from the arena: plain, pitched and stream-ordered.
//
// A plain free waits, as natively, until nothing can use the memory any more - but not here: a waiter does, unless
// nothing can be running. A stream-ordered free leaves an event in its stream; the memory is free when the event has
// passed. (For the stream's next allocation of the same size the client keeps it: client/memory/freed_memory.h.)

#include <cuda.h>

#include "proto/codec/operations.gen.h"
#include "proto/driverabi/requests.h"
#include "proto/logging/log.h"
#include "server/dispatch/malformed.h"
#include "server/worker/calls/handlers.gen.h"
#include "server/worker/calls/work.h"
#include "server/worker/memory/snapshot_memory.h"
#include "server/worker/session/driver_hooks.h"
#include "server/worker/session/failures.h"
#include "server/worker/session/worker_session.h"

namespace cuda_remote::server {
namespace {

// Row pitch of pitched memory: what the driver itself uses on all GPUs of the last decade.
constexpr uint64_t kPitch = 512;

// Whether a pool has room: it may have been made with a limit. Its memory is the arena's, so the driver does not count.
bool FitsIntoPool(WorkerSession& session, uint64_t pool, uint64_t bytes) {
  CUmemPoolProps props;
  if (pool == 0 || !PropsOfPool(reinterpret_cast<CUmemoryPool>(pool), &props) || props.maxSize == 0) return true;
  uint64_t used = 0;
  for (const auto& [address, range] : session.ranges().all()) {
    if (range.pool == pool) used += range.bytes;
  }
  return used <= props.maxSize && bytes <= props.maxSize - used;
}

}  // namespace

CUresult OpMemAlloc(WorkerSession& session, const Request&, const wire::OpMemAlloc_Request& in,
                    wire::OpMemAlloc_Reply* out, ReplyBuilder*) {
  if (in.flags == driverabi::kAllocateSnapshot) {
    const ContextRef context = session.contexts().On(in.device);
    if (context.id == 0) return CUDA_ERROR_INVALID_CONTEXT;
    CUresult result = MakeCurrent(session.driver(), context);
    if (result == CUDA_SUCCESS) result = SnapshotMemory::Get().Allocate(in.device, in.bytes, &out->address);
    MakeCurrent(session.driver(), session.contexts().current_ref());
    return result;
  }
  if (in.flags & ~driverabi::kAllocateStreamOrdered) return kMalformedRequest;
  session.ipc().ForgetOffers();  // of a move that has come to nothing: a job that moves makes no calls
  if (in.device < 0 || size_t(in.device) >= session.loaded().devices.size()) return CUDA_ERROR_INVALID_DEVICE;
  uint64_t bytes = in.bytes;
  uint64_t pitch = 0;
  if (in.pitch_width != 0) {
    if (in.bytes != 0 || in.pitch_height == 0) return kMalformedRequest;
    if (in.pitch_width > kArenaBytes || in.pitch_height > kArenaBytes) return CUDA_ERROR_OUT_OF_MEMORY;
    pitch = (in.pitch_width + kPitch - 1) / kPitch * kPitch;
    if (pitch > kArenaBytes / in.pitch_height) return CUDA_ERROR_OUT_OF_MEMORY;
    bytes = pitch * in.pitch_height;
  }
  if (bytes == 0) return CUDA_ERROR_INVALID_VALUE;
  const bool ordered = (in.flags & driverabi::kAllocateStreamOrdered) != 0;
  CUstream stream = nullptr;
  if (ordered && !session.RealStream(in.stream, &stream)) return CUDA_ERROR_INVALID_HANDLE;
  uint64_t pool = 0;
  // In a replay the pool may be gone, though its memory is not.
  if (in.pool != 0 && !session.Real(Kind::kMemoryPool, in.pool, &pool) && in.at == 0) return CUDA_ERROR_INVALID_HANDLE;
  if (in.pool != 0 && session.ipc().Holds(in.pool)) return CUDA_ERROR_INVALID_VALUE;  // another session's
  if (ordered && IsCaptured(stream)) {
    logging::Warn("cuMemAllocAsync in a stream that is being captured is not supported");
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  // No call of the driver's would give the error of a kernel that failed.
  if (const CUresult stuck = StickyError(session.driver()); stuck != CUDA_SUCCESS) return stuck;
  if (in.at == 0 && !FitsIntoPool(session, pool, bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
  // Drivers may want a context to map memory, and the record of a pool's memory names none.
  const bool borrows = session.contexts().current_ref().id == 0;
  if (borrows) MakeCurrent(session.driver(), session.contexts().On(in.device));
  if (!session.frees().empty() && CapturesInProgress() == 0) session.frees().Collect(false);
  uint64_t address = 0;
  CUresult result = session.arena().Allocate(in.device, bytes, in.at, &address);
  if (result == CUDA_ERROR_OUT_OF_MEMORY && !session.frees().empty() && CapturesInProgress() == 0) {
    session.frees().Collect(true);
    result = session.arena().Allocate(in.device, bytes, in.at, &address);
  }
  if (borrows) MakeCurrent(session.driver(), session.contexts().current_ref());
  if (result != CUDA_SUCCESS) return result;
  DeviceRange range;
  range.bytes = bytes;
  range.kind = ordered ? DeviceRange::kStreamOrdered : DeviceRange::kAllocation;
  range.device = in.device;
  range.context = session.CurrentContext();
  range.pool = pool;
  session.ranges().Insert(address, range);
  out->address = address;
  out->pitch = pitch;
  out->bytes = bytes;
  return CUDA_SUCCESS;
}

CUresult OpMemFree(WorkerSession& session, const Request&, const wire::OpMemFree_Request& in, wire::OpMemFree_Reply*,
                   ReplyBuilder* reply) {
  if (SnapshotMemory::Get().Free(in.address)) return CUDA_SUCCESS;
  const DeviceRange* const range = session.ranges().At(in.address);
  if (range == nullptr || (range->kind != DeviceRange::kAllocation && range->kind != DeviceRange::kStreamOrdered)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  session.ipc().Forget(in.address);
  session.ipc().ForgetOffers();
  const DriverTable* const driver = &session.driver();
  if (in.stream_ordered) {
    CUstream stream;
    if (!session.RealStream(in.stream, &stream)) return CUDA_ERROR_INVALID_HANDLE;
    if (session.contexts().current_ref().id == 0) return CUDA_ERROR_INVALID_CONTEXT;
    if (IsCaptured(stream)) {
      logging::Warn("cuMemFreeAsync in a stream that is being captured is not supported");
      return CUDA_ERROR_NOT_SUPPORTED;
    }
    CUevent event = nullptr;
    CUresult result = driver->cuEventCreate(&event, CU_EVENT_DISABLE_TIMING);
    if (result != CUDA_SUCCESS) return result;
    result = driver->cuEventRecord(event, stream);
    if (result != CUDA_SUCCESS) {
      driver->cuEventDestroy_v2(event);
      return result;
    }
    session.frees().Add({event, in.stream, session.contexts().current_ref(), in.address});
    session.ranges().Erase(in.address);
    return CUDA_SUCCESS;
  }
  const int gpu = range->device;
  session.ranges().Erase(in.address);
  DeviceArena* const arena = &session.arena();
  if (session.work().idle()) {
    arena->Free(in.address);
    return CUDA_SUCCESS;
  }
  // What may use it ends first, as natively. A kernel of another GPU may wait for what the program does next.
  const std::function<CUresult()> wait = WaitFor(session, WorkOnMemoryOf(session, gpu));
  const ContextRef context = session.contexts().Any();
  session.answers().DeferIn(context, reply, [driver, arena, context, wait, address = in.address](Answer*) {
    // A context whose work has failed runs nothing any more.
    NoteResult(wait());
    arena->Free(address);
    return MakeCurrent(*driver, context) == CUDA_SUCCESS ? StickyError(*driver) : CUDA_SUCCESS;
  });
  return CUDA_SUCCESS;
}

}  // namespace cuda_remote::server
