// SPDX-License-Identifier: Apache-2.0
// Green contexts. Multiprocessors are numbered; a resource is a range of them, a green context runs on one or several
// ranges. How much of the machine's processors a kernel gets does not depend on it: kernels may run on more than was
// provisioned, as the interface allows.
#include <algorithm>
#include <cstring>

#include "softgpu/api/api.h"
#include "softgpu/core/event.h"
#include "softgpu/core/stream.h"

using namespace cuda_remote::softgpu;

namespace {

// As the driver's for small parts: two multiprocessors at least.
constexpr unsigned kMinimum = 2;
constexpr unsigned kAlignment = 2;
constexpr uint32_t kMark = 0x53475352;  // in every resource that is made here

// What is in the opaque part of a resource.
struct Inside {
  uint32_t mark = 0;
  int32_t device = 0;
  uint32_t first = 0;
  uint32_t split = 0;  // which call of cuDevSmResourceSplitByCount it is from; 0: none
};

std::atomic<uint32_t> g_splits{0};

CUdevResource MakeResource(int device, uint32_t first, uint32_t count, uint32_t split) {
  CUdevResource resource;
  std::memset(&resource, 0, sizeof resource);
  if (count == 0) return resource;  // invalid
  const Inside inside = {kMark, device, first, split};
  static_assert(sizeof inside <= sizeof resource._internal_padding);
  std::memcpy(resource._internal_padding, &inside, sizeof inside);
  resource.type = CU_DEV_RESOURCE_TYPE_SM;
  resource.sm.smCount = count;
  resource.sm.minSmPartitionSize = kMinimum;
  resource.sm.smCoscheduledAlignment = kAlignment;
  return resource;
}

CUresult Look(const CUdevResource& resource, Inside* inside) {
  if (resource.type != CU_DEV_RESOURCE_TYPE_SM) return CUDA_ERROR_INVALID_RESOURCE_TYPE;
  std::memcpy(inside, resource._internal_padding, sizeof *inside);
  if (inside->mark != kMark || GetDevice(inside->device) == nullptr || resource.sm.smCount == 0 ||
      inside->first > kMultiprocessors || resource.sm.smCount > kMultiprocessors - inside->first) {
    return CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION;
  }
  return CUDA_SUCCESS;
}

struct Descriptor {
  int device = 0;
  uint32_t first = 0;
  uint32_t count = 0;
  CUdevResourceDesc handle() { return reinterpret_cast<CUdevResourceDesc>(this); }
};

struct Green {
  Descriptor resources;
  ContextPtr context;  // its own streams; modules and variables are the primary context's
  ContextPtr primary;
  CUgreenCtx handle() { return reinterpret_cast<CUgreenCtx>(this); }
};

CUresult FindGreen(CUgreenCtx handle, std::shared_ptr<Green>* green) {
  *green = Registry<Green>::Get().Find(handle);
  return *green ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

// The green context that a context was made from; null for others.
std::shared_ptr<Green> GreenOf(const Context* context) {
  std::shared_ptr<Green> found;
  Registry<Green>::Get().ForEach([&](Green& green) {
    if (green.context.get() == context) found = Registry<Green>::Get().Find(&green);
  });
  return found;
}

CUresult GetResource(const Descriptor& from, CUdevResource* out, CUdevResourceType type) {
  if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (type != CU_DEV_RESOURCE_TYPE_SM) return CUDA_ERROR_INVALID_RESOURCE_TYPE;
  *out = MakeResource(from.device, from.first, from.count, 0);
  return CUDA_SUCCESS;
}

}  // namespace

SOFTGPU_API cuDeviceGetDevResource(CUdevice device, CUdevResource* out, CUdevResourceType type) {
  SOFTGPU_ENTER();
  if (GetDevice(device) == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  return GetResource({device, 0, kMultiprocessors}, out, type);
}

SOFTGPU_API cuCtxGetDevResource(CUcontext handle, CUdevResource* out, CUdevResourceType type) {
  SOFTGPU_ENTER();
  ContextPtr context;
  if (CUresult result = ContextFor(handle, &context); result != CUDA_SUCCESS) return result;
  if (std::shared_ptr<Green> green = GreenOf(context.get())) return GetResource(green->resources, out, type);
  return GetResource({context->device(), 0, kMultiprocessors}, out, type);
}

SOFTGPU_API cuGreenCtxGetDevResource(CUgreenCtx handle, CUdevResource* out, CUdevResourceType type) {
  SOFTGPU_ENTER();
  std::shared_ptr<Green> green;
  if (CUresult result = FindGreen(handle, &green); result != CUDA_SUCCESS) return result;
  return GetResource(green->resources, out, type);
}

SOFTGPU_API cuDevSmResourceSplitByCount(CUdevResource* results, unsigned int* groups, const CUdevResource* input,
                                        CUdevResource* remaining, unsigned int flags, unsigned int minimum) {
  SOFTGPU_ENTER();
  if (groups == nullptr || input == nullptr) return CUDA_ERROR_INVALID_VALUE;
  Inside inside;
  if (CUresult result = Look(*input, &inside); result != CUDA_SUCCESS) return result;
  // A split's results are not split again without a green context in between.
  if (inside.split != 0 || minimum > input->sm.smCount) return CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION;
  const bool fine = (flags & CU_DEV_SM_RESOURCE_SPLIT_IGNORE_SM_COSCHEDULING) != 0;
  unsigned size = std::max(minimum, fine ? 1u : kMinimum);
  if (!fine) size = (size + kAlignment - 1) / kAlignment * kAlignment;
  unsigned count = input->sm.smCount / size;
  if (results == nullptr) {
    *groups = count;
    return CUDA_SUCCESS;
  }
  count = std::min(count, *groups);
  const uint32_t split = ++g_splits;
  for (unsigned i = 0; i < count; ++i) results[i] = MakeResource(inside.device, inside.first + i * size, size, split);
  *groups = count;
  if (remaining != nullptr) {
    *remaining = MakeResource(inside.device, inside.first + count * size, input->sm.smCount - count * size, split);
  }
  return CUDA_SUCCESS;
}

SOFTGPU_API cuDevResourceGenerateDesc(CUdevResourceDesc* out, CUdevResource* resources, unsigned int count) {
  SOFTGPU_ENTER();
  if (out == nullptr || resources == nullptr || count == 0) return CUDA_ERROR_INVALID_VALUE;
  auto descriptor = std::make_shared<Descriptor>();
  uint32_t split = 0, end = 0;
  for (unsigned i = 0; i < count; ++i) {
    Inside inside;
    if (CUresult result = Look(resources[i], &inside); result != CUDA_SUCCESS) return result;
    if (i == 0) {
      *descriptor = {inside.device, inside.first, 0};
      split = inside.split;
      end = inside.first;
    } else if (inside.device != descriptor->device || inside.split != split || split == 0) {
      return CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION;
    }
    descriptor->first = std::min(descriptor->first, inside.first);
    end = std::max(end, inside.first + resources[i].sm.smCount);
    descriptor->count += resources[i].sm.smCount;
  }
  if (descriptor->count > end - descriptor->first) return CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION;  // one twice
  *out = Registry<Descriptor>::Get().Add(descriptor)->handle();
  return CUDA_SUCCESS;
}

SOFTGPU_API cuGreenCtxCreate(CUgreenCtx* out, CUdevResourceDesc desc, CUdevice device, unsigned int flags) {
  SOFTGPU_ENTER();
  std::shared_ptr<Descriptor> descriptor = Registry<Descriptor>::Get().Find(desc);
  if (out == nullptr || !descriptor || flags != CU_GREEN_CTX_DEFAULT_STREAM) return CUDA_ERROR_INVALID_VALUE;
  if (GetDevice(device) == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  if (descriptor->device != device) return CUDA_ERROR_INVALID_VALUE;
  CUcontext primary = nullptr;
  if (CUresult result = cuDevicePrimaryCtxRetain(&primary, device); result != CUDA_SUCCESS) return result;
  auto green = std::make_shared<Green>();
  green->resources = *descriptor;
  green->primary = Registry<Context>::Get().Find(primary);
  green->context = Context::Create(device, 0, false);
  green->context->SetHome(green->primary);
  Registry<Context>::Get().Add(green->context);
  *out = Registry<Green>::Get().Add(green)->handle();
  return CUDA_SUCCESS;
}

SOFTGPU_API cuGreenCtxDestroy(CUgreenCtx handle) {
  SOFTGPU_ENTER();
  std::shared_ptr<Green> green = Registry<Green>::Get().Remove(handle);
  if (!green) return CUDA_ERROR_INVALID_CONTEXT;
  green->context->Deactivate();
  Registry<Context>::Get().Remove(green->context.get());
  return cuDevicePrimaryCtxRelease_v2(green->resources.device);
}

SOFTGPU_API cuCtxFromGreenCtx(CUcontext* out, CUgreenCtx handle) {
  SOFTGPU_ENTER();
  std::shared_ptr<Green> green;
  if (CUresult result = FindGreen(handle, &green); result != CUDA_SUCCESS) return result;
  if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *out = green->context->handle();
  return CUDA_SUCCESS;
}

SOFTGPU_API cuGreenCtxGetId(CUgreenCtx handle, unsigned long long* id) {
  SOFTGPU_ENTER();
  if (id == nullptr) return CUDA_ERROR_INVALID_VALUE;
  std::shared_ptr<Green> green;
  if (handle == nullptr) {
    ContextPtr current;
    if (CUresult result = UsableContext(&current); result != CUDA_SUCCESS) return result;
    green = GreenOf(current.get());
  } else {
    green = Registry<Green>::Get().Find(handle);
  }
  if (!green) return CUDA_ERROR_INVALID_CONTEXT;
  *id = green->context->id();
  return CUDA_SUCCESS;
}

SOFTGPU_API cuGreenCtxStreamCreate(CUstream* out, CUgreenCtx handle, unsigned int flags, int priority) {
  SOFTGPU_ENTER();
  std::shared_ptr<Green> green;
  if (CUresult result = FindGreen(handle, &green); result != CUDA_SUCCESS) return result;
  if (out == nullptr || flags != CU_STREAM_NON_BLOCKING) return CUDA_ERROR_INVALID_VALUE;
  auto stream = std::make_shared<Stream>(green->context, StreamKind::kUser, flags, std::clamp(priority, -5, 0));
  green->context->Adopt(stream);
  *out = Registry<Stream>::Get().Add(stream)->handle();
  return CUDA_SUCCESS;
}

SOFTGPU_API cuStreamGetGreenCtx(CUstream handle, CUgreenCtx* out) {
  SOFTGPU_ENTER();
  ContextPtr current;
  if (reinterpret_cast<uintptr_t>(handle) <= 2) {
    if (CUresult result = UsableContext(&current); result != CUDA_SUCCESS) return result;
  }
  StreamPtr stream;
  if (CUresult result = ResolveStream(current, handle, &stream); result != CUDA_SUCCESS) return result;
  if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  std::shared_ptr<Green> green = GreenOf(stream->context().get());
  *out = green ? green->handle() : nullptr;
  return CUDA_SUCCESS;
}

SOFTGPU_API cuGreenCtxRecordEvent(CUgreenCtx handle, CUevent event_handle) {
  SOFTGPU_ENTER();
  std::shared_ptr<Green> green;
  if (CUresult result = FindGreen(handle, &green); result != CUDA_SUCCESS) return result;
  EventPtr event = Registry<Event>::Get().Find(event_handle);
  if (!event || event->context->device() != green->context->device()) return CUDA_ERROR_INVALID_HANDLE;
  RecordEvent(event, green->context->legacy(), green->context->Pending());
  return CUDA_SUCCESS;
}

SOFTGPU_API cuGreenCtxWaitEvent(CUgreenCtx handle, CUevent event_handle) {
  SOFTGPU_ENTER();
  std::shared_ptr<Green> green;
  if (CUresult result = FindGreen(handle, &green); result != CUDA_SUCCESS) return result;
  EventPtr event = Registry<Event>::Get().Find(event_handle);
  if (!event) return CUDA_ERROR_INVALID_HANDLE;
  for (const StreamPtr& stream : green->context->AllStreams()) WaitEvent(event, stream);
  return CUDA_SUCCESS;
}
