// SPDX-License-Identifier: Apache-2.0
#include "client/session/host_mappings.h"

#include "client/session/shared_pages.h"
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
  std::string message;
  request.Encode(&message);
  return requests_->Operate(kOpHostMap, message, nullptr);
}

CUresult HostMappings::Map(uint64_t address, uint64_t bytes, unsigned flags) {
  return Ask({address, bytes, arena_->fd(), HostArena::OffsetOf(address), flags, false, 0});
}

CUresult HostMappings::MapManaged(uint64_t address, uint64_t bytes, int device) {
  const int file = ManagedHome::Contains(address) ? managed_home_->file() : arena_->fd();
  const int fd = shared_memory() ? file : -1;
  return Ask({address, bytes, fd, HostArena::OffsetOf(address), 0, true, device});
}

CUresult HostMappings::MapOwn(uint64_t address, uint64_t bytes) {
  const uint64_t page = HostArena::PageOf(address);
  return Ask({page, address - page + bytes, -1, 0, 0, false, 0});
}

CUresult HostMappings::MapRegistered(uint64_t start, uint64_t bytes, const HostRange& range) {
  const uint64_t page = HostArena::PageOf(start), length = HostArena::RoundUp(start - page + bytes);
  const uint64_t device = HostArena::PageOf(range.device);
  if (range.sharing == HostRange::kMoved) return Map(device, length, range.flags);
  const PageBacking backing = FindBacking(page, length, arena_->fd());
  if (backing.kind != PageBacking::kFile) return CUDA_ERROR_OUT_OF_MEMORY;
  return Ask({device, length, backing.fd.get(), backing.offset, range.flags, false, 0});
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
  if (range.registered && range.sharing != HostRange::kMoved) {
    const uint64_t page = HostArena::PageOf(start);
    own = FindBacking(page, HostArena::RoundUp(start - page + bytes), -1).kind == PageBacking::kPrivate;
  }
  return own ? settings_->mapped_writers : ManagedMirror::Writers::kAnybody;
}

}  // namespace cuda_remote::client
