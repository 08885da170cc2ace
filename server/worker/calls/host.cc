// SPDX-License-Identifier: Apache-2.0
// Pinned memory that client and worker share, and host functions.

#include <cuda.h>
#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <map>
#include <vector>

#include "proto/codec/operations.gen.h"
#include "proto/driverabi/job_addresses.h"
#include "proto/threads/mutex.h"
#include "server/dispatch/malformed.h"
#include "server/worker/calls/handlers.gen.h"
#include "server/worker/calls/work.h"
#include "server/worker/memory/registered_pages.h"
#include "server/worker/memory/side_reads.h"
#include "server/worker/session/driver_hooks.h"
#include "server/worker/session/worker_session.h"

#ifndef MAP_FIXED_NOREPLACE
#define MAP_FIXED_NOREPLACE 0x100000
#endif

namespace cuda_remote::server {
namespace {

// The addresses of the client's host arena: nothing of this process lies there.
constexpr uint64_t kClientBase = driverabi::kHostBase, kClientBytes = driverabi::kHostBytes + driverabi::kManagedBytes;
constexpr uint64_t kHostPage = 4096;
// The descriptor was sent before the request, on another way.
constexpr int kDescriptorTimeoutMs = 5000;

// Maps the file where the client has it, or memory of this process's own (fd -1). Null if the file does not hold that
// range or something is there already (errno is EEXIST then).
void* MapAt(int fd, const wire::OpHostMap_Request& in) {
  void* const wanted = reinterpret_cast<void*>(in.address);
  if (fd < 0) {
    void* const own =
        mmap(wanted, in.bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    if (own != MAP_FAILED && own != wanted) munmap(own, in.bytes);
    return own == wanted ? own : nullptr;
  }
  errno = 0;
  struct stat facts;
  if (fstat(fd, &facts) != 0 || !S_ISREG(facts.st_mode)) return nullptr;
  // The last page of a file can be mapped whole.
  const uint64_t size = (uint64_t(facts.st_size) + kHostPage - 1) / kHostPage * kHostPage;
  if (in.offset > size || in.bytes > size - in.offset) return nullptr;
  // What the client may only read.
  const int flags = fcntl(fd, F_GETFL);
  const int protection = flags >= 0 && (flags & O_ACCMODE) == O_RDONLY ? PROT_READ : PROT_READ | PROT_WRITE;
  void* const got = mmap(wanted, in.bytes, protection, MAP_SHARED | MAP_FIXED_NOREPLACE, fd, off_t(in.offset));
  if (got == MAP_FAILED) return nullptr;
  if (got != wanted) {  // a kernel that does not know the flag
    munmap(got, in.bytes);
    return nullptr;
  }
  return got;
}

// Registers with the driver what the client has registered, on pages that are mapped here.
CUresult Register(WorkerSession& session, const wire::OpHostMap_Request& in) {
  bool own = false;
  if (in.registered_bytes == 0 || in.registered + in.registered_bytes < in.registered ||
      !session.registered_pages().Hold(in.registered, in.registered_bytes, &own) ||
      session.host_ranges().Overlaps(in.registered, in.registered_bytes)) {
    return CUDA_ERROR_ALREADY_MAPPED;
  }
  char* const memory = reinterpret_cast<char*>(in.registered);
  if (own) {
    // Other pages are new. These may have been another registration's.
    const uint64_t first = std::min(in.registered_bytes, kHostPage - in.registered % kHostPage);
    const uint64_t last = std::min(in.registered_bytes, (in.registered + in.registered_bytes) % kHostPage);
    memset(memory, 0, first);
    memset(memory + in.registered_bytes - last, 0, last);
  }
  HostRange range;
  range.bytes = in.registered_bytes;
  range.flags = in.flags;
  range.own = own;
  range.of_pages = true;
  const ContextRef context = session.contexts().Any();
  if (context.id != 0) {
    MakeCurrent(session.driver(), context);
    const CUresult result = session.host_ranges().Register(in.registered, range);
    MakeCurrent(session.driver(), session.contexts().current_ref());
    if (result != CUDA_SUCCESS) return result;
    range.registered_in = context.id;
  }
  session.host_ranges().all()[in.registered] = range;
  return CUDA_SUCCESS;
}

void Unmap(const std::vector<RegisteredPages::Range>& pages) {
  for (const RegisteredPages::Range& range : pages) munmap(reinterpret_cast<void*>(range.address), range.bytes);
}

// Maps pages that the program registers, at its own addresses.
CUresult MapPages(WorkerSession& session, int fd, const wire::OpHostMap_Request& in) {
  if (in.address % kHostPage != 0 || in.bytes % kHostPage != 0 || in.offset % kHostPage != 0) return kMalformedRequest;
  if (in.bytes != 0) {
    if (!RegisteredPages::MayLieAt(in.address, in.bytes)) return CUDA_ERROR_ALREADY_MAPPED;
    if (fd < 0 && !session.arena().Charge(in.bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
    if (MapAt(fd, in) == nullptr) {
      const int error = errno;
      if (fd < 0) session.arena().Discharge(in.bytes);
      return error == EEXIST ? CUDA_ERROR_ALREADY_MAPPED : CUDA_ERROR_OUT_OF_MEMORY;
    }
    session.registered_pages().Add(in.address, in.bytes, fd < 0);
  }
  if (in.registered == 0) return CUDA_SUCCESS;
  const CUresult result = Register(session, in);
  if (result != CUDA_SUCCESS && in.bytes != 0) {
    uint64_t own;
    Unmap(session.registered_pages().Take(in.address, in.bytes, &own));
    session.arena().Discharge(own);
  }
  return result;
}

}  // namespace

CUresult OpHostMap(WorkerSession& session, const Request&, const wire::OpHostMap_Request& in,
                   wire::OpHostMap_Reply* out, ReplyBuilder*) {
  // Without a descriptor it is the copy here of memory that the client has elsewhere (proto/mirror).
  if (in.managed && (in.device < 0 || size_t(in.device) >= session.loaded().devices.size()))
    return CUDA_ERROR_INVALID_DEVICE;
  const int fd = in.tag == 0 ? -1 : session.channel().TakeFd(in.tag, kDescriptorTimeoutMs);
  if (fd < 0 && in.tag != 0) return CUDA_ERROR_INVALID_VALUE;
  if (in.pages) {
    const CUresult result = MapPages(session, fd, in);
    if (fd >= 0) close(fd);
    out->device_pointer = in.registered;
    return result;
  }
  const bool aligned = in.address % kHostPage == 0 && in.bytes % kHostPage == 0 && in.offset % kHostPage == 0;
  const bool inside = in.address >= kClientBase && in.bytes != 0 && in.bytes <= kClientBytes &&
                      in.address - kClientBase <= kClientBytes - in.bytes;
  if (!aligned || !inside) {
    if (fd >= 0) close(fd);
    return kMalformedRequest;
  }
  if (fd < 0 && !session.arena().Charge(in.bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
  void* const memory = MapAt(fd, in);
  if (fd >= 0) close(fd);
  if (memory == nullptr) {
    if (fd < 0) session.arena().Discharge(in.bytes);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  HostRange& range = session.host_ranges().all()[in.address];
  range = HostRange();
  range.bytes = in.bytes;
  range.flags = in.flags;
  range.own = fd < 0;
  const ContextRef context = session.contexts().Any();
  MakeCurrent(session.driver(), context);
  session.host_ranges().RegisterAll(session.contexts().Any());
  MakeCurrent(session.driver(), session.contexts().current_ref());
  if (context.id != 0 && range.registered_in == 0) {
    session.host_ranges().all().erase(in.address);
    munmap(memory, in.bytes);
    if (fd < 0) session.arena().Discharge(in.bytes);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  if (in.managed) {
    DeviceRange managed;
    managed.kind = DeviceRange::kManaged;
    managed.managed = true;
    managed.bytes = in.bytes;
    managed.device = in.device;
    managed.context = session.CurrentContext();
    session.ranges().Insert(in.address, managed);
  }
  out->device_pointer = in.address;
  return CUDA_SUCCESS;
}

CUresult OpHostUnmap(WorkerSession& session, const Request&, const wire::OpHostUnmap_Request& in,
                     wire::OpHostUnmap_Reply*, ReplyBuilder* reply) {
  HostRange range;
  const auto it = session.host_ranges().all().find(in.address);
  if (it != session.host_ranges().all().end()) {
    range = it->second;
  } else if (in.address != 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const bool of_pages = range.of_pages || in.address == 0;
  if (of_pages && in.page_bytes != 0) {
    if (in.page_bytes > ~in.pages) return kMalformedRequest;
    // Not those of others.
    const uint64_t begin = in.pages, end = in.pages + in.page_bytes;
    const uint64_t first = std::clamp(in.address, begin, end), last = std::clamp(in.address + range.bytes, first, end);
    if (begin % kHostPage != 0 || session.host_ranges().Overlaps(begin, first - begin) ||
        session.host_ranges().Overlaps(last, end - last)) {
      return kMalformedRequest;
    }
  }
  if (in.address != 0) session.host_ranges().all().erase(it);
  std::vector<RegisteredPages::Range> unmapped;
  if (of_pages) {
    uint64_t own;
    unmapped = session.registered_pages().Take(in.pages, in.page_bytes, &own);
    session.arena().Discharge(own);
  } else {
    unmapped = {{in.address, range.bytes}};
    if (range.own) session.arena().Discharge(range.bytes);
  }
  if (const DeviceRange* const known = session.ranges().At(in.address);
      known != nullptr && known->kind == DeviceRange::kManaged) {
    session.ranges().Erase(in.address);
  }
  if (range.own) {
    MutexLock lock(&session.mirror_mutex());
    std::map<uint64_t, Mirrored>& mirrored = session.mirrored();
    mirrored.erase(mirrored.lower_bound(in.address), mirrored.lower_bound(in.address + range.bytes));
  }
  if (range.registered_in == 0) {
    AwaitSideReads();  // which write to it
    Unmap(unmapped);
    return CUDA_SUCCESS;
  }
  // What uses it ends first, as natively; any context may.
  const std::function<CUresult()> wait = WaitFor(session, AllWork(session));
  ContextRef context = session.contexts().Any();
  for (const auto& [handle, info] : session.contexts().all()) {
    if (info.ref.id == range.registered_in) context = info.ref;
  }
  const DriverTable* const driver = &session.driver();
  void* const memory = reinterpret_cast<void*>(in.address);
  session.answers().DeferIn(context, reply, [driver, context, memory, unmapped, wait](Answer*) {
    wait();
    MakeCurrent(*driver, context);
    driver->cuMemHostUnregister(memory);
    Unmap(unmapped);
    return CUDA_SUCCESS;
  });
  return CUDA_SUCCESS;
}

CUresult OpLaunchHostFunc(WorkerSession& session, const Request&, const wire::OpLaunchHostFunc_Request& in,
                          wire::OpLaunchHostFunc_Reply*, ReplyBuilder*) {
  CUstream stream;
  if (!session.RealStream(in.stream, &stream)) return CUDA_ERROR_INVALID_HANDLE;
  const bool captured = IsCaptured(stream);
  const CUresult result = session.host_functions().Launch(session.driver(), stream, in.id, in.callback, captured);
  if (result == CUDA_SUCCESS && !captured) session.work().NoteHostFunction(in.stream, in.id);
  return result;
}

CUresult OpHostFuncDone(WorkerSession& session, const Request&, const wire::OpHostFuncDone_Request& in,
                        wire::OpHostFuncDone_Reply*, ReplyBuilder*) {
  session.host_functions().Done(in.turn);
  return CUDA_SUCCESS;
}

}  // namespace cuda_remote::server
