// SPDX-License-Identifier: Apache-2.0
// Streams: whether they are done, which context they are of, and what the client notes of their attributes.

#include <cuda.h>

#include <algorithm>
#include <vector>

#include "client/calls/bodies.gen.h"
#include "client/calls/runtime.h"
#include "client/calls/wait.h"
#include "client/core/call.h"
#include "client/core/session.h"
#include "proto/api/call_ids.gen.h"
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

template <typename Request>
CUresult OfStream(const CallInfo& info, CUstream stream, bool per_thread, bool waits) {
  Call call(info);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  Request request;
  if (const CUresult result = call.StreamToWire(stream, per_thread, &request.hStream); result != CUDA_SUCCESS) {
    return result;
  }
  // The default stream is each context's own.
  Question question{Kind::kStream, request.hStream, 0, waits};
  if (KindOf(request.hStream) != Kind::kStream) {
    question.kind = Kind::kContext;
    question.object = call.thread().current_context();
  }
  if (IsKnown(call.session(), &question)) return AnswerKnown(call.session(), question);
  request.Encode(&call.message());
  return AskServer(call, question);
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

// The log has what was copied, not the copy: the source may have other attributes, or be gone, by the time of a replay.
// Copied is what the source was told. What else it has, both have from their creation.
CUresult Custom_cuStreamCopyAttributes(CUstream dst, CUstream src, bool per_thread) {
  Call call(info::k_cuStreamCopyAttributes);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  wire::cuStreamCopyAttributes_Request request;
  if (const CUresult result = call.StreamToWire(dst, per_thread, &request.dstStream); result != CUDA_SUCCESS) {
    return result;
  }
  if (const CUresult result = call.StreamToWire(src, per_thread, &request.srcStream); result != CUDA_SUCCESS) {
    return result;
  }
  request.Encode(&call.message());
  if (const CUresult result = call.Transact(); result != CUDA_SUCCESS) return result;
  const replay::ObjectKey to = StreamKey(call, request.dstStream), from = StreamKey(call, request.srcStream);
  if (to == from) return CUDA_SUCCESS;
  std::vector<replay::Record> copied;
  {
    WriterLock lock(&call.session().objects().mutex());
    replay::Log& log = call.session().objects().log();
    copied = log.SettingsOf(from, kCall_cuStreamSetAttribute);
    for (const replay::Record& one : log.SettingsOf(to, kCall_cuStreamSetAttribute)) {
      log.ForgetSetting(to, kCall_cuStreamSetAttribute, one.key);
    }
  }
  call.set_id(kCall_cuStreamSetAttribute);
  for (const replay::Record& one : copied) {
    wire::cuStreamSetAttribute_Request setting;
    if (!setting.Decode(one.message)) continue;
    setting.hStream = request.dstStream;
    call.message().clear();
    setting.Encode(&call.message());
    call.Modified(to, one.key);
  }
  call.session().answers().Forget();
  return CUDA_SUCCESS;
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

CUresult Custom_cuStreamQuery(CUstream hStream, bool per_thread) {
  return OfStream<wire::cuStreamQuery_Request>(info::k_cuStreamQuery, hStream, per_thread, false);
}

CUresult Custom_cuStreamSynchronize(CUstream hStream, bool per_thread) {
  return OfStream<wire::cuStreamSynchronize_Request>(info::k_cuStreamSynchronize, hStream, per_thread, true);
}

}  // namespace cuda_remote::client
