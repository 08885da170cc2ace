// SPDX-License-Identifier: Apache-2.0
// Memory pools: those of the application's own, the default pool of a device, which pool is a device's current one, and
// what pools say of themselves.
//
// The driver has the pools, for their settings; memory and figures are ours (client/memory/pool_accounts.h).

#include <cuda.h>

#include <cstring>
#include <vector>

#include "client/calls/bodies.gen.h"
#include "client/core/call.h"
#include "client/core/session.h"
#include "proto/api/attribute_sizes.h"
#include "proto/api/call_ids.gen.h"
#include "proto/codec/codec.h"
#include "proto/codec/wire.h"

namespace cuda_remote::client {
namespace {

// Asks for a pool that may or may not have a handle yet: a new one is offered, and kept if the server used it.
// `default_of`: the device whose default pool a pool without a handle is.
template <typename Request, typename Reply>
CUresult GetPool(const CallInfo& info, CUmemoryPool* pool, Request request, int default_of) {
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
  {
    // Pools of the application's own are known; another thread may have asked for this one at the same time.
    WriterLock lock(&call.session().memory().mutex());
    PoolAccounts& pools = call.session().memory().pools();
    if (pools.PlaceOf(reply.pool, -1).device < 0) pools.IsDefault(reply.pool, default_of);
  }
  *pool = reinterpret_cast<CUmemoryPool>(reply.pool);
  return CUDA_SUCCESS;
}

// Memory of pools comes from the server's arena, which is a GPU's.
CUresult CheckPlace(const char* name, const CUmemLocation& location, CUmemAllocationType type) {
  if (location.type == CU_MEM_LOCATION_TYPE_HOST || location.type == CU_MEM_LOCATION_TYPE_HOST_NUMA ||
      location.type == CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT) {
    return Call::Unsupported(name, "pools of the host's memory");
  }
  if (type == CU_MEM_ALLOCATION_TYPE_MANAGED) return Call::Unsupported(name, "pools of managed memory");
  return CUDA_SUCCESS;
}

// Whether it is one of the figures that are kept here; with *high, one that may be set.
bool IsFigure(CUmemPool_attribute attribute, bool* high) {
  *high = attribute == CU_MEMPOOL_ATTR_USED_MEM_HIGH || attribute == CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH;
  return *high || attribute == CU_MEMPOOL_ATTR_USED_MEM_CURRENT || attribute == CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT;
}

driverabi::PoolFigures& FiguresOfLocked(Session& session, CUmemoryPool pool) CR_REQUIRES(session.memory().mutex()) {
  PoolAccounts& pools = session.memory().pools();
  return pools.FiguresOf(pools.PlaceOf(reinterpret_cast<uint64_t>(pool), 0));
}

uint64_t Answer(const driverabi::PoolFigures& figures, CUmemPool_attribute attribute) {
  switch (attribute) {
    case CU_MEMPOOL_ATTR_USED_MEM_CURRENT:
      return figures.used();
    case CU_MEMPOOL_ATTR_USED_MEM_HIGH:
      return figures.used_high();
    case CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT:
      return figures.reserved();
    default:
      return figures.reserved_high();
  }
}

// The setting is recorded with the pool, which it needs. No other pool is the device's current one any more: when this
// one is destroyed, that is the default pool.
void MadeCurrent(Call& call, uint64_t pool, int device) {
  {
    RecordedObjects& objects = call.session().objects();
    WriterLock lock(&objects.mutex());
    std::vector<replay::ObjectKey> pools;
    objects.handles().ForEach(Kind::kMemoryPool, [&](uint64_t one, const Object&) {
      pools.push_back({Kind::kMemoryPool, one});
    });
    for (const replay::ObjectKey& one : pools) {
      for (const uint32_t id : {kCall_cuDeviceSetMemPool, kCall_cuMemSetMemPool})
        objects.log().ForgetSetting(one, id, uint64_t(device));
    }
  }
  call.Modified({Kind::kMemoryPool, pool}, uint64_t(device));
  WriterLock lock(&call.session().memory().mutex());
  call.session().memory().pools().SetCurrent(device, pool);
}

}  // namespace

CUresult Custom_cuMemPoolCreate(CUmemoryPool* pool, const CUmemPoolProps* poolProps) {
  Call call(info::k_cuMemPoolCreate);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  if (!pool || !poolProps) return CUDA_ERROR_INVALID_VALUE;
  const char* const name = call.info().name;
  if (poolProps->win32SecurityAttributes) {
    return Call::Unsupported(name, "poolProps->win32SecurityAttributes is not carried over");
  }
  if (const CUresult result = CheckPlace(name, poolProps->location, poolProps->allocType); result != CUDA_SUCCESS) {
    return result;
  }
  wire::cuMemPoolCreate_Request request;
  request.pool = call.NewHandle(Kind::kMemoryPool, kNoParent);
  if (!request.pool) return CUDA_ERROR_OUT_OF_MEMORY;
  request.poolProps = wire::BytesOf(*poolProps);
  request.Encode(&call.message());
  if (const CUresult result = call.Transact(); result != CUDA_SUCCESS) return result;
  call.Created({Kind::kMemoryPool, request.pool});
  *pool = reinterpret_cast<CUmemoryPool>(request.pool);
  WriterLock lock(&call.session().memory().mutex());
  call.session().memory().pools().Created(request.pool, poolProps->location.id);
  return CUDA_SUCCESS;
}

CUresult Custom_cuMemPoolGetAttribute(CUmemoryPool pool, CUmemPool_attribute attr, void* value) {
  Call call(info::k_cuMemPoolGetAttribute);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  if (!call.Valid(Kind::kMemoryPool, pool)) return CUDA_ERROR_INVALID_VALUE;
  if (!value) return CUDA_ERROR_INVALID_VALUE;
  if (bool high; IsFigure(attr, &high)) {
    WriterLock lock(&call.session().memory().mutex());
    const cuuint64_t figure = Answer(FiguresOfLocked(call.session(), pool), attr);
    memcpy(value, &figure, sizeof(figure));
    return CUDA_SUCCESS;
  }
  wire::cuMemPoolGetAttribute_Request request;
  request.pool = reinterpret_cast<uint64_t>(pool);
  request.attr = attr;
  request.Encode(&call.message());
  if (const CUresult result = call.Transact(); result != CUDA_SUCCESS) return result;
  wire::cuMemPoolGetAttribute_Reply reply;
  if (!reply.Decode(call.reply()) || reply.value.size() != PoolAttributeSize(attr)) {
    return call.session().Lose(ChannelStatus::kProtocolError);
  }
  memcpy(value, reply.value.data(), reply.value.size());
  return CUDA_SUCCESS;
}

CUresult Custom_cuMemPoolSetAttribute(CUmemoryPool pool, CUmemPool_attribute attr, void* value) {
  Call call(info::k_cuMemPoolSetAttribute);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  if (!call.Valid(Kind::kMemoryPool, pool)) return CUDA_ERROR_INVALID_VALUE;
  if (!value) return CUDA_ERROR_INVALID_VALUE;
  cuuint64_t number = 0;
  memcpy(&number, value, PoolAttributeSize(attr));
  if (bool high; IsFigure(attr, &high)) {
    if (!high || number != 0) return CUDA_ERROR_INVALID_VALUE;
    WriterLock lock(&call.session().memory().mutex());
    driverabi::PoolFigures& figures = FiguresOfLocked(call.session(), pool);
    attr == CU_MEMPOOL_ATTR_USED_MEM_HIGH ? figures.ResetUsedHigh() : figures.ResetReservedHigh();
    return CUDA_SUCCESS;
  }
  wire::cuMemPoolSetAttribute_Request request;
  request.pool = reinterpret_cast<uint64_t>(pool);
  request.attr = attr;
  request.value = {static_cast<const char*>(value), PoolAttributeSize(attr)};
  request.Encode(&call.message());
  if (const CUresult result = call.Transact(); result != CUDA_SUCCESS) return result;
  call.Modified({Kind::kMemoryPool, request.pool}, uint64_t(attr));
  if (attr == CU_MEMPOOL_ATTR_RELEASE_THRESHOLD) {
    WriterLock lock(&call.session().memory().mutex());
    FiguresOfLocked(call.session(), pool).set_threshold(number);
    call.session().memory().pools().NoteIdle();
  }
  return CUDA_SUCCESS;
}

CUresult Custom_cuMemPoolTrimTo(CUmemoryPool pool, size_t minBytesToKeep) {
  Call call(info::k_cuMemPoolTrimTo);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  if (!call.Valid(Kind::kMemoryPool, pool)) return CUDA_ERROR_INVALID_VALUE;
  {
    WriterLock lock(&call.session().memory().mutex());
    FiguresOfLocked(call.session(), pool).TrimTo(minBytesToKeep);
  }
  // What the application has freed is to be others' now, so the server must know of it.
  call.session().memory().GiveBackFreed();
  wire::cuMemPoolTrimTo_Request request;
  request.pool = reinterpret_cast<uint64_t>(pool);
  request.minBytesToKeep = minBytesToKeep;
  request.Encode(&call.message());
  return call.Transact();
}

CUresult Custom_cuDeviceGetDefaultMemPool(CUmemoryPool* pool_out, CUdevice dev) {
  wire::cuDeviceGetDefaultMemPool_Request request;
  request.device = dev;
  return GetPool<wire::cuDeviceGetDefaultMemPool_Request, wire::cuDeviceGetDefaultMemPool_Reply>(
      info::k_cuDeviceGetDefaultMemPool, pool_out, request, dev);
}

CUresult Custom_cuDeviceGetMemPool(CUmemoryPool* pool, CUdevice dev) {
  wire::cuDeviceGetMemPool_Request request;
  request.device = dev;
  return GetPool<wire::cuDeviceGetMemPool_Request, wire::cuDeviceGetMemPool_Reply>(info::k_cuDeviceGetMemPool, pool,
                                                                                   request, dev);
}

CUresult Custom_cuMemGetDefaultMemPool(CUmemoryPool* pool_out, CUmemLocation* location, CUmemAllocationType type) {
  const CallInfo& kInfo = info::k_cuMemGetDefaultMemPool;
  if (!location) return CUDA_ERROR_INVALID_VALUE;
  if (const CUresult result = CheckPlace(kInfo.name, *location, type); result != CUDA_SUCCESS) return result;
  wire::cuMemGetDefaultMemPool_Request request;
  request.location = wire::BytesOf(*location);
  request.allocation_type = type;
  return GetPool<wire::cuMemGetDefaultMemPool_Request, wire::cuMemGetDefaultMemPool_Reply>(kInfo, pool_out, request,
                                                                                           location->id);
}

CUresult Custom_cuMemGetMemPool(CUmemoryPool* pool_out, CUmemLocation* location, CUmemAllocationType type) {
  const CallInfo& kInfo = info::k_cuMemGetMemPool;
  if (!location) return CUDA_ERROR_INVALID_VALUE;
  if (const CUresult result = CheckPlace(kInfo.name, *location, type); result != CUDA_SUCCESS) return result;
  wire::cuMemGetMemPool_Request request;
  request.location = wire::BytesOf(*location);
  request.allocation_type = type;
  return GetPool<wire::cuMemGetMemPool_Request, wire::cuMemGetMemPool_Reply>(kInfo, pool_out, request, location->id);
}

CUresult Custom_cuDeviceSetMemPool(CUdevice dev, CUmemoryPool pool) {
  Call call(info::k_cuDeviceSetMemPool);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  wire::cuDeviceSetMemPool_Request request;
  request.dev = dev;
  request.pool = reinterpret_cast<uint64_t>(pool);
  if (!call.Valid(Kind::kMemoryPool, request.pool)) return CUDA_ERROR_INVALID_VALUE;
  request.Encode(&call.message());
  const CUresult result = call.Transact();
  if (result == CUDA_SUCCESS) MadeCurrent(call, request.pool, dev);
  return result;
}

CUresult Custom_cuMemSetMemPool(CUmemLocation* location, CUmemAllocationType type, CUmemoryPool pool) {
  const CallInfo& kInfo = info::k_cuMemSetMemPool;
  if (!location) return CUDA_ERROR_INVALID_VALUE;
  if (const CUresult result = CheckPlace(kInfo.name, *location, type); result != CUDA_SUCCESS) return result;
  Call call(kInfo);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  wire::cuMemSetMemPool_Request request;
  request.location = wire::BytesOf(*location);
  request.type = type;
  request.pool = reinterpret_cast<uint64_t>(pool);
  if (!call.Valid(Kind::kMemoryPool, request.pool)) return CUDA_ERROR_INVALID_VALUE;
  request.Encode(&call.message());
  const CUresult result = call.Transact();
  if (result == CUDA_SUCCESS) MadeCurrent(call, request.pool, location->id);
  return result;
}

}  // namespace cuda_remote::client
