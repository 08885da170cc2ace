// SPDX-License-Identifier: Apache-2.0
// Planes and levels of arrays, texture and surface objects. A kernel gets one by value, among its parameters or from
// memory, so the application holds the driver's own values, not virtual handles; the record asks for the value that it
// got, and a replay gets that or stops. Values of two contexts may be the same, so tables and log go by context and
// value.

#include <cuda.h>

#include <memory>
#include <string>
#include <string_view>

#include "client/calls/bodies.gen.h"
#include "client/calls/mapped_memory.h"
#include "client/core/call.h"
#include "client/core/session.h"
#include "proto/codec/codec.h"
#include "proto/threads/mutex.h"

namespace cuda_remote::client {
namespace {

// Values from the driver are small: indices into its tables.
constexpr uint64_t kValueBits = 40;

// The driver gives the value of an object that is destroyed to the next one, perhaps before the first thread has the
// answer: objects are made and destroyed one at a time, up to their place in the tables and the log.
Mutex g_order;

uint64_t KeyOf(uint64_t context, uint64_t value) { return uint64_t(SlotOf(context)) << kValueBits | value; }

template <typename T>
std::string_view BytesOf(const T& value) {
  return std::string_view(reinterpret_cast<const char*>(&value), sizeof(value));
}

// What a resource is made of, for the log; kNone for memory: the driver takes any address, and a texture outlives the
// memory that it shows.
replay::ObjectKey ResourceKey(const CUDA_RESOURCE_DESC& resource) {
  switch (resource.resType) {
    case CU_RESOURCE_TYPE_ARRAY:
      return {Kind::kArray, reinterpret_cast<uint64_t>(resource.res.array.hArray)};
    case CU_RESOURCE_TYPE_MIPMAPPED_ARRAY:
      return {Kind::kMipmappedArray, reinterpret_cast<uint64_t>(resource.res.mipmap.hMipmappedArray)};
    default:
      return {};
  }
}

// Pinned memory under a texture must be the GPU's, here and wherever the job goes.
CUresult MapResource(Call& call, const CUDA_RESOURCE_DESC& resource) {
  CUdeviceptr address = 0;
  if (resource.resType == CU_RESOURCE_TYPE_LINEAR) address = resource.res.linear.devPtr;
  if (resource.resType == CU_RESOURCE_TYPE_PITCH2D) address = resource.res.pitch2D.devPtr;
  return MapParameters(call, std::string(BytesOf(address)), true);
}

CUresult CheckResource(Call& call, const CUDA_RESOURCE_DESC& resource) {
  switch (resource.resType) {
    case CU_RESOURCE_TYPE_ARRAY:
      if (!resource.res.array.hArray) return CUDA_ERROR_INVALID_VALUE;
      return call.Valid(Kind::kArray, resource.res.array.hArray) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
    case CU_RESOURCE_TYPE_MIPMAPPED_ARRAY:
      return call.Valid(Kind::kMipmappedArray, resource.res.mipmap.hMipmappedArray) ? CUDA_SUCCESS
                                                                                    : CUDA_ERROR_INVALID_HANDLE;
    case CU_RESOURCE_TYPE_LINEAR:
    case CU_RESOURCE_TYPE_PITCH2D:
      return CUDA_SUCCESS;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
}

// Records a new object, whose request is in the call's message with the value that it got.
void Remember(Call& call, Kind kind, uint64_t value, const ResourceObject& object) {
  Session& session = call.session();
  const uint64_t key = KeyOf(object.context, value);
  const replay::ObjectKey needs = ResourceKey(object.resource);
  if (needs.kind == Kind::kNone) {
    call.Created({kind, key});
  } else {
    call.Created({kind, key}, {needs});
  }
  session.objects().resource_objects(kind).Insert(key, object);
}

// Looks an object of the current context up.
CUresult Look(const CallInfo& info, Kind kind, uint64_t value, ResourceObject* object) {
  Call call(info);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  const uint64_t key = KeyOf(call.thread().current_context(), value);
  const bool found = value >> kValueBits == 0 && call.session().objects().resource_objects(kind).Find(key, object);
  return found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

// What is no object is destroyed as well as any other, natively, too.
template <typename Request>
CUresult Destroy(const CallInfo& info, Kind kind, uint64_t value, uint64_t Request::*member) {
  Call call(info);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  const uint64_t key = KeyOf(call.thread().current_context(), value);
  if (value >> kValueBits != 0 || !call.session().objects().resource_objects(kind).Contains(key)) return CUDA_SUCCESS;
  Request request;
  request.*member = value;
  request.Encode(&call.message());
  MutexLock lock(&g_order);
  const CUresult result = call.Transact();
  if (result == CUDA_SUCCESS) call.Destroyed({kind, key});
  return result;
}

// The driver's value is one that kernels can be given and that the tables can hold.
CUresult CheckValue(const Call& call, uint64_t value) {
  if (value >> kValueBits == 0) return CUDA_SUCCESS;
  return Call::Unsupported(call.info().name, "the driver numbers texture and surface objects in an unknown way");
}

// An array that is a part of another one. Asking for it again gives the same handle, as natively.
template <typename Request>
CUresult Part(const CallInfo& info, CUarray* part, Kind kind, uint64_t whole, unsigned number, Request request,
              uint64_t Request::*handle) {
  Call call(info);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  if (!part) return CUDA_ERROR_INVALID_VALUE;
  if (!call.Valid(kind, whole)) return CUDA_ERROR_INVALID_HANDLE;
  RecordedObjects& objects = call.session().objects();
  const std::string name = std::to_string(number);
  MutexLock one_at_a_time(&g_order);
  {
    ReaderLock lock(&objects.mutex());
    if (const uint64_t known = objects.ChildLocked(kind, whole, name)) {
      *part = reinterpret_cast<CUarray>(known);
      return CUDA_SUCCESS;
    }
  }
  const uint64_t made = request.*handle = call.NewHandle(Kind::kArray, whole);
  if (made == 0) return CUDA_ERROR_OUT_OF_MEMORY;
  request.Encode(&call.message());
  if (const CUresult result = call.Transact(); result != CUDA_SUCCESS) return result;
  call.Created({Kind::kArray, made});
  WriterLock lock(&objects.mutex());
  objects.NameChildLocked(kind, whole, name, made);
  *part = reinterpret_cast<CUarray>(made);
  return CUDA_SUCCESS;
}

}  // namespace

CUresult Custom_cuArrayGetPlane(CUarray* pPlaneArray, CUarray hArray, unsigned int planeIdx) {
  using Request = wire::cuArrayGetPlane_Request;
  Request request;
  request.hArray = reinterpret_cast<uint64_t>(hArray);
  request.planeIdx = planeIdx;
  return Part(info::k_cuArrayGetPlane, pPlaneArray, Kind::kArray, request.hArray, planeIdx, request,
              &Request::pPlaneArray);
}

CUresult Custom_cuMipmappedArrayGetLevel(CUarray* pLevelArray, CUmipmappedArray hMipmappedArray, unsigned int level) {
  using Request = wire::cuMipmappedArrayGetLevel_Request;
  Request request;
  request.hMipmappedArray = reinterpret_cast<uint64_t>(hMipmappedArray);
  request.level = level;
  return Part(info::k_cuMipmappedArrayGetLevel, pLevelArray, Kind::kMipmappedArray, request.hMipmappedArray, level,
              request, &Request::pLevelArray);
}

CUresult Custom_cuTexObjectCreate(CUtexObject* pTexObject, const CUDA_RESOURCE_DESC* pResDesc,
                                  const CUDA_TEXTURE_DESC* pTexDesc, const CUDA_RESOURCE_VIEW_DESC* pResViewDesc) {
  if (!pTexObject || !pResDesc) return CUDA_ERROR_INVALID_VALUE;
  Call call(info::k_cuTexObjectCreate);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  if (const CUresult result = CheckResource(call, *pResDesc); result != CUDA_SUCCESS) return result;
  if (const CUresult result = MapResource(call, *pResDesc); result != CUDA_SUCCESS) return result;
  wire::cuTexObjectCreate_Request request;
  request.pResDesc = BytesOf(*pResDesc);
  request.has_pTexDesc = pTexDesc != nullptr;
  if (pTexDesc) request.pTexDesc = BytesOf(*pTexDesc);
  request.has_pResViewDesc = pResViewDesc != nullptr;
  if (pResViewDesc) request.pResViewDesc = BytesOf(*pResViewDesc);
  request.Encode(&call.message());
  MutexLock lock(&g_order);
  if (const CUresult result = call.Transact(); result != CUDA_SUCCESS) return result;
  wire::cuTexObjectCreate_Reply reply;
  if (!reply.Decode(call.reply())) return call.session().Lose(ChannelStatus::kProtocolError);
  if (const CUresult result = CheckValue(call, reply.pTexObject); result != CUDA_SUCCESS) return result;
  request.pTexObject = reply.pTexObject;
  call.message().clear();
  request.Encode(&call.message());
  ResourceObject object;
  object.context = call.thread().current_context();
  object.resource = *pResDesc;
  if (pTexDesc) object.texture = *pTexDesc;
  if (pResViewDesc) object.view = *pResViewDesc;
  object.has_view = pResViewDesc != nullptr;
  Remember(call, Kind::kTexture, request.pTexObject, object);
  *pTexObject = request.pTexObject;
  return CUDA_SUCCESS;
}

CUresult Custom_cuTexObjectDestroy(CUtexObject texObject) {
  using Request = wire::cuTexObjectDestroy_Request;
  return Destroy<Request>(info::k_cuTexObjectDestroy, Kind::kTexture, texObject, &Request::texObject);
}

CUresult Custom_cuTexObjectGetResourceDesc(CUDA_RESOURCE_DESC* pResDesc, CUtexObject texObject) {
  if (!pResDesc) return CUDA_ERROR_INVALID_VALUE;
  ResourceObject object;
  if (const CUresult result = Look(info::k_cuTexObjectGetResourceDesc, Kind::kTexture, texObject, &object);
      result != CUDA_SUCCESS)
    return result;
  *pResDesc = object.resource;
  return CUDA_SUCCESS;
}

CUresult Custom_cuTexObjectGetTextureDesc(CUDA_TEXTURE_DESC* pTexDesc, CUtexObject texObject) {
  if (!pTexDesc) return CUDA_ERROR_INVALID_VALUE;
  ResourceObject object;
  if (const CUresult result = Look(info::k_cuTexObjectGetTextureDesc, Kind::kTexture, texObject, &object);
      result != CUDA_SUCCESS)
    return result;
  *pTexDesc = object.texture;
  return CUDA_SUCCESS;
}

CUresult Custom_cuTexObjectGetResourceViewDesc(CUDA_RESOURCE_VIEW_DESC* pResViewDesc, CUtexObject texObject) {
  if (!pResViewDesc) return CUDA_ERROR_INVALID_VALUE;
  ResourceObject object;
  if (const CUresult result = Look(info::k_cuTexObjectGetResourceViewDesc, Kind::kTexture, texObject, &object);
      result != CUDA_SUCCESS)
    return result;
  *pResViewDesc = object.view;  // zeros without one
  return CUDA_SUCCESS;
}

CUresult Custom_cuSurfObjectCreate(CUsurfObject* pSurfObject, const CUDA_RESOURCE_DESC* pResDesc) {
  if (!pSurfObject || !pResDesc || pResDesc->resType != CU_RESOURCE_TYPE_ARRAY) return CUDA_ERROR_INVALID_VALUE;
  Call call(info::k_cuSurfObjectCreate);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  if (const CUresult result = CheckResource(call, *pResDesc); result != CUDA_SUCCESS) return result;
  wire::cuSurfObjectCreate_Request request;
  request.pResDesc = BytesOf(*pResDesc);
  request.Encode(&call.message());
  MutexLock lock(&g_order);
  if (const CUresult result = call.Transact(); result != CUDA_SUCCESS) return result;
  wire::cuSurfObjectCreate_Reply reply;
  if (!reply.Decode(call.reply())) return call.session().Lose(ChannelStatus::kProtocolError);
  if (const CUresult result = CheckValue(call, reply.pSurfObject); result != CUDA_SUCCESS) return result;
  request.pSurfObject = reply.pSurfObject;
  call.message().clear();
  request.Encode(&call.message());
  ResourceObject object;
  object.context = call.thread().current_context();
  object.resource = *pResDesc;
  Remember(call, Kind::kSurface, request.pSurfObject, object);
  *pSurfObject = request.pSurfObject;
  return CUDA_SUCCESS;
}

CUresult Custom_cuSurfObjectDestroy(CUsurfObject surfObject) {
  using Request = wire::cuSurfObjectDestroy_Request;
  return Destroy<Request>(info::k_cuSurfObjectDestroy, Kind::kSurface, surfObject, &Request::surfObject);
}

CUresult Custom_cuSurfObjectGetResourceDesc(CUDA_RESOURCE_DESC* pResDesc, CUsurfObject surfObject) {
  if (!pResDesc) return CUDA_ERROR_INVALID_VALUE;
  ResourceObject object;
  if (const CUresult result = Look(info::k_cuSurfObjectGetResourceDesc, Kind::kSurface, surfObject, &object);
      result != CUDA_SUCCESS)
    return result;
  *pResDesc = object.resource;
  return CUDA_SUCCESS;
}

}  // namespace cuda_remote::client
