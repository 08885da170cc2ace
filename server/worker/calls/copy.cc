// SPDX-License-Identifier: Apache-2.0
// Linear copies. A client names device memory that it owns, pinned memory that both sides have mapped, or the payload:
// nothing else of this process can be read or written.

#include <cuda.h>

#include "proto/codec/copy.gen.h"
#include "proto/logging/log.h"
#include "server/dispatch/malformed.h"
#include "server/worker/calls/copy_answer.h"
#include "server/worker/calls/handlers.gen.h"
#include "server/worker/calls/work.h"
#include "server/worker/memory/uploads.h"
#include "server/worker/session/driver_hooks.h"
#include "server/worker/session/worker_session.h"

namespace cuda_remote::server {
namespace {

// Replies up to this size are worth waiting for on the spot.
constexpr size_t kSmallReply = 64 << 10;

// Copies of pageable memory in a captured stream would read or write a buffer that is long gone when the graph runs.
CUresult RefuseCapture(const char* what) {
  logging::Warn("{} of pageable memory in a stream that is being captured is not supported; use pinned memory", what);
  return CUDA_ERROR_NOT_SUPPORTED;
}

// Both ends are device memory of the session, perhaps on two GPUs, which need not reach each other.
CUresult CopyOnDevices(WorkerSession& session, uint64_t dst, uint64_t src, size_t bytes, CUstream stream) {
  const DriverTable& driver = session.driver();
  const DeviceRange* const target = session.ranges().Find(dst);
  const DeviceRange* const source = session.ranges().Find(src);
  // Every GPU reaches managed memory.
  if (target->managed || source->managed) return driver.cuMemcpyAsync(dst, src, bytes, stream);
  const int to = target->device;
  const int from = source->device;
  if (to != from) {
    const ContextRef to_context = session.contexts().On(to);
    const ContextRef from_context = session.contexts().On(from);
    if (to_context.id != 0 && from_context.id != 0) {
      return driver.cuMemcpyPeerAsync(dst, to_context.real, src, from_context.real, bytes, stream);
    }
  }
  return driver.cuMemcpyDtoDAsync_v2(dst, src, bytes, stream);
}

}  // namespace

CUresult AnswerBehind(WorkerSession& session, CUstream stream, std::shared_ptr<char> buffer, size_t bytes,
                      ReplyBuilder* reply) {
  const DriverTable* const driver = &session.driver();
  CUresult result;
  const CUevent event = EventBehind(*driver, stream, &result);
  if (event == nullptr) {  // the stream has been waited for
    if (result == CUDA_SUCCESS && bytes != 0) reply->payload.assign(buffer.get(), bytes);
    return result;
  }
  if (bytes <= kSmallReply) {
    CUresult state = CUDA_SUCCESS;
    if (session.answers().SpinUntil([&] { return (state = driver->cuEventQuery(event)) != CUDA_ERROR_NOT_READY; })) {
      if (state == CUDA_SUCCESS && session.modules().print()) driver->cuEventSynchronize(event);
      driver->cuEventDestroy_v2(event);
      if (state == CUDA_SUCCESS && bytes != 0) reply->payload.assign(buffer.get(), bytes);
      return state;
    }
  }
  const auto wait = [driver, event, buffer = std::move(buffer), bytes](Answer* answer) {
    const CUresult state = driver->cuEventSynchronize(event);
    driver->cuEventDestroy_v2(event);
    answer->keeper = buffer;
    if (state == CUDA_SUCCESS) answer->view = {buffer.get(), bytes};
    return state;
  };
  session.answers().DeferInStream(stream, reply, wait,
                                  [driver, event] { return driver->cuEventQuery(event) != CUDA_ERROR_NOT_READY; });
  return CUDA_SUCCESS;
}

CUresult Custom_cuMemcpyHtoDAsync_v2(WorkerSession& session, const Request& request,
                                     const wire::cuMemcpyHtoDAsync_v2_Request& in, wire::cuMemcpyHtoDAsync_v2_Reply*,
                                     ReplyBuilder* reply) {
  CUstream stream;
  if (!session.RealStream(in.stream, &stream)) return CUDA_ERROR_INVALID_HANDLE;
  if (in.src == 0 && request.payload.size() != in.bytes) return kMalformedRequest;
  if (in.bytes == 0) return CUDA_SUCCESS;
  if (!session.OwnsDeviceRange(in.dst, in.bytes)) return CUDA_ERROR_INVALID_VALUE;
  if (in.src != 0 && !session.host_ranges().Owns(in.src, in.bytes)) return CUDA_ERROR_INVALID_VALUE;
  if (in.src == 0 && IsCaptured(stream)) return RefuseCapture("a copy");
  const auto copy = [&](const void* source) {
    return session.driver().cuMemcpyHtoDAsync_v2(in.dst, source, in.bytes, stream);
  };
  const CUresult result = in.src != 0
                              ? copy(reinterpret_cast<const void*>(in.src))
                              : session.uploads().Copy(session.contexts().current_ref(), stream, request.payload, copy);
  const bool wait = in.blocking || (in.bounded && session.uploads().plenty());
  if (result != CUDA_SUCCESS || !wait || IsCaptured(stream)) return result;
  return AnswerBehind(session, stream, nullptr, 0, reply);
}

CUresult Custom_cuMemcpyDtoHAsync_v2(WorkerSession& session, const Request&,
                                     const wire::cuMemcpyDtoHAsync_v2_Request& in, wire::cuMemcpyDtoHAsync_v2_Reply*,
                                     ReplyBuilder* reply) {
  CUstream stream;
  if (!session.RealStream(in.stream, &stream)) return CUDA_ERROR_INVALID_HANDLE;
  if (in.bytes == 0) return CUDA_SUCCESS;
  if (!session.OwnsDeviceRange(in.src, in.bytes)) return CUDA_ERROR_INVALID_VALUE;
  if (in.dst != 0) {
    if (!session.host_ranges().Owns(in.dst, in.bytes)) return CUDA_ERROR_INVALID_VALUE;
    const CUresult result =
        session.driver().cuMemcpyDtoHAsync_v2(reinterpret_cast<void*>(in.dst), in.src, in.bytes, stream);
    if (result != CUDA_SUCCESS || !in.blocking || IsCaptured(stream)) return result;
    return AnswerBehind(session, stream, nullptr, 0, reply);
  }
  if (in.bytes > kMaxTotalPayloadBytes) return CUDA_ERROR_INVALID_VALUE;
  if (IsCaptured(stream)) return RefuseCapture("a copy");
  if (in.bytes > StagingPool::kLarge) GiveBackStaging(session);
  std::shared_ptr<char> buffer = session.staging().Take(in.bytes);
  if (!buffer) return CUDA_ERROR_OUT_OF_MEMORY;
  const CUresult result = session.driver().cuMemcpyDtoHAsync_v2(buffer.get(), in.src, in.bytes, stream);
  if (result != CUDA_SUCCESS) return result;
  return AnswerBehind(session, stream, std::move(buffer), in.bytes, reply);
}

CUresult Custom_cuMemcpyAsync(WorkerSession& session, const Request&, const wire::cuMemcpyAsync_Request& in,
                              wire::cuMemcpyAsync_Reply*, ReplyBuilder* reply) {
  CUstream stream;
  if (!session.RealStream(in.stream, &stream)) return CUDA_ERROR_INVALID_HANDLE;
  if (in.bytes == 0) return CUDA_SUCCESS;
  const bool to_device = session.OwnsDeviceRange(in.dst, in.bytes);
  const bool from_device = session.OwnsDeviceRange(in.src, in.bytes);
  if (!to_device && !session.host_ranges().Owns(in.dst, in.bytes)) return CUDA_ERROR_INVALID_VALUE;
  if (!from_device && !session.host_ranges().Owns(in.src, in.bytes)) return CUDA_ERROR_INVALID_VALUE;
  const DriverTable& driver = session.driver();
  CUresult result;
  if (to_device && from_device) {
    result = CopyOnDevices(session, in.dst, in.src, in.bytes, stream);
  } else if (to_device) {
    result = driver.cuMemcpyHtoDAsync_v2(in.dst, reinterpret_cast<const void*>(in.src), in.bytes, stream);
  } else if (from_device) {
    result = driver.cuMemcpyDtoHAsync_v2(reinterpret_cast<void*>(in.dst), in.src, in.bytes, stream);
  } else {
    result = driver.cuMemcpyAsync(in.dst, in.src, in.bytes, stream);
  }
  if (result != CUDA_SUCCESS || !in.blocking || IsCaptured(stream)) return result;
  return AnswerBehind(session, stream, nullptr, 0, reply);
}

CUresult Custom_cuMemcpyPeerAsync(WorkerSession& session, const Request&, const wire::cuMemcpyPeerAsync_Request& in,
                                  wire::cuMemcpyPeerAsync_Reply*, ReplyBuilder* reply) {
  CUstream stream;
  if (!session.RealStream(in.stream, &stream)) return CUDA_ERROR_INVALID_HANDLE;
  const ContextInfo* const to = session.contexts().Find(in.dst_context);
  const ContextInfo* const from = session.contexts().Find(in.src_context);
  if (to == nullptr || from == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  if (in.bytes == 0) return CUDA_SUCCESS;
  if (!session.OwnsDeviceRange(in.dst, in.bytes) || !session.OwnsDeviceRange(in.src, in.bytes)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const CUresult result =
      session.driver().cuMemcpyPeerAsync(in.dst, to->ref.real, in.src, from->ref.real, in.bytes, stream);
  if (result != CUDA_SUCCESS || !in.blocking || IsCaptured(stream)) return result;
  return AnswerBehind(session, stream, nullptr, 0, reply);
}

}  // namespace cuda_remote::server
