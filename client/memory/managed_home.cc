// SPDX-License-Identifier: Apache-2.0
#include "client/memory/managed_home.h"

#include <fcntl.h>
#include <sys/mman.h>

#include <string>

#include "client/memory/fault_device.h"
#include "proto/codec/operations.gen.h"
#include "proto/driverabi/requests.h"

namespace cuda_remote::client {
namespace {

using driverabi::kUnmapClear, driverabi::kUnmapFree;

}  // namespace

bool ManagedHome::OnGpuLocked() {
  if (place_ == Place::kUnknown) {
    const auto source = [server = parts_.settings->server] { return AskForFaultDevice(server); };
    const PageFaults::Accesses accesses = parts_.settings->managed_accesses;
    pages_.SetFaultSource(source, accesses);
    const bool may = parts_.settings->managed_on_gpu && PageFaults::Supported(source, accesses);
    place_ = may ? Place::kGpu : Place::kHost;
  }
  return place_ == Place::kGpu;
}

CUresult ManagedHome::MapOnServer(uint64_t address, uint64_t bytes, int device) {
  wire::OpManagedMap_Request request;
  if (parts_.mappings->shared_memory()) {
    const CUresult sent = parts_.requests->SendFile(arena_.fd(), &request.tag);
    if (sent != CUDA_SUCCESS) return sent;
  }
  request.address = address;
  request.bytes = bytes;
  request.offset = HostArena::OffsetOf(address);
  request.device = device;
  std::string message;
  request.Encode(&message);
  return parts_.requests->Operate(kOpManagedMap, message, nullptr);
}

CUresult ManagedHome::UnmapOnServer(uint64_t address, uint32_t action) {
  wire::OpManagedUnmap_Request request;
  request.address = address;
  request.action = action;
  std::string message;
  request.Encode(&message);
  return parts_.requests->Operate(kOpManagedUnmap, message, nullptr);
}

CUresult ManagedHome::AddSegmentLocked(uint64_t bytes, int device, bool small, uint64_t* address) {
  void* const memory = arena_.Allocate(bytes);
  if (!memory) return CUDA_ERROR_OUT_OF_MEMORY;
  *address = reinterpret_cast<uint64_t>(memory);
  const CUresult result = MapOnServer(*address, bytes, device);
  if (result != CUDA_SUCCESS) {
    arena_.Free(memory, bytes);
    // A server of before, a driver that has other uses for the addresses, GPUs that do not reach each other.
    if (result == CUDA_ERROR_NOT_SUPPORTED && heap_.segments().empty()) place_ = Place::kHost;
    return result;
  }
  pages_.SetFile(arena_.fd(), HostArena::kManagedBase, !parts_.mappings->shared_memory());
  pages_.Add(*address, bytes);
  heap_.Add(*address, bytes, device, small);
  return CUDA_SUCCESS;
}

CUresult ManagedHome::TakeSegmentLocked(uint64_t bytes, int device, bool small, uint64_t* address) {
  for (auto it = kept_.begin(); it != kept_.end() && !small; ++it) {
    if (it->bytes != bytes || it->device != device) continue;
    *address = it->address;
    kept_bytes_ -= bytes;
    kept_.erase(it);
    pages_.Add(*address, bytes);
    heap_.Add(*address, bytes, device, false);
    return CUDA_SUCCESS;
  }
  const CUresult result = AddSegmentLocked(bytes, device, small, address);
  if (result != CUDA_ERROR_OUT_OF_MEMORY || !DropKeptLocked()) return result;
  return AddSegmentLocked(bytes, device, small, address);
}

CUresult ManagedHome::Allocate(uint64_t bytes, int device, uint64_t* address) {
  if (bytes > HostArena::kMaxBytes) return CUDA_ERROR_OUT_OF_MEMORY;
  const uint64_t rounded = SegmentHeap::RoundUp(bytes);
  MutexLock lock(&mutex_);
  if (!OnGpuLocked()) return CUDA_ERROR_NOT_SUPPORTED;
  if (!SegmentHeap::IsSmall(bytes)) return TakeSegmentLocked(rounded, device, false, address);
  *address = heap_.Take(rounded, device);
  if (*address == 0) {
    uint64_t segment;
    const CUresult result = TakeSegmentLocked(SegmentHeap::kSegment, device, true, &segment);
    if (result != CUDA_SUCCESS) return result;
    *address = heap_.Take(rounded, device);
  }
  if (empty_ != 0 && heap_.At(empty_)->used != 0) empty_ = 0;
  return CUDA_SUCCESS;
}

CUresult ManagedHome::RemoveSegmentLocked(uint64_t address) {
  const SegmentHeap::Segment segment = *heap_.At(address);
  heap_.Remove(address);
  pages_.Leave(address);
  CUresult result;
  if (place_ == Place::kGpu) {
    result = UnmapOnServer(address, kUnmapFree);
  } else {
    parts_.mirror->Remove(address);
    result = parts_.mappings->Unmap(address);
  }
  // Only now: the server never sees a hole in the file.
  pages_.Remove(address);
  arena_.Free(reinterpret_cast<void*>(address), segment.bytes);
  return result;
}

CUresult ManagedHome::Free(uint64_t address, uint64_t bytes) {
  MutexLock lock(&mutex_);
  if (SegmentHeap::IsSmall(bytes)) {
    const uint64_t rounded = SegmentHeap::RoundUp(bytes);
    CUresult result = parts_.requests->WaitForWork();
    pages_.Clear(address, rounded);
    const uint64_t unused = heap_.Give(address, rounded);
    if (unused == 0) return result;
    if (empty_ == 0 && place_ == Place::kGpu && !pages_.WasInPlace(unused)) {
      empty_ = unused;
      return result;
    }
    const CUresult removed = RemoveSegmentLocked(unused);
    return result == CUDA_SUCCESS ? removed : result;
  }
  const SegmentHeap::Segment segment = *heap_.At(address);
  if (place_ != Place::kGpu || segment.bytes > kLongestKept) return RemoveSegmentLocked(address);
  pages_.Leave(address);
  const CUresult result = UnmapOnServer(address, kUnmapClear);
  if (result != CUDA_SUCCESS) {
    RemoveSegmentLocked(address);
    return result;
  }
  heap_.Remove(address);
  pages_.Remove(address);
  fallocate(arena_.fd(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, off_t(HostArena::OffsetOf(address)),
            off_t(segment.bytes));
  kept_.push_back({address, segment.bytes, segment.device});
  kept_bytes_ += segment.bytes;
  while (kept_bytes_ > kMostKept) {
    const Kept oldest = kept_.front();
    kept_.pop_front();
    kept_bytes_ -= oldest.bytes;
    UnmapOnServer(oldest.address, kUnmapFree);
    arena_.Free(reinterpret_cast<void*>(oldest.address), oldest.bytes);
  }
  return CUDA_SUCCESS;
}

bool ManagedHome::DropKeptLocked() {
  const bool any = !kept_.empty() || empty_ != 0;
  for (const Kept& kept : kept_) {
    UnmapOnServer(kept.address, kUnmapFree);
    arena_.Free(reinterpret_cast<void*>(kept.address), kept.bytes);
  }
  kept_.clear();
  kept_bytes_ = 0;
  if (empty_ != 0) RemoveSegmentLocked(empty_);
  empty_ = 0;
  return any;
}

bool ManagedHome::DropKept() {
  MutexLock lock(&mutex_);
  return DropKeptLocked();
}

CUresult ManagedHome::Settle() {
  MutexLock lock(&mutex_);
  DropKeptLocked();
  return pages_.Settle(parts_.connection->lost() == CUDA_SUCCESS ? &parts_.connection->channel() : nullptr);
}

CUresult ManagedHome::MoveTo() {
  MutexLock lock(&mutex_);
  moved_ = true;
  place_before_ = place_;
  carried_before_ = pages_.carried();
  place_ = Place::kUnknown;
  pages_.Enable(true);
  CUresult result = CUDA_SUCCESS;
  if (OnGpuLocked()) {
    pages_.SetFile(arena_.fd(), HostArena::kManagedBase, !parts_.mappings->shared_memory());
    std::vector<uint64_t> mapped;
    for (const auto& [address, segment] : heap_.segments()) {
      result = MapOnServer(address, segment.bytes, segment.device);
      if (result != CUDA_SUCCESS) break;
      mapped.push_back(address);
    }
    if (mapped.size() == heap_.segments().size()) return CUDA_SUCCESS;
    for (const uint64_t address : mapped) UnmapOnServer(address, kUnmapFree);
    place_ = Place::kHost;
  }
  pages_.Enable(false);
  for (const auto& [address, segment] : heap_.segments()) {
    result = parts_.mappings->MapManaged(address, segment.bytes, segment.device);
    if (result == CUDA_SUCCESS) continue;
    MoveBackLocked();
    return result;
  }
  return CUDA_SUCCESS;
}

void ManagedHome::MoveBackLocked() {
  // Without a move the former server is the one of an earlier move, or there was none.
  if (!moved_) return;
  moved_ = false;
  place_ = place_before_;
  pages_.SetCarried(carried_before_);
  pages_.Enable(place_ != Place::kHost);
}

void ManagedHome::MoveBack() {
  MutexLock lock(&mutex_);
  MoveBackLocked();
}

void ManagedHome::ForgetFormer() {
  MutexLock lock(&mutex_);
  moved_ = false;
}

std::vector<ManagedMirror::Place> ManagedHome::Mirrored() {
  MutexLock lock(&mutex_);
  std::vector<ManagedMirror::Place> places;
  if (parts_.mappings->shared_memory() || place_ == Place::kGpu) return places;
  for (const auto& [address, segment] : heap_.segments()) {
    // Memory that is given back is cleared through the file.
    places.push_back({address, segment.bytes, address, true, ManagedMirror::Writers::kAnybody});
  }
  return places;
}

}  // namespace cuda_remote::client
