// SPDX-License-Identifier: Apache-2.0
// What generated bodies use besides Call: moving values between the caller's memory and messages.
//
// This header is part of the client library: no libprotobuf, no abseil, no logging.
#ifndef CUDA_REMOTE_CLIENT_CALLS_RUNTIME_H_
#define CUDA_REMOTE_CLIENT_CALLS_RUNTIME_H_

#include <cuda.h>

#include <cstdint>
#include <cstring>
#include <string_view>

#include "client/core/call.h"
#include "client/core/setting_keys.h"
#include "proto/api/attribute_sizes.h"
#include "proto/frame/frame.h"

namespace cuda_remote::client {

// The reply of a call cannot be understood: the server is not what it says it is.
inline constexpr CUresult kBadReply = CUDA_ERROR_UNKNOWN;

// Whether an array fits into a message beside everything else.
inline bool Fits(uint64_t count, size_t element) { return count <= kMaxMessageBytes / 4 / element; }

// An array that does not: refused by name rather than cut.
inline CUresult TooLong(const CallInfo& info) {
  return Call::Unsupported(info.name, "an array is longer than a message");
}

template <typename T>
std::string_view ArrayBytes(const T* values, uint64_t count) {
  return {reinterpret_cast<const char*>(values), count * sizeof(T)};
}

// Copies a struct or value out of a reply; false if its length is not exactly `size`.
inline bool TakeExactly(std::string_view bytes, void* to, size_t size) {
  if (bytes.size() != size) return false;
  std::memcpy(to, bytes.data(), size);
  return true;
}

// Copies at most `count` elements out of a reply; false if there are more or a torn one.
template <typename T>
bool TakeArray(std::string_view bytes, uint64_t count, T* to) {
  if (bytes.size() % sizeof(T) != 0 || bytes.size() / sizeof(T) > count) return false;
  if (!bytes.empty()) std::memcpy(to, bytes.data(), bytes.size());
  return true;
}

// Whether all handles of an array are live.
template <typename T>
bool AllValid(Call& call, Kind kind, const T* handles, uint64_t count) {
  for (uint64_t i = 0; i < count; ++i) {
    if (!call.Valid(kind, handles[i])) return false;
  }
  return true;
}

// The log's name of the object behind a virtual handle.
inline replay::ObjectKey ObjectOf(uint64_t handle) { return {KindOf(handle), handle}; }

// The log's name of the calling thread's current context.
replay::ObjectKey CurrentContextKey(Call& call);

// The log's name of a stream as it goes on the wire. A default stream is its context's: that of the current one.
replay::ObjectKey StreamKey(Call& call, uint64_t stream);

// The log's name of the memory in which an address lies; none if there is no such memory.
replay::ObjectKey MemoryKey(Call& call, CUdeviceptr address);

// Sees to it that all nodes of a graph, or of a node's graph, have handles, before a call whose answer names them.
CUresult NameNodesOf(Call& call, uint64_t graph_or_node);

// Before a capture adds to a graph (graph_names.h).
CUresult PrepareCapture(Call& call, uint64_t graph);

// Before a stream or an event is destroyed: a capture in progress that it has a part in notes what it was.
CUresult PrepareDestruction(Call& call, uint64_t handle);

// The error of calls that a graph which allocates or frees memory does not allow.
CUresult CheckWithoutMemoryNodes(Call& call, uint64_t graph);
// The same for a graph that is to be a child of another one, which some other graphs cannot be, either.
CUresult CheckChildGraph(Call& call, uint64_t graph);

// What the driver refuses of a node that fills memory: an empty rectangle, and one that leaves its memory, which the
// server's driver does not see.
CUresult CheckFill(Call& call, const CUDA_MEMSET_NODE_PARAMS_v1& fill);

// Whether the client knows [address, address + bytes) to be device memory. A "no" only costs a wait for the server's
// own answer. Has the server map pinned memory that it does not have yet.
bool KnowsDeviceRange(Call& call, CUdeviceptr address, uint64_t bytes);

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_CALLS_RUNTIME_H_
