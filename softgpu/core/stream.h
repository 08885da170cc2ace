// SPDX-License-Identifier: Apache-2.0
// Streams and the tasks in them.
//
// Every stream that ever had work has a thread of its own, which runs the stream's tasks in order. What a task has to
// wait for besides (the legacy default stream's rules, events) is settled when it is submitted: it keeps the tasks that
// must be done first. Submissions to all streams of a context are serialised, so these dependencies cannot form a
// circle.
//
// With SOFTGPU_LATE_MS a stream begins its tasks only when somebody waits for them, or after that time.
//
// Thread-safe.
#ifndef CUDA_REMOTE_SOFTGPU_CORE_STREAM_H_
#define CUDA_REMOTE_SOFTGPU_CORE_STREAM_H_

#include <cuda.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "proto/threads/mutex.h"
#include "softgpu/core/context.h"

namespace cuda_remote::softgpu {

struct Capture;
struct GraphNode;
class Stream;

// One piece of work. Done for good once done.
class Task {
 public:
  // What runs; its error becomes the context's. Null: nothing.
  using Run = std::function<CUresult()>;
  Task(Run run, bool always) : run_(std::move(run)), always_(always) {}

  bool done() const { return done_.load(std::memory_order_acquire); }
  void Wait();
  // The same until `end`; false if it is not done then.
  bool WaitUntil(Moment end);

  // Waits for `dependencies`, runs (unless the context failed; `always`: even then) and wakes who waits.
  void Execute(Context& context);

  std::vector<TaskPtr> dependencies;  // before it is submitted

 private:
  friend class Stream;
  friend TaskPtr SubmitLocked(Context& context, const std::shared_ptr<Stream>& stream, TaskPtr task);
  // Lets the stream begin this task if it is in no hurry.
  void Want();

  Run run_;
  // Set when it is submitted to a stream that begins its work late.
  std::weak_ptr<Stream> late_stream_;
  uint64_t number_ = 0;
  const bool always_;
  std::atomic<bool> done_{false};
  Mutex mutex_;
  Condition changed_;
};

enum class StreamKind { kLegacy, kPerThread, kUser };

class Stream : public std::enable_shared_from_this<Stream> {
 public:
  Stream(ContextPtr context, StreamKind kind, unsigned flags, int priority);

  CUstream handle() { return reinterpret_cast<CUstream>(this); }
  const ContextPtr& context() const { return context_; }
  StreamKind kind() const { return kind_; }
  unsigned flags() const { return flags_; }
  int priority() const { return priority_; }
  uint64_t id() const { return id_; }
  bool blocking() const { return kind_ != StreamKind::kLegacy && (flags_ & CU_STREAM_NON_BLOCKING) == 0; }

  // What was set of it, by attribute. Scheduling policies and hints: only who asks for them sees a difference.
  using Attributes = std::map<CUstreamAttrID, CUstreamAttrValue>;
  Attributes attributes() {
    MutexLock lock(&mutex_);
    return attributes_;
  }
  void SetAttribute(CUstreamAttrID id, const CUstreamAttrValue& value) {
    MutexLock lock(&mutex_);
    attributes_[id] = value;
  }
  void SetAttributes(Attributes all) {
    MutexLock lock(&mutex_);
    attributes_ = std::move(all);
  }

  // Appends work. `wait_for` are tasks of any stream that must be done before it.
  TaskPtr Submit(Task::Run run, std::vector<TaskPtr> wait_for = {}, bool always = false);

  // Waits for all work submitted before, then returns the context's error.
  CUresult Synchronize();
  CUresult Query();

  // No more work comes: the thread ends when what is there is done.
  void Close();
  bool retired() const { return retired_.load(std::memory_order_acquire); }

  // Capture state, guarded by CaptureMutex() (capture.h).
  std::shared_ptr<Capture> capture;
  std::vector<GraphNode*> capture_dependencies;

 private:
  friend class Context;
  friend TaskPtr SubmitLocked(Context& context, const StreamPtr& stream, TaskPtr task);
  friend class Task;
  void Loop();
  // Lets tasks up to this number begin.
  void Want(uint64_t number);
  // Waits until the first task may begin.
  void AwaitTurnLocked() CR_REQUIRES(mutex_);

  const ContextPtr context_;
  const StreamKind kind_;
  const unsigned flags_;
  const int priority_;
  const uint64_t id_;
  TaskPtr last_;  // guarded by the context's submit lock

  Mutex mutex_;
  Condition changed_;
  std::deque<TaskPtr> queue_ CR_GUARDED_BY(mutex_);
  uint64_t submitted_ CR_GUARDED_BY(mutex_) = 0;  // number of the last task
  uint64_t wanted_ CR_GUARDED_BY(mutex_) = 0;     // number of the last task that may begin; SOFTGPU_LATE_MS only
  Attributes attributes_ CR_GUARDED_BY(mutex_);
  bool started_ CR_GUARDED_BY(mutex_) = false;
  bool closing_ CR_GUARDED_BY(mutex_) = false;
  std::atomic<bool> retired_{false};
};

// Says for its lifetime that the calling thread is inside a per-thread default stream variant of a call.
class PerThreadScope {
 public:
  PerThreadScope();
  ~PerThreadScope();

 private:
  bool before_;
};

// The stream that a caller's value means: 0 is the legacy default stream, or the thread's own inside a PerThreadScope.
// CUDA_ERROR_INVALID_HANDLE (or INVALID_CONTEXT) for what is no stream of a live context.
CUresult ResolveStream(const ContextPtr& current, CUstream value, StreamPtr* stream);

// The same, and `context` is the call's: the current one or, for a stream that somebody made, that stream's.
CUresult ResolveStream(CUstream value, ContextPtr* context, StreamPtr* stream);

// The context of a stream that somebody made; null for default streams and for what is no stream.
ContextPtr OwnContext(CUstream value);

// Blocking host functions: set while a stream's thread runs tasks.
bool OnStreamThread();

}  // namespace cuda_remote::softgpu

#endif  // CUDA_REMOTE_SOFTGPU_CORE_STREAM_H_
