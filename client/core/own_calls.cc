// SPDX-License-Identifier: Apache-2.0
#include "client/core/own_calls.h"

#include <mutex>

#include "client/core/call.h"
#include "client/core/call_info.gen.h"
#include "client/core/session.h"
#include "proto/codec/green.gen.h"
#include "proto/codec/stream.gen.h"

namespace cuda_remote::client {

CUresult CreateStream(unsigned flags, uint64_t* stream) {
  Call call(info::k_cuStreamCreate);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  wire::cuStreamCreate_Request request;
  request.Flags = flags;
  request.phStream = call.NewHandle(Kind::kStream, 0);
  if (!request.phStream) return CUDA_ERROR_OUT_OF_MEMORY;
  request.Encode(&call.message());
  if (const CUresult result = call.Transact(); result != CUDA_SUCCESS) return result;
  call.Created({Kind::kStream, request.phStream});
  *stream = request.phStream;
  return CUDA_SUCCESS;
}

CUresult DestroyStream(uint64_t stream) {
  Call call(info::k_cuStreamDestroy_v2);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  if (!call.Valid(Kind::kStream, stream)) return CUDA_ERROR_INVALID_HANDLE;
  wire::cuStreamDestroy_v2_Request request;
  request.hStream = stream;
  request.Encode(&call.message());
  if (const CUresult result = call.Send(); result != CUDA_SUCCESS) return result;
  call.Destroyed({Kind::kStream, stream});
  return CUDA_SUCCESS;
}

CUresult ContextOfGreen(uint64_t green, uint64_t* context) {
  Call call(info::k_cuCtxFromGreenCtx);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  Session& session = call.session();
  if (!call.Valid(Kind::kGreenContext, green)) return CUDA_ERROR_INVALID_CONTEXT;
  static std::mutex* const one_at_a_time = new std::mutex;  // the context is made once
  std::lock_guard<std::mutex> first(*one_at_a_time);
  int device;
  {
    ReaderLock lock(&session.objects().mutex());
    const Object* const object = session.objects().handles().Find(Kind::kGreenContext, green);
    if (!object) return CUDA_ERROR_INVALID_CONTEXT;
    device = object->device;
    if (object->green != 0) {
      *context = object->green;
      return CUDA_SUCCESS;
    }
  }
  wire::cuCtxFromGreenCtx_Request request;
  request.green = green;
  request.context = call.NewHandle(Kind::kContext, green);
  if (!request.context) return CUDA_ERROR_OUT_OF_MEMORY;
  request.Encode(&call.message());
  if (const CUresult result = call.Transact(); result != CUDA_SUCCESS) return result;
  call.Created({Kind::kContext, request.context});
  WriterLock lock(&session.objects().mutex());
  Object* const object = session.objects().handles().Find(Kind::kContext, request.context);
  object->device = device;
  object->id = session.objects().NextContextIdLocked();
  object->green = green;
  session.objects().handles().Find(Kind::kGreenContext, green)->green = request.context;
  *context = request.context;
  return CUDA_SUCCESS;
}

}  // namespace cuda_remote::client
