// SPDX-License-Identifier: Apache-2.0
#include "server/worker/session/gpu_work.h"

#include <algorithm>

#include "server/worker/memory/uploads.h"
#include "server/worker/session/driver_hooks.h"

namespace cuda_remote::server {

void GpuWork::NoteSynchronized(uint64_t work) {
  uint64_t before = synced_.load(std::memory_order_relaxed);
  while (before < work && !synced_.compare_exchange_weak(before, work, std::memory_order_acq_rel)) {
  }
}

CUresult GpuWork::QueryAll(const std::vector<ContextRef>& contexts) {
  CUresult first = CUDA_SUCCESS;
  const auto note = [&first](CUresult state) {
    if (first == CUDA_SUCCESS || state == CUDA_ERROR_NOT_READY) first = state;
  };
  for (const ContextRef& context : contexts) {
    if (MakeCurrent(driver_, context) == CUDA_SUCCESS) note(driver_.cuStreamQuery(CU_STREAM_LEGACY));
    if (first == CUDA_ERROR_NOT_READY) return first;
  }
  handles_.ForEach(Kind::kStream, [&](const HandleMap::Entry& entry) {
    if (first != CUDA_ERROR_NOT_READY) note(driver_.cuStreamQuery(reinterpret_cast<CUstream>(entry.real)));
  });
  for (const WorkMark& mark : stream_marks_) {
    if (first != CUDA_ERROR_NOT_READY) note(driver_.cuEventQuery(mark.event.get()));
  }
  return first;
}

bool GpuWork::BlockingStreamIsCaptured() const {
  bool captured = false;
  const auto look = [&captured](uint64_t real) {
    const CUstream stream = reinterpret_cast<CUstream>(real);
    captured = captured || (IsBlocking(stream) && IsCaptured(stream));
  };
  handles_.ForEach(Kind::kStream, [&look](const HandleMap::Entry& entry) { look(entry.real); });
  // A capture that is made again has streams of its own.
  for (const auto& [handle, real] : substitutes_) {
    if (KindOf(handle) == Kind::kStream) look(real);
  }
  return captured;
}

void GpuWork::NoteHostFunction(uint64_t stream, uint64_t id) {
  // This request has been counted.
  if (given_ != last_function_work_ + 1) last_functions_.clear();
  last_function_work_ = given_;
  for (LastFunction& last : last_functions_) {
    if (last.stream == stream && last.context.id == contexts_.current_ref().id) {
      last.id = id;
      return;
    }
  }
  last_functions_.push_back({contexts_.current_ref(), stream, id});
}

std::vector<LastFunction> GpuWork::LastFunctions() const {
  return given_ == last_function_work_ ? last_functions_ : std::vector<LastFunction>();
}

void GpuWork::MarkLegacy() {
  // Then nothing can have been put into a legacy stream since the last time.
  if (BlockingStreamIsCaptured()) return;
  legacy_marks_.clear();
  if (idle()) return;
  for (const auto& [handle, context] : contexts_.all()) {
    if (MakeCurrent(driver_, context.ref) != CUDA_SUCCESS) continue;
    AddMark(context, CU_STREAM_LEGACY, &legacy_marks_);
  }
}

void GpuWork::MarkStream(CUstream stream) {
  const auto done = [this](const WorkMark& mark) {
    return driver_.cuEventQuery(mark.event.get()) != CUDA_ERROR_NOT_READY;
  };
  stream_marks_.erase(std::remove_if(stream_marks_.begin(), stream_marks_.end(), done), stream_marks_.end());
  if (idle()) return;
  CUcontext real = nullptr;
  if (driver_.cuStreamGetCtx(stream, &real) != CUDA_SUCCESS) return;
  for (const auto& [handle, context] : contexts_.all()) {
    if (context.ref.real != real || MakeCurrent(driver_, context.ref) != CUDA_SUCCESS) continue;
    AddMark(context, stream, &stream_marks_);
    return;
  }
}

void GpuWork::AddMark(const ContextInfo& context, CUstream stream, std::vector<WorkMark>* marks) {
  CUresult result = CUDA_SUCCESS;
  const CUevent event = EventBehindWork(driver_, stream, &result);
  if (event == nullptr) return;  // its work is done
  const DriverTable* const driver = &driver_;
  marks->push_back(
      {context.ref.id, context.device, {event, [driver](CUevent mark) { driver->cuEventDestroy_v2(mark); }}});
}

void GpuWork::ForgetContext(uint64_t id) {
  for (std::vector<WorkMark>* marks : {&legacy_marks_, &stream_marks_}) {
    marks->erase(
        std::remove_if(marks->begin(), marks->end(), [&](const WorkMark& mark) { return mark.context_id == id; }),
        marks->end());
  }
}

}  // namespace cuda_remote::server
