// SPDX-License-Identifier: Apache-2.0
// Texture and surface references: settings and what they are bound to. Kernels find what those of modules are bound to
// under the address of the variable that stands for the reference; those that the host makes are for nobody.
#include <algorithm>
#include <cstring>
#include <memory>

#include "softgpu/api/api.h"
#include "softgpu/api/texture.h"
#include "softgpu/core/array.h"
#include "softgpu/core/memory_map.h"
#include "softgpu/core/module.h"
#include "softgpu/core/registry.h"

using namespace cuda_remote::softgpu;

namespace {

constexpr size_t kAlignment = 512;  // of the memory that a texture shows

// The variable of a module that stands for a reference.
struct Place {
  bool in_module = false;
  std::weak_ptr<Allocation> variable;

  // False once the module is gone.
  bool alive() const { return !in_module || !variable.expired(); }
};

// The defaults are the documentation's.
struct TextureReference {
  Place place;
  CUarray array = nullptr;
  CUmipmappedArray mipmapped = nullptr;
  CUdeviceptr address = 0;
  size_t bytes = 0;                         // of linear memory
  size_t width = 0, height = 0, pitch = 0;  // of pitched memory
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
    address = bytes = width = height = pitch = 0;
  }
};
using ReferencePtr = std::shared_ptr<TextureReference>;

struct SurfaceReference {
  Place place;
  CUarray array = nullptr;
};

template <typename T>
std::shared_ptr<T> Find(const void* handle) {
  std::shared_ptr<T> reference = Registry<T>::Get().Find(handle);
  return reference && reference->place.alive() ? reference : nullptr;
}

// The handle of the reference that a variable stands for: its address.
template <typename T>
void* OfVariable(const AllocationPtr& variable) {
  void* const handle = reinterpret_cast<void*>(variable->begin);
  if (Find<T>(handle)) return handle;
  Registry<T>::Get().RemoveIf([](const T& one) { return !one.place.alive(); });
  auto reference = std::make_shared<T>();
  reference->place = {true, variable};
  Registry<T>::Get().Add(std::move(reference), handle);
  return handle;
}

// Shows kernels that are launched from now on what the reference is bound to, if that is complete.
void Refer(const Context* context, const TextureReference& reference) {
  const AllocationPtr variable = reference.place.variable.lock();
  if (!variable) return;
  CUDA_RESOURCE_DESC resource = {};
  CUDA_TEXTURE_DESC sampling = {};
  if (reference.array != nullptr) {
    resource.resType = CU_RESOURCE_TYPE_ARRAY;
    resource.res.array.hArray = reference.array;
  } else if (reference.mipmapped != nullptr) {
    resource.resType = CU_RESOURCE_TYPE_MIPMAPPED_ARRAY;
    resource.res.mipmap.hMipmappedArray = reference.mipmapped;
  } else if (reference.pitch != 0) {
    resource.resType = CU_RESOURCE_TYPE_PITCH2D;
    auto& pitched = resource.res.pitch2D;
    pitched.devPtr = reference.address;
    pitched.format = reference.format;
    pitched.numChannels = unsigned(reference.channels);
    pitched.width = reference.width;
    pitched.height = reference.height;
    pitched.pitchInBytes = reference.pitch;
  } else {
    resource.resType = CU_RESOURCE_TYPE_LINEAR;
    auto& linear = resource.res.linear;
    linear.devPtr = reference.address / kAlignment * kAlignment;
    linear.format = reference.format;
    linear.numChannels = unsigned(reference.channels);
    linear.sizeInBytes = reference.bytes + reference.address % kAlignment;
  }
  std::copy(reference.modes, reference.modes + 3, sampling.addressMode);
  sampling.filterMode = reference.filter;
  sampling.flags = reference.flags;
  sampling.maxAnisotropy = reference.anisotropy;
  sampling.mipmapFilterMode = reference.level_filter;
  sampling.mipmapLevelBias = reference.bias;
  sampling.minMipmapLevelClamp = reference.clamp[0];
  sampling.maxMipmapLevelClamp = reference.clamp[1];
  std::copy(reference.border, reference.border + 4, sampling.borderColor);
  std::shared_ptr<TextureObject> object;
  const CUresult made = MakeTexture(context, resource, sampling, &object);
  SynchronizeAllContexts();  // kernels that were launched before
  if (made == CUDA_SUCCESS) {
    TextureObjects().Refer(variable->begin, std::move(object));
  } else {
    TextureObjects().Erase(variable->begin);
  }
}

bool IsChannels(int channels) { return channels == 1 || channels == 2 || channels == 4; }

bool IsFilter(CUfilter_mode mode) { return mode == CU_TR_FILTER_MODE_POINT || mode == CU_TR_FILTER_MODE_LINEAR; }

}  // namespace

// The reference behind `handle`, or the call's end.
#define REFERENCE(reference, handle)                       \
  SOFTGPU_ENTER_CONTEXT(context);                          \
  ReferencePtr reference = Find<TextureReference>(handle); \
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
  REFERENCE(reference, handle);
  if (reference->place.in_module) return CUDA_ERROR_INVALID_VALUE;
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
  Refer(context.get(), *reference);
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
  Refer(context.get(), *reference);
  return CUDA_SUCCESS;
}

SOFTGPU_API cuTexRefSetAddress_v2(size_t* offset, CUtexref handle, CUdeviceptr address, size_t bytes) {
  REFERENCE(reference, handle);
  // Without room for an offset the address must need none.
  if (offset == nullptr && address % kAlignment != 0) return CUDA_ERROR_INVALID_VALUE;
  AllocationPtr memory = MemoryMap::Get().Find(address);
  if (address != 0 && (!memory || bytes > memory->begin + memory->size - address)) return CUDA_ERROR_INVALID_VALUE;
  reference->Unbind();
  reference->address = address;
  reference->bytes = bytes;
  if (offset != nullptr) *offset = address % kAlignment;
  Refer(context.get(), *reference);
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
  reference->width = facts->Width;
  reference->height = facts->Height;
  reference->pitch = pitch;
  reference->format = facts->Format;
  reference->channels = int(facts->NumChannels);
  Refer(context.get(), *reference);
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
  Refer(context.get(), *reference);
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
  Refer(context.get(), *reference);
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
  Refer(context.get(), *reference);
  return CUDA_SUCCESS;
}
ANSWER(cuTexRefGetFilterMode, CUfilter_mode, filter)

SOFTGPU_API cuTexRefSetMipmapFilterMode(CUtexref handle, CUfilter_mode mode) {
  REFERENCE(reference, handle);
  if (!IsFilter(mode)) return CUDA_ERROR_INVALID_VALUE;
  reference->level_filter = mode;
  Refer(context.get(), *reference);
  return CUDA_SUCCESS;
}
ANSWER(cuTexRefGetMipmapFilterMode, CUfilter_mode, level_filter)

SOFTGPU_API cuTexRefSetMipmapLevelBias(CUtexref handle, float bias) {
  REFERENCE(reference, handle);
  reference->bias = bias;
  Refer(context.get(), *reference);
  return CUDA_SUCCESS;
}
ANSWER(cuTexRefGetMipmapLevelBias, float, bias)

SOFTGPU_API cuTexRefSetMipmapLevelClamp(CUtexref handle, float least, float most) {
  REFERENCE(reference, handle);
  reference->clamp[0] = least;
  reference->clamp[1] = most;
  Refer(context.get(), *reference);
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
  Refer(context.get(), *reference);
  return CUDA_SUCCESS;
}
ANSWER(cuTexRefGetMaxAnisotropy, int, anisotropy)

SOFTGPU_API cuTexRefSetFlags(CUtexref handle, unsigned int flags) {
  REFERENCE(reference, handle);
  constexpr unsigned kFlags =
      CU_TRSF_READ_AS_INTEGER | CU_TRSF_NORMALIZED_COORDINATES | CU_TRSF_DISABLE_TRILINEAR_OPTIMIZATION;
  if ((flags & ~kFlags) != 0) return CUDA_ERROR_INVALID_VALUE;
  reference->flags = flags;
  Refer(context.get(), *reference);
  return CUDA_SUCCESS;
}
ANSWER(cuTexRefGetFlags, unsigned int, flags)

SOFTGPU_API cuTexRefSetBorderColor(CUtexref handle, float* color) {
  REFERENCE(reference, handle);
  if (color == nullptr) return CUDA_ERROR_INVALID_VALUE;
  std::memcpy(reference->border, color, sizeof reference->border);
  Refer(context.get(), *reference);
  return CUDA_SUCCESS;
}
SOFTGPU_API cuTexRefGetBorderColor(float* color, CUtexref handle) {
  REFERENCE(reference, handle);
  if (color == nullptr) return CUDA_ERROR_INVALID_VALUE;
  std::memcpy(color, reference->border, sizeof reference->border);
  return CUDA_SUCCESS;
}

SOFTGPU_API cuModuleGetTexRef(CUtexref* out, CUmodule handle, const char* name) {
  SOFTGPU_ENTER_CONTEXT_OF(context, handle);
  if (out == nullptr || name == nullptr) return CUDA_ERROR_INVALID_VALUE;
  ModulePtr module = Registry<Module>::Get().Find(handle);
  if (!module) return CUDA_ERROR_INVALID_HANDLE;
  const AllocationPtr variable = module->FindReference(name, ptx::Reference::kTexture);
  if (!variable) return CUDA_ERROR_NOT_FOUND;
  *out = reinterpret_cast<CUtexref>(OfVariable<TextureReference>(variable));
  return CUDA_SUCCESS;
}

SOFTGPU_API cuModuleGetSurfRef(CUsurfref* out, CUmodule handle, const char* name) {
  SOFTGPU_ENTER_CONTEXT_OF(context, handle);
  if (out == nullptr || name == nullptr) return CUDA_ERROR_INVALID_VALUE;
  ModulePtr module = Registry<Module>::Get().Find(handle);
  if (!module) return CUDA_ERROR_INVALID_HANDLE;
  const AllocationPtr variable = module->FindReference(name, ptx::Reference::kSurface);
  if (!variable) return CUDA_ERROR_NOT_FOUND;
  *out = reinterpret_cast<CUsurfref>(OfVariable<SurfaceReference>(variable));
  return CUDA_SUCCESS;
}

SOFTGPU_API cuSurfRefSetArray(CUsurfref handle, CUarray array, unsigned int flags) {
  SOFTGPU_ENTER_CONTEXT(context);
  const auto reference = Find<SurfaceReference>(handle);
  const AllocationPtr variable = reference ? reference->place.variable.lock() : nullptr;
  if (!variable) return CUDA_ERROR_INVALID_HANDLE;
  if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
  std::shared_ptr<SurfaceObject> object;
  if (CUresult result = MakeSurface(context.get(), array, &object); result != CUDA_SUCCESS) return result;
  SynchronizeAllContexts();
  SurfaceObjects().Refer(variable->begin, std::move(object));
  reference->array = array;
  return CUDA_SUCCESS;
}

SOFTGPU_API cuSurfRefGetArray(CUarray* array, CUsurfref handle) {
  SOFTGPU_ENTER_CONTEXT(context);
  const auto reference = Find<SurfaceReference>(handle);
  if (!reference) return CUDA_ERROR_INVALID_HANDLE;
  if (array == nullptr || reference->array == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *array = reference->array;
  return CUDA_SUCCESS;
}
