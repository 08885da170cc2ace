// SPDX-License-Identifier: Apache-2.0
// Sizes of array elements.
#ifndef CUDA_REMOTE_PROTO_DRIVERABI_ARRAY_FORMAT_H_
#define CUDA_REMOTE_PROTO_DRIVERABI_ARRAY_FORMAT_H_

#include <cuda.h>

#include <cstdint>

namespace cuda_remote {

// Bytes of one element; 0 for formats whose elements do not lie one after the other (compressed blocks, planes), or
// unknown.
constexpr uint64_t ArrayElementBytes(unsigned format, unsigned channels) {
  switch (format) {
    case CU_AD_FORMAT_UNSIGNED_INT8:
    case CU_AD_FORMAT_SIGNED_INT8:
      return channels;
    case CU_AD_FORMAT_UNSIGNED_INT16:
    case CU_AD_FORMAT_SIGNED_INT16:
    case CU_AD_FORMAT_HALF:
      return 2 * uint64_t(channels);
    case CU_AD_FORMAT_UNSIGNED_INT32:
    case CU_AD_FORMAT_SIGNED_INT32:
    case CU_AD_FORMAT_FLOAT:
      return 4 * uint64_t(channels);
    case CU_AD_FORMAT_UNORM_INT8X1:
    case CU_AD_FORMAT_SNORM_INT8X1:
      return 1;
    case CU_AD_FORMAT_UNORM_INT8X2:
    case CU_AD_FORMAT_SNORM_INT8X2:
    case CU_AD_FORMAT_UNORM_INT16X1:
    case CU_AD_FORMAT_SNORM_INT16X1:
      return 2;
    case CU_AD_FORMAT_UNORM_INT8X4:
    case CU_AD_FORMAT_SNORM_INT8X4:
    case CU_AD_FORMAT_UNORM_INT16X2:
    case CU_AD_FORMAT_SNORM_INT16X2:
    case CU_AD_FORMAT_UNORM_INT_101010_2:
      return 4;
    case CU_AD_FORMAT_UNORM_INT16X4:
    case CU_AD_FORMAT_SNORM_INT16X4:
      return 8;
    default:
      return 0;
  }
}

}  // namespace cuda_remote

#endif  // CUDA_REMOTE_PROTO_DRIVERABI_ARRAY_FORMAT_H_
