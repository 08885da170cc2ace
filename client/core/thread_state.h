// SPDX-License-Identifier: Apache-2.0
// What the driver keeps for each thread: the context stack, and the hidden stream behind the per-thread default stream.
//
// A ThreadState belongs to one thread and needs no lock. It outlives the thread's C++ thread_local objects on purpose:
// the CUDA runtime makes driver calls from its own exit handlers, when those are gone already.
#ifndef CUDA_REMOTE_CLIENT_CORE_THREAD_STATE_H_
#define CUDA_REMOTE_CLIENT_CORE_THREAD_STATE_H_

#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace cuda_remote::client {

struct FunctionInfo;

struct ThreadState {
  // The calling thread's state, made at its first call. Null only if memory is exhausted.
  static ThreadState* Get();

  // The context that calls are made in; 0 if there is none.
  uint64_t current_context() const {
    const uint64_t top = context_stack.empty() ? 0 : context_stack.back();
    return top ? top : borrowed_context;
  }

  // Virtual handles; the back is current. A 0 on the stack is a pushed NULL context.
  std::vector<uint64_t> context_stack;

  // Without a current context, while a call is being made that names an object: the object's (Call::Borrow). Else 0.
  uint64_t borrowed_context = 0;

  // (context, stream) pairs: the ordinary stream that stands for the per-thread default stream in that context.
  std::vector<std::pair<uint64_t, uint64_t>> hidden_streams;

  CUstreamCaptureMode capture_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;

  // What cuStreamGetCaptureInfo points the application at, until the thread asks again.
  std::vector<CUgraphNode> capture_nodes;
  std::vector<CUgraphEdgeData> capture_edges;

  // Calls of this thread that are inside the library: a call's body may make other calls.
  int depth = 0;

  // Its counter at the gate.
  unsigned lane = 0;

  // The context that it asked about last, and that context's device: those of a handle never change. No context: -1.
  uint64_t device_context = 0;
  int device = -1;

  // What it has found out about functions and kernels, so that a launch needs no lock: good while
  // RecordedObjects::function_epoch() is the same, and the handle is live.
  struct Function {
    uint64_t handle = 0;
    uint64_t epoch = 0;
    std::shared_ptr<const FunctionInfo> info;
  };
  static constexpr size_t kFunctions = 16;
  Function functions[kFunctions];

  // Functions, each with a stream (or context, for its default stream), that are of the same context: those of a
  // handle never change.
  struct Fit {
    uint64_t function = 0;
    uint64_t stream = 0;
  };
  static constexpr size_t kFits = 16;
  Fit fits[kFits];

  // Buffers of calls by depth, reused so that a call allocates nothing once warm.
  static constexpr int kMaxDepth = 6;
  std::string messages[kMaxDepth];
  std::string replies[kMaxDepth];
};

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_CORE_THREAD_STATE_H_
