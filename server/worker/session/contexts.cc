// SPDX-License-Identifier: Apache-2.0
#include "server/worker/session/contexts.h"

#include <algorithm>
#include <utility>

namespace cuda_remote::server {

CUresult Contexts::Change(uint32_t slot) {
  current_ = 0;
  current_ref_ = {};
  if (slot != 0) {
    const HandleMap::Entry* const entry = handles_.At(slot);
    const ContextInfo* const context = entry != nullptr ? Find(entry->handle) : nullptr;
    if (context == nullptr) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    current_ = entry->handle;
    current_ref_ = context->ref;
  }
  return Restore();
}

void Contexts::Return(uint64_t context, ContextRef ref) {
  current_ = context;
  current_ref_ = ref;
  Restore();
}

const ContextInfo* Contexts::Find(uint64_t handle) const {
  const auto it = all_.find(handle);
  return it == all_.end() ? nullptr : &it->second;
}

ContextRef Contexts::On(int device) const {
  if (const ContextInfo* const current = Find(current_); current != nullptr && current->device == device) {
    return current->ref;
  }
  for (const auto& [handle, context] : all_) {
    if (context.device == device) return context.ref;
  }
  return {};
}

ContextRef Contexts::Any() const {
  if (current_ref_.id != 0) return current_ref_;
  return all_.empty() ? ContextRef() : all_.begin()->second.ref;
}

std::vector<uint64_t> Contexts::OldestFirst() const {
  std::vector<uint64_t> contexts;
  for (const auto& [context, info] : all_) contexts.push_back(context);
  std::sort(contexts.begin(), contexts.end(),
            [this](uint64_t a, uint64_t b) { return Find(a)->ref.id < Find(b)->ref.id; });
  return contexts;
}

const ContextInfo& Contexts::Add(uint64_t handle, CUcontext real, int device, bool primary) {
  for (const auto& [other, info] : all_) on_several_gpus_ = on_several_gpus_ || info.device != device;
  ContextInfo& context = all_[handle];
  context.ref = {real, next_id_++};
  context.device = device;
  context.primary = primary;
  return context;
}

void Contexts::Remove(uint64_t handle) {
  all_.erase(handle);
  if (current_ != handle) return;
  current_ = 0;
  current_ref_ = {};
}

CUcontext Contexts::TakeWarm(int device) {
  return device == warm_gpu_ ? std::exchange(warm_context_, nullptr) : nullptr;
}

CUresult Contexts::Early(int device, CUcontext* context) {
  const auto early = early_.find(device);
  if (early != early_.end()) {
    *context = early->second;
    return CUDA_SUCCESS;
  }
  const CUresult result = driver_.cuDevicePrimaryCtxRetain(context, device);
  if (result == CUDA_SUCCESS) early_[device] = *context;
  return result;
}

void Contexts::EndEarly() {
  // The replay has made its own by now; where it has not, this ends the context, in which there is nothing.
  for (const auto& [device, context] : std::exchange(early_, {})) driver_.cuDevicePrimaryCtxRelease_v2(device);
}

}  // namespace cuda_remote::server
