// SPDX-License-Identifier: Apache-2.0
// Tensor maps: checked as the driver checks them, and written in this GPU's own form (ptx/tensor_map.h).
#include <cstring>

#include "softgpu/api/api.h"
#include "softgpu/core/device.h"
#include "softgpu/ptx/tensor_map.h"

using namespace cuda_remote::softgpu;

namespace {

static_assert(sizeof(CUtensorMap) == sizeof(ptx::TensorMap), "a map has this size");

// False: there is no such type. CUDA's types that are converted on their way are known and not supported.
bool KnownType(CUtensorMapDataType type, ptx::TensorType* known, bool* supported) {
  *supported = true;
  switch (type) {
    case CU_TENSOR_MAP_DATA_TYPE_UINT8:
      *known = ptx::TensorType::kU8;
      return true;
    case CU_TENSOR_MAP_DATA_TYPE_UINT16:
      *known = ptx::TensorType::kU16;
      return true;
    case CU_TENSOR_MAP_DATA_TYPE_UINT32:
      *known = ptx::TensorType::kU32;
      return true;
    case CU_TENSOR_MAP_DATA_TYPE_INT32:
      *known = ptx::TensorType::kS32;
      return true;
    case CU_TENSOR_MAP_DATA_TYPE_UINT64:
      *known = ptx::TensorType::kU64;
      return true;
    case CU_TENSOR_MAP_DATA_TYPE_INT64:
      *known = ptx::TensorType::kS64;
      return true;
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT16:
      *known = ptx::TensorType::kF16;
      return true;
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT32:
      *known = ptx::TensorType::kF32;
      return true;
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT64:
      *known = ptx::TensorType::kF64;
      return true;
    case CU_TENSOR_MAP_DATA_TYPE_BFLOAT16:
      *known = ptx::TensorType::kBf16;
      return true;
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT32_FTZ:
    case CU_TENSOR_MAP_DATA_TYPE_TFLOAT32:
    case CU_TENSOR_MAP_DATA_TYPE_TFLOAT32_FTZ:
    case CU_TENSOR_MAP_DATA_TYPE_16U4_ALIGN8B:
    case CU_TENSOR_MAP_DATA_TYPE_16U4_ALIGN16B:
    case CU_TENSOR_MAP_DATA_TYPE_16U6_ALIGN16B:
      *supported = false;
      return true;
    default:
      return false;
  }
}

bool IsFloat(ptx::TensorType type) { return type >= ptx::TensorType::kF16; }

CUresult Unsupported(const char* what) {
  LogOnce(std::string("tensor maps with ") + what + " are not supported");
  return CUDA_ERROR_NOT_SUPPORTED;
}

}  // namespace

SOFTGPU_API cuTensorMapEncodeTiled(CUtensorMap* out, CUtensorMapDataType data_type, cuuint32_t rank, void* address,
                                   const cuuint64_t* dim, const cuuint64_t* strides, const cuuint32_t* box,
                                   const cuuint32_t* steps, CUtensorMapInterleave interleave,
                                   CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                                   CUtensorMapFloatOOBfill fill) {
  SOFTGPU_ENTER();
  if (ComputeMajor() < 9) return CUDA_ERROR_NOT_SUPPORTED;
  ptx::TensorMap map;
  bool supported = false;
  if (out == nullptr || rank == 0 || rank > ptx::kTensorDimensions || dim == nullptr || box == nullptr ||
      steps == nullptr || (strides == nullptr && rank > 1) || !KnownType(data_type, &map.type, &supported) ||
      interleave < CU_TENSOR_MAP_INTERLEAVE_NONE || interleave > CU_TENSOR_MAP_INTERLEAVE_32B ||
      swizzle < CU_TENSOR_MAP_SWIZZLE_NONE || swizzle > CU_TENSOR_MAP_SWIZZLE_128B_ATOM_64B ||
      promotion < CU_TENSOR_MAP_L2_PROMOTION_NONE || promotion > CU_TENSOR_MAP_L2_PROMOTION_L2_256B ||
      fill < CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE || fill > CU_TENSOR_MAP_FLOAT_OOB_FILL_NAN_REQUEST_ZERO_FMA) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const bool interleaved = interleave != CU_TENSOR_MAP_INTERLEAVE_NONE;
  if (interleaved && rank < 3) return CUDA_ERROR_INVALID_VALUE;
  if (!supported) return Unsupported("elements that are converted or packed");
  if (interleaved) return Unsupported("interleaved layouts");
  if (swizzle > CU_TENSOR_MAP_SWIZZLE_128B) return Unsupported("swizzling of more than 16 bytes at once");
  if (reinterpret_cast<uintptr_t>(address) % 16 != 0) return CUDA_ERROR_INVALID_VALUE;
  if (fill != CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE && !IsFloat(map.type)) return CUDA_ERROR_INVALID_VALUE;
  map.address = reinterpret_cast<uint64_t>(address);
  map.rank = static_cast<uint8_t>(rank);
  map.nan = fill != CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE ? 1 : 0;
  for (uint32_t i = 0; i < ptx::kTensorDimensions; ++i) {
    const bool used = i < rank;
    const uint64_t size = used ? dim[i] : 1, boxed = used ? box[i] : 1, step = used ? steps[i] : 1;
    const uint64_t stride = used && i > 0 ? strides[i - 1] : 0;
    if (size == 0 || size > uint64_t{1} << 32 || boxed == 0 || boxed > ptx::kTensorBox || step == 0 ||
        step > ptx::kTensorStep || stride % 16 != 0 || stride >> 40 != 0) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    map.dim[i] = size;
    map.box[i] = static_cast<uint16_t>(boxed);
    map.step[i] = static_cast<uint8_t>(i == 0 ? 1 : step);  // there is none in dimension 0
    if (i > 0) map.stride[i - 1] = stride;
  }
  const uint32_t inner = map.box[0] * ptx::TensorBytes(map.type);
  if (inner % 16 != 0) return CUDA_ERROR_INVALID_VALUE;
  if (swizzle != CU_TENSOR_MAP_SWIZZLE_NONE) {
    map.span = static_cast<uint8_t>(16u << (swizzle - CU_TENSOR_MAP_SWIZZLE_NONE));
    if (inner > map.span) return CUDA_ERROR_INVALID_VALUE;
    if (inner < map.span) return Unsupported("boxes narrower than their swizzling");
  }
  std::memcpy(out, &map, sizeof map);
  return CUDA_SUCCESS;
}

SOFTGPU_API cuTensorMapReplaceAddress(CUtensorMap* out, void* address) {
  SOFTGPU_ENTER();
  if (out == nullptr || reinterpret_cast<uintptr_t>(address) % 16 != 0) return CUDA_ERROR_INVALID_VALUE;
  // Whatever else is there is left to the kernels, as by the driver.
  ptx::TensorMap map;
  std::memcpy(static_cast<void*>(&map), out, sizeof map);
  map.address = reinterpret_cast<uint64_t>(address);
  std::memcpy(out, &map, sizeof map);
  return CUDA_SUCCESS;
}
