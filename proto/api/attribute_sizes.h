// SPDX-License-Identifier: Apache-2.0
// Sizes that depend on arguments: of untyped values, and of the memory that calls use. Semantics rows name these
// functions.
//
// This header is part of the client library: no libprotobuf, no abseil, no logging.
#ifndef CUDA_REMOTE_PROTO_API_ATTRIBUTE_SIZES_H_
#define CUDA_REMOTE_PROTO_API_ATTRIBUTE_SIZES_H_

#include <cuda.h>

#include <cstddef>
#include <cstdint>

namespace cuda_remote {

// The first three attributes of a pool are ints, the others 64-bit counters; 8 for attributes that are not known yet,
// which is the largest there is.
inline size_t PoolAttributeSize(CUmemPool_attribute attribute) {
  switch (attribute) {
    case CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES:
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC:
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES:
      return sizeof(int);
    default:
      return sizeof(cuuint64_t);
  }
}

// `count` things of `size` bytes; all there is, if that is too many.
constexpr uint64_t ScaledBytes(uint64_t count, uint64_t size) {
  return count > UINT64_MAX / size ? UINT64_MAX : count * size;
}

// From the first byte to the last of `height` rows of `width` things of `size` bytes, with `pitch` bytes from row to
// row.
constexpr uint64_t PitchedBytes(uint64_t pitch, uint64_t width, uint64_t height, uint64_t size) {
  if (width == 0 || height == 0) return 0;
  const uint64_t row = ScaledBytes(width, size);
  const uint64_t before = pitch == 0 ? 0 : ScaledBytes(height - 1, pitch);
  return row > UINT64_MAX - before ? UINT64_MAX : before + row;
}

}  // namespace cuda_remote

#endif  // CUDA_REMOTE_PROTO_API_ATTRIBUTE_SIZES_H_
