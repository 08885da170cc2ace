// Memory pools that the driver owns: the default pool of a device, and which pool is a device's current one.
//
// Pools of the application's own (cuMemPoolCreate) are ordinary objects and generated.

#include <cuda.h>

#include <mutex>
#include <shared_mutex>

#include "client/entry/custom.gen.h"
#include "client/session/call.h"
#include "client/session/session.h"
#include "proto/codec/codec.h"

namespace cuda_remote::client {
namespace {

// Asks for a pool that may or may not have a handle yet: a new one is offered, and kept if the server used it.
template <typename Request, typename Reply>
CUresult GetPool(const CallInfo& info, CUmemoryPool* pool, Request request) {
  if (!pool) return CUDA_ERROR_INVALID_VALUE;
  Call call(info);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  request.pool = call.NewHandle(Kind::kMemoryPool, kNoParent);
  if (!request.pool) return CUDA_ERROR_OUT_OF_MEMORY;
  request.Encode(&call.message());
  if (const CUresult result = call.Transact(); result != CUDA_SUCCESS) return result;
  Reply reply;
  if (!reply.Decode(call.reply())) return call.session().Lose(ChannelStatus::kProtocolError);
  if (reply.pool == request.pool) call.Created({Kind::kMemoryPool, request.pool});
  *pool = reinterpret_cast<CUmemoryPool>(reply.pool);
  return CUDA_SUCCESS;
}

std::string_view LocationBytes(const CUmemLocation* location) {
  return {reinterpret_cast<const char*>(location), sizeof(*location)};
}

}  // namespace

CUresult Custom_cuDeviceGetDefaultMemPool(CUmemoryPool* pool_out, CUdevice dev) {
  static constexpr CallInfo kInfo{kCall_cuDeviceGetDefaultMemPool, "cuDeviceGetDefaultMemPool", false,
                                  ContextOf::kNone};
  wire::cuDeviceGetDefaultMemPool_Request request;
  request.device = dev;
  return GetPool<wire::cuDeviceGetDefaultMemPool_Request, wire::cuDeviceGetDefaultMemPool_Reply>(kInfo, pool_out,
                                                                                                  request);
}

CUresult Custom_cuDeviceGetMemPool(CUmemoryPool* pool, CUdevice dev) {
  static constexpr CallInfo kInfo{kCall_cuDeviceGetMemPool, "cuDeviceGetMemPool", false, ContextOf::kNone};
  wire::cuDeviceGetMemPool_Request request;
  request.device = dev;
  return GetPool<wire::cuDeviceGetMemPool_Request, wire::cuDeviceGetMemPool_Reply>(kInfo, pool, request);
}

CUresult Custom_cuMemGetDefaultMemPool(CUmemoryPool* pool_out, CUmemLocation* location, CUmemAllocationType type) {
  static constexpr CallInfo kInfo{kCall_cuMemGetDefaultMemPool, "cuMemGetDefaultMemPool", false, ContextOf::kNone};
  if (!location) return CUDA_ERROR_INVALID_VALUE;
  wire::cuMemGetDefaultMemPool_Request request;
  request.location = LocationBytes(location);
  request.allocation_type = type;
  return GetPool<wire::cuMemGetDefaultMemPool_Request, wire::cuMemGetDefaultMemPool_Reply>(kInfo, pool_out, request);
}

CUresult Custom_cuMemGetMemPool(CUmemoryPool* pool_out, CUmemLocation* location, CUmemAllocationType type) {
  static constexpr CallInfo kInfo{kCall_cuMemGetMemPool, "cuMemGetMemPool", false, ContextOf::kNone};
  if (!location) return CUDA_ERROR_INVALID_VALUE;
  wire::cuMemGetMemPool_Request request;
  request.location = LocationBytes(location);
  request.allocation_type = type;
  return GetPool<wire::cuMemGetMemPool_Request, wire::cuMemGetMemPool_Reply>(kInfo, pool_out, request);
}

// The setting is recorded with the pool: it needs the pool, and the last one set wins.
CUresult Custom_cuDeviceSetMemPool(CUdevice dev, CUmemoryPool pool) {
  static constexpr CallInfo kInfo{kCall_cuDeviceSetMemPool, "cuDeviceSetMemPool", false, ContextOf::kNone};
  Call call(kInfo);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  wire::cuDeviceSetMemPool_Request request;
  request.dev = dev;
  request.pool = reinterpret_cast<uint64_t>(pool);
  if (!call.Valid(Kind::kMemoryPool, request.pool)) return CUDA_ERROR_INVALID_VALUE;
  request.Encode(&call.message());
  const CUresult result = call.Transact();
  if (result == CUDA_SUCCESS) call.Modified({Kind::kMemoryPool, request.pool}, uint64_t(dev));
  return result;
}

CUresult Custom_cuMemSetMemPool(CUmemLocation* location, CUmemAllocationType type, CUmemoryPool pool) {
  static constexpr CallInfo kInfo{kCall_cuMemSetMemPool, "cuMemSetMemPool", false, ContextOf::kNone};
  if (!location) return CUDA_ERROR_INVALID_VALUE;
  Call call(kInfo);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  wire::cuMemSetMemPool_Request request;
  request.location = LocationBytes(location);
  request.type = type;
  request.pool = reinterpret_cast<uint64_t>(pool);
  if (!call.Valid(Kind::kMemoryPool, request.pool)) return CUDA_ERROR_INVALID_VALUE;
  request.Encode(&call.message());
  const CUresult result = call.Transact();
  if (result == CUDA_SUCCESS) call.Modified({Kind::kMemoryPool, request.pool}, uint64_t(location->id));
  return result;
}

}  // namespace cuda_remote::client
