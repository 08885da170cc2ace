// SPDX-License-Identifier: Apache-2.0
#include "softgpu/core/copy.h"

#include "softgpu/core/array.h"
#include "softgpu/core/memory_map.h"
#include "softgpu/core/settings.h"

namespace cuda_remote::softgpu {
namespace {

struct Side {
  uint64_t address = 0;
  uint64_t pitch = 0, slice = 0;
  bool device = false;  // must be known memory
  bool pageable = false;
};

// A side in an array, whose layout counts and not the copy's pitch.
CUresult MakeArraySide(CUarray handle, uint64_t x, uint64_t y, uint64_t z, const CUDA_MEMCPY3D& copy, Side* side) {
  if (handle == nullptr) return CUDA_ERROR_INVALID_VALUE;
  ArrayPtr array = Registry<Array>::Get().Find(handle);
  if (!array) return CUDA_ERROR_INVALID_HANDLE;
  const auto inside = [](uint64_t at, uint64_t count, uint64_t size) { return at <= size && count <= size - at; };
  if (!inside(x, copy.WidthInBytes, array->row_bytes()) || !inside(y, copy.Height, array->rows) ||
      !inside(z, copy.Depth, array->slices) || x % array->element_bytes != 0 ||
      copy.WidthInBytes % array->element_bytes != 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  side->pitch = array->row_bytes();
  side->slice = array->slice_bytes();
  side->address = reinterpret_cast<uint64_t>(array->memory.get()) + z * side->slice + y * side->pitch + x;
  return CUDA_SUCCESS;
}

CUresult MakeSide(CUmemorytype type, const void* host, CUdeviceptr device, CUarray array, uint64_t pitch, uint64_t rows,
                  uint64_t x, uint64_t y, uint64_t z, const CUDA_MEMCPY3D& copy, Side* side) {
  uint64_t base;
  switch (type) {
    case CU_MEMORYTYPE_HOST:
      base = reinterpret_cast<uint64_t>(host);
      side->pageable = MemoryMap::Get().Find(base) == nullptr;
      break;
    case CU_MEMORYTYPE_DEVICE:
      base = device;
      side->device = true;
      break;
    case CU_MEMORYTYPE_UNIFIED:
      base = device;
      side->device = MemoryMap::Get().Find(base) != nullptr;
      side->pageable = !side->device;
      break;
    case CU_MEMORYTYPE_ARRAY:
      return MakeArraySide(array, x, y, z, copy, side);
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
  if (base == 0) return CUDA_ERROR_INVALID_VALUE;
  // What is given must hold the box, also where there is one row or one slice.
  if (pitch == 0) pitch = x + copy.WidthInBytes;
  if (rows == 0) rows = y + copy.Height;
  if (pitch < x + copy.WidthInBytes || rows < y + copy.Height) return CUDA_ERROR_INVALID_VALUE;
  side->pitch = pitch;
  side->slice = pitch * rows;
  side->address = base + z * side->slice + y * pitch + x;
  if (side->device) {
    uint64_t bytes = (copy.Depth - 1) * side->slice + (copy.Height - 1) * pitch + copy.WidthInBytes;
    if (!MemoryMap::Get().Covers(side->address, bytes)) return CUDA_ERROR_INVALID_VALUE;
  }
  return CUDA_SUCCESS;
}

}  // namespace

CUresult MakeCopy(const CUDA_MEMCPY3D& copy, CopyWork* work, bool* pageable_from, bool* pageable_to) {
  *pageable_from = *pageable_to = false;
  *work = CopyWork();
  work->width = copy.WidthInBytes;
  work->height = copy.Height;
  work->depth = copy.Depth;
  constexpr uint64_t kSane = uint64_t{1} << 47;
  if (copy.WidthInBytes >= kSane || copy.Height >= kSane || copy.Depth >= kSane) return CUDA_ERROR_INVALID_VALUE;
  if (copy.WidthInBytes == 0 || copy.Height == 0 || copy.Depth == 0) {
    work->depth = 0;
    return CUDA_SUCCESS;
  }
  if (copy.srcLOD != 0 || copy.dstLOD != 0) return CUDA_ERROR_INVALID_VALUE;
  Side from, to;
  if (CUresult result = MakeSide(copy.srcMemoryType, copy.srcHost, copy.srcDevice, copy.srcArray, copy.srcPitch,
                                 copy.srcHeight, copy.srcXInBytes, copy.srcY, copy.srcZ, copy, &from);
      result != CUDA_SUCCESS) {
    return result;
  }
  if (CUresult result = MakeSide(copy.dstMemoryType, copy.dstHost, copy.dstDevice, copy.dstArray, copy.dstPitch,
                                 copy.dstHeight, copy.dstXInBytes, copy.dstY, copy.dstZ, copy, &to);
      result != CUDA_SUCCESS) {
    return result;
  }
  work->from = from.address;
  work->from_pitch = from.pitch;
  work->from_slice = from.slice;
  work->to = to.address;
  work->to_pitch = to.pitch;
  work->to_slice = to.slice;
  *pageable_from = from.pageable;
  *pageable_to = to.pageable;
  const AllocationPtr allocation = MemoryMap::Get().Find(to.address);
  work->from_pageable = from.pageable && !to.pageable && !(allocation && allocation->host());
  return CUDA_SUCCESS;
}

CUresult MakeMemset(CUdeviceptr to, size_t pitch, uint32_t value, uint32_t element, size_t width, size_t height,
                    MemsetWork* work) {
  *work = {to, pitch, value, element, width, height};
  if (width == 0 || height == 0) {
    work->height = 0;
    return CUDA_SUCCESS;
  }
  uint64_t row, bytes;
  if (to == 0 || to % element != 0) return CUDA_ERROR_INVALID_VALUE;
  if (__builtin_mul_overflow(width, uint64_t{element}, &row)) return CUDA_ERROR_INVALID_VALUE;
  if (height > 1 && (pitch < row || pitch % element != 0)) return CUDA_ERROR_INVALID_VALUE;
  if (__builtin_mul_overflow(uint64_t{height - 1}, uint64_t{pitch}, &bytes)) return CUDA_ERROR_INVALID_VALUE;
  if (__builtin_add_overflow(bytes, row, &bytes)) return CUDA_ERROR_INVALID_VALUE;
  return MemoryMap::Get().Covers(to, bytes) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

}  // namespace cuda_remote::softgpu
