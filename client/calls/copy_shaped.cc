// SPDX-License-Identifier: Apache-2.0
// Copies of rectangles and boxes, and to and from arrays.
//
// A side that lies in this process's memory travels as packed rows in bands of about 1 MiB; all else is named by the
// call's own struct. 3D copies are done slice by slice where a host side takes part.

#include <cuda.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "client/calls/bodies.gen.h"
#include "client/calls/copy.h"
#include "client/calls/copy_shape.h"
#include "client/calls/mapped_memory.h"
#include "client/calls/pointer.h"
#include "client/calls/staged_node.h"
#include "client/core/session.h"
#include "proto/codec/codec.h"
#include "proto/driverabi/array_format.h"

namespace cuda_remote::client {
namespace {

constexpr CallInfo kCopy2D = Under(info::k_cuMemcpy2DAsync_v2, "cuMemcpy2D");
constexpr CallInfo kCopy3D = Under(info::k_cuMemcpy3DAsync_v2, "cuMemcpy3D");

// Longer rows go in pieces.
constexpr size_t kLongestRow = size_t(64) << 20;
// No row of an array is as long.
constexpr size_t kLongestArrayRow = size_t(16) << 20;

// Whether a device's address is that of pinned memory, which the driver takes for it.
bool IsPinned(Session& session, CUdeviceptr address) {
  if (IsDevicePointer(session, address)) return false;
  ReaderLock lock(&session.memory().mutex());
  return session.memory().host_ranges().Find(address) != nullptr;
}

// A unified side becomes what its pointer says it is. So does a host side in memory of the GPU (in managed memory, so
// that the server reaches it in the stream's order), and a device side in pinned memory.
template <typename Copy>
void ResolveUnified(Session& session, Copy* copy) {
  if (copy->srcMemoryType == CU_MEMORYTYPE_DEVICE && IsPinned(session, copy->srcDevice)) {
    copy->srcMemoryType = CU_MEMORYTYPE_UNIFIED;
  }
  if (copy->dstMemoryType == CU_MEMORYTYPE_DEVICE && IsPinned(session, copy->dstDevice)) {
    copy->dstMemoryType = CU_MEMORYTYPE_UNIFIED;
  }
  if (copy->srcMemoryType == CU_MEMORYTYPE_HOST &&
      IsDevicePointer(session, reinterpret_cast<uint64_t>(copy->srcHost))) {
    copy->srcMemoryType = CU_MEMORYTYPE_DEVICE;
    copy->srcDevice = reinterpret_cast<uint64_t>(copy->srcHost);
  }
  if (copy->dstMemoryType == CU_MEMORYTYPE_HOST &&
      IsDevicePointer(session, reinterpret_cast<uint64_t>(copy->dstHost))) {
    copy->dstMemoryType = CU_MEMORYTYPE_DEVICE;
    copy->dstDevice = reinterpret_cast<uint64_t>(copy->dstHost);
  }
  if (copy->srcMemoryType == CU_MEMORYTYPE_UNIFIED) {
    copy->srcMemoryType = IsDevicePointer(session, copy->srcDevice) ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
    copy->srcHost = reinterpret_cast<const void*>(HostAddressOf(session, copy->srcDevice));
  }
  if (copy->dstMemoryType == CU_MEMORYTYPE_UNIFIED) {
    copy->dstMemoryType = IsDevicePointer(session, copy->dstDevice) ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
    copy->dstHost = reinterpret_cast<void*>(HostAddressOf(session, copy->dstDevice));
  }
}

// What the driver refuses before it has copied or looked at a byte.
CUresult CheckSides(CUmemorytype from, const void* from_host, CUmemorytype to, const void* to_host, size_t width) {
  for (const CUmemorytype type : {from, to}) {
    if (type != CU_MEMORYTYPE_HOST && type != CU_MEMORYTYPE_DEVICE && type != CU_MEMORYTYPE_ARRAY)
      return CUDA_ERROR_INVALID_VALUE;
    if (type == CU_MEMORYTYPE_ARRAY && width > kLongestArrayRow) return CUDA_ERROR_INVALID_VALUE;
  }
  const bool missing = (from == CU_MEMORYTYPE_HOST && !from_host) || (to == CU_MEMORYTYPE_HOST && !to_host);
  return missing ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

// The same of a whole copy. `Copy`: CUDA_MEMCPY3D or CUDA_MEMCPY3D_PEER.
template <typename Copy>
CUresult Check(Session& session, Copy copy) {
  if (copy.srcMemoryType == CU_MEMORYTYPE_DEVICE && LeavesAllocation(session, copy.srcDevice, copy.WidthInBytes)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (copy.dstMemoryType == CU_MEMORYTYPE_DEVICE && LeavesAllocation(session, copy.dstDevice, copy.WidthInBytes)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const bool nowhere = (copy.srcMemoryType == CU_MEMORYTYPE_ARRAY && !copy.srcArray) ||
                       (copy.dstMemoryType == CU_MEMORYTYPE_ARRAY && !copy.dstArray);
  if (nowhere || !CompleteSides(&copy)) return CUDA_ERROR_INVALID_VALUE;
  return CheckSides(copy.srcMemoryType, copy.srcHost, copy.dstMemoryType, copy.dstHost, copy.WidthInBytes);
}

template <typename Request, typename Copy>
void Describe(const Copy& copy, uint64_t stream, bool unaligned, Request* request) {
  request->copy = std::string_view(reinterpret_cast<const char*>(&copy), sizeof(copy));
  request->stream = stream;
  request->unaligned = unaligned;
}

// One rectangle, whose rows fit a message; both host sides, if any, are in `copy` as pitch and offsets say.
template <typename Request, typename Copy>
CUresult CopyNarrow(Call& call, Copy copy, uint64_t stream, bool unaligned) {
  const size_t width = copy.WidthInBytes;
  const size_t height = copy.Height;
  const bool from_host = copy.srcMemoryType == CU_MEMORYTYPE_HOST;
  const bool to_host = copy.dstMemoryType == CU_MEMORYTYPE_HOST;
  const size_t src_pitch = copy.srcPitch;
  const size_t dst_pitch = copy.dstPitch;
  const char* const src =
      from_host ? static_cast<const char*>(copy.srcHost) + copy.srcY * src_pitch + copy.srcXInBytes : nullptr;
  char* const dst = to_host ? static_cast<char*>(copy.dstHost) + copy.dstY * dst_pitch + copy.dstXInBytes : nullptr;
  if (from_host && to_host) {
    if (const CUresult result = WaitForStream(call, stream); result != CUDA_SUCCESS) return result;
    for (size_t y = 0; y < height; ++y) memmove(dst + y * dst_pitch, src + y * src_pitch, width);
    return CUDA_SUCCESS;
  }
  if (from_host) {
    // What the GPU can write, earlier work in the stream may still have to.
    uint64_t device;
    const CUresult result = IsSharedHostMemory(call.session(), src, 1, &device) ? WaitForStream(call, stream)
                                                                                : SettleHostFunctions(call, stream);
    if (result != CUDA_SUCCESS) return result;
    call.set_id(call.info().id);  // waiting was another request
  }
  const size_t band = std::max<size_t>(1, kMaxPayloadBytes / width);
  std::vector<char> rows;
  for (size_t y = 0; y < height;) {
    const size_t count = std::min(band, height - y);
    Copy piece = copy;
    piece.Height = count;
    if (from_host) {
      rows.resize(count * width);
      for (size_t i = 0; i < count; ++i) memcpy(&rows[i * width], src + (y + i) * src_pitch, width);
      piece.srcHost = nullptr;
      piece.srcXInBytes = piece.srcY = 0;
      piece.srcPitch = width;
      piece.dstY += y;
      call.SetPayload({rows.data(), rows.size()});
    } else {
      rows.resize(count * width);
      piece.dstHost = nullptr;
      piece.dstXInBytes = piece.dstY = 0;
      piece.dstPitch = width;
      piece.srcY += y;
      call.SetReplyPayload(rows.data(), rows.size());
    }
    Request request;
    Describe(piece, stream, unaligned, &request);
    request.src_is_payload = from_host;
    request.dst_is_payload = to_host;
    request.blocking = true;
    call.message().clear();
    request.Encode(&call.message());
    const CUresult result = call.Transact();
    if (result != CUDA_SUCCESS) return result;
    if (to_host) {
      if (call.reply_payload_bytes() != rows.size()) return call.session().Lose(ChannelStatus::kProtocolError);
      for (size_t i = 0; i < count; ++i) memcpy(dst + (y + i) * dst_pitch, &rows[i * width], width);
    }
    y += count;
  }
  return CUDA_SUCCESS;
}

// `copy` has its sides completed.
template <typename Request, typename Copy>
CUresult CopyRectangle(Call& call, Copy copy, uint64_t stream, bool unaligned) {
  const size_t width = copy.WidthInBytes;
  for (size_t x = 0; x < width;) {
    Copy piece = copy;
    piece.WidthInBytes = std::min(width - x, kLongestRow);
    piece.srcXInBytes += x;
    piece.dstXInBytes += x;
    const CUresult result = CopyNarrow<Request>(call, piece, stream, unaligned);
    if (result != CUDA_SUCCESS) return result;
    x += piece.WidthInBytes;
  }
  return CUDA_SUCCESS;
}

// Between device memory and arrays only: the struct says it all.
template <typename Request, typename Copy>
CUresult CopyOnServer(Call& call, const Copy& copy, uint64_t stream, bool unaligned, bool blocking) {
  Request request;
  Describe(copy, stream, unaligned, &request);
  request.blocking = blocking;
  request.Encode(&call.message());
  return call.Transact();
}

// From the first byte of a side in memory to the last.
struct Span {
  size_t offset, bytes;
};
Span SpanOf(size_t x, size_t y, size_t z, size_t pitch, size_t height, const CUDA_MEMCPY3D& copy) {
  if (pitch == 0) pitch = x + copy.WidthInBytes;
  if (height == 0) height = y + copy.Height;
  return {(z * height + y) * pitch + x, ((copy.Depth - 1) * height + copy.Height - 1) * pitch + copy.WidthInBytes};
}

// Between the GPU and host memory that the server shares: where it finds all that the copy touches there. It then
// copies in the stream's order, and nobody waits that does not want to. False: it does not share that, or both sides
// are the host's, which the driver copies while its caller waits.
bool FindShared(Session& session, CUDA_MEMCPY3D* copy) {
  const bool from_host = copy->srcMemoryType == CU_MEMORYTYPE_HOST;
  if (from_host && copy->dstMemoryType == CU_MEMORYTYPE_HOST) return false;
  const Span span = from_host
                        ? SpanOf(copy->srcXInBytes, copy->srcY, copy->srcZ, copy->srcPitch, copy->srcHeight, *copy)
                        : SpanOf(copy->dstXInBytes, copy->dstY, copy->dstZ, copy->dstPitch, copy->dstHeight, *copy);
  const char* const base = static_cast<const char*>(from_host ? copy->srcHost : copy->dstHost);
  uint64_t device;
  if (!IsSharedHostMemory(session, base + span.offset, span.bytes, &device)) return false;
  void* const shared = reinterpret_cast<void*>(device - span.offset);
  from_host ? copy->srcHost = shared : copy->dstHost = shared;
  return true;
}

// A captured copy: where the server finds the host memory of a side. False if it does not reach it.
bool ReachSide(Call& call, CUmemorytype type, const void** host) {
  if (type != CU_MEMORYTYPE_HOST) return true;
  uint64_t reached;
  if (!IsSharedHostMemory(call.session(), *host, 1, &reached) &&
      MapForDevice(call, reinterpret_cast<uint64_t>(*host), &reached) != CUDA_SUCCESS) {
    return false;
  }
  *host = reinterpret_cast<const void*>(reached);
  return true;
}
template <typename Copy>
bool ReachSides(Call& call, Copy* copy) {
  const void *from = copy->srcHost, *to = copy->dstHost;
  if (!ReachSide(call, copy->srcMemoryType, &from) || !ReachSide(call, copy->dstMemoryType, &to)) return false;
  copy->srcHost = from;
  copy->dstHost = const_cast<void*>(to);
  return true;
}

bool AlwaysOnServer(unsigned src, unsigned dst) { return src != CU_MEMORYTYPE_HOST && dst != CU_MEMORYTYPE_HOST; }

CUDA_MEMCPY3D ThreeDimensional(const CUDA_MEMCPY2D& flat) {
  CUDA_MEMCPY3D copy{};
  copy.srcXInBytes = flat.srcXInBytes;
  copy.srcY = flat.srcY;
  copy.srcMemoryType = flat.srcMemoryType;
  copy.srcHost = flat.srcHost;
  copy.srcDevice = flat.srcDevice;
  copy.srcArray = flat.srcArray;
  copy.srcPitch = flat.srcPitch;
  copy.dstXInBytes = flat.dstXInBytes;
  copy.dstY = flat.dstY;
  copy.dstMemoryType = flat.dstMemoryType;
  copy.dstHost = flat.dstHost;
  copy.dstDevice = flat.dstDevice;
  copy.dstArray = flat.dstArray;
  copy.dstPitch = flat.dstPitch;
  copy.WidthInBytes = flat.WidthInBytes;
  copy.Height = flat.Height;
  copy.Depth = 1;
  return copy;
}

CUresult Copy2D(const CUDA_MEMCPY2D* pCopy, CUstream stream, bool per_thread, bool blocking, bool unaligned) {
  if (!pCopy) return CUDA_ERROR_INVALID_VALUE;
  Call call(kCopy2D);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  uint64_t wire_stream;
  if (const CUresult result = call.StreamToWire(stream, per_thread, &wire_stream); result != CUDA_SUCCESS)
    return result;
  CUDA_MEMCPY2D copy = *pCopy;
  if (copy.WidthInBytes == 0 || copy.Height == 0) return CUDA_SUCCESS;
  ResolveUnified(call.session(), &copy);
  CUDA_MEMCPY3D box = ThreeDimensional(copy);
  if (const CUresult result = Check(call.session(), box); result != CUDA_SUCCESS) return result;
  if (AlwaysOnServer(copy.srcMemoryType, copy.dstMemoryType)) {
    return CopyOnServer<wire::cuMemcpy2DAsync_v2_Request>(call, copy, wire_stream, unaligned, blocking);
  }
  if (!blocking && call.session().graphs().captures().IsCaptured(wire_stream)) {
    if (!ReachSides(call, &copy)) return CaptureStagedNode(wire_stream, box);
    return CopyOnServer<wire::cuMemcpy2DAsync_v2_Request>(call, copy, wire_stream, unaligned, false);
  }
  if (FindShared(call.session(), &box)) {
    copy.srcHost = box.srcHost;
    copy.dstHost = box.dstHost;
    return CopyOnServer<wire::cuMemcpy2DAsync_v2_Request>(call, copy, wire_stream, unaligned, blocking);
  }
  CompleteSides(&box);
  copy.srcPitch = box.srcPitch;
  copy.dstPitch = box.dstPitch;
  return CopyRectangle<wire::cuMemcpy2DAsync_v2_Request>(call, copy, wire_stream, unaligned);
}

CUresult Copy3D(const CUDA_MEMCPY3D* pCopy, CUstream stream, bool per_thread, bool blocking) {
  if (!pCopy) return CUDA_ERROR_INVALID_VALUE;
  Call call(kCopy3D);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  uint64_t wire_stream;
  if (const CUresult result = call.StreamToWire(stream, per_thread, &wire_stream); result != CUDA_SUCCESS)
    return result;
  CUDA_MEMCPY3D copy = *pCopy;
  if (copy.WidthInBytes == 0 || copy.Height == 0 || copy.Depth == 0) return CUDA_SUCCESS;
  ResolveUnified(call.session(), &copy);
  if (const CUresult result = Check(call.session(), copy); result != CUDA_SUCCESS) return result;
  if (AlwaysOnServer(copy.srcMemoryType, copy.dstMemoryType)) {
    return CopyOnServer<wire::cuMemcpy3DAsync_v2_Request>(call, copy, wire_stream, false, blocking);
  }
  if (!blocking && call.session().graphs().captures().IsCaptured(wire_stream)) {
    if (!ReachSides(call, &copy)) return CaptureStagedNode(wire_stream, copy);
    return CopyOnServer<wire::cuMemcpy3DAsync_v2_Request>(call, copy, wire_stream, false, false);
  }
  if (FindShared(call.session(), &copy)) {
    return CopyOnServer<wire::cuMemcpy3DAsync_v2_Request>(call, copy, wire_stream, false, blocking);
  }
  CompleteSides(&copy);
  const size_t src_slice = copy.srcPitch * copy.srcHeight;
  const size_t dst_slice = copy.dstPitch * copy.dstHeight;
  for (size_t z = 0; z < copy.Depth; ++z) {
    CUDA_MEMCPY3D slice = copy;
    slice.Depth = 1;
    // A host side moves its pointer from slice to slice; the other side names the slice.
    if (copy.srcMemoryType == CU_MEMORYTYPE_HOST) {
      slice.srcHost = static_cast<const char*>(copy.srcHost) + (copy.srcZ + z) * src_slice;
      slice.srcZ = 0;
    } else {
      slice.srcZ += z;
    }
    if (copy.dstMemoryType == CU_MEMORYTYPE_HOST) {
      slice.dstHost = static_cast<char*>(copy.dstHost) + (copy.dstZ + z) * dst_slice;
      slice.dstZ = 0;
    } else {
      slice.dstZ += z;
    }
    const CUresult result = CopyRectangle<wire::cuMemcpy3DAsync_v2_Request>(call, slice, wire_stream, false);
    if (result != CUDA_SUCCESS) return result;
  }
  return CUDA_SUCCESS;
}

// One row between an array and something else: how the 1D array calls are expressed.
CUDA_MEMCPY2D Row(size_t bytes) {
  CUDA_MEMCPY2D copy{};
  copy.WidthInBytes = bytes;
  copy.Height = 1;
  return copy;
}

void FromHost(const void* src, CUDA_MEMCPY2D* copy) {
  copy->srcMemoryType = CU_MEMORYTYPE_HOST;
  copy->srcHost = src;
}
void FromDevice(CUdeviceptr src, CUDA_MEMCPY2D* copy) {
  copy->srcMemoryType = CU_MEMORYTYPE_DEVICE;
  copy->srcDevice = src;
}
void FromArray(CUarray src, size_t offset, CUDA_MEMCPY2D* copy) {
  copy->srcMemoryType = CU_MEMORYTYPE_ARRAY;
  copy->srcArray = src;
  copy->srcXInBytes = offset;
}
void ToHost(void* dst, CUDA_MEMCPY2D* copy) {
  copy->dstMemoryType = CU_MEMORYTYPE_HOST;
  copy->dstHost = dst;
}
void ToDevice(CUdeviceptr dst, CUDA_MEMCPY2D* copy) {
  copy->dstMemoryType = CU_MEMORYTYPE_DEVICE;
  copy->dstDevice = dst;
}
void ToArray(CUarray dst, size_t offset, CUDA_MEMCPY2D* copy) {
  copy->dstMemoryType = CU_MEMORYTYPE_ARRAY;
  copy->dstArray = dst;
  copy->dstXInBytes = offset;
}

// One side of a copy in a batch: counts of elements become bytes.
struct BatchSide {
  CUmemorytype type;
  CUdeviceptr address = 0;
  CUarray array = nullptr;
  size_t x = 0, y = 0, z = 0;
  size_t pitch = 0, height = 0;
};

BatchSide SideOf(const CUmemcpy3DOperand& operand, size_t element) {
  BatchSide side;
  if (operand.type == CU_MEMCPY_OPERAND_TYPE_ARRAY) {
    side.type = CU_MEMORYTYPE_ARRAY;
    side.array = operand.op.array.array;
    side.x = operand.op.array.offset.x * element;
    side.y = operand.op.array.offset.y;
    side.z = operand.op.array.offset.z;
  } else {
    side.type = CU_MEMORYTYPE_UNIFIED;
    side.address = operand.op.ptr.ptr;
    side.pitch = operand.op.ptr.rowLength * element;
    side.height = operand.op.ptr.layerHeight;
  }
  return side;
}

// Bytes of an element of the copy: an array's, or 1 between pointers. 0: not a copy that can be done.
size_t BatchElement(const CUDA_MEMCPY3D_BATCH_OP& op) {
  for (const CUmemcpy3DOperand* operand : {&op.src, &op.dst}) {
    if (operand->type == CU_MEMCPY_OPERAND_TYPE_POINTER) continue;
    CUDA_ARRAY3D_DESCRIPTOR facts;
    if (operand->type != CU_MEMCPY_OPERAND_TYPE_ARRAY ||
        Call_cuArray3DGetDescriptor_v2(&facts, operand->op.array.array) != CUDA_SUCCESS) {
      return 0;
    }
    return ArrayElementBytes(facts.Format, facts.NumChannels);
  }
  return 1;
}

CUresult CopyBatch(size_t count, const CUDA_MEMCPY3D_BATCH_OP* list, unsigned long long flags, CUstream stream,
                   bool per_thread, size_t* failed) {
  if (count == 0 || !list || flags != 0 || IsLegacyStream(stream, per_thread)) return CUDA_ERROR_INVALID_VALUE;
  bool wait = false;
  for (size_t i = 0; i < count; ++i) {
    const CUDA_MEMCPY3D_BATCH_OP& op = list[i];
    wait = wait || op.srcAccessOrder == CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL;
    *failed = i;
    const size_t element = BatchElement(op);
    if (element == 0 || op.extent.width == 0 || op.extent.height == 0 || op.extent.depth == 0) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    const BatchSide from = SideOf(op.src, element), to = SideOf(op.dst, element);
    CUDA_MEMCPY3D copy{};
    copy.srcMemoryType = from.type;
    copy.srcDevice = from.address;
    copy.srcArray = from.array;
    copy.srcXInBytes = from.x;
    copy.srcY = from.y;
    copy.srcZ = from.z;
    copy.srcPitch = from.pitch;
    copy.srcHeight = from.height;
    copy.dstMemoryType = to.type;
    copy.dstDevice = to.address;
    copy.dstArray = to.array;
    copy.dstXInBytes = to.x;
    copy.dstY = to.y;
    copy.dstZ = to.z;
    copy.dstPitch = to.pitch;
    copy.dstHeight = to.height;
    copy.WidthInBytes = op.extent.width * element;
    copy.Height = op.extent.height;
    copy.Depth = op.extent.depth;
    if (const CUresult result = Copy3D(&copy, stream, per_thread, false); result != CUDA_SUCCESS) return result;
  }
  // The caller may change such a source when the call has returned.
  return wait ? Custom_cuStreamSynchronize(stream, per_thread) : CUDA_SUCCESS;
}

}  // namespace

CUresult Custom_cuMemcpy3DBatchAsync_v2(size_t numOps, CUDA_MEMCPY3D_BATCH_OP* opList, unsigned long long flags,
                                        CUstream hStream, bool per_thread) {
  size_t failed = 0;
  return CopyBatch(numOps, opList, flags, hStream, per_thread, &failed);
}

CUresult Custom_cuMemcpy3DBatchAsync(size_t numOps, CUDA_MEMCPY3D_BATCH_OP* opList, size_t* failIdx,
                                     unsigned long long flags, CUstream hStream, bool per_thread) {
  size_t failed = SIZE_MAX;  // of no single one
  const CUresult result = CopyBatch(numOps, opList, flags, hStream, per_thread, &failed);
  if (failIdx) *failIdx = result == CUDA_SUCCESS ? SIZE_MAX : failed;
  return result;
}

CUresult Custom_cuMemcpy2D_v2(const CUDA_MEMCPY2D* pCopy, bool per_thread) {
  return Copy2D(pCopy, nullptr, per_thread, true, false);
}

CUresult Custom_cuMemcpy2DUnaligned_v2(const CUDA_MEMCPY2D* pCopy, bool per_thread) {
  return Copy2D(pCopy, nullptr, per_thread, true, true);
}

CUresult Custom_cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D* pCopy, CUstream hStream, bool per_thread) {
  return Copy2D(pCopy, hStream, per_thread, false, false);
}

CUresult Custom_cuMemcpy3D_v2(const CUDA_MEMCPY3D* pCopy, bool per_thread) {
  return Copy3D(pCopy, nullptr, per_thread, true);
}

CUresult Custom_cuMemcpy3DAsync_v2(const CUDA_MEMCPY3D* pCopy, CUstream hStream, bool per_thread) {
  return Copy3D(pCopy, hStream, per_thread, false);
}

namespace {

CUresult CopyPeer(const CUDA_MEMCPY3D_PEER* pCopy, CUstream hStream, bool per_thread, bool blocking) {
  if (!pCopy) return CUDA_ERROR_INVALID_VALUE;
  Call call(kCopy3D);
  call.set_id(kCall_cuMemcpy3DPeerAsync);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  uint64_t wire_stream;
  if (const CUresult result = call.StreamToWire(hStream, per_thread, &wire_stream); result != CUDA_SUCCESS) {
    return result;
  }
  CUDA_MEMCPY3D_PEER copy = *pCopy;
  if (copy.WidthInBytes == 0 || copy.Height == 0 || copy.Depth == 0) return CUDA_SUCCESS;
  ResolveUnified(call.session(), &copy);
  if (const CUresult result = Check(call.session(), copy); result != CUDA_SUCCESS) return result;
  if (AlwaysOnServer(copy.srcMemoryType, copy.dstMemoryType)) {
    return CopyOnServer<wire::cuMemcpy3DPeerAsync_Request>(call, copy, wire_stream, false, blocking);
  }
  // Host memory is in no context.
  CUDA_MEMCPY3D one{};
  one.srcXInBytes = copy.srcXInBytes;
  one.srcY = copy.srcY;
  one.srcZ = copy.srcZ;
  one.srcMemoryType = copy.srcMemoryType;
  one.srcHost = copy.srcHost;
  one.srcDevice = copy.srcDevice;
  one.srcArray = copy.srcArray;
  one.srcPitch = copy.srcPitch;
  one.srcHeight = copy.srcHeight;
  one.dstXInBytes = copy.dstXInBytes;
  one.dstY = copy.dstY;
  one.dstZ = copy.dstZ;
  one.dstMemoryType = copy.dstMemoryType;
  one.dstHost = copy.dstHost;
  one.dstDevice = copy.dstDevice;
  one.dstArray = copy.dstArray;
  one.dstPitch = copy.dstPitch;
  one.dstHeight = copy.dstHeight;
  one.WidthInBytes = copy.WidthInBytes;
  one.Height = copy.Height;
  one.Depth = copy.Depth;
  return Copy3D(&one, hStream, per_thread, blocking);
}

}  // namespace

CUresult Custom_cuMemcpy3DPeerAsync(const CUDA_MEMCPY3D_PEER* pCopy, CUstream hStream, bool per_thread) {
  return CopyPeer(pCopy, hStream, per_thread, false);
}

CUresult Custom_cuMemcpy3DPeer(const CUDA_MEMCPY3D_PEER* pCopy, bool per_thread) {
  return CopyPeer(pCopy, nullptr, per_thread, true);
}

CUresult Custom_cuMemcpyHtoA_v2(CUarray dstArray, size_t dstOffset, const void* srcHost, size_t ByteCount,
                                bool per_thread) {
  CUDA_MEMCPY2D copy = Row(ByteCount);
  FromHost(srcHost, &copy);
  ToArray(dstArray, dstOffset, &copy);
  return Copy2D(&copy, nullptr, per_thread, true, false);
}

CUresult Custom_cuMemcpyHtoAAsync_v2(CUarray dstArray, size_t dstOffset, const void* srcHost, size_t ByteCount,
                                     CUstream hStream, bool per_thread) {
  CUDA_MEMCPY2D copy = Row(ByteCount);
  FromHost(srcHost, &copy);
  ToArray(dstArray, dstOffset, &copy);
  return Copy2D(&copy, hStream, per_thread, false, false);
}

CUresult Custom_cuMemcpyAtoH_v2(void* dstHost, CUarray srcArray, size_t srcOffset, size_t ByteCount, bool per_thread) {
  CUDA_MEMCPY2D copy = Row(ByteCount);
  FromArray(srcArray, srcOffset, &copy);
  ToHost(dstHost, &copy);
  return Copy2D(&copy, nullptr, per_thread, true, false);
}

CUresult Custom_cuMemcpyAtoHAsync_v2(void* dstHost, CUarray srcArray, size_t srcOffset, size_t ByteCount,
                                     CUstream hStream, bool per_thread) {
  CUDA_MEMCPY2D copy = Row(ByteCount);
  FromArray(srcArray, srcOffset, &copy);
  ToHost(dstHost, &copy);
  return Copy2D(&copy, hStream, per_thread, false, false);
}

CUresult Custom_cuMemcpyDtoA_v2(CUarray dstArray, size_t dstOffset, CUdeviceptr srcDevice, size_t ByteCount,
                                bool per_thread) {
  CUDA_MEMCPY2D copy = Row(ByteCount);
  FromDevice(srcDevice, &copy);
  ToArray(dstArray, dstOffset, &copy);
  return Copy2D(&copy, nullptr, per_thread, true, false);
}

CUresult Custom_cuMemcpyAtoD_v2(CUdeviceptr dstDevice, CUarray srcArray, size_t srcOffset, size_t ByteCount,
                                bool per_thread) {
  CUDA_MEMCPY2D copy = Row(ByteCount);
  FromArray(srcArray, srcOffset, &copy);
  ToDevice(dstDevice, &copy);
  return Copy2D(&copy, nullptr, per_thread, true, false);
}

CUresult Custom_cuMemcpyAtoA_v2(CUarray dstArray, size_t dstOffset, CUarray srcArray, size_t srcOffset,
                                size_t ByteCount, bool per_thread) {
  CUDA_MEMCPY2D copy = Row(ByteCount);
  FromArray(srcArray, srcOffset, &copy);
  ToArray(dstArray, dstOffset, &copy);
  return Copy2D(&copy, nullptr, per_thread, true, false);
}

}  // namespace cuda_remote::client
