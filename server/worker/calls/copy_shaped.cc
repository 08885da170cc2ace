// SPDX-License-Identifier: Apache-2.0
// Copies of rectangles and boxes. The client's struct is checked side by side: what is device memory must be its own,
// over the whole extent; what is host memory must be pinned memory of its own, or the payload, packed.

#include <cuda.h>

#include <cstring>

#include "proto/codec/copy.gen.h"
#include "server/dispatch/malformed.h"
#include "server/dispatch/runtime.h"
#include "server/worker/calls/copy_answer.h"
#include "server/worker/calls/handlers.gen.h"
#include "server/worker/calls/work.h"
#include "server/worker/session/driver_hooks.h"
#include "server/worker/session/worker_session.h"

namespace cuda_remote::server {
namespace {

// Big enough that no product of the client's numbers overflows unseen; everything is compared as Wide.
using Wide = unsigned __int128;

// One side of a copy, the same for all three structs.
struct Side {
  CUmemorytype type;
  uint64_t address;  // device or host
  CUarray* array;
  uint64_t x, y, z;
  uint64_t pitch;
  uint64_t height;  // rows from slice to slice
};

struct Extent {
  uint64_t width, height, depth;
  Wide packed() const { return Wide(width) * height * depth; }
};

// The bytes that a side touches, from its first to its last. False if they do not fit an address space.
bool Touched(const Side& side, const Extent& extent, uint64_t* address, uint64_t* bytes) {
  constexpr uint64_t kMost = uint64_t{1} << 48;
  const Wide pitch = side.pitch != 0 ? Wide(side.pitch) : Wide(side.x) + extent.width;
  const Wide height = side.height != 0 ? Wide(side.height) : Wide(side.y) + extent.height;
  for (const uint64_t number :
       {side.x, side.y, side.z, side.pitch, side.height, extent.width, extent.height, extent.depth}) {
    if (number > kMost) return false;
  }
  const Wide rows_before = Wide(side.z) * height + side.y;
  const Wide rows = Wide(extent.depth - 1) * height + (extent.height - 1);
  if (rows_before > kMost || rows > kMost) return false;
  const Wide start = rows_before * pitch + side.x;
  const Wide length = rows * pitch + extent.width;
  if (start > kMost || length > kMost || Wide(side.address) + start > ~uint64_t(0)) return false;
  *address = side.address + uint64_t(start);
  *bytes = uint64_t(length);
  return true;
}

// Checks and translates one side. `payload`: the side is the channel's payload.
CUresult CheckSide(WorkerSession& session, const Side& side, const Extent& extent, bool payload) {
  uint64_t address = 0, bytes = 0;
  switch (side.type) {
    case CU_MEMORYTYPE_ARRAY: {
      if (payload) return kMalformedRequest;
      const bool known = session.Real(Kind::kArray, reinterpret_cast<uint64_t>(*side.array), side.array);
      return known ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
    }
    case CU_MEMORYTYPE_DEVICE:
      if (payload) return kMalformedRequest;
      if (!Touched(side, extent, &address, &bytes)) return CUDA_ERROR_INVALID_VALUE;
      return session.OwnsDeviceRange(address, bytes) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    case CU_MEMORYTYPE_HOST:
      if (payload) {
        const bool packed =
            side.x == 0 && side.y == 0 && side.z == 0 && side.pitch == extent.width && extent.depth == 1;
        return packed && extent.packed() <= kMaxTotalPayloadBytes ? CUDA_SUCCESS : kMalformedRequest;
      }
      if (!Touched(side, extent, &address, &bytes)) return CUDA_ERROR_INVALID_VALUE;
      return session.host_ranges().Owns(address, bytes) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    default:
      return kMalformedRequest;  // the client resolves unified addresses
  }
}

Extent ExtentOf(const CUDA_MEMCPY2D& c) { return {c.WidthInBytes, c.Height, 1}; }
template <typename Copy>
Extent ExtentOf(const Copy& c) {
  return {c.WidthInBytes, c.Height, c.Depth};
}
Side Source(CUDA_MEMCPY2D* c) {
  const bool host = c->srcMemoryType == CU_MEMORYTYPE_HOST;
  return {c->srcMemoryType, host ? reinterpret_cast<uint64_t>(c->srcHost) : c->srcDevice,
          &c->srcArray,     c->srcXInBytes,
          c->srcY,          0,
          c->srcPitch,      0};
}
Side Target(CUDA_MEMCPY2D* c) {
  const bool host = c->dstMemoryType == CU_MEMORYTYPE_HOST;
  return {c->dstMemoryType, host ? reinterpret_cast<uint64_t>(c->dstHost) : c->dstDevice,
          &c->dstArray,     c->dstXInBytes,
          c->dstY,          0,
          c->dstPitch,      0};
}
template <typename Copy>
Side Source(Copy* c) {
  const bool host = c->srcMemoryType == CU_MEMORYTYPE_HOST;
  return {c->srcMemoryType, host ? reinterpret_cast<uint64_t>(c->srcHost) : c->srcDevice,
          &c->srcArray,     c->srcXInBytes,
          c->srcY,          c->srcZ,
          c->srcPitch,      c->srcHeight};
}
template <typename Copy>
Side Target(Copy* c) {
  const bool host = c->dstMemoryType == CU_MEMORYTYPE_HOST;
  return {c->dstMemoryType, host ? reinterpret_cast<uint64_t>(c->dstHost) : c->dstDevice,
          &c->dstArray,     c->dstXInBytes,
          c->dstY,          c->dstZ,
          c->dstPitch,      c->dstHeight};
}

// What the driver does with a checked struct.
CUresult Enqueue(const DriverTable& driver, const CUDA_MEMCPY2D& copy, CUstream stream) {
  return driver.cuMemcpy2DAsync_v2(&copy, stream);
}
CUresult Enqueue(const DriverTable& driver, const CUDA_MEMCPY3D& copy, CUstream stream) {
  return driver.cuMemcpy3DAsync_v2(&copy, stream);
}
CUresult Enqueue(const DriverTable& driver, const CUDA_MEMCPY3D_PEER& copy, CUstream stream) {
  return driver.cuMemcpy3DPeerAsync(&copy, stream);
}

CUresult Prepare(WorkerSession&, CUDA_MEMCPY2D*) { return CUDA_SUCCESS; }
CUresult Prepare(WorkerSession&, CUDA_MEMCPY3D* copy) {
  copy->reserved0 = copy->reserved1 = nullptr;
  return CUDA_SUCCESS;
}
CUresult Prepare(WorkerSession& session, CUDA_MEMCPY3D_PEER* copy) {
  const ContextInfo* const from = session.contexts().Find(reinterpret_cast<uint64_t>(copy->srcContext));
  const ContextInfo* const to = session.contexts().Find(reinterpret_cast<uint64_t>(copy->dstContext));
  if (from == nullptr || to == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  copy->srcContext = from->ref.real;
  copy->dstContext = to->ref.real;
  return CUDA_SUCCESS;
}

// The one call that has no stream. It waits, so a waiter makes it.
bool Unaligned(WorkerSession& session, const CUDA_MEMCPY2D& copy, std::shared_ptr<char> buffer, size_t bytes,
               ReplyBuilder* reply) {
  const DriverTable* const driver = &session.driver();
  session.answers().Defer(reply, [driver, copy, buffer = std::move(buffer), bytes](Answer* answer) {
    CUresult result = driver->cuMemcpy2DUnaligned_v2(&copy);
    // Within device memory it need not wait, but the client's side may be managed memory, which the host may use now.
    if (result == CUDA_SUCCESS && !buffer) result = driver->cuStreamSynchronize(nullptr);
    answer->keeper = buffer;
    if (result == CUDA_SUCCESS) answer->view = {buffer.get(), bytes};
    return result;
  });
  return true;
}
template <typename Copy>
bool Unaligned(WorkerSession&, const Copy&, const std::shared_ptr<char>&, size_t, ReplyBuilder*) {
  return false;
}

template <typename Copy, typename In>
CUresult CopyShaped(WorkerSession& session, const Request& request, const In& in, ReplyBuilder* reply) {
  Copy copy;
  if (!CopyExactly(in.copy, &copy, sizeof copy)) return kMalformedRequest;
  CUstream stream;
  if (!session.RealStream(in.stream, &stream)) return CUDA_ERROR_INVALID_HANDLE;
  const Extent extent = ExtentOf(copy);
  if (extent.width == 0 || extent.height == 0 || extent.depth == 0) return CUDA_SUCCESS;
  if (in.src_is_payload && in.dst_is_payload) return kMalformedRequest;
  if (in.src_is_payload && Wide(request.payload.size()) != extent.packed()) return kMalformedRequest;
  if (const CUresult result = Prepare(session, &copy); result != CUDA_SUCCESS) return result;
  if (const CUresult result = CheckSide(session, Source(&copy), extent, in.src_is_payload); result != CUDA_SUCCESS) {
    return result;
  }
  if (const CUresult result = CheckSide(session, Target(&copy), extent, in.dst_is_payload); result != CUDA_SUCCESS) {
    return result;
  }
  std::shared_ptr<char> buffer;
  size_t answer_bytes = 0;
  if (in.src_is_payload || in.dst_is_payload) {
    if (IsCaptured(stream)) return CUDA_ERROR_NOT_SUPPORTED;
    const size_t bytes = size_t(extent.packed());
    if (bytes > StagingPool::kLarge) GiveBackStaging(session);
    buffer = session.staging().Take(bytes);
    if (!buffer) return CUDA_ERROR_OUT_OF_MEMORY;
    if (in.src_is_payload) {
      request.payload.CopyTo(buffer.get());
      copy.srcHost = buffer.get();
    } else {
      copy.dstHost = buffer.get();
      answer_bytes = bytes;
    }
  }
  if (in.unaligned && Unaligned(session, copy, buffer, answer_bytes, reply)) return CUDA_SUCCESS;
  const CUresult result = Enqueue(session.driver(), copy, stream);
  if (result != CUDA_SUCCESS || (!buffer && (!in.blocking || IsCaptured(stream)))) return result;
  return AnswerBehind(session, stream, std::move(buffer), answer_bytes, reply);
}

}  // namespace

CUresult Custom_cuMemcpy2DAsync_v2(WorkerSession& session, const Request& request,
                                   const wire::cuMemcpy2DAsync_v2_Request& in, wire::cuMemcpy2DAsync_v2_Reply*,
                                   ReplyBuilder* reply) {
  return CopyShaped<CUDA_MEMCPY2D>(session, request, in, reply);
}

CUresult Custom_cuMemcpy3DAsync_v2(WorkerSession& session, const Request& request,
                                   const wire::cuMemcpy3DAsync_v2_Request& in, wire::cuMemcpy3DAsync_v2_Reply*,
                                   ReplyBuilder* reply) {
  return CopyShaped<CUDA_MEMCPY3D>(session, request, in, reply);
}

CUresult Custom_cuMemcpy3DPeerAsync(WorkerSession& session, const Request& request,
                                    const wire::cuMemcpy3DPeerAsync_Request& in, wire::cuMemcpy3DPeerAsync_Reply*,
                                    ReplyBuilder* reply) {
  return CopyShaped<CUDA_MEMCPY3D_PEER>(session, request, in, reply);
}

}  // namespace cuda_remote::server
