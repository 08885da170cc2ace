// SPDX-License-Identifier: Apache-2.0
// Green contexts: a part of a GPU's multiprocessors, with streams of its own.
//
// A green context and what is made from it (a CUcontext, streams) are objects of the log; the CUcontext and the streams
// go with it. Dividing multiprocessors into groups is computed by the server's driver.

#include <cuda.h>

#include "client/calls/bodies.gen.h"
#include "client/core/call.h"
#include "client/core/own_calls.h"
#include "client/core/session.h"
#include "proto/codec/codec.h"
#include "proto/driverabi/export_tables.h"

namespace cuda_remote::client {

CUresult Custom_cuGreenCtxCreate(CUgreenCtx* phCtx, CUdevResourceDesc desc, CUdevice dev, unsigned int flags) {
  if (!phCtx) return CUDA_ERROR_INVALID_VALUE;
  Call call(info::k_cuGreenCtxCreate);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  Session& session = call.session();
  if (dev < 0 || size_t(dev) >= session.devices().size()) return CUDA_ERROR_INVALID_DEVICE;
  wire::cuGreenCtxCreate_Request request;
  request.desc = reinterpret_cast<uint64_t>(desc);
  if (!call.Valid(Kind::kDevResourceDesc, request.desc)) return CUDA_ERROR_INVALID_VALUE;
  request.dev = dev;
  request.flags = flags;
  request.phCtx = call.NewHandle(Kind::kGreenContext, kNoParent);
  if (!request.phCtx) return CUDA_ERROR_OUT_OF_MEMORY;
  request.Encode(&call.message());
  if (const CUresult result = call.Transact(); result != CUDA_SUCCESS) return result;
  call.Created({Kind::kGreenContext, request.phCtx}, {{Kind::kDevResourceDesc, request.desc}});
  WriterLock lock(&session.objects().mutex());
  Object* const object = session.objects().handles().Find(Kind::kGreenContext, request.phCtx);
  object->device = dev;
  object->id = session.objects().NextContextIdLocked();
  *phCtx = reinterpret_cast<CUgreenCtx>(request.phCtx);
  return CUDA_SUCCESS;
}

CUresult Custom_cuGreenCtxDestroy(CUgreenCtx hCtx) {
  Call call(info::k_cuGreenCtxDestroy);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  Session& session = call.session();
  wire::cuGreenCtxDestroy_Request request;
  request.hCtx = reinterpret_cast<uint64_t>(hCtx);
  if (!call.Valid(Kind::kGreenContext, request.hCtx)) return CUDA_ERROR_INVALID_CONTEXT;
  uint64_t context;
  {
    ReaderLock objects_lock(&session.objects().mutex());
    context = session.objects().handles().Find(Kind::kGreenContext, request.hCtx)->green;
    ReaderLock memory_lock(&session.memory().mutex());
    // Natively such memory is the primary context's and lives on; here it is recorded with the context that was
    // current.
    for (auto& [start, range] : session.memory().device_ranges()) {
      if (context != 0 && range.value.context == context && range.value.source == DeviceRange::kAllocation) {
        return Call::Unsupported("cuGreenCtxDestroy",
                                 "memory that was allocated while its context was current must be "
                                 "freed first");
      }
    }
  }
  request.Encode(&call.message());
  const CUresult result = call.Transact();
  if (result != CUDA_SUCCESS) return result;
  if (context) driverabi::ContextDestroyed(reinterpret_cast<CUcontext>(context));
  call.Destroyed({Kind::kGreenContext, request.hCtx});
  return CUDA_SUCCESS;
}

// The number is the client's own, so it stays the same over a restart.
CUresult Custom_cuGreenCtxGetId(CUgreenCtx greenCtx, unsigned long long* greenCtxId) {
  if (!greenCtxId) return CUDA_ERROR_INVALID_VALUE;
  Call call(info::k_cuGreenCtxGetId);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  Session& session = call.session();
  ReaderLock lock(&session.objects().mutex());
  auto green = reinterpret_cast<uint64_t>(greenCtx);
  if (!green) {
    const Object* const current = session.objects().handles().Find(Kind::kContext, call.thread().current_context());
    green = current ? current->green : 0;
  }
  const Object* const object = session.objects().handles().Find(Kind::kGreenContext, green);
  if (!object) return CUDA_ERROR_INVALID_CONTEXT;
  *greenCtxId = object->id;
  return CUDA_SUCCESS;
}

CUresult Custom_cuCtxFromGreenCtx(CUcontext* pContext, CUgreenCtx hCtx) {
  if (!pContext) return CUDA_ERROR_INVALID_VALUE;
  uint64_t context = 0;
  const CUresult result = ContextOfGreen(reinterpret_cast<uint64_t>(hCtx), &context);
  if (result == CUDA_SUCCESS) *pContext = reinterpret_cast<CUcontext>(context);
  return result;
}

}  // namespace cuda_remote::client
