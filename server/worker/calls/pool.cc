// SPDX-License-Identifier: Apache-2.0
// Memory pools that the driver owns: the client offers a virtual handle, which the pool gets if it has none yet.

#include <cuda.h>

#include "proto/codec/device.gen.h"
#include "proto/codec/pool.gen.h"
#include "server/dispatch/malformed.h"
#include "server/dispatch/runtime.h"
#include "server/worker/calls/handlers.gen.h"

namespace cuda_remote::server {
namespace {

CUresult NamePool(Session& session, CUresult result, CUmemoryPool pool, uint64_t offered, uint64_t* name) {
  if (result != CUDA_SUCCESS) return result;
  *name = session.Virtual(Kind::kMemoryPool, reinterpret_cast<uint64_t>(pool));
  if (*name != 0) return CUDA_SUCCESS;
  if (!session.MayBind(Kind::kMemoryPool, offered)) return kMalformedRequest;
  session.Bind(Kind::kMemoryPool, offered, reinterpret_cast<uint64_t>(pool), 0);
  *name = offered;
  return CUDA_SUCCESS;
}

}  // namespace

CUresult Custom_cuDeviceGetDefaultMemPool(WorkerSession& session, const Request&,
                                          const wire::cuDeviceGetDefaultMemPool_Request& in,
                                          wire::cuDeviceGetDefaultMemPool_Reply* out, ReplyBuilder*) {
  CUmemoryPool pool = nullptr;
  const CUresult result = session.driver().cuDeviceGetDefaultMemPool(&pool, in.device);
  return NamePool(session, result, pool, in.pool, &out->pool);
}

CUresult Custom_cuDeviceGetMemPool(WorkerSession& session, const Request&, const wire::cuDeviceGetMemPool_Request& in,
                                   wire::cuDeviceGetMemPool_Reply* out, ReplyBuilder*) {
  CUmemoryPool pool = nullptr;
  const CUresult result = session.driver().cuDeviceGetMemPool(&pool, in.device);
  return NamePool(session, result, pool, in.pool, &out->pool);
}

CUresult Custom_cuMemGetDefaultMemPool(WorkerSession& session, const Request&,
                                       const wire::cuMemGetDefaultMemPool_Request& in,
                                       wire::cuMemGetDefaultMemPool_Reply* out, ReplyBuilder*) {
  CUmemLocation location;
  if (!CopyExactly(in.location, &location, sizeof location)) return kMalformedRequest;
  CUmemoryPool pool = nullptr;
  const CUresult result =
      session.driver().cuMemGetDefaultMemPool(&pool, &location, CUmemAllocationType(in.allocation_type));
  return NamePool(session, result, pool, in.pool, &out->pool);
}

CUresult Custom_cuMemGetMemPool(WorkerSession& session, const Request&, const wire::cuMemGetMemPool_Request& in,
                                wire::cuMemGetMemPool_Reply* out, ReplyBuilder*) {
  CUmemLocation location;
  if (!CopyExactly(in.location, &location, sizeof location)) return kMalformedRequest;
  CUmemoryPool pool = nullptr;
  const CUresult result = session.driver().cuMemGetMemPool(&pool, &location, CUmemAllocationType(in.allocation_type));
  return NamePool(session, result, pool, in.pool, &out->pool);
}

}  // namespace cuda_remote::server
