// SPDX-License-Identifier: Apache-2.0
// Pitch and height of the sides of a copy. The client refuses what the driver would, before it reads or writes outside
// the rectangle: the server's driver sees little of a side in host memory, whose rows travel packed, slice by slice, or
// which pinned memory takes the place of.
#ifndef CUDA_REMOTE_CLIENT_CALLS_COPY_SHAPE_H_
#define CUDA_REMOTE_CLIENT_CALLS_COPY_SHAPE_H_

#include <cuda.h>

#include <cstddef>
#include <initializer_list>

namespace cuda_remote::client {

// One side of a copy; `rows` is what CUDA calls the height of a source or destination.
struct SideShape {
  size_t x, y, z;
  size_t *pitch, *rows;
};

// Fills in a pitch or a height that is 0. False for what CUDA refuses, whether there are several rows and slices or
// one: a pitch that is less than the rectangle's width and what lies to its left, and a height that is less than the
// rectangle's and what lies above it. False also if the side does not fit an address space.
inline bool CompleteShape(const SideShape& side, size_t width, size_t height, size_t depth) {
  using Wide = unsigned __int128;
  constexpr size_t kMost = size_t{1} << 47;
  for (const size_t number : {side.x, side.y, side.z, *side.pitch, *side.rows, width, height, depth}) {
    if (number >= kMost) return false;
  }
  if (*side.pitch == 0) *side.pitch = side.x + width;
  if (*side.rows == 0) *side.rows = side.y + height;
  if (*side.pitch < side.x + width || *side.rows < side.y + height) return false;
  const Wide last_row = Wide(side.z + depth - 1) * *side.rows + side.y + height - 1;
  return last_row < kMost && last_row * *side.pitch + side.x + width < kMost;
}

// CompleteShape of all sides that are no arrays, which have no pitch. `Copy`: CUDA_MEMCPY3D or CUDA_MEMCPY3D_PEER,
// which is not empty.
template <typename Copy>
bool CompleteSides(Copy* copy) {
  const SideShape from{copy->srcXInBytes, copy->srcY, copy->srcZ, &copy->srcPitch, &copy->srcHeight};
  const SideShape to{copy->dstXInBytes, copy->dstY, copy->dstZ, &copy->dstPitch, &copy->dstHeight};
  const auto complete = [copy](CUmemorytype type, const SideShape& side) {
    return type == CU_MEMORYTYPE_ARRAY || CompleteShape(side, copy->WidthInBytes, copy->Height, copy->Depth);
  };
  return complete(copy->srcMemoryType, from) && complete(copy->dstMemoryType, to);
}

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_CALLS_COPY_SHAPE_H_
