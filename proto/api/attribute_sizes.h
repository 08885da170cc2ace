// Sizes of untyped values whose type depends on an attribute; semantics rows name these functions.
//
// This header is part of the client library: no libprotobuf, no abseil, no logging.
#ifndef CUDA_REMOTE_PROTO_API_ATTRIBUTE_SIZES_H_
#define CUDA_REMOTE_PROTO_API_ATTRIBUTE_SIZES_H_

#include <cuda.h>

#include <cstddef>

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

}  // namespace cuda_remote

#endif  // CUDA_REMOTE_PROTO_API_ATTRIBUTE_SIZES_H_
