// SPDX-License-Identifier: Apache-2.0
// Arrays and mipmapped arrays.
#include "softgpu/core/array.h"

#include <sys/mman.h>

#include <algorithm>

#include "proto/driverabi/array_format.h"
#include "softgpu/api/api.h"
#include "softgpu/core/device.h"

using namespace cuda_remote::softgpu;

namespace {

constexpr uint64_t kMostAlong = 1 << 17;  // elements along an axis
constexpr unsigned kFlags = CUDA_ARRAY3D_LAYERED | CUDA_ARRAY3D_SURFACE_LDST | CUDA_ARRAY3D_CUBEMAP |
                            CUDA_ARRAY3D_TEXTURE_GATHER | CUDA_ARRAY3D_COLOR_ATTACHMENT;

CUresult Check(const CUDA_ARRAY3D_DESCRIPTOR& facts) {
  cuda_remote::softgpu::ptx::Channel channel;
  if (!ChannelOf(facts.Format, &channel)) {
    LogOnce("arrays of format " + std::to_string(unsigned(facts.Format)) + " are not supported");
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  if (facts.NumChannels != 1 && facts.NumChannels != 2 && facts.NumChannels != 4) return CUDA_ERROR_INVALID_VALUE;
  if (facts.Flags & ~kFlags) {
    LogOnce("arrays with flags " + std::to_string(facts.Flags) + " are not supported");
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  const bool layered = (facts.Flags & CUDA_ARRAY3D_LAYERED) != 0, cube = (facts.Flags & CUDA_ARRAY3D_CUBEMAP) != 0;
  if (facts.Width == 0 || facts.Width > kMostAlong || facts.Height > kMostAlong || facts.Depth > kMostAlong) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (facts.Depth != 0 && facts.Height == 0 && !layered) return CUDA_ERROR_INVALID_VALUE;
  if (layered && facts.Depth == 0) return CUDA_ERROR_INVALID_VALUE;
  if (cube && (facts.Width != facts.Height || facts.Depth % 6 != 0 || facts.Depth == 0))
    return CUDA_ERROR_INVALID_VALUE;
  return CUDA_SUCCESS;
}

// An array without a place in the registry.
CUresult Make(const ContextPtr& context, const CUDA_ARRAY3D_DESCRIPTOR& facts, ArrayPtr* out) {
  auto array = std::make_shared<Array>();
  array->facts = facts;
  array->element_bytes = cuda_remote::ArrayElementBytes(facts.Format, facts.NumChannels);
  array->rows = std::max<uint64_t>(facts.Height, 1);
  array->slices = std::max<uint64_t>(facts.Depth, 1);
  array->context = context.get();
  const uint64_t bytes = array->slice_bytes() * array->slices;
  Device* device = GetDevice(context->device());
  if (!device->TakeMemory(bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    device->GiveMemory(bytes);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  array->memory.reset(static_cast<char*>(memory), [bytes, device](char* p) {
    munmap(p, bytes);
    device->GiveMemory(bytes);
  });
  *out = std::move(array);
  return CUDA_SUCCESS;
}

CUDA_ARRAY_DESCRIPTOR Flat(const CUDA_ARRAY3D_DESCRIPTOR& facts) {
  CUDA_ARRAY_DESCRIPTOR flat = {};
  flat.Width = facts.Width;
  flat.Height = facts.Height;
  flat.Format = facts.Format;
  flat.NumChannels = facts.NumChannels;
  return flat;
}

}  // namespace

SOFTGPU_API cuArray3DCreate_v2(CUarray* out, const CUDA_ARRAY3D_DESCRIPTOR* facts) {
  SOFTGPU_ENTER_CONTEXT(context);
  if (out == nullptr || facts == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (CUresult result = Check(*facts); result != CUDA_SUCCESS) return result;
  ArrayPtr array;
  if (CUresult result = Make(context, *facts, &array); result != CUDA_SUCCESS) return result;
  *out = array->handle();
  Registry<Array>::Get().Add(std::move(array));
  return CUDA_SUCCESS;
}

SOFTGPU_API cuArrayCreate_v2(CUarray* out, const CUDA_ARRAY_DESCRIPTOR* flat) {
  SOFTGPU_ENTER();
  if (flat == nullptr) return CUDA_ERROR_INVALID_VALUE;
  CUDA_ARRAY3D_DESCRIPTOR facts = {};
  facts.Width = flat->Width;
  facts.Height = flat->Height;
  facts.Format = flat->Format;
  facts.NumChannels = flat->NumChannels;
  return cuArray3DCreate_v2(out, &facts);
}

SOFTGPU_API cuArray3DGetDescriptor_v2(CUDA_ARRAY3D_DESCRIPTOR* facts, CUarray handle) {
  SOFTGPU_ENTER_CONTEXT_OF(context, handle);
  if (facts == nullptr) return CUDA_ERROR_INVALID_VALUE;
  ArrayPtr array = Registry<Array>::Get().Find(handle);
  if (!array) return CUDA_ERROR_INVALID_HANDLE;
  *facts = array->facts;
  return CUDA_SUCCESS;
}

SOFTGPU_API cuArrayGetDescriptor_v2(CUDA_ARRAY_DESCRIPTOR* flat, CUarray handle) {
  SOFTGPU_ENTER_CONTEXT_OF(context, handle);
  if (flat == nullptr) return CUDA_ERROR_INVALID_VALUE;
  ArrayPtr array = Registry<Array>::Get().Find(handle);
  if (!array) return CUDA_ERROR_INVALID_HANDLE;
  *flat = Flat(array->facts);
  return CUDA_SUCCESS;
}

SOFTGPU_API cuArrayDestroy(CUarray handle) {
  SOFTGPU_ENTER_CONTEXT_OF(context, handle);
  ArrayPtr array = Registry<Array>::Get().Find(handle);
  if (!array || array->level) return CUDA_ERROR_INVALID_HANDLE;
  SynchronizeAllContexts();
  return Registry<Array>::Get().Remove(handle) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

SOFTGPU_API cuMipmappedArrayCreate(CUmipmappedArray* out, const CUDA_ARRAY3D_DESCRIPTOR* facts, unsigned int levels) {
  SOFTGPU_ENTER_CONTEXT(context);
  if (out == nullptr || facts == nullptr || levels == 0) return CUDA_ERROR_INVALID_VALUE;
  if (CUresult result = Check(*facts); result != CUDA_SUCCESS) return result;
  const bool layered = (facts->Flags & CUDA_ARRAY3D_LAYERED) != 0 || (facts->Flags & CUDA_ARRAY3D_CUBEMAP) != 0;
  uint64_t largest = std::max<uint64_t>(facts->Width, facts->Height);
  if (!layered) largest = std::max<uint64_t>(largest, facts->Depth);
  unsigned most = 1;
  while (largest >> most != 0) ++most;
  auto whole = std::make_shared<MipmappedArray>();
  whole->facts = *facts;
  whole->context = context.get();
  for (unsigned i = 0; i < std::min(levels, most); ++i) {
    CUDA_ARRAY3D_DESCRIPTOR level = *facts;
    const auto halved = [i](size_t size) { return size == 0 ? 0 : std::max<size_t>(size >> i, 1); };
    level.Width = halved(facts->Width);
    level.Height = halved(facts->Height);
    if (!layered) level.Depth = halved(facts->Depth);
    ArrayPtr array;
    if (CUresult result = Make(context, level, &array); result != CUDA_SUCCESS) return result;
    array->level = true;
    whole->levels.push_back(std::move(array));
  }
  for (const ArrayPtr& array : whole->levels) Registry<Array>::Get().Add(array);
  *out = whole->handle();
  Registry<MipmappedArray>::Get().Add(std::move(whole));
  return CUDA_SUCCESS;
}

SOFTGPU_API cuMipmappedArrayGetLevel(CUarray* out, CUmipmappedArray handle, unsigned int level) {
  SOFTGPU_ENTER_CONTEXT_OF(context, handle);
  if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  auto whole = Registry<MipmappedArray>::Get().Find(handle);
  if (!whole) return CUDA_ERROR_INVALID_HANDLE;
  if (level >= whole->levels.size()) return CUDA_ERROR_INVALID_VALUE;
  *out = whole->levels[level]->handle();
  return CUDA_SUCCESS;
}

SOFTGPU_API cuMipmappedArrayDestroy(CUmipmappedArray handle) {
  SOFTGPU_ENTER_CONTEXT_OF(context, handle);
  if (!Registry<MipmappedArray>::Get().Find(handle)) return CUDA_ERROR_INVALID_HANDLE;
  SynchronizeAllContexts();
  auto whole = Registry<MipmappedArray>::Get().Remove(handle);
  if (!whole) return CUDA_ERROR_INVALID_HANDLE;
  for (const ArrayPtr& level : whole->levels) Registry<Array>::Get().Remove(level.get());
  return CUDA_SUCCESS;
}

SOFTGPU_API cuArrayGetMemoryRequirements(CUDA_ARRAY_MEMORY_REQUIREMENTS* out, CUarray handle, CUdevice device) {
  SOFTGPU_ENTER();
  if (out == nullptr || handle == nullptr || device < 0 || device >= DeviceCount()) return CUDA_ERROR_INVALID_VALUE;
  ArrayPtr array = Registry<Array>::Get().Find(handle);
  if (!array) return CUDA_ERROR_INVALID_HANDLE;
  *out = {};
  out->size = array->slice_bytes() * array->slices;
  out->alignment = 512;
  return CUDA_SUCCESS;
}
