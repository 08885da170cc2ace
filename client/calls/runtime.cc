// SPDX-License-Identifier: Apache-2.0
#include "client/calls/runtime.h"

#include "client/calls/copy.h"
#include "client/calls/graph_memory.h"
#include "client/calls/graph_names.h"
#include "client/calls/managed.h"
#include "client/calls/mapped_memory.h"
#include "client/calls/staged_node.h"
#include "client/core/session.h"
#include "client/core/thread_state.h"
#include "client/graphs/host_needs.h"
#include "proto/codec/codec.h"
#include "proto/codec/decode_as.h"

namespace cuda_remote::client {

replay::ObjectKey CurrentContextKey(Call& call) { return {Kind::kContext, call.thread().current_context()}; }

replay::ObjectKey StreamKey(Call& call, uint64_t stream) {
  return KindOf(stream) == Kind::kStream ? ObjectOf(stream) : CurrentContextKey(call);
}

replay::ObjectKey MemoryKey(Call& call, CUdeviceptr address) { return MemoryAt(&call.session().memory(), address); }

CUresult NameNodesOf(Call& call, uint64_t graph_or_node) { return NameNodes(call.session(), graph_or_node); }

CUresult PrepareCapture(Call& call, uint64_t graph) { return PrepareCaptureInto(call.session(), graph); }

CUresult PrepareDestruction(Call& call, uint64_t handle) {
  Session& session = call.session();
  if (!session.graphs().captures().active()) return CUDA_SUCCESS;
  ReaderLock lock(&session.objects().mutex());
  const Object* const object = session.objects().handles().Find(KindOf(handle), handle);
  if (!object) return CUDA_SUCCESS;
  if (KindOf(handle) == Kind::kEvent) {
    session.graphs().captures().Goes(wire::CapturedEvent{handle, object->parent});
    return CUDA_SUCCESS;
  }
  // The driver refuses to say of a captured stream how it was made, and ends the capture.
  wire::CapturedStream stream{handle, object->parent};
  if (const replay::Record* const made = session.objects().log().Find(ObjectOf(handle))) {
    wire::cuStreamCreate_Request plain;
    wire::cuStreamCreateWithPriority_Request with_priority;
    wire::cuGreenCtxStreamCreate_Request green;
    const auto take = [&stream](const auto& request) {
      stream.flags = request.flags;
      stream.priority = request.priority;
    };
    const uint32_t call = made->header.call;
    if (wire::DecodeAs(call, made->message, &plain)) stream.flags = plain.Flags;
    if (wire::DecodeAs(call, made->message, &with_priority)) take(with_priority);
    if (wire::DecodeAs(call, made->message, &green)) take(green);
  }
  session.graphs().captures().Goes(stream);
  return CUDA_SUCCESS;
}

CUresult CheckWithoutMemoryNodes(Call& call, uint64_t graph) { return CheckWithoutMemory(call.session(), graph); }

CUresult CheckChildGraph(Call& call, uint64_t graph) {
  const CUresult result = CheckWithoutMemory(call.session(), graph);
  return result == CUDA_SUCCESS ? PrepareCopies(call.session(), graph) : result;
}

CUresult CheckFill(Call& call, const CUDA_MEMSET_NODE_PARAMS_v1& fill) {
  if (fill.width == 0 || fill.height == 0) return CUDA_ERROR_INVALID_VALUE;
  uint64_t row, bytes;
  // What does not fit an address space is for the driver to judge.
  if (__builtin_mul_overflow(uint64_t{fill.width}, uint64_t{fill.elementSize}, &row) ||
      __builtin_mul_overflow(uint64_t{fill.height - 1}, uint64_t{fill.pitch}, &bytes) ||
      __builtin_add_overflow(bytes, row, &bytes)) {
    return CUDA_SUCCESS;
  }
  return LeavesMemory(call.session(), fill.dst, bytes, true) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

bool KnowsDeviceRange(Call& call, CUdeviceptr address, uint64_t bytes) {
  // What the host uses too is waited for: a fill of it has been done when the call returns.
  if (IsManaged(call.session(), address, 1)) return false;
  KnownMemory& memory = call.session().memory();
  {
    ReaderLock lock(&memory.mutex());
    const auto* const range = memory.device_ranges().Find(address);
    if (range) return range->Contains(address, bytes);
  }
  // Pinned and registered memory is the GPU's as well; a server that does not share it must have it first.
  uint64_t device;
  if (HostArena::Contains(address) || memory.uses_registered()) MapForDevice(call, address, &device);
  return false;
}

}  // namespace cuda_remote::client
