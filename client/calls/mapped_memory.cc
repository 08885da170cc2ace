// SPDX-License-Identifier: Apache-2.0
#include "client/calls/mapped_memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <vector>

#include "client/core/log.h"
#include "client/memory/fault_device.h"
#include "client/memory/shared_pages.h"
#include "proto/base/text.h"

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

// Registrations that make their pages shared ones.
bool IsShared(const HostMappings::Ranges::Range& range) {
  return range.value.registered && range.value.shared && !range.value.alias_of;
}

HostMappings::Pages PagesOnServer(Session& session, uint64_t start, uint64_t bytes) {
  ReaderLock lock(&session.memory().mutex());
  return HostMappings::PagesOf(&session.memory().host_ranges(), start, bytes,
                               [&](const auto& other) { return session.memory().host_mappings().IsRegistered(other); });
}

// Has the server make memory of its own at `range.device`, and mirrors what is at `start` there.
CUresult Mirror(Session& session, uint64_t start, uint64_t bytes, const HostRange& range) {
  const bool at_its_own = range.registered && range.device == start;
  const HostMappings::Pages pages = at_its_own ? PagesOnServer(session, start, bytes) : HostMappings::Pages{};
  const CUresult result = at_its_own ? session.memory().host_mappings().RegisterOwn(start, bytes, pages)
                                     : session.memory().host_mappings().MapOwn(range.device, bytes);
  if (result != CUDA_SUCCESS) return result;
  const CUresult added = session.memory().managed_mirror().Add(
      &session.channel(), range.device, bytes, start, session.memory().host_mappings().WritersOf(start, bytes, range));
  if (added == CUDA_SUCCESS) {
    SayOnce();
  } else if (at_its_own) {
    session.memory().host_mappings().Unregister(start, pages);
  } else {
    session.memory().host_mappings().Unmap(HostArena::PageOf(range.device));
  }
  return added;
}

// The GPU's address of registered memory is another one if the server has no room at the program's. Null if there is
// none left. The host cannot use it: natively it might get away with such a mistake.
void* ReserveAlias(Session& session, uint64_t start, uint64_t bytes, HostRange* range) {
  const uint64_t page = HostArena::PageOf(start), length = HostArena::RoundUp(start - page + bytes);
  void* const alias = session.memory().host_arena().Allocate(length);
  if (!alias) return nullptr;
  mprotect(alias, length, PROT_NONE);
  range->device = reinterpret_cast<uint64_t>(alias) + (start - page);
  static std::atomic<bool> said{false};
  if (!said.exchange(true)) {
    LogLine(
        "the GPU server has something else at the address of registered memory (%s). Kernels reach this memory only "
        "by its device pointer (cuMemHostGetDevicePointer). If the program runs without address space randomisation, "
        "as in a debugger, turn it on",
        Hex(start).c_str());
  }
  return alias;
}

PageFaults::DeviceSource FaultSource(Session& session) {
  return [server = session.settings().server] { return AskForFaultDevice(server); };
}

// Makes private pages of the program's shared ones; `pieces` is what is behind them, and says afterwards what is then.
// False, and nothing has changed, if they cannot be shared.
bool MakeShared(Session& session, const HostMappings::Pages& pages, unsigned flags, std::vector<PageBacking>* pieces) {
  if (pages.bytes == 0) return true;
  *pieces = FindBacking(pages.start, pages.bytes, session.memory().host_arena().fd());
  if (pieces->empty()) return false;
  const PageBacking& first = pieces->front();
  const bool read_only = (flags & CU_MEMHOSTREGISTER_READ_ONLY) != 0;
  if (pieces->size() == 1 && first.kind == PageBacking::kPrivate && (first.writable || read_only)) {
    char* const window = static_cast<char*>(session.memory().host_arena().Allocate(pages.bytes, true));
    if (!window) return false;
    const uint64_t offset = HostArena::OffsetOf(reinterpret_cast<uint64_t>(window));
    if (!MovePages(pages.start, pages.bytes, first.writable, session.memory().host_arena().fd(), offset, window,
                   FaultSource(session))) {
      session.memory().host_arena().Free(window, pages.bytes);
      return false;
    }
    mprotect(window, pages.bytes, PROT_NONE);
    pieces->front().kind = PageBacking::kMoved;
    pieces->front().offset = offset;
    return true;
  }
  return std::all_of(pieces->begin(), pieces->end(), [read_only](const PageBacking& piece) {
    return (piece.kind == PageBacking::kFile || piece.kind == PageBacking::kMoved) && (piece.writable || read_only);
  });
}

// Ends it.
void MakePrivate(Session& session, const HostMappings::Pages& pages) {
  if (pages.bytes == 0) return;
  for (const PageBacking& piece : FindBacking(pages.start, pages.bytes, session.memory().host_arena().fd())) {
    if (piece.kind != PageBacking::kMoved) continue;
    if (MovePagesBack(piece.start, piece.bytes, FaultSource(session))) {
      session.memory().host_arena().Free(reinterpret_cast<void*>(HostArena::kBase + piece.offset), piece.bytes);
      continue;
    }
    LogLine(
        "memory that the program no longer registers stays shared with the arena of pinned memory, since the kernel "
        "refuses userfaultfd; its addresses are not used again");
  }
}

HostMappings::Pages PagesNotShared(Session& session, uint64_t start, uint64_t bytes) {
  ReaderLock lock(&session.memory().mutex());
  return HostMappings::PagesOf(&session.memory().host_ranges(), start, bytes, IsShared);
}

}  // namespace

CUresult ShareRegistered(Call& call, uint64_t start) {
  Session& session = call.session();
  std::lock_guard<std::mutex> mapping(MappingMutex());
  uint64_t bytes;
  HostRange range;
  {
    ReaderLock lock(&session.memory().mutex());
    const auto* const found = session.memory().host_ranges().At(start);
    if (!found) return CUDA_ERROR_INVALID_VALUE;
    bytes = found->bytes;
    range = found->value;
  }
  const HostMappings::Pages pages = PagesNotShared(session, start, bytes);
  std::vector<PageBacking> pieces;
  if (!MakeShared(session, pages, range.flags, &pieces)) return CUDA_SUCCESS;
  const CUresult result = session.memory().host_mappings().RegisterShared(start, bytes, range.flags, pieces);
  if (result != CUDA_SUCCESS) {
    MakePrivate(session, pages);
    return result == CUDA_ERROR_ALREADY_MAPPED ? CUDA_SUCCESS : result;
  }
  WriterLock lock(&session.memory().mutex());
  auto* const found = session.memory().host_ranges().At(start);
  if (!found) return CUDA_ERROR_INVALID_VALUE;  // unregistered by another thread meanwhile: the application's mistake
  found->value.shared = true;
  return CUDA_SUCCESS;
}

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
    void* alias = nullptr;
    CUresult result = CUDA_SUCCESS;
    if (session.memory().host_mappings().IsMirrored(range)) result = Mirror(session, start, bytes, range);
    if (result == CUDA_ERROR_ALREADY_MAPPED && range.registered) {
      alias = ReserveAlias(session, start, bytes, &range);
      result = alias ? Mirror(session, start, bytes, range) : CUDA_ERROR_OUT_OF_MEMORY;
      if (alias && result != CUDA_SUCCESS)
        session.memory().host_arena().Free(alias, HostArena::RoundUp(start % HostArena::kPage + bytes));
    }
    if (result != CUDA_SUCCESS) return result;
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

CUresult FindParameters(Call& call, const std::string& block, bool graph) {
  Session& session = call.session();
  const bool any = session.memory().uses_registered();  // registered memory may lie anywhere
  for (size_t at = 0; at + sizeof(uint64_t) <= block.size(); at += sizeof(uint64_t)) {
    uint64_t value;
    memcpy(&value, block.data() + at, sizeof value);
    if (!any && !HostArena::Contains(value)) continue;
    {
      ReaderLock lock(&session.memory().mutex());
      const auto* const range = session.memory().host_ranges().Find(value);
      if (!range || range->value.on_device) continue;
      if (!graph && range->value.shared && session.shared_memory()) continue;
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
  bool at_its_own;
  HostMappings::Pages on_server, moved;
  {
    WriterLock lock(&session.memory().mutex());
    HostMappings::Ranges& ranges = session.memory().host_ranges();
    auto* const found = ranges.At(start);
    if (!found || !(found->value.on_device || found->value.registered)) return CUDA_SUCCESS;
    range = found->value;
    bytes = found->bytes;
    at_its_own = session.memory().host_mappings().IsRegistered(*found);
    on_server = HostMappings::PagesOf(
        &ranges, start, bytes, [&](const auto& other) { return session.memory().host_mappings().IsRegistered(other); });
    moved = HostMappings::PagesOf(&ranges, start, bytes, IsShared);
    found->value.on_device = false;
    if (range.registered) found->value.shared = false;
    if (range.registered && range.on_device && range.device != start) ranges.Erase(range.device);
  }
  const bool has_alias = range.registered && range.on_device && range.device != start;
  if (has_alias) {
    WriterLock lock(&session.objects().mutex());
    session.objects().DropLocked({Kind::kHostMemory, range.device});
  }
  CUresult result = CUDA_SUCCESS;
  if (session.memory().host_mappings().IsMirrored(range)) {
    // The program keeps what it has registered, and with it what the work in progress still writes.
    if (range.registered) result = session.requests().WaitForWork();
    if (const ChannelStatus status = session.memory().managed_mirror().Pull(&session.channel());
        status != ChannelStatus::kOk)
      result = session.Lose(status);
    session.memory().managed_mirror().Remove(range.device);
    // Waits for the GPU; only then may the addresses serve others.
    const CUresult unmapped = at_its_own ? session.memory().host_mappings().Unregister(start, on_server)
                                         : session.memory().host_mappings().Unmap(HostArena::PageOf(range.device));
    if (result == CUDA_SUCCESS) result = unmapped;
    // The program may take the free for the wait that it is.
    if (session.memory().managed_mirror().active()) session.memory().managed_mirror().Pull(&session.channel());
  } else if (at_its_own) {
    result = session.memory().host_mappings().Unregister(start, on_server);
  }
  if (range.registered && range.shared) MakePrivate(session, moved);
  if (has_alias) {
    const uint64_t alias = HostArena::PageOf(range.device);
    session.memory().host_arena().Free(reinterpret_cast<void*>(alias),
                                       HostArena::RoundUp(range.device - alias + bytes));
  }
  return result;
}

uint64_t HostAddressOf(Session& session, uint64_t address) {
  if (!HostArena::Contains(address)) return address;
  ReaderLock lock(&session.memory().mutex());
  const auto* const range = session.memory().host_ranges().Find(address);
  return range && range->value.alias_of ? range->value.alias_of + (address - range->start) : address;
}

}  // namespace cuda_remote::client
