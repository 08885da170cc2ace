// SPDX-License-Identifier: Apache-2.0
// CUDA arrays and mipmapped arrays.
//
// An array's elements lie row after row without gaps. A level of a mipmapped array is an array of its own, alive as
// long as the whole.
#ifndef CUDA_REMOTE_SOFTGPU_CORE_ARRAY_H_
#define CUDA_REMOTE_SOFTGPU_CORE_ARRAY_H_

#include <cuda.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "softgpu/core/context.h"
#include "softgpu/ptx/texture.h"

namespace cuda_remote::softgpu {

struct Array {
  CUDA_ARRAY3D_DESCRIPTOR facts = {};  // as the application gave it: 0 for missing dimensions
  uint64_t element_bytes = 0;
  uint64_t rows = 1, slices = 1;
  std::shared_ptr<char> memory;
  const Context* context = nullptr;
  bool level = false;  // of a mipmapped array: not the application's to destroy

  CUarray handle() { return reinterpret_cast<CUarray>(this); }
  uint64_t row_bytes() const { return facts.Width * element_bytes; }
  uint64_t slice_bytes() const { return row_bytes() * rows; }
  bool layered() const { return (facts.Flags & CUDA_ARRAY3D_LAYERED) != 0; }
  // Axes that a coordinate has, without the layer.
  int dimensions() const;
  ptx::Image image() const;
};
using ArrayPtr = std::shared_ptr<Array>;

struct MipmappedArray {
  CUDA_ARRAY3D_DESCRIPTOR facts = {};
  std::vector<ArrayPtr> levels;
  const Context* context = nullptr;

  CUmipmappedArray handle() { return reinterpret_cast<CUmipmappedArray>(this); }
};

// The channels of a format; false for formats that are not supported.
bool ChannelOf(CUarray_format format, ptx::Channel* channel);

// The context that an array was made in; null for what is none.
ContextPtr OwnContext(CUarray handle);
ContextPtr OwnContext(CUmipmappedArray handle);

// Destroys the arrays of a context that has no work left, and its texture and surface objects.
void DestroyArraysOf(const Context* context);

}  // namespace cuda_remote::softgpu

#endif  // CUDA_REMOTE_SOFTGPU_CORE_ARRAY_H_
