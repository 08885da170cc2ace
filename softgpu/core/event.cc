// SPDX-License-Identifier: Apache-2.0
#include "softgpu/core/event.h"

#include "proto/base/clock.h"
#include "proto/threads/mutex.h"

namespace cuda_remote::softgpu {

void Event::RecordNow() {
  auto now = std::make_shared<EventRecord>();
  now->nanoseconds = uint64_t(NowNs());
  if (shared) shared->Complete(shared->Submit());
  MutexLock lock(&mutex);
  record = std::move(now);
}

void RecordEvent(const EventPtr& event, const StreamPtr& stream, std::vector<TaskPtr> wait_for) {
  auto record = std::make_shared<EventRecord>();
  // The event's lock is held so that nobody sees the record before its task is known.
  MutexLock lock(&event->mutex);
  // Task and record own each other until the task is done.
  const std::shared_ptr<SharedEvent> shared = event->shared;
  const uint64_t number = shared ? shared->Submit() : 0;
  record->task = stream->Submit(
      [record, shared, number] {
        if (shared) shared->Complete(number);
        record->nanoseconds.store(uint64_t(NowNs()), std::memory_order_relaxed);
        return CUDA_SUCCESS;
      },
      std::move(wait_for), true);
  event->record = std::move(record);
}

void WaitEvent(const EventPtr& event, const StreamPtr& stream) {
  if (event->shared) {
    const uint64_t number = event->shared->Latest();
    if (event->shared->Done(number)) return;
    stream->Submit(
        [shared = event->shared, number, context = stream->context().get()] {
          shared->Wait(number, context->cancel());
          return CUDA_SUCCESS;
        },
        {}, true);
    return;
  }
  std::shared_ptr<EventRecord> record = event->latest();
  if (!record || record->done()) return;
  stream->Submit(nullptr, {record->task}, true);
}

}  // namespace cuda_remote::softgpu
