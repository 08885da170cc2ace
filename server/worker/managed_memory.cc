// SPDX-License-Identifier: Apache-2.0
#include "server/worker/managed_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>

#include "server/worker/device_arena.h"
#include "spdlog/spdlog.h"

namespace cuda_remote::server {

const ManagedMemory::Segment* ManagedMemory::FindLocked(uint64_t address, uint64_t bytes, uint64_t* start) const {
  auto it = segments_.upper_bound(address);
  if (it == segments_.begin()) return nullptr;
  --it;
  const uint64_t offset = address - it->first;
  if (offset >= it->second.bytes || bytes > it->second.bytes - offset) return nullptr;
  *start = it->first;
  return &it->second;
}

bool ManagedMemory::ReserveLocked() {
  if (reserved_ != 0) return true;
  CUresult result;
  reserved_ = ReserveAddressesAt(driver_, kManagedBase, kManagedBytes, &result);
  if (reserved_ == 0) spdlog::warn("the driver does not give the addresses of managed memory: CUDA error {}", int(result));
  return reserved_ != 0;
}

void ManagedMemory::UseContext(int device, ContextRef context) {
  std::lock_guard<std::mutex> lock(mutex_);
  Lane& lane = lanes_[device];
  if (lane.context.id != 0 || context.id == 0) return;
  if (MakeCurrent(driver_, context) != CUDA_SUCCESS) return;
  if (driver_.cuStreamCreate(&lane.stream, CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS) lane.context = context;
}

void ManagedMemory::ContextDies(uint64_t id) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto& [device, lane] : lanes_) {
    if (lane.context.id != id) continue;
    lane = Lane();
    // The registrations were made in it.
    for (auto& [address, segment] : segments_) {
      if (segment.device != device) continue;
      for (Piece& piece : segment.pieces) piece = Piece();
    }
  }
}

CUstream ManagedMemory::EnterLocked(int device) {
  const Lane& lane = lanes_[device];
  if (lane.context.id == 0 || MakeCurrent(driver_, lane.context) != CUDA_SUCCESS) return nullptr;
  return lane.stream;
}

CUresult ManagedMemory::BackLocked(uint64_t address, uint64_t bytes, int device, const std::vector<int>& devices) {
  CUmemAllocationProp prop = {};
  prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  prop.location.id = device;
  CUmemGenericAllocationHandle physical = 0;
  CUresult result = driver_.cuMemCreate(&physical, bytes, &prop, 0);
  if (result != CUDA_SUCCESS) return result;
  result = driver_.cuMemMap(address, bytes, 0, physical, 0);
  // The mapping keeps the memory alive.
  driver_.cuMemRelease(physical);
  if (result != CUDA_SUCCESS) return result;
  std::vector<CUmemAccessDesc> access(devices.size());
  for (size_t i = 0; i < devices.size(); ++i) {
    access[i].location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    access[i].location.id = devices[i];
    access[i].flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  }
  result = driver_.cuMemSetAccess(address, bytes, access.data(), access.size());
  if (result != CUDA_SUCCESS) driver_.cuMemUnmap(address, bytes);
  return result;
}

CUresult ManagedMemory::Map(uint64_t address, uint64_t bytes, int device, const std::vector<int>& devices, int fd,
                            uint64_t offset) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!ReserveLocked()) return CUDA_ERROR_NOT_SUPPORTED;
  if (address - kManagedBase > reserved_ || bytes > reserved_ - (address - kManagedBase)) return CUDA_ERROR_OUT_OF_MEMORY;
  auto next = segments_.lower_bound(address);
  if (next != segments_.end() && next->first < address + bytes) return CUDA_ERROR_INVALID_VALUE;
  if (next != segments_.begin()) {
    --next;
    if (next->first + next->second.bytes > address) return CUDA_ERROR_INVALID_VALUE;
  }
  if (!EnterLocked(device)) return CUDA_ERROR_NOT_SUPPORTED;
  Segment segment;
  segment.bytes = bytes;
  segment.device = device;
  void* const file = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, off_t(offset));
  if (file == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  segment.file = static_cast<char*>(file);
  segment.pieces.resize((bytes + kRegistered - 1) / kRegistered);
  CUresult result = BackLocked(address, bytes, device, devices);
  if (result == CUDA_SUCCESS) {
    result = ClearLocked(segment, address);
    if (result != CUDA_SUCCESS) driver_.cuMemUnmap(address, bytes);
  }
  if (result != CUDA_SUCCESS) {
    munmap(file, bytes);
    return result;
  }
  segments_[address] = std::move(segment);
  return CUDA_SUCCESS;
}

CUresult ManagedMemory::Unmap(uint64_t address) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto it = segments_.find(address);
  if (it == segments_.end()) return CUDA_ERROR_INVALID_VALUE;
  EnterLocked(it->second.device);
  UnregisterLocked(&it->second);
  const CUresult result = driver_.cuMemUnmap(address, it->second.bytes);
  munmap(it->second.file, it->second.bytes);
  segments_.erase(it);
  if (segments_.empty() && driver_.cuMemAddressFree(kManagedBase, reserved_) == CUDA_SUCCESS) reserved_ = 0;
  return result;
}

CUresult ManagedMemory::Clear(uint64_t address) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto it = segments_.find(address);
  if (it == segments_.end()) return CUDA_ERROR_INVALID_VALUE;
  UnregisterLocked(&it->second);
  return ClearLocked(it->second, address);
}

CUresult ManagedMemory::ClearLocked(const Segment& segment, uint64_t address) {
  const CUstream stream = EnterLocked(segment.device);
  if (!stream) return CUDA_ERROR_INVALID_CONTEXT;
  const CUresult result = driver_.cuMemsetD8Async(address, 0, segment.bytes, stream);
  return result == CUDA_SUCCESS ? driver_.cuStreamSynchronize(stream) : result;
}

uint64_t ManagedMemory::BytesAt(uint64_t address) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto it = segments_.find(address);
  return it == segments_.end() ? 0 : it->second.bytes;
}

bool ManagedMemory::Contains(uint64_t address, uint64_t bytes) const {
  std::lock_guard<std::mutex> lock(mutex_);
  uint64_t start;
  return FindLocked(address, bytes, &start) != nullptr;
}

void ManagedMemory::RegisterLocked(Segment* segment, size_t index) {
  const uint64_t at = index * kRegistered;
  const CUresult result = driver_.cuMemHostRegister_v2(segment->file + at, std::min(kRegistered, segment->bytes - at),
                                                       CU_MEMHOSTREGISTER_PORTABLE);
  // Without, copies are only slower.
  segment->pieces[index].registered = result == CUDA_SUCCESS || result == CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
  segment->pieces[index].moved = 0;
}

void ManagedMemory::UnregisterLocked(Segment* segment) {
  for (size_t i = 0; i < segment->pieces.size(); ++i) {
    if (segment->pieces[i].registered && EnterLocked(segment->device)) {
      driver_.cuMemHostUnregister(segment->file + i * kRegistered);
    }
    segment->pieces[i] = Piece();
  }
}

CUresult ManagedMemory::CopyLocked(Segment* segment, uint64_t start, uint64_t address, uint64_t bytes, bool to_device) {
  const CUstream stream = EnterLocked(segment->device);
  if (!stream) return CUDA_ERROR_INVALID_CONTEXT;
  for (uint64_t at = address - start, end = at + bytes; at < end;) {
    const size_t index = at / kRegistered;
    const uint64_t step = std::min(end, (index + 1) * kRegistered) - at;
    Piece& piece = segment->pieces[index];
    piece.moved += step;
    // Once as much has been copied as there is, more is to be expected.
    const uint64_t length = std::min(kRegistered, segment->bytes - index * kRegistered);
    if (!piece.registered && (piece.moved > length || step == length)) RegisterLocked(segment, index);
    char* const file = segment->file + at;
    const CUresult result = to_device ? driver_.cuMemcpyHtoDAsync_v2(start + at, file, step, stream)
                                      : driver_.cuMemcpyDtoHAsync_v2(file, start + at, step, stream);
    if (result != CUDA_SUCCESS) return result;
    at += step;
  }
  return CUDA_SUCCESS;
}

CUresult ManagedMemory::Flush(std::string_view runs) {
  struct Run {
    uint64_t address, bytes;
  };
  if (runs.size() % sizeof(Run) != 0) return CUDA_ERROR_INVALID_VALUE;
  // The client can still change the payload.
  std::vector<Run> copied(runs.size() / sizeof(Run));
  memcpy(copied.data(), runs.data(), runs.size());
  std::lock_guard<std::mutex> lock(mutex_);
  uint64_t start;
  for (const Run& run : copied) {
    if (run.bytes == 0 || !FindLocked(run.address, run.bytes, &start)) return CUDA_ERROR_INVALID_VALUE;
  }
  CUresult first = CUDA_SUCCESS;
  for (const Run& run : copied) {
    Segment* const segment = FindLocked(run.address, run.bytes, &start);
    const CUresult result = CopyLocked(segment, start, run.address, run.bytes, true);
    if (first == CUDA_SUCCESS) first = result;
  }
  // Also after an error: the client may write to the file when this has returned.
  for (const auto& [device, lane] : lanes_) {
    if (!EnterLocked(device)) continue;
    const CUresult result = driver_.cuStreamSynchronize(lane.stream);
    if (first == CUDA_SUCCESS) first = result;
  }
  return first;
}

CUresult ManagedMemory::Fetch(uint64_t address, uint64_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  uint64_t start;
  Segment* const segment = FindLocked(address, bytes, &start);
  if (bytes == 0 || !segment) return CUDA_ERROR_INVALID_VALUE;
  const CUresult result = CopyLocked(segment, start, address, bytes, false);
  const CUstream stream = EnterLocked(segment->device);
  if (!stream) return CUDA_ERROR_INVALID_CONTEXT;
  const CUresult waited = driver_.cuStreamSynchronize(stream);
  return result == CUDA_SUCCESS ? waited : result;
}

}  // namespace cuda_remote::server
