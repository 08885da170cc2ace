// SPDX-License-Identifier: Apache-2.0
// Managed memory that the client does not share: the worker's end of proto/mirror.
//
// The bytes are this process's own: memory that it has registered with the driver, or a `__managed__` variable, which
// the driver lets the host use. Both are touched while kernels may run; who touches the same bytes at the same time is
// the application's affair, as natively.

#include <cuda.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <map>
#include <utility>

#include "proto/codec/operations.gen.h"
#include "proto/logging/log.h"
#include "proto/mirror/mirror.h"
#include "proto/threads/mutex.h"
#include "server/dispatch/malformed.h"
#include "server/worker/calls/handlers.gen.h"
#include "server/worker/session/mirror_requests.h"
#include "server/worker/session/worker_session.h"

namespace cuda_remote::server {
namespace {

// The range that a mirror stands for, if it is still there: variables go with their modules.
bool IsAlive(WorkerSession& session, uint64_t address, const Mirrored& mirrored) {
  if (mirrored.pinned) return true;
  const DeviceRange* const range = session.ranges().At(address);
  return range != nullptr && range->managed && range->bytes == mirrored.bytes && range->owner == mirrored.owner;
}

// Whether this is pinned memory of this process's own, all of it in one piece.
bool IsOwnPinned(WorkerSession& session, uint64_t address, uint64_t bytes) {
  auto it = session.host_ranges().all().upper_bound(address);
  if (it == session.host_ranges().all().begin()) return false;
  --it;
  const uint64_t offset = address - it->first;
  return it->second.own && bytes != 0 && offset < it->second.bytes && bytes <= it->second.bytes - offset;
}

// Whether this process may touch managed variables while the GPU works.
bool HostMayTouch(WorkerSession& session, uint64_t address, const DeviceRange& range) {
  if (range.kind == DeviceRange::kManaged) return true;
  int concurrent = 0;
  unsigned managed = 0;  // the driver's own word: the image, which said so first, came from the client
  // It may want a context, and the runtime registers variables before there is one.
  if (session.driver().cuPointerGetAttribute(&managed, CU_POINTER_ATTRIBUTE_IS_MANAGED, address) == CUDA_SUCCESS &&
      managed == 0) {
    return false;
  }
  return session.driver().cuDeviceGetAttribute(&concurrent, CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS,
                                               range.device) == CUDA_SUCCESS &&
         concurrent != 0;
}

}  // namespace

CUresult OpMirrorAdd(WorkerSession& session, const Request&, const wire::OpMirrorAdd_Request& in,
                     wire::OpMirrorAdd_Reply*, ReplyBuilder*) {
  const DeviceRange* const range = session.ranges().At(in.address);
  // Managed memory is mapped in whole pages and mirrored as far as the application asked for it.
  const bool fits = range != nullptr && range->managed && in.bytes != 0 && in.bytes <= range->bytes &&
                    (range->kind == DeviceRange::kManaged || in.bytes == range->bytes);
  const bool pinned = !fits && range == nullptr && IsOwnPinned(session, in.address, in.bytes);
  if (!fits && !pinned) return CUDA_ERROR_INVALID_VALUE;
  if (fits && range->kind == DeviceRange::kManaged && !IsOwnPinned(session, in.address, in.bytes)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (fits && !HostMayTouch(session, in.address, *range)) {
    logging::Warn("the driver does not let the host use this variable while kernels run: not supported");
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  const size_t bytes = in.bytes;
  void* const base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  MutexLock lock(&session.mirror_mutex());
  Mirrored& mirrored = session.mirrored()[in.address];
  mirrored.bytes = fits ? range->bytes : bytes;
  mirrored.shown = bytes;
  mirrored.owner = fits ? range->owner : 0;
  mirrored.pinned = pinned;
  mirrored.fresh = mirrored.owner != 0 ? 0 : bytes;
  mirrored.base = std::shared_ptr<char>(static_cast<char*>(base), [bytes](char* p) { munmap(p, bytes); });
  return CUDA_SUCCESS;
}

bool WriteMirrored(WorkerSession& session, std::string_view runs, bool executor) {
  MutexLock lock(&session.mirror_mutex());
  std::map<uint64_t, Mirrored>& all = session.mirrored();
  return mirror::ForEachRun(runs, [&](uint64_t address, std::string_view bytes) {
    auto it = all.upper_bound(address);
    if (it == all.begin()) return false;
    --it;
    Mirrored& mirrored = it->second;
    const uint64_t offset = address - it->first;
    if (offset > mirrored.shown || bytes.size() > mirrored.shown - offset) return false;
    // A variable whose module has just been unloaded is nobody's error.
    if (executor && !IsAlive(session, it->first, mirrored)) return true;
    // The client can still change the payload: what goes into the memory is what goes into the base.
    const bool alone = mirror::OverwriteRun(bytes.data(), bytes.size(), reinterpret_cast<char*>(address),
                                            mirrored.base.get() + offset);
    if (offset == mirrored.fresh) {
      mirrored.fresh += bytes.size();
    } else if (!alone) {
      mirrored.lost = true;
    }
    return true;
  });
}

void ReadMirrored(WorkerSession& session, uint64_t from, bool executor, wire::OpMirrorRead_Reply* out,
                  std::string* runs) {
  MutexLock lock(&session.mirror_mutex());
  std::map<uint64_t, Mirrored>& all = session.mirrored();
  auto it = all.upper_bound(from);
  if (it != all.begin() && std::prev(it)->first + std::prev(it)->second.shown > from) --it;
  for (; it != all.end(); ++it) {
    Mirrored& mirrored = it->second;
    if (executor && !IsAlive(session, it->first, mirrored)) continue;
    // Others may write to pinned memory at any time.
    out->lost = out->lost || (std::exchange(mirrored.lost, false) && !mirrored.pinned);
    uint64_t at = std::max(from, it->first) - it->first;
    if (mirror::CollectChanges(it->first, reinterpret_cast<const char*>(it->first), mirrored.base.get(), mirrored.shown,
                               false, &at, runs)) {
      mirrored.fresh = mirrored.shown;
      continue;
    }
    out->next = it->first + at;
    return;
  }
}

CUresult OpMirrorWrite(WorkerSession& session, const Request& request, const wire::OpMirrorWrite_Request&,
                       wire::OpMirrorWrite_Reply*, ReplyBuilder*) {
  return WriteMirrored(session, request.payload.unstable(), true) ? CUDA_SUCCESS : kMalformedRequest;
}

CUresult OpMirrorRead(WorkerSession& session, const Request&, const wire::OpMirrorRead_Request& in,
                      wire::OpMirrorRead_Reply* out, ReplyBuilder* reply) {
  ReadMirrored(session, in.from, true, out, &reply->payload);
  return CUDA_SUCCESS;
}

}  // namespace cuda_remote::server
