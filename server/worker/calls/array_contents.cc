// SPDX-License-Identifier: Apache-2.0
#include "server/worker/calls/array_contents.h"

#include <algorithm>

#include "absl/status/status.h"
#include "proto/driverabi/array_format.h"

namespace cuda_remote::server {
namespace {

// More levels than any array can have.
constexpr unsigned kMostLevels = 32;

CUresult CopyRows(const DriverTable& driver, const ArrayLayout::Level& level, uint64_t x, uint64_t y, uint64_t z,
                  uint64_t width, uint64_t rows, char* memory, bool write) {
  CUDA_MEMCPY3D copy = {};
  copy.WidthInBytes = width;
  copy.Height = rows;
  copy.Depth = 1;
  if (write) {
    copy.srcMemoryType = CU_MEMORYTYPE_HOST;
    copy.srcHost = memory;
    copy.srcPitch = width;
    copy.srcHeight = rows;
    copy.dstMemoryType = CU_MEMORYTYPE_ARRAY;
    copy.dstArray = level.array;
    copy.dstXInBytes = x;
    copy.dstY = y;
    copy.dstZ = z;
  } else {
    copy.dstMemoryType = CU_MEMORYTYPE_HOST;
    copy.dstHost = memory;
    copy.dstPitch = width;
    copy.dstHeight = rows;
    copy.srcMemoryType = CU_MEMORYTYPE_ARRAY;
    copy.srcArray = level.array;
    copy.srcXInBytes = x;
    copy.srcY = y;
    copy.srcZ = z;
  }
  return driver.cuMemcpy3D_v2(&copy);
}

}  // namespace

absl::StatusOr<ArrayLayout> DescribeArray(WorkerSession& session, uint64_t handle) {
  ArrayLayout layout;
  const HandleMap::Entry* const entry = session.handles().Find(KindOf(handle), handle);
  if (entry == nullptr) return absl::NotFoundError("an array is gone");
  if (IsArrayHandle(entry->parent)) return layout;
  const ContextInfo* const context = session.contexts().Find(entry->parent);
  const DriverTable& driver = session.driver();
  if (context == nullptr || MakeCurrent(driver, context->ref) != CUDA_SUCCESS)
    return absl::FailedPreconditionError("a CUDA array is in no context");
  layout.context = entry->parent;
  layout.device = context->device;
  const bool mipmapped = KindOf(handle) == Kind::kMipmappedArray;
  for (unsigned i = 0; i < (mipmapped ? kMostLevels : 1); ++i) {
    ArrayLayout::Level level;
    if (mipmapped) {
      const auto real = reinterpret_cast<CUmipmappedArray>(entry->real);
      if (driver.cuMipmappedArrayGetLevel(&level.array, real, i) != CUDA_SUCCESS) break;
    } else {
      level.array = reinterpret_cast<CUarray>(entry->real);
    }
    CUDA_ARRAY3D_DESCRIPTOR facts = {};
    if (const CUresult result = driver.cuArray3DGetDescriptor_v2(&facts, level.array); result != CUDA_SUCCESS) {
      return absl::FailedPreconditionError("a CUDA array cannot be described (CUDA error " +
                                           std::to_string(int(result)) + ")");
    }
    const uint64_t element = ArrayElementBytes(facts.Format, facts.NumChannels);
    if (element == 0) {
      return absl::UnimplementedError("a CUDA array of format " + std::to_string(unsigned(facts.Format)) +
                                      ", whose contents are not saved yet");
    }
    if (facts.Flags & (CUDA_ARRAY3D_SPARSE | CUDA_ARRAY3D_DEFERRED_MAPPING))
      return absl::UnimplementedError("a sparse CUDA array, whose contents are not saved yet");
    level.row_bytes = facts.Width * element;
    level.rows = std::max<uint64_t>(facts.Height, 1);
    level.slices = std::max<uint64_t>(facts.Depth, 1);
    layout.bytes += level.bytes();
    layout.levels.push_back(level);
  }
  return layout;
}

CUresult CopyArrayBytes(const DriverTable& driver, const ArrayLayout& layout, uint64_t offset, char* memory,
                        uint64_t bytes, bool write) {
  if (offset > layout.bytes || bytes > layout.bytes - offset) return CUDA_ERROR_INVALID_VALUE;
  for (const ArrayLayout::Level& level : layout.levels) {
    if (offset >= level.bytes()) {
      offset -= level.bytes();
      continue;
    }
    while (bytes != 0 && offset < level.bytes()) {
      const uint64_t slice_bytes = level.row_bytes * level.rows;
      const uint64_t z = offset / slice_bytes, in_slice = offset % slice_bytes;
      const uint64_t y = in_slice / level.row_bytes, x = in_slice % level.row_bytes;
      // A piece of a row, or as many whole rows as there are in this slice.
      uint64_t width = std::min(bytes, level.row_bytes - x), rows = 1;
      if (x == 0 && bytes >= level.row_bytes) rows = std::min(level.rows - y, bytes / level.row_bytes);
      const CUresult result = CopyRows(driver, level, x, y, z, width, rows, memory, write);
      if (result != CUDA_SUCCESS) return result;
      memory += width * rows;
      offset += width * rows;
      bytes -= width * rows;
    }
    offset = 0;
  }
  return CUDA_SUCCESS;
}

}  // namespace cuda_remote::server
