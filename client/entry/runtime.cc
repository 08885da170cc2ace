#include "client/entry/runtime.h"

#include "client/custom/graph_names.h"
#include "client/custom/managed.h"
#include "client/custom/mapped_memory.h"
#include "client/custom/pointer.h"
#include "client/session/thread_state.h"

namespace cuda_remote::client {

replay::ObjectKey CurrentContextKey(Call& call) { return {Kind::kContext, call.thread().current_context()}; }

CUresult NameNodesOf(Call& call, uint64_t graph_or_node) { return NameNodes(call.session(), graph_or_node); }

bool LooksLikeDeviceMemory(Call& call, CUdeviceptr address) {
  // Pinned memory is the GPU's as well; a server that does not share it must have it first.
  uint64_t device;
  if (HostArena::Contains(address)) MapForDevice(call, address, &device);
  // What the host uses too is waited for: a fill of it has been done when the call returns.
  return IsDevicePointer(call.session(), address) && !IsManaged(call.session(), address, 1);
}

}  // namespace cuda_remote::client
