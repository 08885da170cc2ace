// SPDX-License-Identifier: Apache-2.0
// The CUcontext of a green context. All else about green contexts follows from the rules.

#include <cuda.h>

#include "proto/codec/green.gen.h"
#include "server/dispatch/malformed.h"
#include "server/worker/calls/handlers.gen.h"
#include "server/worker/session/worker_session.h"

namespace cuda_remote::server {

CUresult Custom_cuCtxFromGreenCtx(WorkerSession& session, const Request&, const wire::cuCtxFromGreenCtx_Request& in,
                                  wire::cuCtxFromGreenCtx_Reply*, ReplyBuilder*) {
  if (!session.MayBind(Kind::kContext, in.context)) return kMalformedRequest;
  CUgreenCtx green;
  if (!session.Real(Kind::kGreenContext, in.green, &green)) return CUDA_ERROR_INVALID_CONTEXT;
  const DriverTable& driver = session.driver();
  CUcontext context = nullptr;
  CUresult result = driver.cuCtxFromGreenCtx(&context, green);
  if (result != CUDA_SUCCESS) return result;
  CUdevice device = 0;
  result = driver.cuCtxPushCurrent_v2(context);
  if (result == CUDA_SUCCESS) {
    result = driver.cuCtxGetDevice(&device);
    CUcontext popped = nullptr;
    driver.cuCtxPopCurrent_v2(&popped);
  }
  ForgetCurrent();
  if (result != CUDA_SUCCESS) return result;
  session.BindContext(in.context, context, device, false, in.green);
  return CUDA_SUCCESS;
}

}  // namespace cuda_remote::server
