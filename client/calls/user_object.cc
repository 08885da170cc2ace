// SPDX-License-Identifier: Apache-2.0
// User objects: memory of the application that graphs keep, and whose destructor it has given.

#include <cuda.h>

#include "client/calls/bodies.gen.h"
#include "client/core/call.h"
#include "client/core/session.h"
#include "proto/codec/codec.h"

namespace cuda_remote::client {

// The server's driver counts the references; when there are none left, it has this process call the destructor.
CUresult Custom_cuUserObjectCreate(CUuserObject* object_out, void* ptr, CUhostFn destroy, unsigned int initialRefcount,
                                   unsigned int flags) {
  if (!object_out || !destroy || initialRefcount == 0) return CUDA_ERROR_INVALID_VALUE;
  Call call(info::k_cuUserObjectCreate);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  if (!call.session().host_functions().Start()) return CUDA_ERROR_OUT_OF_MEMORY;
  wire::cuUserObjectCreate_Request request;
  request.object = call.NewHandle(Kind::kUserObject, kNoParent);
  if (!request.object) return CUDA_ERROR_OUT_OF_MEMORY;
  request.count = initialRefcount;
  request.flags = flags;
  request.Encode(&call.message());
  if (const CUresult result = call.Transact(); result != CUDA_SUCCESS) return result;
  call.session().host_functions().RegisterObject(request.object, destroy, ptr);
  call.Created({Kind::kUserObject, request.object});
  *object_out = reinterpret_cast<CUuserObject>(request.object);
  return CUDA_SUCCESS;
}

}  // namespace cuda_remote::client
