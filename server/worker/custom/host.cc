// SPDX-License-Identifier: Apache-2.0
// Pinned memory that client and worker share, and host functions.

#include <cuda.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <functional>
#include <map>

#include "proto/codec/operations.gen.h"
#include "proto/driverabi/job_addresses.h"
#include "proto/threads/mutex.h"
#include "server/dispatch/malformed.h"
#include "server/worker/custom/handlers.gen.h"
#include "server/worker/custom/work.h"
#include "server/worker/driver_hooks.h"
#include "server/worker/side_reads.h"
#include "server/worker/worker_session.h"

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
// range or something is there already.
void* MapAt(int fd, const wire::OpHostMap_Request& in) {
  void* const wanted = reinterpret_cast<void*>(in.address);
  if (fd < 0) {
    void* const own =
        mmap(wanted, in.bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    if (own != MAP_FAILED && own != wanted) munmap(own, in.bytes);
    return own == wanted ? own : nullptr;
  }
  struct stat facts;
  if (fstat(fd, &facts) != 0 || !S_ISREG(facts.st_mode)) return nullptr;
  // The last page of a file can be mapped whole.
  const uint64_t size = (uint64_t(facts.st_size) + kHostPage - 1) / kHostPage * kHostPage;
  if (in.offset > size || in.bytes > size - in.offset) return nullptr;
  void* const got =
      mmap(wanted, in.bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED_NOREPLACE, fd, off_t(in.offset));
  if (got == MAP_FAILED) return nullptr;
  if (got != wanted) {  // a kernel that does not know the flag
    munmap(got, in.bytes);
    return nullptr;
  }
  return got;
}

}  // namespace

CUresult OpHostMap(Session& session, const Request&, const wire::OpHostMap_Request& in, wire::OpHostMap_Reply* out,
                   ReplyBuilder*) {
  WorkerSession& worker = Worker(session);
  // Without a descriptor it is the copy here of memory that the client has elsewhere (proto/mirror).
  if (in.managed && (in.device < 0 || size_t(in.device) >= worker.loaded().devices.size()))
    return CUDA_ERROR_INVALID_DEVICE;
  const int fd = in.tag == 0 ? -1 : worker.channel().TakeFd(in.tag, kDescriptorTimeoutMs);
  if (fd < 0 && in.tag != 0) return CUDA_ERROR_INVALID_VALUE;
  const bool aligned = in.address % kHostPage == 0 && in.bytes % kHostPage == 0 && in.offset % kHostPage == 0;
  const bool inside = in.address >= kClientBase && in.bytes != 0 && in.bytes <= kClientBytes &&
                      in.address - kClientBase <= kClientBytes - in.bytes;
  if (!aligned || !inside) {
    if (fd >= 0) close(fd);
    return kMalformedRequest;
  }
  if (fd < 0 && !worker.arena().Charge(in.bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
  void* const memory = MapAt(fd, in);
  if (fd >= 0) close(fd);
  if (memory == nullptr) {
    if (fd < 0) worker.arena().Discharge(in.bytes);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  HostRange& range = worker.host_ranges()[in.address];
  range = HostRange();
  range.bytes = in.bytes;
  range.flags = in.flags;
  range.own = fd < 0;
  const ContextRef context = worker.AnyContext();
  MakeCurrent(session.driver(), context);
  worker.RegisterHostRanges();
  MakeCurrent(session.driver(), worker.current_ref());
  if (context.id != 0 && range.registered_in == 0) {
    worker.host_ranges().erase(in.address);
    munmap(memory, in.bytes);
    if (fd < 0) worker.arena().Discharge(in.bytes);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  if (in.managed) {
    DeviceRange managed;
    managed.kind = DeviceRange::kManaged;
    managed.managed = true;
    managed.bytes = in.bytes;
    managed.device = in.device;
    managed.context = session.CurrentContext();
    worker.ranges().Insert(in.address, managed);
  }
  out->device_pointer = in.address;
  return CUDA_SUCCESS;
}

CUresult OpHostUnmap(Session& session, const Request&, const wire::OpHostUnmap_Request& in, wire::OpHostUnmap_Reply*,
                     ReplyBuilder* reply) {
  WorkerSession& worker = Worker(session);
  const auto it = worker.host_ranges().find(in.address);
  if (it == worker.host_ranges().end()) return CUDA_ERROR_INVALID_VALUE;
  const HostRange range = it->second;
  worker.host_ranges().erase(it);
  if (const DeviceRange* const known = worker.ranges().At(in.address);
      known != nullptr && known->kind == DeviceRange::kManaged) {
    worker.ranges().Erase(in.address);
  }
  if (range.own) {
    MutexLock lock(&worker.mirror_mutex());
    std::map<uint64_t, Mirrored>& mirrored = worker.mirrored();
    mirrored.erase(mirrored.lower_bound(in.address), mirrored.lower_bound(in.address + range.bytes));
  }
  if (range.own) worker.arena().Discharge(range.bytes);
  const DriverTable* const driver = &session.driver();
  void* const memory = reinterpret_cast<void*>(in.address);
  if (range.registered_in == 0) {
    AwaitSideReads();  // which write to it
    munmap(memory, range.bytes);
    return CUDA_SUCCESS;
  }
  // What uses it ends first, as natively; any context may.
  const std::function<CUresult()> wait = WaitFor(worker, AllWork(worker));
  ContextRef context = worker.AnyContext();
  for (const auto& [handle, info] : worker.contexts()) {
    if (info.ref.id == range.registered_in) context = info.ref;
  }
  worker.DeferIn(context, reply, [driver, context, memory, range, wait](Answer*) {
    wait();
    MakeCurrent(*driver, context);
    driver->cuMemHostUnregister(memory);
    munmap(memory, range.bytes);
    return CUDA_SUCCESS;
  });
  return CUDA_SUCCESS;
}

CUresult OpLaunchHostFunc(Session& session, const Request&, const wire::OpLaunchHostFunc_Request& in,
                          wire::OpLaunchHostFunc_Reply*, ReplyBuilder*) {
  WorkerSession& worker = Worker(session);
  CUstream stream;
  if (!session.RealStream(in.stream, &stream)) return CUDA_ERROR_INVALID_HANDLE;
  const bool captured = IsCaptured(stream);
  const CUresult result = worker.host_functions().Launch(session.driver(), stream, in.id, in.callback, captured);
  if (result == CUDA_SUCCESS && !captured) worker.NoteHostFunction(in.stream, in.id);
  return result;
}

CUresult OpHostFuncDone(Session& session, const Request&, const wire::OpHostFuncDone_Request& in,
                        wire::OpHostFuncDone_Reply*, ReplyBuilder*) {
  Worker(session).host_functions().Done(in.turn);
  return CUDA_SUCCESS;
}

}  // namespace cuda_remote::server
