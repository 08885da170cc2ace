// SPDX-License-Identifier: Apache-2.0
// Texture and surface objects.
#include "softgpu/api/texture.h"

#include <algorithm>

#include "softgpu/api/api.h"
#include "softgpu/core/array.h"
#include "softgpu/core/device.h"
#include "softgpu/core/texture_objects.h"

namespace cuda_remote::softgpu {
namespace {

// Elements in device memory. As the driver (580 on an H100): any address will do, even one where nothing is, and more
// bytes than are allocated; what a kernel reads is checked when it reads.
CUresult FromMemory(CUdeviceptr address, CUarray_format format, unsigned channels, TextureObject* object) {
  ptx::Texture& texture = object->texture;
  if (!ChannelOf(format, &texture.channel)) {
    if (format != CU_AD_FORMAT_UNORM_INT_101010_2) return CUDA_ERROR_INVALID_VALUE;
    LogOnce("textures of format " + std::to_string(unsigned(format)) + " are not supported");
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  if (channels != 1 && channels != 2 && channels != 4) return CUDA_ERROR_INVALID_VALUE;
  texture.channels = channels;
  texture.in_memory = true;
  return address == 0 || address % kTextureAlignment != 0 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult FromLinear(const CUDA_RESOURCE_DESC& resource, TextureObject* object) {
  const auto& linear = resource.res.linear;
  constexpr uint64_t kMostBytes = uint64_t{1} << 32, kMostElements = uint64_t{1} << 30;
  if (CUresult result = FromMemory(linear.devPtr, linear.format, linear.numChannels, object); result != CUDA_SUCCESS) {
    return result;
  }
  ptx::Image image;
  image.data = reinterpret_cast<uint8_t*>(linear.devPtr);
  image.width = linear.sizeInBytes / object->texture.element_bytes();
  if (linear.sizeInBytes > kMostBytes || image.width > kMostElements) return CUDA_ERROR_INVALID_VALUE;
  object->texture.linear_memory = true;
  object->texture.levels.push_back(image);
  return CUDA_SUCCESS;
}

CUresult FromPitched(const CUDA_RESOURCE_DESC& resource, TextureObject* object) {
  const auto& pitched = resource.res.pitch2D;
  constexpr uint64_t kMostWidth = 131072, kMostHeight = 65000, kPitchEnd = 2097152;
  if (CUresult result = FromMemory(pitched.devPtr, pitched.format, pitched.numChannels, object);
      result != CUDA_SUCCESS) {
    return result;
  }
  if (pitched.width > kMostWidth || pitched.height > kMostHeight || pitched.pitchInBytes >= kPitchEnd ||
      pitched.pitchInBytes % kTexturePitchAlignment != 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  ptx::Image image;
  image.data = reinterpret_cast<uint8_t*>(pitched.devPtr);
  image.width = std::max<uint64_t>(pitched.width, 1);
  image.height = std::max<uint64_t>(pitched.height, 1);
  image.row_bytes = pitched.pitchInBytes;
  object->texture.levels.push_back(image);
  return CUDA_SUCCESS;
}

CUresult AddLevel(const ArrayPtr& array, TextureObject* object) {
  if (!array || !ChannelOf(array->facts.Format, &object->texture.channel)) return CUDA_ERROR_INVALID_HANDLE;
  object->texture.channels = array->facts.NumChannels;
  object->texture.cube = (array->facts.Flags & CUDA_ARRAY3D_CUBEMAP) != 0;
  object->texture.layered = array->layered() && !object->texture.cube;
  object->texture.levels.push_back(array->image());
  object->memory.push_back(array->memory);
  return CUDA_SUCCESS;
}

CUresult Resource(const CUDA_RESOURCE_DESC& resource, TextureObject* object) {
  switch (resource.resType) {
    case CU_RESOURCE_TYPE_ARRAY:
      if (resource.res.array.hArray == nullptr) return CUDA_ERROR_INVALID_VALUE;
      return AddLevel(Registry<Array>::Get().Find(resource.res.array.hArray), object);
    case CU_RESOURCE_TYPE_MIPMAPPED_ARRAY: {
      auto whole = Registry<MipmappedArray>::Get().Find(resource.res.mipmap.hMipmappedArray);
      if (!whole) return CUDA_ERROR_INVALID_HANDLE;
      for (const ArrayPtr& level : whole->levels) {
        if (CUresult result = AddLevel(level, object); result != CUDA_SUCCESS) return result;
      }
      return CUDA_SUCCESS;
    }
    case CU_RESOURCE_TYPE_LINEAR:
      return FromLinear(resource, object);
    case CU_RESOURCE_TYPE_PITCH2D:
      return FromPitched(resource, object);
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
}

CUresult Sampling(const CUDA_TEXTURE_DESC& from, ptx::Texture* texture) {
  // The driver takes all of the lower ones, among them two that have no name.
  const unsigned flags = 0x3f | (texture->cube ? unsigned{CU_TRSF_SEAMLESS_CUBEMAP} : 0);
  if (from.flags & ~flags) return CUDA_ERROR_INVALID_VALUE;
  // sRGB is for bytes; other elements are left alone.
  if ((from.flags & CU_TRSF_SRGB) != 0 && texture->channel == ptx::Channel::kU8 &&
      (from.flags & CU_TRSF_READ_AS_INTEGER) == 0) {
    LogOnce("sRGB textures are not supported");
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  const auto is_filter = [](CUfilter_mode mode) {
    return mode == CU_TR_FILTER_MODE_POINT || mode == CU_TR_FILTER_MODE_LINEAR;
  };
  if (!is_filter(from.filterMode) || !is_filter(from.mipmapFilterMode)) return CUDA_ERROR_INVALID_VALUE;
  for (const int reserved : from.reserved) {
    if (reserved != 0) return CUDA_ERROR_INVALID_VALUE;
  }
  texture->seamless = (from.flags & CU_TRSF_SEAMLESS_CUBEMAP) != 0;
  texture->as_integer = (from.flags & CU_TRSF_READ_AS_INTEGER) != 0;
  texture->normalized_coordinates = (from.flags & CU_TRSF_NORMALIZED_COORDINATES) != 0;
  texture->linear_filter = from.filterMode == CU_TR_FILTER_MODE_LINEAR;
  texture->linear_mipmaps = from.mipmapFilterMode == CU_TR_FILTER_MODE_LINEAR;
  texture->level_bias = from.mipmapLevelBias;
  texture->level_min = from.minMipmapLevelClamp;
  texture->level_max = from.maxMipmapLevelClamp;
  for (int i = 0; i < 3; ++i) {
    switch (from.addressMode[i]) {
      case CU_TR_ADDRESS_MODE_WRAP:
        texture->address[i] = ptx::AddressMode::kWrap;
        break;
      case CU_TR_ADDRESS_MODE_CLAMP:
        texture->address[i] = ptx::AddressMode::kClamp;
        break;
      case CU_TR_ADDRESS_MODE_MIRROR:
        texture->address[i] = ptx::AddressMode::kMirror;
        break;
      case CU_TR_ADDRESS_MODE_BORDER:
        texture->address[i] = ptx::AddressMode::kBorder;
        break;
      default:
        return CUDA_ERROR_INVALID_VALUE;
    }
  }
  std::copy(from.borderColor, from.borderColor + 4, texture->border);
  // The driver filters integers, too, which the CUDA runtime does not let programs ask for.
  if (!texture->linear_filter || texture->gives_floats() || texture->linear_memory) return CUDA_SUCCESS;
  LogOnce("textures that filter integers are not supported");
  return CUDA_ERROR_NOT_SUPPORTED;
}

// A view that shows the resource as it is changes nothing; others are refused.
bool IsPlainView(const CUDA_RESOURCE_VIEW_DESC& view, const ptx::Texture& texture) {
  const bool all_levels = view.firstMipmapLevel == 0 && view.lastMipmapLevel + 1 == texture.levels.size();
  const bool all_layers = view.firstLayer == 0 && (!texture.layered || view.lastLayer + 1 == texture.levels[0].depth);
  return view.width == texture.levels[0].width && all_levels && all_layers;
}

}  // namespace

CUresult MakeTexture(const Context* context, const CUDA_RESOURCE_DESC& resource, const CUDA_TEXTURE_DESC& sampling,
                     std::shared_ptr<TextureObject>* out) {
  auto object = std::make_shared<TextureObject>();
  object->context = context;
  object->resource = resource;
  object->sampling = sampling;
  if (CUresult result = Resource(resource, object.get()); result != CUDA_SUCCESS) return result;
  if (CUresult result = Sampling(sampling, &object->texture); result != CUDA_SUCCESS) return result;
  *out = std::move(object);
  return CUDA_SUCCESS;
}

CUresult MakeSurface(const Context* context, CUarray handle, std::shared_ptr<SurfaceObject>* out) {
  ArrayPtr array = Registry<Array>::Get().Find(handle);
  if (!array) return CUDA_ERROR_INVALID_HANDLE;
  if ((array->facts.Flags & CUDA_ARRAY3D_SURFACE_LDST) == 0) return CUDA_ERROR_INVALID_VALUE;
  auto object = std::make_shared<SurfaceObject>();
  object->context = context;
  object->resource.resType = CU_RESOURCE_TYPE_ARRAY;
  object->resource.res.array.hArray = handle;
  object->surface.image = array->image();
  object->surface.element_bytes = uint32_t(array->element_bytes);
  object->memory = array->memory;
  *out = std::move(object);
  return CUDA_SUCCESS;
}

}  // namespace cuda_remote::softgpu

using namespace cuda_remote::softgpu;

SOFTGPU_API cuTexObjectCreate(CUtexObject* out, const CUDA_RESOURCE_DESC* resource, const CUDA_TEXTURE_DESC* sampling,
                              const CUDA_RESOURCE_VIEW_DESC* view) {
  SOFTGPU_ENTER_CONTEXT(context);
  if (out == nullptr || resource == nullptr || sampling == nullptr) return CUDA_ERROR_INVALID_VALUE;
  std::shared_ptr<TextureObject> object;
  if (CUresult result = MakeTexture(context.get(), *resource, *sampling, &object); result != CUDA_SUCCESS) {
    return result;
  }
  if (resource->flags != 0) return CUDA_ERROR_INVALID_VALUE;
  if (view != nullptr) {
    // A view of memory changes nothing, whatever it says.
    if (!object->texture.in_memory && !IsPlainView(*view, object->texture)) {
      LogOnce("texture views of a part or with another format are not supported");
      return CUDA_ERROR_NOT_SUPPORTED;
    }
    object->view = *view;
    object->has_view = true;
  }
  *out = TextureObjects().Enter(std::move(object));
  return CUDA_SUCCESS;
}

// What is none destroys as well as any other, with the real driver, too.
SOFTGPU_API cuTexObjectDestroy(CUtexObject handle) {
  SOFTGPU_ENTER_CONTEXT(context);
  if (!TextureObjects().Find(handle)) return CUDA_SUCCESS;
  SynchronizeAllContexts();
  TextureObjects().Erase(handle);
  return CUDA_SUCCESS;
}

SOFTGPU_API cuTexObjectGetResourceDesc(CUDA_RESOURCE_DESC* out, CUtexObject handle) {
  SOFTGPU_ENTER_CONTEXT(context);
  auto object = TextureObjects().Find(handle);
  if (out == nullptr || !object) return CUDA_ERROR_INVALID_VALUE;
  *out = object->resource;
  return CUDA_SUCCESS;
}

SOFTGPU_API cuTexObjectGetTextureDesc(CUDA_TEXTURE_DESC* out, CUtexObject handle) {
  SOFTGPU_ENTER_CONTEXT(context);
  auto object = TextureObjects().Find(handle);
  if (out == nullptr || !object) return CUDA_ERROR_INVALID_VALUE;
  *out = object->sampling;
  return CUDA_SUCCESS;
}

SOFTGPU_API cuTexObjectGetResourceViewDesc(CUDA_RESOURCE_VIEW_DESC* out, CUtexObject handle) {
  SOFTGPU_ENTER_CONTEXT(context);
  auto object = TextureObjects().Find(handle);
  if (out == nullptr || !object) return CUDA_ERROR_INVALID_VALUE;
  *out = object->view;  // zeros without one
  return CUDA_SUCCESS;
}

SOFTGPU_API cuSurfObjectCreate(CUsurfObject* out, const CUDA_RESOURCE_DESC* resource) {
  SOFTGPU_ENTER_CONTEXT(context);
  if (out == nullptr || resource == nullptr || resource->resType != CU_RESOURCE_TYPE_ARRAY)
    return CUDA_ERROR_INVALID_VALUE;
  if (resource->res.array.hArray == nullptr) return CUDA_ERROR_INVALID_VALUE;
  std::shared_ptr<SurfaceObject> object;
  if (CUresult result = MakeSurface(context.get(), resource->res.array.hArray, &object); result != CUDA_SUCCESS) {
    return result;
  }
  object->resource = *resource;
  *out = SurfaceObjects().Enter(std::move(object));
  return CUDA_SUCCESS;
}

SOFTGPU_API cuSurfObjectDestroy(CUsurfObject handle) {
  SOFTGPU_ENTER_CONTEXT(context);
  if (!SurfaceObjects().Find(handle)) return CUDA_SUCCESS;
  SynchronizeAllContexts();
  SurfaceObjects().Erase(handle);
  return CUDA_SUCCESS;
}

SOFTGPU_API cuSurfObjectGetResourceDesc(CUDA_RESOURCE_DESC* out, CUsurfObject handle) {
  SOFTGPU_ENTER_CONTEXT(context);
  auto object = SurfaceObjects().Find(handle);
  if (out == nullptr || !object) return CUDA_ERROR_INVALID_VALUE;
  *out = object->resource;
  return CUDA_SUCCESS;
}
