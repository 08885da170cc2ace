// SPDX-License-Identifier: Apache-2.0
#include "softgpu/core/stream.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "proto/base/clock.h"
#include "proto/threads/mutex.h"
#include "softgpu/core/settings.h"

namespace cuda_remote::softgpu {
namespace {

std::atomic<uint64_t> g_next_stream_id{1};
thread_local bool t_per_thread = false;
thread_local bool t_on_stream = false;

}  // namespace

bool OnStreamThread() { return t_on_stream; }

PerThreadScope::PerThreadScope() : before_(t_per_thread) { t_per_thread = true; }
PerThreadScope::~PerThreadScope() { t_per_thread = before_; }

void Task::Want() {
  if (StreamPtr stream = late_stream_.lock()) stream->Want(number_);
}

void Task::Wait() {
  if (done()) return;
  Want();
  MutexLock lock(&mutex_);
  while (!done_.load(std::memory_order_relaxed)) changed_.Wait(&mutex_);
}

bool Task::WaitUntil(Moment end) {
  if (!done()) Want();
  MutexLock lock(&mutex_);
  while (!done() && changed_.WaitUntil(&mutex_, end)) {
  }
  return done();
}

void Task::Execute(Context& context) {
  for (const TaskPtr& dependency : dependencies) dependency->Wait();
  if (run_ && (always_ || context.error() == CUDA_SUCCESS)) {
    if (CUresult result = run_(); result != CUDA_SUCCESS) context.SetError(result);
  }
  // Whatever the work kept alive goes now, not when the last one who knows the task forgets it.
  run_ = nullptr;
  dependencies.clear();
  MutexLock lock(&mutex_);
  done_.store(true, std::memory_order_release);
  changed_.NotifyAll();
}

Stream::Stream(ContextPtr context, StreamKind kind, unsigned flags, int priority)
    : context_(std::move(context)), kind_(kind), flags_(flags), priority_(priority), id_(g_next_stream_id++) {}

TaskPtr SubmitLocked(Context& context, const StreamPtr& stream, TaskPtr task) CR_REQUIRES(context.submit_) {
  auto depend = [&task](const TaskPtr& other) {
    if (other && !other->done()) task->dependencies.push_back(other);
  };
  if (stream->kind() == StreamKind::kLegacy) {
    for (const StreamPtr& other : context.streams_) {
      if (other->blocking()) depend(other->last_);
    }
  } else if (stream->blocking() && context.legacy_) {
    depend(context.legacy_->last_);
  }
  stream->last_ = task;
  {
    MutexLock lock(&stream->mutex_);
    task->number_ = ++stream->submitted_;
    if (GetSettings().late_ms != 0) task->late_stream_ = stream;
    stream->queue_.push_back(task);
    if (!stream->started_) {
      stream->started_ = true;
      std::thread([stream] { stream->Loop(); }).detach();
    }
  }
  stream->changed_.NotifyOne();
  return task;
}

TaskPtr Stream::Submit(Task::Run run, std::vector<TaskPtr> wait_for, bool always) {
  auto task = std::make_shared<Task>(std::move(run), always);
  for (TaskPtr& other : wait_for) {
    if (other && !other->done()) task->dependencies.push_back(std::move(other));
  }
  MutexLock lock(&context_->submit_);
  return SubmitLocked(*context_, shared_from_this(), std::move(task));
}

void Stream::Loop() {
  t_on_stream = true;
  for (;;) {
    TaskPtr task;
    {
      MutexLock lock(&mutex_);
      while (queue_.empty() && !closing_) changed_.Wait(&mutex_);
      if (queue_.empty()) return;
      if (GetSettings().late_ms != 0) AwaitTurnLocked();
      task = std::move(queue_.front());
      queue_.pop_front();
    }
    task->Execute(*context_);
  }
}

void Stream::Want(uint64_t number) {
  {
    MutexLock lock(&mutex_);
    if (number <= wanted_) return;
    wanted_ = number;
  }
  changed_.NotifyOne();
}

void Stream::AwaitTurnLocked() {
  const uint64_t first = queue_.front()->number_;
  const auto end = Now() + std::chrono::milliseconds(GetSettings().late_ms);
  while (wanted_ < first) {
    if (!changed_.WaitUntil(&mutex_, end) && wanted_ < first) wanted_ = submitted_;
  }
}

void Stream::Close() {
  {
    MutexLock lock(&mutex_);
    closing_ = true;
    retired_.store(true, std::memory_order_release);
  }
  changed_.NotifyAll();
}

CUresult Stream::Synchronize() {
  std::vector<TaskPtr> work;
  {
    MutexLock lock(&context_->submit_);
    work.push_back(last_);
    // The legacy stream's turn comes after that of all blocking streams.
    if (kind_ == StreamKind::kLegacy) {
      for (const StreamPtr& other : context_->streams_) {
        if (other->blocking()) work.push_back(other->last_);
      }
    }
  }
  for (const TaskPtr& task : work) {
    if (task) task->Wait();
  }
  context_->FlushOutput();
  return context_->error();
}

CUresult Stream::Query() {
  if (CUresult error = context_->error(); error != CUDA_SUCCESS) return error;
  MutexLock lock(&context_->submit_);
  if (last_ && !last_->done()) return CUDA_ERROR_NOT_READY;
  if (kind_ == StreamKind::kLegacy) {
    for (const StreamPtr& other : context_->streams_) {
      if (other->blocking() && other->last_ && !other->last_->done()) return CUDA_ERROR_NOT_READY;
    }
  }
  return context_->error();
}

CUresult ResolveStream(const ContextPtr& current, CUstream value, StreamPtr* stream) {
  auto number = reinterpret_cast<uintptr_t>(value);
  if (number <= 2) {
    if (!current) return CUDA_ERROR_INVALID_CONTEXT;
    bool per_thread = number == 2 || (number == 0 && t_per_thread);
    *stream = per_thread ? current->PerThread() : current->legacy();
    return *stream ? CUDA_SUCCESS : CUDA_ERROR_CONTEXT_IS_DESTROYED;
  }
  StreamPtr found = Registry<Stream>::Get().Find(value);
  if (!found) return CUDA_ERROR_INVALID_HANDLE;
  if (!found->context()->active()) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
  if (CUresult error = found->context()->error(); error != CUDA_SUCCESS) return error;
  *stream = std::move(found);
  return CUDA_SUCCESS;
}

ContextPtr OwnContext(CUstream value) {
  StreamPtr stream = Registry<Stream>::Get().Find(value);
  return stream ? stream->context() : nullptr;
}

CUresult ResolveStream(CUstream value, ContextPtr* context, StreamPtr* stream) {
  CUresult result = UsableContextOr([value] { return OwnContext(value); }, context);
  return result == CUDA_SUCCESS ? ResolveStream(*context, value, stream) : result;
}

}  // namespace cuda_remote::softgpu
