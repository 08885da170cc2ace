// SPDX-License-Identifier: Apache-2.0
#include "client/custom/mapped_memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <mutex>

#include "client/session/log.h"
#include "client/session/shared_pages.h"

namespace cuda_remote::client {
namespace {

// One at a time: between looking and having mapped, nobody else may map the same.
std::mutex& MappingMutex() {
  static auto* mutex = new std::mutex;  // outlives exit handlers
  return *mutex;
}

void SayOnce() {
  static std::atomic<bool> said{false};
  if (said.exchange(true)) return;
  LogLine(
      "kernels of this job use host memory that the server does not share. This memory is mirrored: what kernels write "
      "arrives at the calls that wait for the GPU. A program that waits for a kernel by reading such memory, without a "
      "CUDA call, waits forever");
}

// Has the server make memory of its own at `range.device`, and mirrors what is at `start` there.
CUresult Mirror(Session& session, uint64_t start, uint64_t bytes, const HostRange& range) {
  const CUresult result = session.host_mappings().MapOwn(range.device, bytes);
  if (result != CUDA_SUCCESS) return result;
  const CUresult added = session.managed_mirror().Add(&session.channel(), range.device, bytes, start,
                                                      session.host_mappings().WritersOf(start, bytes, range));
  if (added != CUDA_SUCCESS) session.host_mappings().Unmap(HostArena::PageOf(range.device));
  if (added == CUDA_SUCCESS) SayOnce();
  return added;
}

// Shares the application's own pages with a server on this machine; range->sharing stays kNone if that cannot be done.
// `page` and `length`: the whole pages that the registration lies on; `alias`: the GPU's addresses for them.
CUresult ShareRegistered(Session& session, uint64_t start, uint64_t bytes, uint64_t page, uint64_t length, void* alias,
                         HostRange* range) {
  const PageBacking::Kind backing = FindBacking(page, length, session.host_arena().fd()).kind;
  const uint64_t offset = HostArena::OffsetOf(reinterpret_cast<uint64_t>(alias));
  if (backing == PageBacking::kFile) {
    range->sharing = HostRange::kFile;
  } else if (backing == PageBacking::kPrivate && MovePages(page, length, session.host_arena().fd(), offset, alias)) {
    range->sharing = HostRange::kMoved;
  } else {
    return CUDA_SUCCESS;
  }
  const CUresult result = session.host_mappings().MapRegistered(start, bytes, *range);
  if (result == CUDA_SUCCESS) return result;
  if (range->sharing == HostRange::kMoved && !MovePagesBack(page, length)) return result;
  range->sharing = HostRange::kNone;
  return result;
}

}  // namespace

CUresult MapForDevice(Call& call, uint64_t address, uint64_t* device) {
  Session& session = call.session();
  std::lock_guard<std::mutex> mapping(MappingMutex());
  uint64_t start, bytes;
  HostRange range;
  {
    ReaderLock lock(&session.memory().mutex());
    const auto* const found = session.memory().host_ranges().Find(address);
    if (!found) return CUDA_ERROR_INVALID_VALUE;
    start = found->start;
    bytes = found->bytes;
    range = found->value;
  }
  if (!range.on_device) {
    range.on_device = true;
    range.device = start;
    const uint64_t page = HostArena::PageOf(start);
    const uint64_t length = HostArena::RoundUp(start - page + bytes);
    void* alias = nullptr;
    CUresult result = CUDA_SUCCESS;
    if (range.registered) {
      alias = session.host_arena().Allocate(length);
      if (!alias) return CUDA_ERROR_OUT_OF_MEMORY;
      range.device = reinterpret_cast<uint64_t>(alias) + (start - page);
      if (session.shared_memory()) result = ShareRegistered(session, start, bytes, page, length, alias, &range);
      // It is the GPU's address only: a host that uses it has made a mistake, which natively it might get away with.
      mprotect(alias, length, PROT_NONE);
    }
    if (result == CUDA_SUCCESS && session.host_mappings().IsMirrored(range))
      result = Mirror(session, start, bytes, range);
    if (result != CUDA_SUCCESS) {
      // Pages that have moved and cannot be moved back need it.
      if (alias && range.sharing != HostRange::kMoved) session.host_arena().Free(alias, length);
      return result;
    }
    WriterLock lock(&session.memory().mutex());
    auto* const found = session.memory().host_ranges().At(start);
    // Freed by another thread meanwhile, which is the application's mistake: the server's memory stays till the end.
    if (!found) return CUDA_ERROR_INVALID_VALUE;
    found->value = range;
    if (alias) {
      HostRange other = range;
      other.alias_of = start;
      session.memory().host_ranges().Insert(range.device, bytes, other);
    }
  }
  // An address that is the GPU's already stays what it is.
  *device = range.alias_of ? address : range.device + (address - start);
  return CUDA_SUCCESS;
}

CUresult FindParameters(Call& call, const std::string& block) {
  Session& session = call.session();
  for (size_t at = 0; at + sizeof(uint64_t) <= block.size(); at += sizeof(uint64_t)) {
    uint64_t value;
    memcpy(&value, block.data() + at, sizeof value);
    if (!HostArena::Contains(value)) continue;
    {
      ReaderLock lock(&session.memory().mutex());
      const auto* const range = session.memory().host_ranges().Find(value);
      if (!range || range->value.on_device) continue;
    }
    uint64_t device;
    if (const CUresult result = MapForDevice(call, value, &device); result != CUDA_SUCCESS) return result;
  }
  return CUDA_SUCCESS;
}

CUresult UnmapFromDevice(Call& call, uint64_t start) {
  Session& session = call.session();
  std::lock_guard<std::mutex> mapping(MappingMutex());
  HostRange range;
  uint64_t bytes;
  {
    WriterLock lock(&session.memory().mutex());
    auto* const found = session.memory().host_ranges().At(start);
    if (!found || !found->value.on_device) return CUDA_SUCCESS;
    range = found->value;
    bytes = found->bytes;
    found->value.on_device = false;
    if (range.registered) session.memory().host_ranges().Erase(range.device);
  }
  if (range.registered) {
    WriterLock lock(&session.objects().mutex());
    session.objects().DropLocked({Kind::kHostMemory, range.device});
  }
  const uint64_t page = HostArena::PageOf(start), alias = HostArena::PageOf(range.device);
  const uint64_t length = HostArena::RoundUp(start - page + bytes);
  CUresult result = CUDA_SUCCESS;
  if (session.host_mappings().IsMirrored(range)) {
    // The program keeps what it has registered, and with it what the work in progress still writes.
    if (range.registered) result = session.requests().WaitForWork();
    const ChannelStatus status = session.managed_mirror().Pull(&session.channel());
    if (status != ChannelStatus::kOk) return session.Lose(status);
    session.managed_mirror().Remove(range.device);
    // Waits for the GPU; only then may the addresses serve others.
    const CUresult unmapped = session.host_mappings().Unmap(alias);
    if (result == CUDA_SUCCESS) result = unmapped;
    // The program may take the free for the wait that it is.
    if (session.managed_mirror().active()) session.managed_mirror().Pull(&session.channel());
  } else if (range.registered) {
    result = session.host_mappings().Unmap(alias);
  }
  if (!range.registered) return result;
  if (range.sharing == HostRange::kMoved && !MovePagesBack(page, length)) {
    LogLine(
        "memory that the program no longer registers stays shared with the arena of pinned memory, since the kernel "
        "refuses userfaultfd; its addresses are not used again");
    return result;
  }
  session.host_arena().Free(reinterpret_cast<void*>(alias), length);
  return result;
}

uint64_t HostAddressOf(Session& session, uint64_t address) {
  if (!HostArena::Contains(address)) return address;
  ReaderLock lock(&session.memory().mutex());
  const auto* const range = session.memory().host_ranges().Find(address);
  return range && range->value.alias_of ? range->value.alias_of + (address - range->start) : address;
}

}  // namespace cuda_remote::client
