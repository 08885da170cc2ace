// SPDX-License-Identifier: Apache-2.0
// One operation of a stream or a graph, in a form that can be kept and done again.
//
// Issue() is how every call hands its operation over: to the stream's queue, or to the graph that the stream is being
// captured into.
#ifndef CUDA_REMOTE_SOFTGPU_CORE_WORK_H_
#define CUDA_REMOTE_SOFTGPU_CORE_WORK_H_

#include <cuda.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "proto/threads/mutex.h"
#include "softgpu/core/context.h"
#include "softgpu/core/module.h"
#include "softgpu/ptx/ptx.h"

namespace cuda_remote::softgpu {

struct Graph;
struct Event;

struct EmptyWork {};

// Attributes of a launch as they were given; of a node of a graph, those that nodes have.
using LaunchAttributes = std::map<CUlaunchAttributeID, CUlaunchAttributeValue>;

struct KernelWork {
  FunctionPtr function;
  CUkernel kernel = nullptr;  // what it was launched by, if that was a kernel
  ModulePtr module;           // kept alive
  ptx::Dim3 grid, block;
  uint32_t shared_bytes = 0;
  ptx::Dim3 cluster;              // blocks of a cluster
  bool explicit_cluster = false;  // its size was asked for, by the code or by the launch
  bool cooperative = false;
  LaunchAttributes attributes;
  std::string params;
};

// Rows of bytes in slices. Both sides are addresses of this process, checked already.
struct CopyWork {
  uint64_t to = 0, from = 0;
  uint64_t width = 0, height = 1, depth = 1;
  uint64_t to_pitch = 0, to_slice = 0;
  uint64_t from_pitch = 0, from_slice = 0;
  bool from_pageable = false;           // to a GPU: a launch of a graph takes the bytes at the call, as 580 does
  std::shared_ptr<std::string> staged;  // bytes of pageable memory, taken at the call; `from` is not used then
};
// Takes the bytes of the source now.
void Stage(CopyWork* work);

struct MemsetWork {
  uint64_t to = 0;
  uint64_t pitch = 0;
  uint32_t value = 0;
  uint32_t element = 1;  // bytes: 1, 2 or 4
  uint64_t width = 0;    // in elements
  uint64_t height = 1;
};

struct HostWork {
  CUhostFn function = nullptr;
  void* data = nullptr;
};

struct EventRecordWork {
  std::shared_ptr<Event> event;
};
struct EventWaitWork {
  std::shared_ptr<Event> event;
};

struct ChildGraphWork {
  std::shared_ptr<Graph> graph;
};

// Which body runs, and how often, is for the value of the handle to say.
struct ConditionalWork {
  uint64_t handle = 0;
  CUgraphConditionalNodeType type = CU_GRAPH_COND_TYPE_IF;
  std::vector<std::shared_ptr<Graph>> bodies;
};

// Stream memory operations.
struct ValueWork {
  bool wait = false;
  uint64_t address = 0;
  uint64_t value = 0;
  bool wide = false;  // 64 bits
  unsigned flags = 0;
};

using Work = std::variant<EmptyWork, KernelWork, CopyWork, MemsetWork, HostWork, EventRecordWork, EventWaitWork,
                          ChildGraphWork, ConditionalWork, ValueWork>;

// The values of a graph's conditional handles, which kernels set while it runs: handle n is values[n - 1].
struct GraphValues {
  Mutex mutex;
  std::vector<uint32_t> values CR_GUARDED_BY(mutex);
};

// While it lives, the thread performs the work of a graph with these values.
class GraphValuesScope {
 public:
  explicit GraphValuesScope(GraphValues* values);
  ~GraphValuesScope();

 private:
  GraphValues* const before_;
};

// Does it now, on the calling thread.
CUresult Perform(const Work& work, Context& context);

// Appends it to the stream, or to the graph that the stream is captured into. Errors are those of a capture.
CUresult Issue(const StreamPtr& stream, Work work);

// The same and waits until it is done; a captured stream cannot wait: CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED.
CUresult IssueAndWait(const StreamPtr& stream, Work work);

}  // namespace cuda_remote::softgpu

#endif  // CUDA_REMOTE_SOFTGPU_CORE_WORK_H_
