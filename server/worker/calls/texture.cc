// SPDX-License-Identifier: Apache-2.0
// Texture and surface objects. The client has the driver's own values. A replay asks for the value of before: the
// driver gives the next higher ones, and such as were given back when it likes (580 on an H200): it is made again and
// again until that number comes, and the others are given back. The replayer asks for them in their order.

#include <cuda.h>

#include <algorithm>
#include <vector>

#include "proto/codec/texture.gen.h"
#include "proto/logging/log.h"
#include "server/dispatch/malformed.h"
#include "server/dispatch/runtime.h"
#include "server/worker/calls/handlers.gen.h"
#include "server/worker/session/worker_session.h"

namespace cuda_remote::server {
namespace {

// Objects made in vain for one that must have a certain value. The driver's tables are not larger.
constexpr int kMostAttempts = 1 << 16;
// So many numbers above the wanted one, each higher than all before, mean that it is not free.
constexpr int kMostAbove = 256;

// Puts the driver's handles into the client's description. Memory is the driver's to check: it takes any address and
// more bytes than are allocated there (580 on an H100; programs pad rows so), and a kernel that reads beyond gets the
// fault that it would get through a pointer.
CUresult TranslateResource(Session& session, CUDA_RESOURCE_DESC* resource) {
  switch (resource->resType) {
    case CU_RESOURCE_TYPE_ARRAY: {
      CUarray& array = resource->res.array.hArray;
      return session.Real(Kind::kArray, reinterpret_cast<uint64_t>(array), &array) ? CUDA_SUCCESS
                                                                                   : CUDA_ERROR_INVALID_HANDLE;
    }
    case CU_RESOURCE_TYPE_MIPMAPPED_ARRAY: {
      CUmipmappedArray& array = resource->res.mipmap.hMipmappedArray;
      return session.Real(Kind::kMipmappedArray, reinterpret_cast<uint64_t>(array), &array) ? CUDA_SUCCESS
                                                                                            : CUDA_ERROR_INVALID_HANDLE;
    }
    case CU_RESOURCE_TYPE_LINEAR:
    case CU_RESOURCE_TYPE_PITCH2D:
      return CUDA_SUCCESS;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
}

// Makes an object, with the value `wanted` unless that is 0. `make` and `destroy` are the driver's.
template <typename Make, typename Destroy>
CUresult MakeNumbered(uint64_t wanted, const Make& make, const Destroy& destroy, uint64_t* value) {
  std::vector<uint64_t> others;
  int above = 0;
  uint64_t highest = 0;
  CUresult result = CUDA_SUCCESS;
  for (int attempt = 0; attempt < kMostAttempts; ++attempt) {
    result = make(value);
    if (result != CUDA_SUCCESS || wanted == 0 || *value == wanted) break;
    others.push_back(*value);
    result = CUDA_ERROR_NOT_FOUND;
    above = *value <= wanted ? 0 : *value > highest ? above + 1 : above;
    highest = std::max(highest, *value);
    if (above > kMostAbove) break;
  }
  for (const uint64_t other : others) destroy(other);
  if (result == CUDA_ERROR_NOT_FOUND && !others.empty()) {
    logging::Warn("cannot recreate texture or surface object {}: the driver returned {} first, and values up to {}",
                  wanted, others.front(), highest);
  }
  return result;
}

}  // namespace

CUresult Custom_cuTexObjectCreate(WorkerSession& session, const Request&, const wire::cuTexObjectCreate_Request& in,
                                  wire::cuTexObjectCreate_Reply* out, ReplyBuilder*) {
  CUDA_RESOURCE_DESC resource;
  CUDA_TEXTURE_DESC texture;
  CUDA_RESOURCE_VIEW_DESC view;
  if (!CopyExactly(in.pResDesc, &resource, sizeof resource)) return kMalformedRequest;
  if (in.has_pTexDesc && !CopyExactly(in.pTexDesc, &texture, sizeof texture)) return kMalformedRequest;
  if (in.has_pResViewDesc && !CopyExactly(in.pResViewDesc, &view, sizeof view)) return kMalformedRequest;
  if (const CUresult result = TranslateResource(session, &resource); result != CUDA_SUCCESS) return result;
  const DriverTable& driver = session.driver();
  uint64_t value = 0;
  const CUresult result = MakeNumbered(
      in.pTexObject,
      [&](uint64_t* made) {
        CUtexObject object = 0;
        const CUresult status = driver.cuTexObjectCreate(&object, &resource, in.has_pTexDesc ? &texture : nullptr,
                                                         in.has_pResViewDesc ? &view : nullptr);
        *made = object;
        return status;
      },
      [&](uint64_t other) { driver.cuTexObjectDestroy(other); }, &value);
  if (result != CUDA_SUCCESS) return result;
  session.textures().insert({session.CurrentContext(), value});
  out->pTexObject = value;
  return CUDA_SUCCESS;
}

CUresult Custom_cuTexObjectDestroy(WorkerSession& session, const Request&, const wire::cuTexObjectDestroy_Request& in,
                                   wire::cuTexObjectDestroy_Reply*, ReplyBuilder*) {
  if (session.textures().erase({session.CurrentContext(), in.texObject}) == 0) return CUDA_ERROR_INVALID_VALUE;
  return session.driver().cuTexObjectDestroy(in.texObject);
}

CUresult Custom_cuSurfObjectCreate(WorkerSession& session, const Request&, const wire::cuSurfObjectCreate_Request& in,
                                   wire::cuSurfObjectCreate_Reply* out, ReplyBuilder*) {
  CUDA_RESOURCE_DESC resource;
  if (!CopyExactly(in.pResDesc, &resource, sizeof resource)) return kMalformedRequest;
  if (resource.resType != CU_RESOURCE_TYPE_ARRAY) return CUDA_ERROR_INVALID_VALUE;
  if (const CUresult result = TranslateResource(session, &resource); result != CUDA_SUCCESS) return result;
  const DriverTable& driver = session.driver();
  uint64_t value = 0;
  const CUresult result = MakeNumbered(
      in.pSurfObject,
      [&](uint64_t* made) {
        CUsurfObject object = 0;
        const CUresult status = driver.cuSurfObjectCreate(&object, &resource);
        *made = object;
        return status;
      },
      [&](uint64_t other) { driver.cuSurfObjectDestroy(other); }, &value);
  if (result != CUDA_SUCCESS) return result;
  session.surfaces().insert({session.CurrentContext(), value});
  out->pSurfObject = value;
  return CUDA_SUCCESS;
}

CUresult Custom_cuSurfObjectDestroy(WorkerSession& session, const Request&, const wire::cuSurfObjectDestroy_Request& in,
                                    wire::cuSurfObjectDestroy_Reply*, ReplyBuilder*) {
  if (session.surfaces().erase({session.CurrentContext(), in.surfObject}) == 0) return CUDA_ERROR_INVALID_VALUE;
  return session.driver().cuSurfObjectDestroy(in.surfObject);
}

}  // namespace cuda_remote::server
