// SPDX-License-Identifier: Apache-2.0
// Calls that wait for the GPU. The executor never does: short waits are watched for a moment, long ones are handed
// over.

#include <cuda.h>

#include <functional>

#include "proto/codec/context.gen.h"
#include "proto/codec/event.gen.h"
#include "proto/codec/stream.gen.h"
#include "server/worker/calls/handlers.gen.h"
#include "server/worker/calls/work.h"
#include "server/worker/memory/managed_memory.h"
#include "server/worker/memory/side_reads.h"
#include "server/worker/session/driver_hooks.h"
#include "server/worker/session/mirror_requests.h"
#include "server/worker/session/worker_session.h"

namespace cuda_remote::server {
namespace {

// With more streams than so many, asking each takes longer than handing the wait over.
constexpr size_t kMostAskedStreams = 256;

CUresult SynchronizeContext(WorkerSession& session, const Request& request, ContextRef context, ReplyBuilder* reply) {
  const DriverTable* const driver = &session.driver();
  const uint64_t work = session.work().now();
  bool fetching = false, in_place = false;
  std::function<CUresult()> wait;
  // What is asked here are the streams of all contexts. With one context, it is the session's work.
  if (session.contexts().all().size() == 1 && CapturesInProgress() == 0 && !session.modules().print() &&
      session.handles().Count(Kind::kStream) <= kMostAskedStreams) {
    CUresult state = CUDA_SUCCESS;
    fetching = BeginFetchExpected(session, request);
    // The copies are behind all of it.
    const auto ask = [&] {
      return fetching ? session.managed_memory().FetchState() : session.work().QueryAll({context});
    };
    if (session.answers().SpinUntil([&] { return (state = ask()) != CUDA_ERROR_NOT_READY; }) && state == CUDA_SUCCESS) {
      session.work().NoteSynchronized(work);
      if (fetching) {
        EndFetchExpected(session, reply);
      } else {
        FetchExpected(session, request, reply);
      }
      return CUDA_SUCCESS;
    }
    if (fetching) in_place = session.managed_memory().LeaveFetch();
    // The copies of managed memory are part of what is waited for, and wait() knows nothing of them.
    if (!fetching && SideReadsAreUnderWay()) wait = WaitBesideSideWork(session, context);
  }
  GpuWork* const all_work = &session.work();
  session.answers().DeferIn(context, reply, [driver, work, all_work, wait, fetching, in_place](Answer* answer) {
    // An error comes from the context's own wait, which also makes the driver print what the kernels have printed.
    const bool done = wait && wait() == CUDA_SUCCESS;
    const CUresult result = done ? CUDA_SUCCESS : driver->cuCtxSynchronize();
    if (result != CUDA_SUCCESS) return result;
    all_work->NoteSynchronized(work);
    if (fetching) NoteFetched(in_place, &answer->payload);
    return result;
  });
  return CUDA_SUCCESS;
}

}  // namespace

CUresult Custom_cuCtxSynchronize(WorkerSession& session, const Request& request, const wire::cuCtxSynchronize_Request&,
                                 wire::cuCtxSynchronize_Reply*, ReplyBuilder* reply) {
  if (session.contexts().current_ref().id == 0) return CUDA_ERROR_INVALID_CONTEXT;
  return SynchronizeContext(session, request, session.contexts().current_ref(), reply);
}

CUresult Custom_cuCtxSynchronize_v2(WorkerSession& session, const Request& request,
                                    const wire::cuCtxSynchronize_v2_Request& in, wire::cuCtxSynchronize_v2_Reply*,
                                    ReplyBuilder* reply) {
  const ContextInfo* const context = session.contexts().Find(in.ctx != 0 ? in.ctx : session.CurrentContext());
  if (context == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  return SynchronizeContext(session, request, context->ref, reply);
}

CUresult Custom_cuStreamSynchronize(WorkerSession& session, const Request& request,
                                    const wire::cuStreamSynchronize_Request& in, wire::cuStreamSynchronize_Reply*,
                                    ReplyBuilder* reply) {
  const DriverTable* const driver = &session.driver();
  CUstream stream;
  if (!session.RealStream(in.hStream, &stream)) return CUDA_ERROR_INVALID_HANDLE;
  // The driver's own answer for a stream being captured comes from its own wait.
  if (!IsCaptured(stream)) {
    CUresult state = CUDA_SUCCESS;
    const bool done =
        session.answers().SpinUntil([&] { return (state = driver->cuStreamQuery(stream)) != CUDA_ERROR_NOT_READY; });
    // An error comes from the wait itself, which also makes the driver print what the kernels have printed.
    if (done && state == CUDA_SUCCESS) {
      if (session.modules().print()) state = driver->cuStreamSynchronize(stream);
      if (state == CUDA_SUCCESS) FetchExpected(session, request, reply);
      return state;
    }
  }
  const auto ready = [driver, stream] {
    // A capture may have begun meanwhile, which the question would break.
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    driver->cuStreamIsCapturing(stream, &status);
    return status == CU_STREAM_CAPTURE_STATUS_NONE && driver->cuStreamQuery(stream) != CUDA_ERROR_NOT_READY;
  };
  session.answers().Defer(
      reply, [driver, stream](Answer*) { return driver->cuStreamSynchronize(stream); }, ready);
  return CUDA_SUCCESS;
}

CUresult Custom_cuEventSynchronize(WorkerSession& session, const Request& request,
                                   const wire::cuEventSynchronize_Request& in, wire::cuEventSynchronize_Reply*,
                                   ReplyBuilder* reply) {
  const DriverTable* const driver = &session.driver();
  CUevent event;
  if (!session.Real(Kind::kEvent, in.hEvent, &event)) return CUDA_ERROR_INVALID_HANDLE;
  if (CapturesInProgress() == 0) {
    CUresult state = CUDA_SUCCESS;
    const bool done =
        session.answers().SpinUntil([&] { return (state = driver->cuEventQuery(event)) != CUDA_ERROR_NOT_READY; });
    // An error comes from the wait itself, which also makes the driver print what the kernels have printed.
    if (done && state == CUDA_SUCCESS) {
      if (session.modules().print()) state = driver->cuEventSynchronize(event);
      if (state == CUDA_SUCCESS) FetchExpected(session, request, reply);
      return state;
    }
  }
  session.answers().Defer(
      reply, [driver, event](Answer*) { return driver->cuEventSynchronize(event); },
      [driver, event] { return driver->cuEventQuery(event) != CUDA_ERROR_NOT_READY; });
  return CUDA_SUCCESS;
}

}  // namespace cuda_remote::server
