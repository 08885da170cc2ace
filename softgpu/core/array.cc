// SPDX-License-Identifier: Apache-2.0
#include "softgpu/core/array.h"

#include "softgpu/core/texture_objects.h"

namespace cuda_remote::softgpu {

int Array::dimensions() const {
  if (facts.Depth != 0 && !layered()) return 3;
  return facts.Height != 0 ? 2 : 1;
}

ptx::Image Array::image() const {
  ptx::Image image;
  image.data = reinterpret_cast<uint8_t*>(memory.get());
  image.width = facts.Width;
  image.height = rows;
  image.depth = slices;
  image.row_bytes = row_bytes();
  image.slice_bytes = slice_bytes();
  return image;
}

bool ChannelOf(CUarray_format format, ptx::Channel* channel) {
  switch (format) {
    case CU_AD_FORMAT_UNSIGNED_INT8:
      *channel = ptx::Channel::kU8;
      return true;
    case CU_AD_FORMAT_UNSIGNED_INT16:
      *channel = ptx::Channel::kU16;
      return true;
    case CU_AD_FORMAT_UNSIGNED_INT32:
      *channel = ptx::Channel::kU32;
      return true;
    case CU_AD_FORMAT_SIGNED_INT8:
      *channel = ptx::Channel::kS8;
      return true;
    case CU_AD_FORMAT_SIGNED_INT16:
      *channel = ptx::Channel::kS16;
      return true;
    case CU_AD_FORMAT_SIGNED_INT32:
      *channel = ptx::Channel::kS32;
      return true;
    case CU_AD_FORMAT_HALF:
      *channel = ptx::Channel::kHalf;
      return true;
    case CU_AD_FORMAT_FLOAT:
      *channel = ptx::Channel::kFloat;
      return true;
    default:
      return false;
  }
}

ContextPtr OwnContext(CUarray handle) {
  ArrayPtr array = Registry<Array>::Get().Find(handle);
  return array ? Registry<Context>::Get().Find(array->context) : nullptr;
}

ContextPtr OwnContext(CUmipmappedArray handle) {
  auto whole = Registry<MipmappedArray>::Get().Find(handle);
  return whole ? Registry<Context>::Get().Find(whole->context) : nullptr;
}

void DestroyArraysOf(const Context* context) {
  TextureObjects().EraseOf(context);
  SurfaceObjects().EraseOf(context);
  Registry<MipmappedArray>::Get().RemoveIf([context](const MipmappedArray& whole) { return whole.context == context; });
  Registry<Array>::Get().RemoveIf([context](const Array& array) { return array.context == context; });
}

}  // namespace cuda_remote::softgpu
