// SPDX-License-Identifier: Apache-2.0
// Copies and fills.
//
// A synchronous copy with host memory waits; one between device addresses, and a fill, is only put into the stream, as
// the driver does. An asynchronous copy from pageable memory takes the bytes at the call; one to pageable memory waits.
// With SOFTGPU_LATE_MS a copy waits only where CUDA's documentation promises that it does (README.md).
#include "softgpu/core/copy.h"

#include "softgpu/api/api.h"
#include "softgpu/core/graph.h"
#include "softgpu/core/memory_map.h"
#include "softgpu/core/settings.h"
#include "softgpu/core/stream.h"
#include "softgpu/core/work.h"

using namespace cuda_remote::softgpu;

namespace {

// Up to here an asynchronous copy from pageable memory is staged; a larger one waits.
constexpr uint64_t kStageBytes = 1 << 20;

// Whether `device` may copy between the host and what is mapped at `address`.
bool Reaches(int device, uint64_t address) {
  const AllocationPtr allocation = MemoryMap::Get().Find(address);
  return !allocation || (allocation->reached_by >> device & 1) != 0;
}

// Whether this is host memory, pageable or not, to CUDA.
bool IsHost(CUmemorytype type, uint64_t address, bool pageable) {
  if (pageable) return true;
  if (type == CU_MEMORYTYPE_ARRAY) return false;
  const AllocationPtr allocation = MemoryMap::Get().Find(address);
  return allocation && allocation->host();
}

// What the documentation allows a driver to do at the latest.
CUresult CopyLate(const CUDA_MEMCPY3D& copy, const StreamPtr& stream, CopyWork work, bool pageable_from,
                  bool pageable_to, bool synchronous) {
  const bool host_from = IsHost(copy.srcMemoryType, work.from, pageable_from);
  const bool host_to = IsHost(copy.dstMemoryType, work.to, pageable_to);
  if (host_from && host_to) return IssueAndWait(stream, std::move(work));
  if (!synchronous) return Issue(stream, std::move(work));
  if (host_to || !pageable_from) return IssueAndWait(stream, std::move(work));
  // The bytes have left the pageable buffer at the end of the call; they need not have arrived.
  if (CUresult result = IssueAndWait(stream, EmptyWork()); result != CUDA_SUCCESS) return result;
  Stage(&work);
  return Issue(stream, std::move(work));
}

CUresult Copy(const CUDA_MEMCPY3D& copy, CUstream handle, bool synchronous) {
  ContextPtr context;
  StreamPtr stream;
  if (CUresult result = ResolveStream(handle, &context, &stream); result != CUDA_SUCCESS) return result;
  if (copy.srcMemoryType == CU_MEMORYTYPE_HOST && copy.dstMemoryType == CU_MEMORYTYPE_DEVICE &&
      !Reaches(context->device(), copy.dstDevice)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (copy.srcMemoryType == CU_MEMORYTYPE_DEVICE && copy.dstMemoryType == CU_MEMORYTYPE_HOST &&
      !Reaches(context->device(), copy.srcDevice)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  CopyWork work;
  bool pageable_from, pageable_to;
  if (CUresult result = MakeCopy(copy, &work, &pageable_from, &pageable_to); result != CUDA_SUCCESS) return result;
  if (work.depth == 0) return CUDA_SUCCESS;
  const bool late = GetSettings().late_ms != 0 && !CaptureOf(stream);
  if (late && !synchronous) return CopyLate(copy, stream, std::move(work), pageable_from, pageable_to, synchronous);
  if (synchronous) {
    bool host = copy.srcMemoryType == CU_MEMORYTYPE_HOST || copy.dstMemoryType == CU_MEMORYTYPE_HOST ||
                copy.srcMemoryType == CU_MEMORYTYPE_UNIFIED || copy.dstMemoryType == CU_MEMORYTYPE_UNIFIED;
    if (host && late) return CopyLate(copy, stream, std::move(work), pageable_from, pageable_to, synchronous);
    if (host) return IssueAndWait(stream, std::move(work));
    if (CaptureOf(stream)) return ForbiddenInCapture(stream);
    return Issue(stream, std::move(work));
  }
  if (CaptureOf(stream)) return Issue(stream, std::move(work));
  if (pageable_to) return IssueAndWait(stream, std::move(work));
  if (pageable_from) {
    uint64_t bytes = work.width * work.height * work.depth;
    if (bytes > kStageBytes) return IssueAndWait(stream, std::move(work));
    Stage(&work);
  }
  return Issue(stream, std::move(work));
}

CUresult CopyBytes(CUmemorytype to_type, uint64_t to, CUmemorytype from_type, uint64_t from, size_t bytes,
                   CUstream stream, bool synchronous) {
  CUDA_MEMCPY3D copy = {};
  copy.srcMemoryType = from_type;
  copy.srcHost = reinterpret_cast<const void*>(from);
  copy.srcDevice = from;
  copy.dstMemoryType = to_type;
  copy.dstHost = reinterpret_cast<void*>(to);
  copy.dstDevice = to;
  copy.WidthInBytes = bytes;
  copy.Height = copy.Depth = 1;
  return Copy(copy, stream, synchronous);
}

CUDA_MEMCPY3D From2D(const CUDA_MEMCPY2D& c) {
  CUDA_MEMCPY3D copy = {};
  copy.srcXInBytes = c.srcXInBytes;
  copy.srcY = c.srcY;
  copy.srcMemoryType = c.srcMemoryType;
  copy.srcHost = c.srcHost;
  copy.srcDevice = c.srcDevice;
  copy.srcArray = c.srcArray;
  copy.srcPitch = c.srcPitch;
  copy.dstXInBytes = c.dstXInBytes;
  copy.dstY = c.dstY;
  copy.dstMemoryType = c.dstMemoryType;
  copy.dstHost = c.dstHost;
  copy.dstDevice = c.dstDevice;
  copy.dstArray = c.dstArray;
  copy.dstPitch = c.dstPitch;
  copy.WidthInBytes = c.WidthInBytes;
  copy.Height = c.Height;
  copy.Depth = 1;
  return copy;
}

CUDA_MEMCPY3D FromPeer(const CUDA_MEMCPY3D_PEER& c) {
  CUDA_MEMCPY3D copy = {};
  copy.srcXInBytes = c.srcXInBytes;
  copy.srcY = c.srcY;
  copy.srcZ = c.srcZ;
  copy.srcMemoryType = c.srcMemoryType;
  copy.srcHost = c.srcHost;
  copy.srcDevice = c.srcDevice;
  copy.srcArray = c.srcArray;
  copy.srcPitch = c.srcPitch;
  copy.srcHeight = c.srcHeight;
  copy.dstXInBytes = c.dstXInBytes;
  copy.dstY = c.dstY;
  copy.dstZ = c.dstZ;
  copy.dstMemoryType = c.dstMemoryType;
  copy.dstHost = c.dstHost;
  copy.dstDevice = c.dstDevice;
  copy.dstArray = c.dstArray;
  copy.dstPitch = c.dstPitch;
  copy.dstHeight = c.dstHeight;
  copy.WidthInBytes = c.WidthInBytes;
  copy.Height = c.Height;
  copy.Depth = c.Depth;
  return copy;
}

CUresult Set(CUdeviceptr to, size_t pitch, uint32_t value, uint32_t element, size_t width, size_t height,
             CUstream handle, bool synchronous) {
  ContextPtr context;
  StreamPtr stream;
  if (CUresult result = ResolveStream(handle, &context, &stream); result != CUDA_SUCCESS) return result;
  MemsetWork work;
  if (CUresult result = MakeMemset(to, pitch, value, element, width, height, &work); result != CUDA_SUCCESS)
    return result;
  if (work.height == 0) return CUDA_SUCCESS;
  // A fill of memory that the host uses has been done when the call returns, if the call has no stream.
  AllocationPtr allocation = synchronous ? MemoryMap::Get().Find(to) : nullptr;
  const bool wait = allocation && (allocation->host() || allocation->kind == MemoryKind::kManaged);
  return wait ? IssueAndWait(stream, work) : Issue(stream, work);
}

// One row between an array and something else; the other side is memory.
CUresult CopyRow(CUmemorytype to_type, uint64_t to, CUarray to_array, size_t to_offset, CUmemorytype from_type,
                 uint64_t from, CUarray from_array, size_t from_offset, size_t bytes, CUstream stream,
                 bool synchronous) {
  CUDA_MEMCPY3D copy = {};
  copy.srcMemoryType = from_type;
  copy.srcHost = reinterpret_cast<const void*>(from);
  copy.srcDevice = from;
  copy.srcArray = from_array;
  copy.srcXInBytes = from_offset;
  copy.dstMemoryType = to_type;
  copy.dstHost = reinterpret_cast<void*>(to);
  copy.dstDevice = to;
  copy.dstArray = to_array;
  copy.dstXInBytes = to_offset;
  copy.WidthInBytes = bytes;
  copy.Height = copy.Depth = 1;
  return Copy(copy, stream, synchronous);
}

constexpr CUmemorytype kArray = CU_MEMORYTYPE_ARRAY;
constexpr CUmemorytype kHost = CU_MEMORYTYPE_HOST, kDevice = CU_MEMORYTYPE_DEVICE, kUnified = CU_MEMORYTYPE_UNIFIED;

}  // namespace

SOFTGPU_API cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
  SOFTGPU_ENTER();
  return CopyBytes(kUnified, to, kUnified, from, bytes, nullptr, true);
}
SOFTGPU_API cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
  SOFTGPU_ENTER();
  return CopyBytes(kUnified, to, kUnified, from, bytes, stream, false);
}
SOFTGPU_API cuMemcpyPeer(CUdeviceptr to, CUcontext, CUdeviceptr from, CUcontext, size_t bytes) {
  SOFTGPU_ENTER();
  return CopyBytes(kDevice, to, kDevice, from, bytes, nullptr, true);
}
SOFTGPU_API cuMemcpyPeerAsync(CUdeviceptr to, CUcontext, CUdeviceptr from, CUcontext, size_t bytes, CUstream stream) {
  SOFTGPU_ENTER();
  return CopyBytes(kDevice, to, kDevice, from, bytes, stream, false);
}
SOFTGPU_API cuMemcpyHtoD_v2(CUdeviceptr to, const void* from, size_t bytes) {
  SOFTGPU_ENTER();
  return CopyBytes(kDevice, to, kHost, reinterpret_cast<uint64_t>(from), bytes, nullptr, true);
}
SOFTGPU_API cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void* from, size_t bytes, CUstream stream) {
  SOFTGPU_ENTER();
  return CopyBytes(kDevice, to, kHost, reinterpret_cast<uint64_t>(from), bytes, stream, false);
}
SOFTGPU_API cuMemcpyDtoH_v2(void* to, CUdeviceptr from, size_t bytes) {
  SOFTGPU_ENTER();
  return CopyBytes(kHost, reinterpret_cast<uint64_t>(to), kDevice, from, bytes, nullptr, true);
}
SOFTGPU_API cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr from, size_t bytes, CUstream stream) {
  SOFTGPU_ENTER();
  return CopyBytes(kHost, reinterpret_cast<uint64_t>(to), kDevice, from, bytes, stream, false);
}
SOFTGPU_API cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
  SOFTGPU_ENTER();
  return CopyBytes(kDevice, to, kDevice, from, bytes, nullptr, true);
}
SOFTGPU_API cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
  SOFTGPU_ENTER();
  return CopyBytes(kDevice, to, kDevice, from, bytes, stream, false);
}

SOFTGPU_API cuMemcpy2D_v2(const CUDA_MEMCPY2D* copy) {
  SOFTGPU_ENTER();
  return copy == nullptr ? CUDA_ERROR_INVALID_VALUE : Copy(From2D(*copy), nullptr, true);
}
SOFTGPU_API cuMemcpy2DUnaligned_v2(const CUDA_MEMCPY2D* copy) {
  SOFTGPU_ENTER();
  return copy == nullptr ? CUDA_ERROR_INVALID_VALUE : Copy(From2D(*copy), nullptr, true);
}
SOFTGPU_API cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D* copy, CUstream stream) {
  SOFTGPU_ENTER();
  return copy == nullptr ? CUDA_ERROR_INVALID_VALUE : Copy(From2D(*copy), stream, false);
}
SOFTGPU_API cuMemcpy3D_v2(const CUDA_MEMCPY3D* copy) {
  SOFTGPU_ENTER();
  return copy == nullptr ? CUDA_ERROR_INVALID_VALUE : Copy(*copy, nullptr, true);
}
SOFTGPU_API cuMemcpy3DAsync_v2(const CUDA_MEMCPY3D* copy, CUstream stream) {
  SOFTGPU_ENTER();
  return copy == nullptr ? CUDA_ERROR_INVALID_VALUE : Copy(*copy, stream, false);
}
SOFTGPU_API cuMemcpy3DPeer(const CUDA_MEMCPY3D_PEER* copy) {
  SOFTGPU_ENTER();
  return copy == nullptr ? CUDA_ERROR_INVALID_VALUE : Copy(FromPeer(*copy), nullptr, true);
}
SOFTGPU_API cuMemcpy3DPeerAsync(const CUDA_MEMCPY3D_PEER* copy, CUstream stream) {
  SOFTGPU_ENTER();
  return copy == nullptr ? CUDA_ERROR_INVALID_VALUE : Copy(FromPeer(*copy), stream, false);
}

SOFTGPU_API cuMemcpyHtoA_v2(CUarray to, size_t offset, const void* from, size_t bytes) {
  SOFTGPU_ENTER();
  return CopyRow(kArray, 0, to, offset, kHost, reinterpret_cast<uint64_t>(from), nullptr, 0, bytes, nullptr, true);
}
SOFTGPU_API cuMemcpyHtoAAsync_v2(CUarray to, size_t offset, const void* from, size_t bytes, CUstream stream) {
  SOFTGPU_ENTER();
  return CopyRow(kArray, 0, to, offset, kHost, reinterpret_cast<uint64_t>(from), nullptr, 0, bytes, stream, false);
}
SOFTGPU_API cuMemcpyAtoH_v2(void* to, CUarray from, size_t offset, size_t bytes) {
  SOFTGPU_ENTER();
  return CopyRow(kHost, reinterpret_cast<uint64_t>(to), nullptr, 0, kArray, 0, from, offset, bytes, nullptr, true);
}
SOFTGPU_API cuMemcpyAtoHAsync_v2(void* to, CUarray from, size_t offset, size_t bytes, CUstream stream) {
  SOFTGPU_ENTER();
  return CopyRow(kHost, reinterpret_cast<uint64_t>(to), nullptr, 0, kArray, 0, from, offset, bytes, stream, false);
}
SOFTGPU_API cuMemcpyDtoA_v2(CUarray to, size_t offset, CUdeviceptr from, size_t bytes) {
  SOFTGPU_ENTER();
  return CopyRow(kArray, 0, to, offset, kDevice, from, nullptr, 0, bytes, nullptr, true);
}
SOFTGPU_API cuMemcpyAtoD_v2(CUdeviceptr to, CUarray from, size_t offset, size_t bytes) {
  SOFTGPU_ENTER();
  return CopyRow(kDevice, to, nullptr, 0, kArray, 0, from, offset, bytes, nullptr, true);
}
SOFTGPU_API cuMemcpyAtoA_v2(CUarray to, size_t to_offset, CUarray from, size_t from_offset, size_t bytes) {
  SOFTGPU_ENTER();
  return CopyRow(kArray, 0, to, to_offset, kArray, 0, from, from_offset, bytes, nullptr, true);
}

SOFTGPU_API cuMemsetD8_v2(CUdeviceptr to, unsigned char value, size_t count) {
  SOFTGPU_ENTER();
  return Set(to, 0, value, 1, count, 1, nullptr, true);
}
SOFTGPU_API cuMemsetD16_v2(CUdeviceptr to, unsigned short value, size_t count) {
  SOFTGPU_ENTER();
  return Set(to, 0, value, 2, count, 1, nullptr, true);
}
SOFTGPU_API cuMemsetD32_v2(CUdeviceptr to, unsigned int value, size_t count) {
  SOFTGPU_ENTER();
  return Set(to, 0, value, 4, count, 1, nullptr, true);
}
SOFTGPU_API cuMemsetD2D8_v2(CUdeviceptr to, size_t pitch, unsigned char value, size_t width, size_t height) {
  SOFTGPU_ENTER();
  return Set(to, pitch, value, 1, width, height, nullptr, true);
}
SOFTGPU_API cuMemsetD2D16_v2(CUdeviceptr to, size_t pitch, unsigned short value, size_t width, size_t height) {
  SOFTGPU_ENTER();
  return Set(to, pitch, value, 2, width, height, nullptr, true);
}
SOFTGPU_API cuMemsetD2D32_v2(CUdeviceptr to, size_t pitch, unsigned int value, size_t width, size_t height) {
  SOFTGPU_ENTER();
  return Set(to, pitch, value, 4, width, height, nullptr, true);
}
SOFTGPU_API cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t count, CUstream stream) {
  SOFTGPU_ENTER();
  return Set(to, 0, value, 1, count, 1, stream, false);
}
SOFTGPU_API cuMemsetD16Async(CUdeviceptr to, unsigned short value, size_t count, CUstream stream) {
  SOFTGPU_ENTER();
  return Set(to, 0, value, 2, count, 1, stream, false);
}
SOFTGPU_API cuMemsetD32Async(CUdeviceptr to, unsigned int value, size_t count, CUstream stream) {
  SOFTGPU_ENTER();
  return Set(to, 0, value, 4, count, 1, stream, false);
}
SOFTGPU_API cuMemsetD2D8Async(CUdeviceptr to, size_t pitch, unsigned char value, size_t width, size_t height,
                              CUstream stream) {
  SOFTGPU_ENTER();
  return Set(to, pitch, value, 1, width, height, stream, false);
}
SOFTGPU_API cuMemsetD2D16Async(CUdeviceptr to, size_t pitch, unsigned short value, size_t width, size_t height,
                               CUstream stream) {
  SOFTGPU_ENTER();
  return Set(to, pitch, value, 2, width, height, stream, false);
}
SOFTGPU_API cuMemsetD2D32Async(CUdeviceptr to, size_t pitch, unsigned int value, size_t width, size_t height,
                               CUstream stream) {
  SOFTGPU_ENTER();
  return Set(to, pitch, value, 4, width, height, stream, false);
}
