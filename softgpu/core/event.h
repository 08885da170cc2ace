// SPDX-License-Identifier: Apache-2.0
// Events: the latest record of each is a task in a stream, with the time when it was done.
#ifndef CUDA_REMOTE_SOFTGPU_CORE_EVENT_H_
#define CUDA_REMOTE_SOFTGPU_CORE_EVENT_H_

#include <cuda.h>

#include <atomic>
#include <memory>
#include <vector>

#include "proto/threads/mutex.h"
#include "softgpu/core/context.h"
#include "softgpu/core/shared_event.h"
#include "softgpu/core/stream.h"

namespace cuda_remote::softgpu {

struct EventRecord {
  TaskPtr task;  // null: done at once
  std::atomic<uint64_t> nanoseconds{0};
  bool done() const { return !task || task->done(); }
};

struct Event {
  ContextPtr context;
  unsigned flags = 0;

  // Of an event that other processes may see: what counts there and here in the record's place. Set when it is made.
  std::shared_ptr<SharedEvent> shared;

  Mutex mutex;
  std::shared_ptr<EventRecord> record CR_GUARDED_BY(mutex);  // null: never recorded

  // Recorded into a capture: where work that waits for it comes after. Guarded by CaptureMutex().
  std::shared_ptr<Capture> capture;
  std::vector<GraphNode*> capture_nodes;
  std::atomic<bool> captured{false};  // whether `capture` is set, for readers without the lock

  CUevent handle() { return reinterpret_cast<CUevent>(this); }
  std::shared_ptr<EventRecord> latest() {
    MutexLock lock(&mutex);
    return record;
  }
  // Recorded and done now (inside a graph, on the stream's thread).
  void RecordNow();
};
using EventPtr = std::shared_ptr<Event>;

// What cuEventRecord and cuStreamWaitEvent do to a stream that is not being captured.
// `wait_for`: what has to be done besides.
void RecordEvent(const EventPtr& event, const StreamPtr& stream, std::vector<TaskPtr> wait_for = {});
void WaitEvent(const EventPtr& event, const StreamPtr& stream);

}  // namespace cuda_remote::softgpu

#endif  // CUDA_REMOTE_SOFTGPU_CORE_EVENT_H_
