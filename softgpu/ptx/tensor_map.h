// SPDX-License-Identifier: Apache-2.0
// What the software GPU's tensor maps hold: 128 bytes that a driver encodes (softgpu/api/tensor.cc), programs
// keep wherever they like, and cp.async.bulk.tensor reads.
#ifndef CUDA_REMOTE_SOFTGPU_PTX_TENSOR_MAP_H_
#define CUDA_REMOTE_SOFTGPU_PTX_TENSOR_MAP_H_

#include <cstdint>

namespace cuda_remote::softgpu::ptx {

enum class TensorType : uint8_t { kU8, kU16, kU32, kS32, kU64, kS64, kF16, kBf16, kF32, kF64, kCount };

constexpr uint32_t kTensorDimensions = 5, kTensorBox = 256, kTensorStep = 8;

struct TensorMap {
  static constexpr uint64_t kMagic = 0x70616d726f736e74;  // tells a map from other bytes

  uint64_t magic = kMagic;
  uint64_t address = 0;                         // of the first element
  uint64_t dim[kTensorDimensions] = {};         // elements; 1 beyond `rank`
  uint64_t stride[kTensorDimensions - 1] = {};  // bytes from one to the next in dimensions 1 and up; 0 beyond `rank`
  uint16_t box[kTensorDimensions] = {};         // elements that a copy passes over; 1 beyond `rank`
  uint8_t step[kTensorDimensions] = {};         // every how manieth of them it takes; 1 in dimension 0
  TensorType type = TensorType::kU8;
  uint8_t rank = 0;
  uint8_t span = 0;  // swizzled in rows of so many bytes: 32, 64, 128; 0: not
  uint8_t nan = 0;   // 1: NaNs for what is outside; 0: zeros (no bool: any byte may stand here)
  uint8_t unused[21] = {};
};
static_assert(sizeof(TensorMap) == 128, "as the driver API has it");

// Bytes of an element; 0 for no type.
uint32_t TensorBytes(TensorType type);

// Whether this is a map, with every number in its range: programs may hand over any bytes.
bool IsTensorMap(const TensorMap& map);

}  // namespace cuda_remote::softgpu::ptx

#endif  // CUDA_REMOTE_SOFTGPU_PTX_TENSOR_MAP_H_
