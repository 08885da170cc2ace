// SPDX-License-Identifier: Apache-2.0
#include "client/memory/host_mappings.h"

#include <algorithm>
#include <string>

#include "proto/codec/operations.gen.h"

namespace cuda_remote::client {

CUresult HostMappings::Ask(const Mapping& mapping) {
  wire::OpHostMap_Request request;
  if (mapping.fd >= 0) {
    const CUresult sent = requests_->SendFile(mapping.fd, &request.tag);
    if (sent != CUDA_SUCCESS) return sent;
  }
  request.managed = mapping.managed;
  request.device = mapping.device;
  request.address = mapping.address;
  request.bytes = HostArena::RoundUp(mapping.bytes);
  request.offset = mapping.offset;
  request.flags = mapping.flags;
  request.pages = mapping.pages;
  request.registered = mapping.registered;
  request.registered_bytes = mapping.registered_bytes;
  std::string message;
  request.Encode(&message);
  return requests_->Operate(kOpHostMap, message, nullptr);
}

CUresult HostMappings::Map(uint64_t address, uint64_t bytes, unsigned flags) {
  return Ask({address, bytes, arena_->fd(), HostArena::OffsetOf(address), flags, false, 0});
}

CUresult HostMappings::MapManaged(uint64_t address, uint64_t bytes, int device) {
  const int file = HostArena::IsManaged(address) ? managed_arena_->fd() : arena_->fd();
  const int fd = shared_memory() ? file : -1;
  return Ask({address, bytes, fd, HostArena::OffsetOf(address), 0, true, device});
}

CUresult HostMappings::MapOwn(uint64_t address, uint64_t bytes) {
  const uint64_t page = HostArena::PageOf(address);
  return Ask({page, address - page + bytes, -1, 0, 0, false, 0});
}

CUresult HostMappings::RegisterShared(uint64_t start, uint64_t bytes, unsigned flags,
                                      const std::vector<PageBacking>& pieces) {
  Mapping mapping = {start, 0, -1, 0, flags, false, 0, true};
  CUresult result = CUDA_SUCCESS;
  for (const PageBacking& piece : pieces) {
    if (mapping.bytes != 0) result = Ask(mapping);
    if (result != CUDA_SUCCESS) break;
    const int fd = piece.kind == PageBacking::kMoved ? arena_->fd() : piece.fd.get();
    mapping = {piece.start, piece.bytes, fd, piece.offset, flags, false, 0, true};
  }
  // The last one registers what lies on all of them.
  mapping.registered = start;
  mapping.registered_bytes = bytes;
  if (result == CUDA_SUCCESS) result = Ask(mapping);
  if (result != CUDA_SUCCESS && pieces.size() > 1)
    Unregister(0, {pieces.front().start, pieces.back().start + pieces.back().bytes - pieces.front().start});
  return result;
}

CUresult HostMappings::RegisterOwn(uint64_t start, uint64_t bytes, const Pages& pages) {
  return Ask({pages.start, pages.bytes, -1, 0, 0, false, 0, true, start, bytes});
}

CUresult HostMappings::Unregister(uint64_t start, const Pages& pages) {
  wire::OpHostUnmap_Request request;
  request.address = start;
  request.pages = pages.start;
  request.page_bytes = pages.bytes;
  std::string message;
  request.Encode(&message);
  return requests_->Operate(kOpHostUnmap, message, nullptr);
}

HostMappings::Pages HostMappings::PagesOf(Ranges* ranges, uint64_t start, uint64_t bytes,
                                          const std::function<bool(const Ranges::Range&)>& counts) {
  const auto others = [&](uint64_t page) {
    const uint64_t end = page + HostArena::kPage;
    for (uint64_t at = page; at < end;) {
      const Ranges::Range* const range = ranges->FindIn(at, end - at);
      if (!range) return false;
      if (range->start != start && counts(*range)) return true;
      at = range->start + range->bytes;
    }
    return false;
  };
  uint64_t begin = HostArena::PageOf(start), end = HostArena::RoundUp(start + bytes);
  if (begin != start && others(begin)) begin += HostArena::kPage;
  if (begin < end && end != start + bytes && others(end - HostArena::kPage)) end -= HostArena::kPage;
  return {begin, end - begin};
}

CUresult HostMappings::Unmap(uint64_t address) {
  wire::OpHostUnmap_Request request;
  request.address = address;
  std::string message;
  request.Encode(&message);
  return requests_->Operate(kOpHostUnmap, message, nullptr);
}

ManagedMirror::Writers HostMappings::WritersOf(uint64_t start, uint64_t bytes, const HostRange& range) const {
  bool own = true;
  // Pages that have moved into the arena, and pinned memory, are this process's alone.
  if (range.registered) {
    const uint64_t page = HostArena::PageOf(start);
    const std::vector<PageBacking> pieces = FindBacking(page, HostArena::RoundUp(start + bytes) - page, arena_->fd());
    own = !pieces.empty() && std::all_of(pieces.begin(), pieces.end(), [](const PageBacking& piece) {
      return piece.kind == PageBacking::kPrivate || piece.kind == PageBacking::kMoved;
    });
  }
  return own ? settings_->mapped_writers : ManagedMirror::Writers::kAnybody;
}

}  // namespace cuda_remote::client
