// SPDX-License-Identifier: Apache-2.0
#include "client/custom/runtime.h"

#include "client/custom/graph_memory.h"
#include "client/custom/graph_names.h"
#include "client/custom/managed.h"
#include "client/custom/mapped_memory.h"
#include "client/custom/staged_node.h"
#include "client/session/host_needs.h"
#include "client/session/session.h"
#include "client/session/thread_state.h"

namespace cuda_remote::client {

replay::ObjectKey CurrentContextKey(Call& call) { return {Kind::kContext, call.thread().current_context()}; }

replay::ObjectKey StreamKey(Call& call, uint64_t stream) {
  return KindOf(stream) == Kind::kStream ? ObjectOf(stream) : CurrentContextKey(call);
}

replay::ObjectKey MemoryKey(Call& call, CUdeviceptr address) { return MemoryAt(&call.session(), address); }

CUresult NameNodesOf(Call& call, uint64_t graph_or_node) { return NameNodes(call.session(), graph_or_node); }

CUresult PrepareCapture(Call& call, uint64_t graph) { return PrepareCaptureInto(call.session(), graph); }

CUresult CheckWithoutMemoryNodes(Call& call, uint64_t graph) { return CheckWithoutMemory(call.session(), graph); }

CUresult CheckChildGraph(Call& call, uint64_t graph) {
  const CUresult result = CheckWithoutMemory(call.session(), graph);
  return result == CUDA_SUCCESS ? CheckMayBeChild(call.session(), graph) : result;
}

bool KnowsDeviceRange(Call& call, CUdeviceptr address, uint64_t bytes) {
  // Pinned memory is the GPU's as well; a server that does not share it must have it first.
  uint64_t device;
  if (HostArena::Contains(address)) MapForDevice(call, address, &device);
  // What the host uses too is waited for: a fill of it has been done when the call returns.
  if (IsManaged(call.session(), address, 1)) return false;
  ReaderLock lock(&call.session().memory().mutex());
  const auto* const range = call.session().memory().device_ranges().Find(address);
  return range && range->Contains(address, bytes);
}

}  // namespace cuda_remote::client
