// SPDX-License-Identifier: Apache-2.0
// Texture references that the host makes: settings and what they are bound to. Kernels cannot name them, since those of
// modules are not supported.
#include <cstring>
#include <memory>

#include "server/softgpu/api/api.h"
#include "server/softgpu/core/array.h"
#include "server/softgpu/core/memory_map.h"
#include "server/softgpu/core/registry.h"

using namespace cuda_remote::softgpu;

namespace {

// The defaults are the documentation's.
struct TextureReference {
  CUarray array = nullptr;
  CUmipmappedArray mipmapped = nullptr;
  CUdeviceptr address = 0;
  CUarray_format format = CU_AD_FORMAT_FLOAT;
  int channels = 1;
  CUaddress_mode modes[3] = {CU_TR_ADDRESS_MODE_CLAMP, CU_TR_ADDRESS_MODE_CLAMP, CU_TR_ADDRESS_MODE_CLAMP};
  CUfilter_mode filter = CU_TR_FILTER_MODE_POINT;
  CUfilter_mode level_filter = CU_TR_FILTER_MODE_POINT;
  unsigned flags = 0;
  unsigned anisotropy = 0;
  float bias = 0;
  float clamp[2] = {0, 0};
  float border[4] = {0, 0, 0, 0};

  void Unbind() {
    array = nullptr;
    mipmapped = nullptr;
    address = 0;
  }
};
using ReferencePtr = std::shared_ptr<TextureReference>;

ReferencePtr Find(CUtexref handle) { return Registry<TextureReference>::Get().Find(handle); }

bool IsChannels(int channels) { return channels == 1 || channels == 2 || channels == 4; }

bool IsFilter(CUfilter_mode mode) { return mode == CU_TR_FILTER_MODE_POINT || mode == CU_TR_FILTER_MODE_LINEAR; }

}  // namespace

// The reference behind `handle`, or the call's end.
#define REFERENCE(reference, handle)     \
  SOFTGPU_ENTER_CONTEXT(context);        \
  ReferencePtr reference = Find(handle); \
  if (!reference) return CUDA_ERROR_INVALID_HANDLE

// A call that says what a reference holds.
#define ANSWER(name, type, member)                         \
  SOFTGPU_API name(type* value, CUtexref handle) {         \
    REFERENCE(reference, handle);                          \
    if (value == nullptr) return CUDA_ERROR_INVALID_VALUE; \
    *value = static_cast<type>(reference->member);         \
    return CUDA_SUCCESS;                                   \
  }

SOFTGPU_API cuTexRefCreate(CUtexref* out) {
  SOFTGPU_ENTER_CONTEXT(context);
  if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *out = reinterpret_cast<CUtexref>(Registry<TextureReference>::Get().Add(std::make_shared<TextureReference>()));
  return CUDA_SUCCESS;
}

SOFTGPU_API cuTexRefDestroy(CUtexref handle) {
  SOFTGPU_ENTER_CONTEXT(context);
  return Registry<TextureReference>::Get().Remove(handle) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

SOFTGPU_API cuTexRefSetArray(CUtexref handle, CUarray array, unsigned int flags) {
  REFERENCE(reference, handle);
  if (flags != CU_TRSA_OVERRIDE_FORMAT) return CUDA_ERROR_INVALID_VALUE;
  std::shared_ptr<Array> found = Registry<Array>::Get().Find(array);
  if (!found) return CUDA_ERROR_INVALID_HANDLE;
  reference->Unbind();
  reference->array = array;
  reference->format = found->facts.Format;
  reference->channels = int(found->facts.NumChannels);
  return CUDA_SUCCESS;
}

SOFTGPU_API cuTexRefSetMipmappedArray(CUtexref handle, CUmipmappedArray array, unsigned int flags) {
  REFERENCE(reference, handle);
  if (flags != CU_TRSA_OVERRIDE_FORMAT) return CUDA_ERROR_INVALID_VALUE;
  std::shared_ptr<MipmappedArray> found = Registry<MipmappedArray>::Get().Find(array);
  if (!found) return CUDA_ERROR_INVALID_HANDLE;
  reference->Unbind();
  reference->mipmapped = array;
  reference->format = found->facts.Format;
  reference->channels = int(found->facts.NumChannels);
  return CUDA_SUCCESS;
}

SOFTGPU_API cuTexRefSetAddress_v2(size_t* offset, CUtexref handle, CUdeviceptr address, size_t bytes) {
  REFERENCE(reference, handle);
  // Without room for an offset the address must need none.
  constexpr size_t kAlignment = 512;
  if (offset == nullptr && address % kAlignment != 0) return CUDA_ERROR_INVALID_VALUE;
  AllocationPtr memory = MemoryMap::Get().Find(address);
  if (address != 0 && (!memory || bytes > memory->begin + memory->size - address)) return CUDA_ERROR_INVALID_VALUE;
  reference->Unbind();
  reference->address = address;
  if (offset != nullptr) *offset = address % kAlignment;
  return CUDA_SUCCESS;
}

SOFTGPU_API cuTexRefSetAddress2D_v3(CUtexref handle, const CUDA_ARRAY_DESCRIPTOR* facts, CUdeviceptr address,
                                    size_t pitch) {
  REFERENCE(reference, handle);
  if (facts == nullptr || facts->Width == 0 || facts->Height == 0 || !IsChannels(int(facts->NumChannels)) ||
      pitch == 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  AllocationPtr memory = MemoryMap::Get().Find(address);
  if (!memory || pitch > (memory->begin + memory->size - address) / facts->Height) return CUDA_ERROR_INVALID_VALUE;
  reference->Unbind();
  reference->address = address;
  reference->format = facts->Format;
  reference->channels = int(facts->NumChannels);
  return CUDA_SUCCESS;
}
SOFTGPU_API cuTexRefSetAddress2D_v2(CUtexref handle, const CUDA_ARRAY_DESCRIPTOR* facts, CUdeviceptr address,
                                    size_t pitch) {
  return cuTexRefSetAddress2D_v3(handle, facts, address, pitch);
}

SOFTGPU_API cuTexRefGetArray(CUarray* array, CUtexref handle) {
  REFERENCE(reference, handle);
  if (array == nullptr || reference->array == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *array = reference->array;
  return CUDA_SUCCESS;
}
SOFTGPU_API cuTexRefGetMipmappedArray(CUmipmappedArray* array, CUtexref handle) {
  REFERENCE(reference, handle);
  if (array == nullptr || reference->mipmapped == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *array = reference->mipmapped;
  return CUDA_SUCCESS;
}
SOFTGPU_API cuTexRefGetAddress_v2(CUdeviceptr* address, CUtexref handle) {
  REFERENCE(reference, handle);
  if (reference->address == 0) return CUDA_ERROR_INVALID_VALUE;
  if (address != nullptr) *address = reference->address;
  return CUDA_SUCCESS;
}

SOFTGPU_API cuTexRefSetFormat(CUtexref handle, CUarray_format format, int channels) {
  REFERENCE(reference, handle);
  ptx::Channel channel;
  if (!ChannelOf(format, &channel) || !IsChannels(channels)) return CUDA_ERROR_INVALID_VALUE;
  reference->format = format;
  reference->channels = channels;
  return CUDA_SUCCESS;
}
SOFTGPU_API cuTexRefGetFormat(CUarray_format* format, int* channels, CUtexref handle) {
  REFERENCE(reference, handle);
  if (format != nullptr) *format = reference->format;
  if (channels != nullptr) *channels = reference->channels;
  return CUDA_SUCCESS;
}

SOFTGPU_API cuTexRefSetAddressMode(CUtexref handle, int axis, CUaddress_mode mode) {
  REFERENCE(reference, handle);
  if (axis < 0 || axis > 2 || mode < CU_TR_ADDRESS_MODE_WRAP || mode > CU_TR_ADDRESS_MODE_BORDER)
    return CUDA_ERROR_INVALID_VALUE;
  reference->modes[axis] = mode;
  return CUDA_SUCCESS;
}
SOFTGPU_API cuTexRefGetAddressMode(CUaddress_mode* mode, CUtexref handle, int axis) {
  REFERENCE(reference, handle);
  if (mode == nullptr || axis < 0 || axis > 2) return CUDA_ERROR_INVALID_VALUE;
  *mode = reference->modes[axis];
  return CUDA_SUCCESS;
}

SOFTGPU_API cuTexRefSetFilterMode(CUtexref handle, CUfilter_mode mode) {
  REFERENCE(reference, handle);
  if (!IsFilter(mode)) return CUDA_ERROR_INVALID_VALUE;
  reference->filter = mode;
  return CUDA_SUCCESS;
}
ANSWER(cuTexRefGetFilterMode, CUfilter_mode, filter)

SOFTGPU_API cuTexRefSetMipmapFilterMode(CUtexref handle, CUfilter_mode mode) {
  REFERENCE(reference, handle);
  if (!IsFilter(mode)) return CUDA_ERROR_INVALID_VALUE;
  reference->level_filter = mode;
  return CUDA_SUCCESS;
}
ANSWER(cuTexRefGetMipmapFilterMode, CUfilter_mode, level_filter)

SOFTGPU_API cuTexRefSetMipmapLevelBias(CUtexref handle, float bias) {
  REFERENCE(reference, handle);
  reference->bias = bias;
  return CUDA_SUCCESS;
}
ANSWER(cuTexRefGetMipmapLevelBias, float, bias)

SOFTGPU_API cuTexRefSetMipmapLevelClamp(CUtexref handle, float least, float most) {
  REFERENCE(reference, handle);
  reference->clamp[0] = least;
  reference->clamp[1] = most;
  return CUDA_SUCCESS;
}
SOFTGPU_API cuTexRefGetMipmapLevelClamp(float* least, float* most, CUtexref handle) {
  REFERENCE(reference, handle);
  if (least == nullptr || most == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *least = reference->clamp[0];
  *most = reference->clamp[1];
  return CUDA_SUCCESS;
}

SOFTGPU_API cuTexRefSetMaxAnisotropy(CUtexref handle, unsigned int most) {
  REFERENCE(reference, handle);
  reference->anisotropy = most;
  return CUDA_SUCCESS;
}
ANSWER(cuTexRefGetMaxAnisotropy, int, anisotropy)

SOFTGPU_API cuTexRefSetFlags(CUtexref handle, unsigned int flags) {
  REFERENCE(reference, handle);
  constexpr unsigned kFlags =
      CU_TRSF_READ_AS_INTEGER | CU_TRSF_NORMALIZED_COORDINATES | CU_TRSF_DISABLE_TRILINEAR_OPTIMIZATION;
  if ((flags & ~kFlags) != 0) return CUDA_ERROR_INVALID_VALUE;
  reference->flags = flags;
  return CUDA_SUCCESS;
}
ANSWER(cuTexRefGetFlags, unsigned int, flags)

SOFTGPU_API cuTexRefSetBorderColor(CUtexref handle, float* color) {
  REFERENCE(reference, handle);
  if (color == nullptr) return CUDA_ERROR_INVALID_VALUE;
  std::memcpy(reference->border, color, sizeof reference->border);
  return CUDA_SUCCESS;
}
SOFTGPU_API cuTexRefGetBorderColor(float* color, CUtexref handle) {
  REFERENCE(reference, handle);
  if (color == nullptr) return CUDA_ERROR_INVALID_VALUE;
  std::memcpy(color, reference->border, sizeof reference->border);
  return CUDA_SUCCESS;
}
