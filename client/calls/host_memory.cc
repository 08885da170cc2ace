// SPDX-License-Identifier: Apache-2.0
// Pinned host memory. client/memory/pinned_heap.h and host_arena.h say how it is shared with a server on the same
// machine.

#include <cuda.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <vector>

#include "client/calls/bodies.gen.h"
#include "client/calls/mapped_memory.h"
#include "client/core/call.h"
#include "client/core/session.h"

namespace cuda_remote::client {
namespace {

constexpr uint64_t kAskedPages = 64 << 10;  // by one call of mincore, which says a byte for each
constexpr unsigned kAllocFlags = CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP | CU_MEMHOSTALLOC_WRITECOMBINED;
constexpr unsigned kRegisterFlags = CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP |
                                    CU_MEMHOSTREGISTER_IOMEMORY | CU_MEMHOSTREGISTER_READ_ONLY;

// Whether the process has memory from the first byte to the last.
bool IsMemory(uint64_t address, size_t bytes) {
  if (bytes > UINT64_MAX - address) return false;
  const uint64_t page = uint64_t(sysconf(_SC_PAGESIZE)), end = address + bytes;
  std::vector<unsigned char> there(kAskedPages);
  for (uint64_t at = address / page * page; at < end;) {
    const uint64_t length = std::min(end - at, kAskedPages * page);
    if (mincore(reinterpret_cast<void*>(at), length, &there[0]) != 0) return false;
    at += length;
  }
  return true;
}

// The start of the application's own mapping that an address lies in; 0 if there is none, or the current context's
// device has no access to it.
uint64_t ReachableMapping(Call& call, uint64_t address) {
  ReaderLock lock(&call.session().memory().mutex());
  const auto* const range = call.session().memory().device_ranges().Find(address);
  const bool reached =
      range && range->value.source == DeviceRange::kMapped && range->value.access.Of(call.device()) != 0;
  return reached ? range->start : 0;
}

CUresult Allocate(const CallInfo& info, void** pp, size_t bytesize, unsigned flags) {
  if (!pp || (flags & ~kAllocFlags)) return CUDA_ERROR_INVALID_VALUE;
  Call call(info);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  if (bytesize == 0) {
    *pp = nullptr;
    return CUDA_SUCCESS;
  }
  Session& session = call.session();
  uint64_t address;
  if (const CUresult result = session.memory().pinned_heap().Allocate(bytesize, flags, &address);
      result != CUDA_SUCCESS) {
    return result;
  }
  void* const memory = reinterpret_cast<void*>(address);
  HostRange range;
  range.shared = true;
  range.flags = flags;
  range.context = call.thread().current_context();
  range.ordinal = std::max(0, call.device());
  WriterLock lock(&session.memory().mutex());
  range.buffer_id = session.memory().NextBufferIdLocked();
  session.memory().host_ranges().Insert(address, bytesize, range);
  lock.Unlock();
  // The application says that kernels will use it, perhaps through pointers that are not seen.
  if (flags & CU_MEMHOSTALLOC_DEVICEMAP) {
    uint64_t device;
    if (const CUresult result = MapForDevice(call, address, &device); result != CUDA_SUCCESS) {
      Custom_cuMemFreeHost(memory);
      return result;
    }
  }
  *pp = memory;
  return CUDA_SUCCESS;
}

}  // namespace

CUresult Custom_cuMemHostAlloc(void** pp, size_t bytesize, unsigned int Flags) {
  return Allocate(info::k_cuMemHostAlloc, pp, bytesize, Flags);
}

CUresult Custom_cuMemAllocHost_v2(void** pp, size_t bytesize) {
  return Allocate(info::k_cuMemAllocHost_v2, pp, bytesize, 0);
}

CUresult Custom_cuMemFreeHost(void* p) {
  Call call(info::k_cuMemFreeHost);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  if (!p) return CUDA_SUCCESS;
  Session& session = call.session();
  const uint64_t address = reinterpret_cast<uint64_t>(p);
  uint64_t bytes;
  {
    ReaderLock lock(&session.memory().mutex());
    const auto* range = session.memory().host_ranges().At(address);
    if (!range || range->value.registered) return CUDA_ERROR_INVALID_VALUE;
  }
  const CUresult result = UnmapFromDevice(call, address);
  {
    WriterLock lock(&session.memory().mutex());
    auto* range = session.memory().host_ranges().At(address);
    if (!range || range->value.registered) return CUDA_ERROR_INVALID_VALUE;
    bytes = range->bytes;
    session.memory().host_ranges().Erase(address);
  }
  {
    // Graphs that copy it go from the log.
    WriterLock lock(&session.objects().mutex());
    session.objects().DropLocked({Kind::kHostMemory, address});
  }
  const CUresult freed = session.memory().pinned_heap().Free(address, bytes);
  return result == CUDA_SUCCESS ? freed : result;
}

CUresult Custom_cuMemHostRegister_v2(void* p, size_t bytesize, unsigned int Flags) {
  if (!p || bytesize == 0 || (Flags & ~kRegisterFlags)) return CUDA_ERROR_INVALID_VALUE;
  if (Flags & CU_MEMHOSTREGISTER_IOMEMORY) return Call::Unsupported("cuMemHostRegister", "I/O memory is not remoted");
  Call call(info::k_cuMemHostRegister_v2);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  Session& session = call.session();
  const uint64_t address = reinterpret_cast<uint64_t>(p);
  if (!IsMemory(address, bytesize)) return CUDA_ERROR_INVALID_VALUE;
  HostRange range;
  range.registered = true;
  range.flags = Flags;
  range.context = call.thread().current_context();
  range.ordinal = std::max(0, call.device());
  {
    WriterLock lock(&session.memory().mutex());
    // What overlaps is refused, and what the driver allocated itself is a wrong value.
    if (const auto* const there = session.memory().host_ranges().FindIn(address, bytesize)) {
      return there->value.registered ? CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED : CUDA_ERROR_INVALID_VALUE;
    }
    range.buffer_id = session.memory().NextBufferIdLocked();
    session.memory().host_ranges().Insert(address, bytesize, range);
  }
  CUresult result = session.shared_memory() ? ShareRegistered(call, address) : CUDA_SUCCESS;
  bool shared;
  {
    ReaderLock lock(&session.memory().mutex());
    const auto* const there = session.memory().host_ranges().At(address);
    shared = there && there->value.shared;
  }
  session.memory().NoteRegistered(shared);
  // The application says that kernels will use it, perhaps through pointers that are not seen.
  if (uint64_t mapped; result == CUDA_SUCCESS && (Flags & CU_MEMHOSTREGISTER_DEVICEMAP))
    result = MapForDevice(call, address, &mapped);
  if (result == CUDA_SUCCESS) return CUDA_SUCCESS;
  if (shared) UnmapFromDevice(call, address);
  WriterLock lock(&session.memory().mutex());
  session.memory().host_ranges().Erase(address);
  return result;
}

CUresult Custom_cuMemHostUnregister(void* p) {
  Call call(info::k_cuMemHostUnregister);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  Session& session = call.session();
  const uint64_t address = reinterpret_cast<uint64_t>(p);
  {
    ReaderLock lock(&session.memory().mutex());
    const auto* range = session.memory().host_ranges().Find(address);
    // Like the driver: the middle of a registration is a wrong value, and its end is not registered.
    if (!p || (range && (!range->value.registered || range->start != address))) return CUDA_ERROR_INVALID_VALUE;
    if (!range || range->value.alias_of) return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
  }
  const CUresult result = UnmapFromDevice(call, address);
  // In one step for what records objects: the pages are the application's own, and may be registered again at once.
  WriterLock lock(&session.objects().mutex());
  {
    WriterLock memory_lock(&session.memory().mutex());
    session.memory().host_ranges().Erase(address);
  }
  session.objects().DropLocked({Kind::kHostMemory, address});
  return result;
}

CUresult Custom_cuMemHostGetDevicePointer_v2(CUdeviceptr* pdptr, void* p, unsigned int Flags) {
  if (!pdptr || Flags != 0) return CUDA_ERROR_INVALID_VALUE;
  *pdptr = 0;
  Call call(info::k_cuMemHostGetDevicePointer_v2);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  const uint64_t address = reinterpret_cast<uint64_t>(p);
  // The same address on the server's machine, and for pinned memory everywhere, as with unified addressing natively. In
  // a mapping the driver gives its start.
  uint64_t device = ReachableMapping(call, address);
  const CUresult result = device != 0 ? CUDA_SUCCESS : MapForDevice(call, address, &device);
  if (result == CUDA_SUCCESS) *pdptr = device;
  return result;
}

// The driver maps all pinned memory where addressing is unified, and says so. It answers for managed memory and for the
// application's own mappings, too.
CUresult Custom_cuMemHostGetFlags(unsigned int* pFlags, void* p) {
  if (!pFlags) return CUDA_ERROR_INVALID_VALUE;
  Call call(info::k_cuMemHostGetFlags);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  const uint64_t address = reinterpret_cast<uint64_t>(p);
  if (ReachableMapping(call, address) != 0) {
    *pFlags = CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP;
    return CUDA_SUCCESS;
  }
  Session& session = call.session();
  ReaderLock lock(&session.memory().mutex());
  if (const auto* const range = session.memory().device_ranges().Find(address)) {
    if (!range->value.managed) return CUDA_ERROR_INVALID_VALUE;
    *pFlags = CU_MEMHOSTALLOC_DEVICEMAP;
    return CUDA_SUCCESS;
  }
  const auto* const range = session.memory().host_ranges().Find(address);
  if (!range) return CUDA_ERROR_INVALID_VALUE;
  const unsigned shown = range->value.registered ? CU_MEMHOSTREGISTER_PORTABLE : CU_MEMHOSTALLOC_WRITECOMBINED;
  *pFlags = (range->value.flags & shown) | CU_MEMHOSTALLOC_DEVICEMAP;
  return CUDA_SUCCESS;
}

}  // namespace cuda_remote::client
