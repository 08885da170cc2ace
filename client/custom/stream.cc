// SPDX-License-Identifier: Apache-2.0
// Questions about streams that the client answers.

#include <cuda.h>

#include <algorithm>

#include "client/custom/bodies.gen.h"
#include "client/session/call.h"
#include "client/session/session.h"
#include "proto/codec/codec.h"

namespace cuda_remote::client {
namespace {

// The context and the green context (null: none) of a stream. A green context's CUcontext is made if nobody has asked
// for it yet.
CUresult ContextOfStream(const CallInfo& info, CUstream hStream, bool per_thread, CUcontext* pctx,
                         CUgreenCtx* green_out) {
  Call call(info);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  uint64_t stream;
  if (const CUresult result = call.StreamToWire(hStream, per_thread, &stream); result != CUDA_SUCCESS) return result;
  uint64_t context = call.thread().current_context();
  uint64_t green = 0;
  {
    ReaderLock lock(&call.session().objects().mutex());
    if (KindOf(stream) == Kind::kStream) {
      if (const Object* object = call.session().objects().handles().Find(Kind::kStream, stream))
        context = object->parent;
    }
    if (KindOf(context) == Kind::kGreenContext) {
      green = context;
    } else if (const Object* object = call.session().objects().handles().Find(Kind::kContext, context)) {
      green = object->green;
    }
  }
  if (green_out) *green_out = reinterpret_cast<CUgreenCtx>(green);
  if (!pctx) return CUDA_SUCCESS;
  if (KindOf(context) == Kind::kGreenContext)
    return Custom_cuCtxFromGreenCtx(pctx, reinterpret_cast<CUgreenCtx>(context));
  *pctx = reinterpret_cast<CUcontext>(context);
  return CUDA_SUCCESS;
}

}  // namespace

CUresult Custom_cuStreamGetCtx(CUstream hStream, CUcontext* pctx, bool per_thread) {
  if (!pctx) return CUDA_ERROR_INVALID_VALUE;
  return ContextOfStream(info::k_cuStreamGetCtx, hStream, per_thread, pctx, nullptr);
}

CUresult Custom_cuStreamGetCtx_v2(CUstream hStream, CUcontext* pctx, CUgreenCtx* pGreenCtx, bool per_thread) {
  return ContextOfStream(info::k_cuStreamGetCtx_v2, hStream, per_thread, pctx, pGreenCtx);
}

CUresult Custom_cuStreamGetGreenCtx(CUstream hStream, CUgreenCtx* phCtx) {
  if (!phCtx) return CUDA_ERROR_INVALID_VALUE;
  return ContextOfStream(info::k_cuStreamGetGreenCtx, hStream, false, nullptr, phCtx);
}

// The mode is each thread's own. The server never restricts its executor, which serves all threads.
CUresult Custom_cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
  if (!mode || *mode < CU_STREAM_CAPTURE_MODE_GLOBAL || *mode > CU_STREAM_CAPTURE_MODE_RELAXED) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  Call call(info::k_cuThreadExchangeStreamCaptureMode);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  std::swap(call.thread().capture_mode, *mode);
  return CUDA_SUCCESS;
}

}  // namespace cuda_remote::client
