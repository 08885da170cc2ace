// SPDX-License-Identifier: Apache-2.0
#include "softgpu/core/context.h"

#include <pthread.h>
#include <stdio.h>
#include <unistd.h>

#include <algorithm>

#include "proto/base/clock.h"
#include "proto/driverabi/export_tables.h"
#include "proto/threads/mutex.h"
#include "softgpu/core/cleanup.h"
#include "softgpu/core/stream.h"
#include "softgpu/core/thread_state.h"

namespace cuda_remote::softgpu {
namespace {

std::atomic<uint64_t> g_next_context_id{1};
thread_local ThreadState* t_state = nullptr;

pthread_key_t ThreadKey() {
  static pthread_key_t key = [] {
    pthread_key_t k;
    pthread_key_create(&k, [](void* state) {
      t_state = nullptr;
      delete static_cast<ThreadState*>(state);
    });
    return k;
  }();
  return key;
}

constexpr size_t kPrintLimit = 1 << 20;
// How long the end of a context waits for kernels before it cancels them.
constexpr std::chrono::seconds kPatience(10);

}  // namespace

ThreadState& GetThreadState() {
  if (t_state == nullptr) {
    t_state = new ThreadState;
    pthread_setspecific(ThreadKey(), t_state);
  }
  return *t_state;
}

ThreadState::~ThreadState() {
  for (auto& [context, stream] : streams) stream->context()->Retire(stream);
}

ContextPtr Context::Create(int device, unsigned flags, bool primary) {
  ContextPtr context(new Context(device, flags, primary));
  if (!primary) context->Activate();
  return context;
}

Context::Context(int device, unsigned context_flags, bool primary)
    : flags(context_flags), device_(device), primary_(primary), id_(g_next_context_id++) {
  for (auto& limit : limits) limit = 0;
}

Context::~Context() = default;

void Context::ResetState() {
  error_ = CUDA_SUCCESS;
  cancel_ = false;
  cache_config = CU_FUNC_CACHE_PREFER_NONE;
  limits[CU_LIMIT_STACK_SIZE] = 1024;
  limits[CU_LIMIT_PRINTF_FIFO_SIZE] = 1 << 20;
  limits[CU_LIMIT_MALLOC_HEAP_SIZE] = 8 << 20;
  heap.Reset();
  limits[CU_LIMIT_DEV_RUNTIME_SYNC_DEPTH] = 2;
  limits[CU_LIMIT_DEV_RUNTIME_PENDING_LAUNCH_COUNT] = 2048;
  limits[CU_LIMIT_MAX_L2_FETCH_GRANULARITY] = 64;
  limits[CU_LIMIT_PERSISTING_L2_CACHE_SIZE] = 0;
  MutexLock lock(&peers_mutex_);
  peers_.clear();
}

bool Context::EnablePeer(uint64_t peer) {
  MutexLock lock(&peers_mutex_);
  return peers_.insert(peer).second;
}

bool Context::DisablePeer(uint64_t peer) {
  MutexLock lock(&peers_mutex_);
  return peers_.erase(peer) != 0;
}

void Context::SetError(CUresult error) {
  int none = CUDA_SUCCESS;
  error_.compare_exchange_strong(none, error);
}

void Context::Activate() {
  MutexLock lock(&submit_);
  if (active_) return;
  ResetState();
  legacy_ = std::make_shared<Stream>(shared_from_this(), StreamKind::kLegacy, 0, 0);
  active_.store(true, std::memory_order_release);
}

void Context::Deactivate() {
  {
    MutexLock lock(&submit_);
    if (!active_) return;
    // Failed kernels must not keep the caller waiting; others are let finish, if they do in time.
    if (error_ != CUDA_SUCCESS) cancel_ = true;
  }
  const Moment patience = Now() + kPatience;
  for (const TaskPtr& task : Pending()) {
    if (task->WaitUntil(patience)) continue;
    cancel_ = true;
    task->Wait();
  }
  FlushOutput();
  DestroyObjectsOf(shared_from_this());
  StreamPtr legacy;
  std::vector<StreamPtr> streams;
  {
    MutexLock lock(&submit_);
    active_.store(false, std::memory_order_release);
    legacy.swap(legacy_);
    streams.swap(streams_);
  }
  if (legacy) legacy->Close();
  for (const StreamPtr& stream : streams) {
    Registry<Stream>::Get().Remove(stream.get());
    stream->Close();
  }
}

StreamPtr Context::legacy() {
  MutexLock lock(&submit_);
  return legacy_;
}

StreamPtr Context::PerThread() {
  ThreadState& state = GetThreadState();
  auto it = state.streams.find(this);
  if (it != state.streams.end()) {
    if (!it->second->retired()) return it->second;
    state.streams.erase(it);
  }
  if (!active()) return nullptr;
  auto stream = std::make_shared<Stream>(shared_from_this(), StreamKind::kPerThread, 0, 0);
  Adopt(stream);
  state.streams[this] = stream;
  return stream;
}

void Context::Adopt(const StreamPtr& stream) {
  MutexLock lock(&submit_);
  PruneLocked();
  streams_.push_back(stream);
}

void Context::Retire(const StreamPtr& stream) {
  stream->Close();
  MutexLock lock(&submit_);
  PruneLocked();
}

// A destroyed stream stays in the list while it has work, for the legacy stream and Synchronize.
void Context::PruneLocked() {
  streams_.erase(std::remove_if(streams_.begin(), streams_.end(),
                                [](const StreamPtr& s) { return s->retired() && (!s->last_ || s->last_->done()); }),
                 streams_.end());
}

std::vector<TaskPtr> Context::Pending() {
  MutexLock lock(&submit_);
  std::vector<TaskPtr> tasks;
  if (legacy_ && legacy_->last_ && !legacy_->last_->done()) tasks.push_back(legacy_->last_);
  for (const StreamPtr& stream : streams_) {
    if (stream->last_ && !stream->last_->done()) tasks.push_back(stream->last_);
  }
  return tasks;
}

std::vector<StreamPtr> Context::AllStreams() {
  MutexLock lock(&submit_);
  std::vector<StreamPtr> streams;
  if (legacy_) streams.push_back(legacy_);
  for (const StreamPtr& stream : streams_) {
    if (!stream->retired()) streams.push_back(stream);
  }
  return streams;
}

CUresult Context::Synchronize() {
  for (const TaskPtr& task : Pending()) task->Wait();
  FlushOutput();
  return error();
}

void SynchronizeAllContexts() {
  Registry<Context>::Get().ForEach([](Context& context) {
    if (context.active()) context.Synchronize();
  });
}

namespace {

// By owner, a bit for each device whose work may use its memory.
std::atomic<uint64_t> g_users[64];

}  // namespace

void NoteReach(int user, int owner) {
  for (int device = 0; device < int(std::size(g_users)); ++device) {
    if (owner == kAnyDevice || owner == device) g_users[device] |= uint64_t{1} << user;
  }
}

void SynchronizeUsersOf(int device) {
  const uint64_t users = g_users[device] | uint64_t{1} << device;
  Registry<Context>::Get().ForEach([users](Context& context) {
    if (context.active() && (users >> context.device() & 1) != 0) context.Synchronize();
  });
}

CUresult Context::Query() { return Pending().empty() ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY; }

void Context::Print(std::string_view text) {
  bool full;
  {
    MutexLock lock(&output_mutex_);
    output_.append(text);
    full = output_.size() > kPrintLimit;
  }
  if (full) FlushOutput();
}

void Context::Complain(std::string_view text) {
  MutexLock lock(&output_mutex_);
  complaints_.append(text);
}

void Context::FlushOutput() {
  MutexLock lock(&output_mutex_);
  const auto write_out = [](int fd, std::string* text) {
    const char* p = text->data();
    size_t left = text->size();
    while (left != 0) {
      ssize_t n = write(fd, p, left);
      if (n <= 0) break;
      p += n;
      left -= n;
    }
    text->clear();
  };
  // What the program itself has printed comes first.
  if (!output_.empty()) fflush(stdout);
  write_out(STDOUT_FILENO, &output_);
  write_out(STDERR_FILENO, &complaints_);
}

ContextPtr CurrentContext() {
  ThreadState& state = GetThreadState();
  return state.contexts.empty() ? nullptr : state.contexts.back();
}

CUresult Usable(const ContextPtr& context) {
  if (!context) return CUDA_ERROR_INVALID_CONTEXT;
  return context->active() ? context->error() : CUDA_ERROR_CONTEXT_IS_DESTROYED;
}

CUresult UsableContext(ContextPtr* context) { return Usable(*context = CurrentContext()); }

CUresult ContextFor(CUcontext handle, ContextPtr* context) {
  if (handle == nullptr) return UsableContext(context);
  return Usable(*context = Registry<Context>::Get().Find(handle));
}

}  // namespace cuda_remote::softgpu
