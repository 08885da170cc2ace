// SPDX-License-Identifier: Apache-2.0
// Linear copies.
//
// Pageable memory goes through the channel in pieces of at most 1 MiB: to the device they are sent without waiting
// (the bytes are out of the application's hands once they are in the channel), to the host several are on their way at
// once. Large copies take the buffers of staged_copy.h instead, if the server shares memory. Pinned memory that the
// server shares is named by its address and never passes through the channel.

#include "client/calls/copy.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "client/calls/bodies.gen.h"
#include "client/calls/managed.h"
#include "client/calls/mapped_memory.h"
#include "client/calls/pointer.h"
#include "client/calls/staged_copy.h"
#include "client/calls/staged_node.h"
#include "client/core/session.h"
#include "proto/codec/codec.h"
#include "proto/driverabi/copy_batch.h"
#include "proto/driverabi/job_addresses.h"

namespace cuda_remote::client {
namespace {

// Requests of one copy to the host that may be outstanding.
constexpr size_t kWindow = 16;
// Longest copy to the device from which the driver, too, returns before it has ended (as its documentation says).
constexpr size_t kUnawaited = 64 << 10;
// Longer ones to the device go in about so many pieces of at least that many bytes: the GPU, or the network, is at work
// on one while the next one is being put into the channel. Where somebody counts on their end, the last is short.
constexpr size_t kPiecesToDevice = 8;
constexpr size_t kLeastPiece = 128 << 10;
constexpr size_t kMostAwaitedPiece = 256 << 10;
constexpr size_t kPage = 4096;

constexpr CallInfo kToDevice = Under(info::k_cuMemcpyHtoDAsync_v2, "cuMemcpyHtoD");
constexpr CallInfo kToHost = Under(info::k_cuMemcpyDtoHAsync_v2, "cuMemcpyDtoH");
constexpr CallInfo kOnDevice = Under(info::k_cuMemcpyAsync, "cuMemcpyDtoD");
constexpr CallInfo kUnified = Under(info::k_cuMemcpyAsync, "cuMemcpy");
constexpr CallInfo kPeer = Under(info::k_cuMemcpyPeerAsync, "cuMemcpyPeer");

bool IsKnownDeviceRange(Session& session, CUdeviceptr address, size_t bytes) {
  ReaderLock lock(&session.memory().mutex());
  const auto* range = session.memory().device_ranges().Find(address);
  return range && range->Contains(address, bytes);
}

// Whether it is memory of the GPU that the host cannot use. The driver takes such for the host's side of a copy, too.
bool IsOnlyOnDevice(Session& session, const void* host) {
  ReaderLock lock(&session.memory().mutex());
  const auto* const range = session.memory().device_ranges().Find(reinterpret_cast<CUdeviceptr>(host));
  return range && !range->value.managed;
}

// What the driver refuses before it has copied or looked at a byte. Of what goes in one piece the server says so
// itself.
CUresult CheckHostCopy(Session& session, CUdeviceptr device, const void* host, size_t bytes) {
  if (bytes != 0 && !host) return CUDA_ERROR_INVALID_VALUE;
  return bytes > kUnawaited && LeavesAllocation(session, device, bytes) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

// A copy that the server does by addresses alone.
CUresult CopyByAddress(Call& call, uint64_t dst, uint64_t src, size_t bytes, uint64_t stream, bool blocking) {
  call.set_id(kCall_cuMemcpyAsync);
  wire::cuMemcpyAsync_Request request;
  request.dst = dst;
  request.src = src;
  request.bytes = bytes;
  request.stream = stream;
  request.blocking = blocking;
  call.message().clear();
  request.Encode(&call.message());
  return blocking ? call.Transact() : call.Send();
}

// Whether either end is memory that the host may use as soon as a blocking copy has returned.
bool TouchesManaged(Session& session, CUdeviceptr dst, CUdeviceptr src) {
  return IsManaged(session, dst, 1) || IsManaged(session, src, 1);
}

// Pointers of either kind: the address maps say which.
CUresult CopyUnified(Call& call, CUdeviceptr dst, CUdeviceptr src, size_t bytes, uint64_t stream, bool blocking) {
  if (bytes == 0) return CUDA_SUCCESS;
  if (dst == 0 || src == 0) return CUDA_ERROR_INVALID_VALUE;
  const bool to_device = IsDevicePointer(call.session(), dst);
  const bool from_device = IsDevicePointer(call.session(), src);
  void* const host_dst = reinterpret_cast<void*>(HostAddressOf(call.session(), dst));
  const void* const host_src = reinterpret_cast<const void*>(HostAddressOf(call.session(), src));
  if (to_device && from_device) {
    const bool known = IsKnownDeviceRange(call.session(), dst, bytes) && IsKnownDeviceRange(call.session(), src, bytes);
    return CopyByAddress(call, dst, src, bytes, stream,
                         !known || (blocking && TouchesManaged(call.session(), dst, src)));
  }
  if (bytes > kUnawaited && LeavesAllocation(call.session(), to_device ? dst : src, bytes))
    return CUDA_ERROR_INVALID_VALUE;
  if (to_device) return CopyToDevice(call, dst, host_src, bytes, stream, blocking);
  if (from_device) return CopyToHost(call, host_dst, src, bytes, stream, blocking);
  // Host to host, in the stream's order.
  if (!blocking && call.session().graphs().captures().IsCaptured(stream)) {
    CUDA_MEMCPY3D copy{};
    copy.srcMemoryType = copy.dstMemoryType = CU_MEMORYTYPE_HOST;
    copy.srcHost = host_src;
    copy.dstHost = host_dst;
    copy.WidthInBytes = bytes;
    copy.Height = copy.Depth = 1;
    const StagedSides both{true, true};
    return CaptureStagedNode(stream, copy, &both);
  }
  if (const CUresult result = WaitForStream(call, stream); result != CUDA_SUCCESS) return result;
  memmove(host_dst, host_src, bytes);
  return CUDA_SUCCESS;
}

// The driver takes pinned memory for the device's side of a copy. That is rare enough to be looked at only when the
// server has refused the address: then this copies; else it returns `refused`.
CUresult CopyPinned(Call& call, CUresult refused, CUdeviceptr device_side, CUdeviceptr dst, CUdeviceptr src,
                    size_t bytes, uint64_t stream, bool blocking) {
  if (refused != CUDA_ERROR_INVALID_VALUE) return refused;
  {
    ReaderLock lock(&call.session().memory().mutex());
    const auto* const range = call.session().memory().host_ranges().Find(device_side);
    if (!range || !range->Contains(device_side, bytes)) return refused;
  }
  call.SetPayload({});
  return CopyUnified(call, dst, src, bytes, stream, blocking);
}

CUresult CopyOnDevice(CUdeviceptr dst, CUdeviceptr src, size_t bytes, CUstream stream, bool per_thread, bool blocking) {
  Call call(kOnDevice);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  uint64_t wire_stream;
  if (const CUresult result = call.StreamToWire(stream, per_thread, &wire_stream); result != CUDA_SUCCESS)
    return result;
  if (bytes == 0) return CUDA_SUCCESS;
  // An address that the client does not know is most likely an error, and must come back from this call.
  const bool known_dst = IsKnownDeviceRange(call.session(), dst, bytes);
  const bool known = known_dst && IsKnownDeviceRange(call.session(), src, bytes);
  const bool wait = !known || (blocking && TouchesManaged(call.session(), dst, src));
  const CUresult result = CopyByAddress(call, dst, src, bytes, wire_stream, wait);
  return CopyPinned(call, result, known_dst ? src : dst, dst, src, bytes, wire_stream, blocking);
}

CUresult ToDevice(CUdeviceptr dst, const void* src, size_t bytes, CUstream stream, bool per_thread, bool blocking) {
  Call call(kToDevice);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  uint64_t wire_stream;
  if (const CUresult result = call.StreamToWire(stream, per_thread, &wire_stream); result != CUDA_SUCCESS)
    return result;
  if (const CUresult result = CheckHostCopy(call.session(), dst, src, bytes); result != CUDA_SUCCESS) return result;
  if (IsOnlyOnDevice(call.session(), src))
    return CopyOnDevice(dst, reinterpret_cast<CUdeviceptr>(src), bytes, stream, per_thread, blocking);
  const CUresult result = CopyToDevice(call, dst, src, bytes, wire_stream, blocking);
  return CopyPinned(call, result, dst, dst, reinterpret_cast<CUdeviceptr>(src), bytes, wire_stream, blocking);
}

CUresult ToHost(void* dst, CUdeviceptr src, size_t bytes, CUstream stream, bool per_thread, bool blocking) {
  Call call(kToHost);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  uint64_t wire_stream;
  if (const CUresult result = call.StreamToWire(stream, per_thread, &wire_stream); result != CUDA_SUCCESS)
    return result;
  if (const CUresult result = CheckHostCopy(call.session(), src, dst, bytes); result != CUDA_SUCCESS) return result;
  if (IsOnlyOnDevice(call.session(), dst))
    return CopyOnDevice(reinterpret_cast<CUdeviceptr>(dst), src, bytes, stream, per_thread, blocking);
  const CUresult result = CopyToHost(call, dst, src, bytes, wire_stream, blocking);
  return CopyPinned(call, result, src, reinterpret_cast<CUdeviceptr>(dst), src, bytes, wire_stream, blocking);
}

CUresult Unified(CUdeviceptr dst, CUdeviceptr src, size_t bytes, CUstream stream, bool per_thread, bool blocking) {
  Call call(kUnified);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  uint64_t wire_stream;
  if (const CUresult result = call.StreamToWire(stream, per_thread, &wire_stream); result != CUDA_SUCCESS)
    return result;
  return CopyUnified(call, dst, src, bytes, wire_stream, blocking);
}

}  // namespace

bool LeavesAllocation(Session& session, CUdeviceptr address, size_t bytes) {
  ReaderLock lock(&session.memory().mutex());
  const auto* const range = session.memory().device_ranges().Find(address);
  return range && range->value.source != DeviceRange::kMapped && !range->Contains(address, bytes);
}

bool LeavesMemory(Session& session, uint64_t address, uint64_t bytes, bool of_gpu) {
  ReaderLock lock(&session.memory().mutex());
  AddressMap<DeviceRange>& ranges = session.memory().device_ranges();
  if (const auto* range = ranges.Find(address)) {
    uint64_t known = range->start + range->bytes - address;
    while (known < bytes && range->value.source == DeviceRange::kMapped) {
      range = ranges.At(address + known);
      if (!range || range->value.source != DeviceRange::kMapped) break;
      known += range->bytes;
    }
    return known < bytes;
  }
  const auto* const pinned = session.memory().host_ranges().Find(address);
  if (pinned) return !pinned->Contains(address, bytes);
  return of_gpu && address - driverabi::kArenaBase < driverabi::kArenaBytes;
}

bool IsSharedHostMemory(Session& session, const void* address, size_t bytes, uint64_t* device) {
  const uint64_t start = reinterpret_cast<uint64_t>(address);
  *device = start;
  if (IsManaged(session, start, bytes)) return true;
  if (!session.shared_memory() && !session.memory().managed_mirror().active()) return false;
  ReaderLock lock(&session.memory().mutex());
  const auto* range = session.memory().host_ranges().Find(start);
  if (!range || !range->Contains(start, bytes) || !session.memory().host_mappings().IsReachable(range->value))
    return false;
  if (range->value.on_device) *device = range->value.device + (start - range->start);
  return true;
}

CUresult WaitForStream(Call& call, uint64_t stream) {
  call.set_id(kCall_cuStreamSynchronize);
  wire::cuStreamSynchronize_Request request;
  request.hStream = stream;
  call.message().clear();
  request.Encode(&call.message());
  return call.Transact();
}

CUresult SettleHostFunctions(Call& call, uint64_t stream) {
  if (call.session().host_functions().outstanding() == 0) return CUDA_SUCCESS;
  return WaitForStream(call, stream);
}

// Pinned memory that a graph is to copy, which must be there when it runs. False for other memory.
bool PinnedForGraph(Call& call, const void* address, size_t bytes, uint64_t* device) {
  Session& session = call.session();
  const uint64_t start = reinterpret_cast<uint64_t>(address);
  {
    ReaderLock lock(&session.memory().mutex());
    const auto* const range = session.memory().host_ranges().Find(start);
    if (!range || range->value.registered || !range->Contains(start, bytes)) return false;
  }
  return MapForDevice(call, start, device) == CUDA_SUCCESS;
}

// A copy of host memory in a captured stream that need not be there as it is when the graph runs. `device` is the other
// side.
CUresult CaptureCopy(void* to_host, const void* from_host, CUdeviceptr device, size_t bytes, uint64_t stream) {
  CUDA_MEMCPY3D copy{};
  copy.srcMemoryType = to_host ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
  copy.dstMemoryType = to_host ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
  copy.srcHost = from_host;
  copy.dstHost = to_host;
  (to_host ? copy.srcDevice : copy.dstDevice) = device;
  copy.WidthInBytes = bytes;
  copy.Height = copy.Depth = 1;
  const StagedSides sides{to_host == nullptr, to_host != nullptr};
  return CaptureStagedNode(stream, copy, &sides);
}

CUresult CopyToDevice(Call& call, CUdeviceptr dst, const void* src, size_t bytes, uint64_t stream, bool blocking) {
  if (bytes == 0) return CUDA_SUCCESS;
  Session& session = call.session();
  if (uint64_t from_device; IsSharedHostMemory(session, src, bytes, &from_device)) {
    return CopyByAddress(call, dst, from_device, bytes, stream, blocking);
  }
  if (!blocking && session.graphs().captures().IsCaptured(stream)) {
    if (uint64_t pinned; PinnedForGraph(call, src, bytes, &pinned)) {
      return CopyByAddress(call, dst, pinned, bytes, stream, false);
    }
    return CaptureCopy(nullptr, src, dst, bytes, stream);
  }
  if (const CUresult result = SettleHostFunctions(call, stream); result != CUDA_SUCCESS) return result;
  // Mirrored memory travels with the calls of the ordinary way.
  const bool staged = !session.memory().managed_mirror().active() && !IsManaged(session, dst, 1);
  if (CUresult result; staged && StagedCopyToDevice(call, dst, src, bytes, stream, &result)) return result;
  call.set_id(kCall_cuMemcpyHtoDAsync_v2);
  const bool known = IsKnownDeviceRange(session, dst, bytes);
  const char* const from = static_cast<const char*>(src);
  // A stream that does not wait for the default one must find the bytes there when the call has returned; up to
  // kUnawaited that is not promised natively either.
  const bool wait = blocking && bytes > kUnawaited && session.has_streams();
  const size_t longest = wait ? kMostAwaitedPiece : kMaxPayloadBytes;
  const size_t piece_bytes = std::clamp(bytes / kPiecesToDevice, kLeastPiece, longest) / kPage * kPage;
  for (size_t done = 0; done < bytes;) {
    const size_t piece = std::min(bytes - done, piece_bytes);
    const bool last = done + piece == bytes;
    wire::cuMemcpyHtoDAsync_v2_Request request;
    request.dst = dst + done;
    request.bytes = piece;
    request.stream = stream;
    request.blocking = wait && last;
    request.bounded = session.memory().upload_limit().ShouldAsk(piece);
    call.message().clear();
    request.Encode(&call.message());
    call.SetPayload({from + done, piece});
    const CUresult result = known && !request.blocking && !request.bounded ? call.Send() : call.Transact();
    if (result != CUDA_SUCCESS) return result;
    done += piece;
  }
  if (!blocking || wait || !IsManaged(session, dst, 1)) return CUDA_SUCCESS;
  // The host may look at managed memory when the call has returned.
  call.SetPayload({});
  return WaitForStream(call, stream);
}

CUresult CopyToHost(Call& call, void* dst, CUdeviceptr src, size_t bytes, uint64_t stream, bool blocking) {
  if (bytes == 0) return CUDA_SUCCESS;
  Session& session = call.session();
  if (uint64_t to_device; IsSharedHostMemory(session, dst, bytes, &to_device)) {
    const CUresult result = CopyByAddress(call, to_device, src, bytes, stream, blocking);
    return result == CUDA_SUCCESS && blocking ? session.TakePendingError() : result;
  }
  if (!blocking && session.graphs().captures().IsCaptured(stream)) {
    if (uint64_t pinned; PinnedForGraph(call, dst, bytes, &pinned)) {
      return CopyByAddress(call, pinned, src, bytes, stream, false);
    }
    return CaptureCopy(dst, nullptr, src, bytes, stream);
  }
  const bool staged = !session.memory().managed_mirror().active() && !IsManaged(session, src, 1);
  if (CUresult result; staged && StagedCopyToHost(call, dst, src, bytes, stream, &result)) return result;
  call.set_id(kCall_cuMemcpyDtoHAsync_v2);
  char* const to = static_cast<char*>(dst);
  std::array<uint64_t, kWindow> sequences;
  size_t begun = 0, finished = 0;
  CUresult first_error = CUDA_SUCCESS;
  for (size_t done = 0; done < bytes || finished < begun;) {
    if (done < bytes && begun - finished < kWindow && first_error == CUDA_SUCCESS) {
      const size_t piece = std::min<size_t>(bytes - done, kMaxPayloadBytes);
      wire::cuMemcpyDtoHAsync_v2_Request request;
      request.src = src + done;
      request.bytes = piece;
      request.stream = stream;
      request.blocking = true;
      call.message().clear();
      request.Encode(&call.message());
      const uint64_t sequence = call.Begin(to + done, piece);
      if (!sequence) return session.Lose(ChannelStatus::kClosed);
      sequences[begun++ % kWindow] = sequence;
      done += piece;
      continue;
    }
    if (finished == begun) break;
    // Also after an error: a reply must not find the application's buffer gone.
    const CUresult result = call.Finish(sequences[finished++ % kWindow]);
    if (result != CUDA_SUCCESS && first_error == CUDA_SUCCESS) first_error = result;
  }
  return first_error;
}

CUresult Custom_cuMemcpyHtoD_v2(CUdeviceptr dstDevice, const void* srcHost, size_t ByteCount, bool per_thread) {
  return ToDevice(dstDevice, srcHost, ByteCount, nullptr, per_thread, true);
}

CUresult Custom_cuMemcpyHtoDAsync_v2(CUdeviceptr dstDevice, const void* srcHost, size_t ByteCount, CUstream hStream,
                                     bool per_thread) {
  return ToDevice(dstDevice, srcHost, ByteCount, hStream, per_thread, false);
}

CUresult Custom_cuMemcpyDtoH_v2(void* dstHost, CUdeviceptr srcDevice, size_t ByteCount, bool per_thread) {
  return ToHost(dstHost, srcDevice, ByteCount, nullptr, per_thread, true);
}

CUresult Custom_cuMemcpyDtoHAsync_v2(void* dstHost, CUdeviceptr srcDevice, size_t ByteCount, CUstream hStream,
                                     bool per_thread) {
  return ToHost(dstHost, srcDevice, ByteCount, hStream, per_thread, false);
}

CUresult Custom_cuMemcpyDtoD_v2(CUdeviceptr dstDevice, CUdeviceptr srcDevice, size_t ByteCount, bool per_thread) {
  return CopyOnDevice(dstDevice, srcDevice, ByteCount, nullptr, per_thread, true);
}

CUresult Custom_cuMemcpyDtoDAsync_v2(CUdeviceptr dstDevice, CUdeviceptr srcDevice, size_t ByteCount, CUstream hStream,
                                     bool per_thread) {
  return CopyOnDevice(dstDevice, srcDevice, ByteCount, hStream, per_thread, false);
}

CUresult Custom_cuMemcpy(CUdeviceptr dst, CUdeviceptr src, size_t ByteCount, bool per_thread) {
  return Unified(dst, src, ByteCount, nullptr, per_thread, true);
}

CUresult Custom_cuMemcpyAsync(CUdeviceptr dst, CUdeviceptr src, size_t ByteCount, CUstream hStream, bool per_thread) {
  return Unified(dst, src, ByteCount, hStream, per_thread, false);
}

CUresult Custom_cuMemcpyPeerAsync(CUdeviceptr dstDevice, CUcontext dstContext, CUdeviceptr srcDevice,
                                  CUcontext srcContext, size_t ByteCount, CUstream hStream, bool per_thread) {
  Call call(kPeer);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  dstContext = call.OrCurrent(dstContext);
  srcContext = call.OrCurrent(srcContext);
  if (!call.Valid(Kind::kContext, dstContext) || !call.Valid(Kind::kContext, srcContext)) {
    return CUDA_ERROR_INVALID_CONTEXT;
  }
  wire::cuMemcpyPeerAsync_Request request;
  if (const CUresult result = call.StreamToWire(hStream, per_thread, &request.stream); result != CUDA_SUCCESS) {
    return result;
  }
  request.dst = dstDevice;
  request.dst_context = reinterpret_cast<uint64_t>(dstContext);
  request.src = srcDevice;
  request.src_context = reinterpret_cast<uint64_t>(srcContext);
  request.bytes = ByteCount;
  request.Encode(&call.message());
  const bool known_dst = IsKnownDeviceRange(call.session(), dstDevice, ByteCount);
  if (known_dst && IsKnownDeviceRange(call.session(), srcDevice, ByteCount)) return call.Send();
  return CopyPinned(call, call.Transact(), known_dst ? srcDevice : dstDevice, dstDevice, srcDevice, ByteCount,
                    request.stream, !hStream);
}

CUresult Custom_cuMemcpyPeer(CUdeviceptr dstDevice, CUcontext dstContext, CUdeviceptr srcDevice, CUcontext srcContext,
                             size_t ByteCount, bool per_thread) {
  return Custom_cuMemcpyPeerAsync(dstDevice, dstContext, srcDevice, srcContext, ByteCount, nullptr, per_thread);
}

CUresult Custom_cuMemcpyBatchAsync_v2(CUdeviceptr* dsts, CUdeviceptr* srcs, size_t* sizes, size_t count,
                                      CUmemcpyAttributes* attrs, size_t* attrsIdxs, size_t numAttrs, CUstream hStream,
                                      bool per_thread) {
  return Custom_cuMemcpyBatchAsync(dsts, srcs, sizes, count, attrs, attrsIdxs, numAttrs, nullptr, hStream, per_thread);
}

CUresult Custom_cuMemcpyBatchAsync(CUdeviceptr* dsts, CUdeviceptr* srcs, size_t* sizes, size_t count,
                                   CUmemcpyAttributes* attrs, size_t* attrsIdxs, size_t numAttrs, size_t* failIdx,
                                   CUstream hStream, bool per_thread) {
  if (IsLegacyStream(hStream, per_thread) ||
      !driverabi::IsBatch(dsts, srcs, sizes, count, attrs, attrsIdxs, numAttrs)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  size_t attribute = 0;
  for (size_t i = 0; i < count; ++i) {
    while (attribute + 1 < numAttrs && attrsIdxs[attribute + 1] <= i) ++attribute;
    // The source may be another one's when the call has returned.
    const bool now = attrs[attribute].srcAccessOrder == CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL;
    CUresult result = Unified(dsts[i], srcs[i], sizes[i], hStream, per_thread, now);
    if (result == CUDA_SUCCESS && now) result = Custom_cuStreamSynchronize(hStream, per_thread);
    if (result == CUDA_SUCCESS) continue;
    if (failIdx) *failIdx = i;
    return result;
  }
  if (failIdx) *failIdx = SIZE_MAX;  // none of them
  return CUDA_SUCCESS;
}

}  // namespace cuda_remote::client
