// SPDX-License-Identifier: Apache-2.0
#include "server/worker/memory/managed_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "proto/base/clock.h"
#include "proto/logging/log.h"
#include "proto/mirror/mirror.h"
#include "proto/threads/mutex.h"
#include "server/worker/memory/device_arena.h"
#include "server/worker/session/driver_hooks.h"

namespace cuda_remote::server {
namespace {

// For tests: segments change their place all the time (ManagedTurns).
const bool kRestless = getenv("CUDA_REMOTE_RESTLESS") != nullptr;

}  // namespace

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
  if (reserved_ == 0)
    logging::Warn("the driver does not give the addresses of managed memory: CUDA error {}", int(result));
  return reserved_ != 0;
}

void ManagedMemory::UseContext(int device, ContextRef context) {
  MutexLock lock(&mutex_);
  Lane& lane = lanes_[device];
  if (lane.context.id != 0 || context.id == 0) return;
  if (MakeCurrent(driver_, context) != CUDA_SUCCESS) return;
  if (driver_.cuStreamCreate(&lane.stream, CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS) lane.context = context;
  if (driver_.cuEventCreate(&lane.flushed, CU_EVENT_DISABLE_TIMING) != CUDA_SUCCESS) lane.flushed = nullptr;
  if (driver_.cuEventCreate(&lane.fetched, CU_EVENT_DISABLE_TIMING) != CUDA_SUCCESS) lane.fetched = nullptr;
}

void ManagedMemory::ContextDies(uint64_t id) {
  MutexLock lock(&mutex_);
  for (auto& [device, lane] : lanes_) {
    if (lane.context.id != id) continue;
    // Registrations die with it, and device memory does not.
    for (const uint64_t address : std::vector<uint64_t>(on_host_)) {
      Segment& segment = segments_[address];
      if (segment.device == device) PlaceOnDeviceLocked(address, &segment, true);
    }
    lane = Lane();  // with what goes on in it
    bulk_.ContextDies(id);
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

bool ManagedMemory::LeavesRoomLocked(uint64_t bytes) const {
  CUdevice device = 0;
  size_t free = 0, total = 0;
  if (GpuMemoryInfo(&device, &free, &total) != CUDA_SUCCESS) return true;
  return free >= bytes && free - bytes >= std::min<uint64_t>(kMostLeft, total / kLeftPart);
}

CUresult ManagedMemory::BackLocked(uint64_t address, const Segment& segment) {
  CUmemAllocationProp prop = {};
  prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  prop.location.id = segment.device;
  CUmemGenericAllocationHandle physical = 0;
  CUresult result = driver_.cuMemCreate(&physical, segment.bytes, &prop, 0);
  if (result != CUDA_SUCCESS) return result;
  result = ShowDeviceLocked(address, segment, physical);
  // The mapping keeps the memory alive.
  driver_.cuMemRelease(physical);
  return result;
}

CUresult ManagedMemory::ShowDeviceLocked(uint64_t address, const Segment& segment,
                                         CUmemGenericAllocationHandle memory) {
  CUresult result = driver_.cuMemMap(address, segment.bytes, 0, memory, 0);
  if (result != CUDA_SUCCESS) return result;
  std::vector<CUmemAccessDesc> access(segment.devices.size());
  for (size_t i = 0; i < access.size(); ++i) {
    access[i].location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    access[i].location.id = segment.devices[i];
    access[i].flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  }
  result = driver_.cuMemSetAccess(address, segment.bytes, access.data(), access.size());
  if (result != CUDA_SUCCESS) driver_.cuMemUnmap(address, segment.bytes);
  return result;
}

CUresult ManagedMemory::PlaceOnHostLocked(uint64_t address, Segment* segment) {
  // Then the file has the newest contents, and a context of the device is current.
  CUresult result = CopyLocked({{address, segment->bytes}}, false, false);
  if (result != CUDA_SUCCESS) return result;
  void* const memory = reinterpret_cast<void*>(address);
  CUmemGenericAllocationHandle device_memory = 0;
  result = driver_.cuMemRetainAllocationHandle(&device_memory, memory);
  if (result != CUDA_SUCCESS) return result;
  result = driver_.cuMemUnmap(address, segment->bytes);
  if (result != CUDA_SUCCESS) {
    driver_.cuMemRelease(device_memory);
    return result;
  }
  // The addresses stay the driver's: what it has reserved may be registered, and be device memory again after that.
  segment->on_host = true;
  segment->device_memory = device_memory;
  on_host_.push_back(address);
  on_host_count_.store(on_host_.size(), std::memory_order_release);
  const bool mapped = mmap(memory, segment->bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED,
                           segment->file->fd.get(), off_t(segment->offset)) == memory;
  result = mapped ? driver_.cuMemHostRegister_v2(memory, segment->bytes,
                                                 CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP)
                  : CUDA_ERROR_OUT_OF_MEMORY;
  if (result != CUDA_SUCCESS) return PlaceOnDeviceLocked(address, segment, false);
  CUdeviceptr there = 0;
  if (driver_.cuMemHostGetDevicePointer_v2(&there, memory, 0) == CUDA_SUCCESS && there == address) return CUDA_SUCCESS;
  return PlaceOnDeviceLocked(address, segment, false);
}

CUresult ManagedMemory::PlaceOnDeviceLocked(uint64_t address, Segment* segment, bool copied) {
  EnterLocked(segment->device);
  void* const memory = reinterpret_cast<void*>(address);
  driver_.cuMemHostUnregister(memory);
  // Empty, as the driver has it.
  const bool emptied =
      mmap(memory, segment->bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0) == memory;
  segment->on_host = false;
  on_host_.erase(std::find(on_host_.begin(), on_host_.end(), address));
  on_host_count_.store(on_host_.size(), std::memory_order_release);
  CUresult result = emptied ? ShowDeviceLocked(address, *segment, segment->device_memory) : CUDA_ERROR_OUT_OF_MEMORY;
  driver_.cuMemRelease(std::exchange(segment->device_memory, 0));
  if (result == CUDA_SUCCESS && copied) result = CopyLocked({{address, segment->bytes}}, true, false);
  segment->turns.Moved(false);
  return result;
}

CUresult ManagedMemory::PlaceLocked(const std::vector<Run>& runs) {
  for (const Run& run : runs) {
    uint64_t start;
    Segment* const segment = FindLocked(run.address, run.bytes, &start);
    if (segment->on_host == segment->turns.wants_host()) continue;
    CUresult result = CUDA_SUCCESS;
    if (segment->on_host) {
      result = PlaceOnDeviceLocked(start, segment, true);
    } else if (segment->bytes != kPage || on_host_.size() == kMostOnHost) {
      segment->turns.Moved(false);
    } else {
      // What the host has changed comes first: then the device has all that is new.
      AwaitFetchLocked();
      result = AwaitFlushLocked();
      std::vector<Run> changed = runs;
      LeaveOutHostLocked(&changed);
      if (result == CUDA_SUCCESS) result = CopyLocked(changed, true, false);
      if (result == CUDA_SUCCESS) result = PlaceOnHostLocked(start, segment);
      segment->turns.Moved(segment->on_host);
    }
    if (result != CUDA_SUCCESS) return result;
  }
  return CUDA_SUCCESS;
}

void ManagedMemory::ForEachSegmentLocked(const std::vector<Run>& runs, const std::function<void(Segment*)>& use) {
  uint64_t start;
  for (const Run& run : runs) use(FindLocked(run.address, run.bytes, &start));
}

void ManagedMemory::LeaveOutHostLocked(std::vector<Run>* runs) const {
  if (on_host_.empty()) return;
  const auto is_on_host = [this](const Run& run) {
    mutex_.AssertHeld();
    uint64_t start;
    return FindLocked(run.address, run.bytes, &start)->on_host;
  };
  runs->erase(std::remove_if(runs->begin(), runs->end(), is_on_host), runs->end());
}

bool ManagedMemory::NoteWork() {
  MutexLock lock(&mutex_);
  bool any = false;
  for (const uint64_t address : on_host_) any = segments_[address].turns.Work() || any;
  return any;
}

void ManagedMemory::LeaveHost() {
  MutexLock lock(&mutex_);
  for (const uint64_t address : std::vector<uint64_t>(on_host_)) {
    Segment& segment = segments_[address];
    if (!segment.turns.is_unused()) continue;
    segment.turns.HostIsAway();
    const CUresult result = PlaceOnDeviceLocked(address, &segment, true);
    if (result != CUDA_SUCCESS) logging::Error("managed memory was lost: CUDA error {}", int(result));
  }
}

void ManagedMemory::StayOnHost() {
  MutexLock lock(&mutex_);
  for (const uint64_t address : on_host_) {
    if (segments_[address].turns.is_unused()) segments_[address].turns.Postpone();
  }
}

std::shared_ptr<ManagedMemory::File> ManagedMemory::OpenFileLocked(int fd) {
  struct stat facts;
  if (fstat(fd, &facts) != 0) return nullptr;
  std::shared_ptr<File> file = file_.lock();
  if (file && file->device == facts.st_dev && file->number == facts.st_ino) return file;
  UniqueFd own(fcntl(fd, F_DUPFD_CLOEXEC, 0));
  if (!own.ok()) return nullptr;
  file = std::shared_ptr<File>(new File{std::move(own), facts.st_dev, facts.st_ino});
  file_ = file;
  return file;
}

CUresult ManagedMemory::MapFileLocked(int fd, uint64_t offset, Segment* segment) {
  segment->file = OpenFileLocked(fd);
  if (!segment->file) return CUDA_ERROR_OUT_OF_MEMORY;
  segment->offset = offset;
  void* const memory = mmap(nullptr, segment->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, off_t(offset));
  if (memory == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  segment->memory = static_cast<char*>(memory);
  segment->pieces.resize((segment->bytes + kRegistered - 1) / kRegistered);
  return CUDA_SUCCESS;
}

bool ManagedMemory::carried() const {
  MutexLock lock(&mutex_);
  return !segments_.empty() && !segments_.begin()->second.file;
}

CUresult ManagedMemory::Map(uint64_t address, uint64_t bytes, int device, const std::vector<int>& devices, int fd,
                            uint64_t offset) {
  MutexLock lock(&mutex_);
  if (!ReserveLocked()) return CUDA_ERROR_NOT_SUPPORTED;
  if (address - kManagedBase > reserved_ || bytes > reserved_ - (address - kManagedBase))
    return CUDA_ERROR_OUT_OF_MEMORY;
  auto next = segments_.lower_bound(address);
  if (next != segments_.end() && next->first < address + bytes) return CUDA_ERROR_INVALID_VALUE;
  if (next != segments_.begin()) {
    --next;
    if (next->first + next->second.bytes > address) return CUDA_ERROR_INVALID_VALUE;
  }
  if (!EnterLocked(device)) return CUDA_ERROR_NOT_SUPPORTED;
  if (!LeavesRoomLocked(bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
  Segment segment;
  segment.turns = ManagedTurns(kRestless);
  segment.bytes = bytes;
  segment.device = device;
  segment.devices = devices;
  // Either all have files or none.
  if (!segments_.empty() && !segments_.begin()->second.file != (fd < 0)) return CUDA_ERROR_INVALID_VALUE;
  if (fd >= 0) {
    const CUresult mapped = MapFileLocked(fd, offset, &segment);
    if (mapped != CUDA_SUCCESS) return mapped;
  }
  CUresult result = BackLocked(address, segment);
  if (result == CUDA_SUCCESS) {
    result = ClearLocked(segment, address);
    if (result != CUDA_SUCCESS) driver_.cuMemUnmap(address, bytes);
  }
  if (result != CUDA_SUCCESS) {
    if (segment.memory) munmap(segment.memory, bytes);
    return result;
  }
  segments_.emplace(address, std::move(segment));
  return CUDA_SUCCESS;
}

CUresult ManagedMemory::Unmap(uint64_t address) {
  MutexLock lock(&mutex_);
  const auto it = segments_.find(address);
  if (it == segments_.end()) return CUDA_ERROR_INVALID_VALUE;
  AwaitFlushLocked();
  EnterLocked(it->second.device);
  if (it->second.on_host) PlaceOnDeviceLocked(address, &it->second, false);
  UnregisterLocked(&it->second);
  const CUresult result = driver_.cuMemUnmap(address, it->second.bytes);
  if (it->second.memory) munmap(it->second.memory, it->second.bytes);
  segments_.erase(it);
  if (segments_.empty() && driver_.cuMemAddressFree(kManagedBase, reserved_) == CUDA_SUCCESS) reserved_ = 0;
  return result;
}

CUresult ManagedMemory::Clear(uint64_t address) {
  MutexLock lock(&mutex_);
  const auto it = segments_.find(address);
  if (it == segments_.end()) return CUDA_ERROR_INVALID_VALUE;
  AwaitFlushLocked();
  if (it->second.on_host) {
    const CUresult placed = PlaceOnDeviceLocked(address, &it->second, false);
    if (placed != CUDA_SUCCESS) return placed;
  }
  it->second.turns = ManagedTurns(kRestless);
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
  MutexLock lock(&mutex_);
  const auto it = segments_.find(address);
  return it == segments_.end() ? 0 : it->second.bytes;
}

bool ManagedMemory::Contains(uint64_t address, uint64_t bytes) const {
  MutexLock lock(&mutex_);
  uint64_t start;
  return FindLocked(address, bytes, &start) != nullptr;
}

void ManagedMemory::RegisterLocked(Segment* segment, size_t index) {
  const uint64_t at = index * kRegistered;
  const CUresult result = driver_.cuMemHostRegister_v2(segment->memory + at, std::min(kRegistered, segment->bytes - at),
                                                       CU_MEMHOSTREGISTER_PORTABLE);
  // Without, copies are only slower.
  segment->pieces[index].registered = result == CUDA_SUCCESS || result == CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
  segment->pieces[index].moved = 0;
}

void ManagedMemory::UnregisterLocked(Segment* segment) {
  for (size_t i = 0; i < segment->pieces.size(); ++i) {
    if (segment->pieces[i].registered && EnterLocked(segment->device)) {
      driver_.cuMemHostUnregister(segment->memory + i * kRegistered);
    }
    segment->pieces[i] = Piece();
  }
}

CUresult ManagedMemory::BeginCopyLocked(Segment* segment, uint64_t start, const Run& run, bool to_device,
                                        CUstream stream, std::map<int, std::vector<BulkCopies::Part>>* bulk) {
  for (uint64_t at = run.address - start, end = at + run.bytes; at < end;) {
    const size_t index = at / kRegistered;
    const uint64_t step = std::min(end, (index + 1) * kRegistered) - at;
    Piece& piece = segment->pieces[index];
    const uint64_t length = std::min(kRegistered, segment->bytes - index * kRegistered);
    piece.moved += step;
    if (!piece.registered && piece.moved > length * (length <= kShort ? kTimesOfShort : kTimesOfLong)) {
      RegisterLocked(segment, index);
    }
    if (!piece.registered && run.bytes >= BulkCopies::kWorth) {
      (*bulk)[segment->device].push_back(
          {segment->file->fd.get(), segment->offset + at, segment->memory + at, start + at, step});
    } else {
      char* const memory = segment->memory + at;
      const CUresult result = to_device ? driver_.cuMemcpyHtoDAsync_v2(start + at, memory, step, stream)
                                        : driver_.cuMemcpyDtoHAsync_v2(memory, start + at, step, stream);
      if (result != CUDA_SUCCESS) return result;
    }
    at += step;
  }
  return CUDA_SUCCESS;
}

CUresult ManagedMemory::CopyLocked(const std::vector<Run>& runs, bool to_device, bool may_go_on) {
  CUresult first = CUDA_SUCCESS;
  const auto note = [&first](CUresult result) {
    if (first == CUDA_SUCCESS) first = result;
  };
  std::map<int, std::vector<BulkCopies::Part>> bulk;
  std::vector<bool> used;
  uint64_t start;
  for (const Run& run : runs) {
    Segment* const segment = FindLocked(run.address, run.bytes, &start);
    const CUstream stream = EnterLocked(segment->device);
    Lane& lane = lanes_[segment->device];
    if (stream && lane.flushing && std::exchange(lane.elsewhere, false) &&
        driver_.cuStreamWaitEvent(stream, lane.flushed, 0) != CUDA_SUCCESS) {
      note(driver_.cuEventSynchronize(lane.flushed));
    }
    note(stream ? BeginCopyLocked(segment, start, run, to_device, stream, &bulk) : CUDA_ERROR_INVALID_CONTEXT);
    used.resize(std::max(used.size(), size_t(segment->device) + 1));
    used[size_t(segment->device)] = true;
  }
  if (!bulk.empty()) note(AwaitFlushLocked());  // they have streams of their own
  for (const auto& [device, parts] : bulk) note(bulk_.Copy(lanes_[device].context, parts, to_device));
  if (may_go_on && first == CUDA_SUCCESS && bulk.empty()) {
    for (size_t device = 0; device < used.size(); ++device) {
      if (used[device] && LeaveLocked(&lanes_[int(device)]) == CUDA_SUCCESS) used[device] = false;
    }
  }
  // Also after an error: the client may write to the file when this has returned.
  note(AwaitLocked(used));
  return first;
}

CUresult ManagedMemory::AwaitLocked(const std::vector<bool>& devices) {
  CUresult first = CUDA_SUCCESS;
  for (size_t device = 0; device < devices.size(); ++device) {
    if (!devices[device]) continue;
    const CUstream stream = EnterLocked(int(device));
    const CUresult result = stream ? driver_.cuStreamSynchronize(stream) : CUDA_ERROR_INVALID_CONTEXT;
    if (first == CUDA_SUCCESS) first = result;
  }
  return first;
}

CUresult ManagedMemory::LeaveLocked(Lane* lane) {
  if (!lane->flushed) return CUDA_ERROR_NOT_SUPPORTED;
  // Its context is current only if it is the last one that was copied in.
  CUresult result = MakeCurrent(driver_, lane->context);
  if (result == CUDA_SUCCESS) result = driver_.cuEventRecord(lane->flushed, lane->stream);
  if (result != CUDA_SUCCESS) return result;
  lane->flushing = true;
  lane->elsewhere = lane->ordered = false;
  flushing_.store(true, std::memory_order_release);
  return CUDA_SUCCESS;
}

bool ManagedMemory::KeepLocked(const std::vector<Run>& runs) {
  if (runs.empty()) return false;
  uint64_t start, bytes = kept_bytes_;
  const int device = FindLocked((kept_.empty() ? runs : kept_)[0].address, 1, &start)->device;
  const Lane& lane = lanes_[device];
  if (lane.context.id == 0 || !lane.flushed) return false;
  for (const Run& run : runs) {
    bytes += run.bytes;
    if (bytes > kMostKept || FindLocked(run.address, run.bytes, &start)->device != device) return false;
  }
  kept_.insert(kept_.end(), runs.begin(), runs.end());
  kept_bytes_ = bytes;
  flushing_.store(true, std::memory_order_release);
  return true;
}

std::vector<ManagedMemory::Run> ManagedMemory::TakeKeptLocked() {
  kept_bytes_ = 0;
  return std::exchange(kept_, {});
}

CUresult ManagedMemory::FlushKeptLocked() {
  return kept_.empty() ? CUDA_SUCCESS : CopyLocked(TakeKeptLocked(), true, true);
}

CUresult ManagedMemory::FlushKeptInLocked(CUstream stream, bool blocking) {
  const std::vector<Run> runs = TakeKeptLocked();
  CUresult result = CUDA_SUCCESS;
  uint64_t start;
  Lane* lane = nullptr;
  std::map<int, std::vector<BulkCopies::Part>> none;  // they are short
  for (const Run& run : runs) {
    Segment* const segment = FindLocked(run.address, run.bytes, &start);
    lane = &lanes_[segment->device];
    if (result == CUDA_SUCCESS) result = BeginCopyLocked(segment, start, run, true, stream, &none);
  }
  // In front of what comes next into the stream: others wait for the copy, not for that.
  if (result == CUDA_SUCCESS) result = driver_.cuEventRecord(lane->flushed, stream);
  if (result != CUDA_SUCCESS) {
    driver_.cuStreamSynchronize(stream);
    return CopyLocked(runs, true, false);
  }
  lane->flushing = lane->elsewhere = true;
  lane->ordered = blocking;
  return CUDA_SUCCESS;
}

CUresult ManagedMemory::OrderBehindFlush(CUstream stream, bool blocking) {
  MutexLock lock(&mutex_);
  CUresult first = CUDA_SUCCESS;
  for (auto& [device, lane] : lanes_) {
    if (!lane.flushing) continue;
    if (driver_.cuEventQuery(lane.flushed) == CUDA_SUCCESS) {
      lane.flushing = false;
    } else if (driver_.cuStreamWaitEvent(stream, lane.flushed, 0) == CUDA_SUCCESS) {
      lane.ordered = lane.ordered || blocking;
    } else {
      const CUresult result = driver_.cuEventSynchronize(lane.flushed);
      if (first == CUDA_SUCCESS) first = result;
      lane.flushing = false;
    }
  }
  if (!kept_.empty()) {
    const CUresult result = FlushKeptInLocked(stream, blocking);
    if (first == CUDA_SUCCESS) first = result;
  }
  const bool any = std::any_of(lanes_.begin(), lanes_.end(), [](const auto& lane) { return lane.second.flushing; });
  flushing_.store(any, std::memory_order_release);
  return first;
}

CUresult ManagedMemory::AwaitFlushLocked() {
  CUresult first = FlushKeptLocked();
  for (auto& [device, lane] : lanes_) {
    if (!lane.flushing) continue;
    const CUresult result = driver_.cuEventSynchronize(lane.flushed);
    if (first == CUDA_SUCCESS) first = result;
    lane.flushing = false;
  }
  flushing_.store(false, std::memory_order_release);
  return first;
}

CUresult ManagedMemory::AwaitFlush() {
  MutexLock lock(&mutex_);
  return AwaitFlushLocked();
}

CUresult ManagedMemory::Write(std::string_view runs) {
  MutexLock lock(&mutex_);
  std::vector<std::shared_ptr<char>> buffers;
  std::vector<bool> used;
  CUresult first = CUDA_SUCCESS;
  const bool well_formed = mirror::ForEachRun(runs, [&](uint64_t address, std::string_view bytes) {
    mutex_.AssertHeld();
    uint64_t start;
    const Segment* const segment = bytes.empty() ? nullptr : FindLocked(address, bytes.size(), &start);
    if (!segment || segment->file) return false;
    used.resize(std::max(used.size(), size_t(segment->device) + 1));
    used[size_t(segment->device)] = true;
    const CUstream stream = EnterLocked(segment->device);
    CUresult result = stream ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
    if (result == CUDA_SUCCESS) {
      buffers.push_back(staging_->Take(bytes.size()));
      result = buffers.back() ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
    }
    if (result == CUDA_SUCCESS) {
      memcpy(buffers.back().get(), bytes.data(), bytes.size());
      result = driver_.cuMemcpyHtoDAsync_v2(address, buffers.back().get(), bytes.size(), stream);
    }
    if (first == CUDA_SUCCESS) first = result;
    return true;
  });
  const CUresult waited = AwaitLocked(used);
  if (!well_formed) return CUDA_ERROR_INVALID_VALUE;
  return first == CUDA_SUCCESS ? waited : first;
}

CUresult ManagedMemory::Read(uint64_t address, uint64_t bytes, std::string* out) {
  MutexLock lock(&mutex_);
  uint64_t start;
  const Segment* const segment = bytes == 0 ? nullptr : FindLocked(address, bytes, &start);
  if (!segment || segment->file) return CUDA_ERROR_INVALID_VALUE;
  const CUstream stream = EnterLocked(segment->device);
  if (!stream) return CUDA_ERROR_INVALID_CONTEXT;
  constexpr uint64_t kPiece = StagingPool::kLarge;
  std::vector<std::shared_ptr<char>> buffers;
  CUresult result = CUDA_SUCCESS;
  for (uint64_t at = 0; at < bytes && result == CUDA_SUCCESS; at += kPiece) {
    const uint64_t step = std::min(kPiece, bytes - at);
    buffers.push_back(staging_->Take(step));
    result = buffers.back() ? driver_.cuMemcpyDtoHAsync_v2(buffers.back().get(), address + at, step, stream)
                            : CUDA_ERROR_OUT_OF_MEMORY;
  }
  const CUresult waited = driver_.cuStreamSynchronize(stream);
  if (result != CUDA_SUCCESS || waited != CUDA_SUCCESS) return result != CUDA_SUCCESS ? result : waited;
  for (uint64_t at = 0; at < bytes; at += kPiece) out->append(buffers[at / kPiece].get(), std::min(kPiece, bytes - at));
  return CUDA_SUCCESS;
}

std::vector<ManagedMemory::Run> ManagedMemory::RunsLocked(std::string_view runs) const {
  if (runs.size() % sizeof(Run) != 0) return {};
  // The client can still change the payload.
  std::vector<Run> copied(runs.size() / sizeof(Run));
  memcpy(copied.data(), runs.data(), runs.size());
  uint64_t start;
  for (const Run& run : copied) {
    const Segment* const segment = run.bytes == 0 ? nullptr : FindLocked(run.address, run.bytes, &start);
    if (!segment || !segment->file) return {};
  }
  return copied;
}

CUresult ManagedMemory::Copy(std::string_view runs, bool to_device, bool may_go_on) {
  MutexLock lock(&mutex_);
  std::vector<Run> copied = RunsLocked(runs);
  if (copied.empty() && !runs.empty()) return CUDA_ERROR_INVALID_VALUE;
  ForEachSegmentLocked(copied, [](Segment* segment) { segment->turns.Interrupt(); });
  return CopyNowLocked(&copied, to_device, may_go_on);
}

CUresult ManagedMemory::CopyNowLocked(std::vector<Run>* runs, bool to_device, bool may_go_on) {
  LeaveOutHostLocked(runs);
  // What it brings later would take the place of what the client has written by then.
  if (!to_device) AwaitFetchLocked();
  const CUresult before = FlushKeptLocked();
  const CUresult result = CopyLocked(*runs, to_device, may_go_on);
  return before == CUDA_SUCCESS ? result : before;
}

CUresult ManagedMemory::BeginFlush(std::string_view runs, bool idle) {
  if (!idle) return Copy(runs, true, true);
  MutexLock lock(&mutex_);
  std::vector<Run> copied = RunsLocked(runs);
  if (copied.empty() && !runs.empty()) return CUDA_ERROR_INVALID_VALUE;
  if (const CUresult placed = PlaceLocked(copied); placed != CUDA_SUCCESS) return placed;
  ForEachSegmentLocked(copied, [now = uint64_t(NowNs())](Segment* segment) { segment->turns.HandedOver(now); });
  LeaveOutHostLocked(&copied);
  return KeepLocked(copied) ? CUDA_SUCCESS : CopyNowLocked(&copied, true, true);
}

bool ManagedMemory::BeginFetch(std::string_view runs) {
  MutexLock lock(&mutex_);
  const std::vector<Run> copied = RunsLocked(runs);
  uint64_t start;
  // The driver copies into memory that is not registered by itself, when the work before it is done.
  const auto is_registered = [&](const Run& run) {
    mutex_.AssertHeld();
    const Segment& segment = *FindLocked(run.address, run.bytes, &start);
    if (segment.on_host) return true;
    const uint64_t first = (run.address - start) / kRegistered,
                   last = (run.address - start + run.bytes - 1) / kRegistered;
    return std::all_of(segment.pieces.begin() + long(first), segment.pieces.begin() + long(last) + 1,
                       [](const Piece& piece) { return piece.registered; });
  };
  if (copied.empty() || !std::all_of(copied.begin(), copied.end(), is_registered)) return false;
  AwaitFetchLocked();
  CUresult result = FlushKeptLocked();
  CUevent fetched = nullptr;
  fetched_.clear();
  for (auto& [device, lane] : lanes_) {
    if (result != CUDA_SUCCESS || !lane.flushing || lane.ordered) continue;
    result =
        EnterLocked(device) ? driver_.cuStreamWaitEvent(CU_STREAM_LEGACY, lane.flushed, 0) : CUDA_ERROR_INVALID_CONTEXT;
    lane.ordered = result == CUDA_SUCCESS;
  }
  for (const Run& run : copied) {
    const Segment& segment = *FindLocked(run.address, run.bytes, &start);
    if (result == CUDA_SUCCESS && !EnterLocked(segment.device)) result = CUDA_ERROR_INVALID_CONTEXT;
    fetched = lanes_[segment.device].fetched;
    fetched_.push_back(start);
    if (segment.on_host) continue;
    for (uint64_t at = run.address - start, end = at + run.bytes; at < end && result == CUDA_SUCCESS;) {
      const uint64_t step = std::min(end, (at / kRegistered + 1) * kRegistered) - at;
      result = driver_.cuMemcpyDtoHAsync_v2(segment.memory + at, start + at, step, CU_STREAM_LEGACY);
      at += step;
    }
  }
  if (result == CUDA_SUCCESS) {
    result = fetched ? driver_.cuEventRecord(fetched, CU_STREAM_LEGACY) : CUDA_ERROR_NOT_SUPPORTED;
  }
  if (result != CUDA_SUCCESS) {
    driver_.cuStreamSynchronize(CU_STREAM_LEGACY);
    return false;
  }
  fetch_ = fetched;
  return true;
}

CUresult ManagedMemory::FetchState() { return driver_.cuEventQuery(fetch_); }

bool ManagedMemory::NoteFetchedLocked(const std::function<void(ManagedTurns*)>& note) {
  bool in_place = true;
  for (const uint64_t address : fetched_) {
    const auto it = segments_.find(address);
    if (it == segments_.end()) continue;  // it has been freed meanwhile
    note(&it->second.turns);
    in_place = in_place && StaysOnHost(it->second);
  }
  return in_place;
}

bool ManagedMemory::EndFetch() {
  MutexLock lock(&mutex_);
  // It was behind them.
  for (auto& [device, lane] : lanes_) lane.flushing = false;
  const uint64_t now = uint64_t(NowNs());
  flushing_.store(false, std::memory_order_release);
  return NoteFetchedLocked([now](ManagedTurns* turns) { turns->CameBack(now); });
}

bool ManagedMemory::LeaveFetch() {
  MutexLock lock(&mutex_);
  for (auto& [device, lane] : lanes_) lane.fetching = lane.fetching || lane.fetched == fetch_;
  return NoteFetchedLocked([](ManagedTurns* turns) { turns->ComesLater(); });
}

void ManagedMemory::AwaitFetchLocked() {
  for (auto& [device, lane] : lanes_) {
    if (lane.fetching) driver_.cuEventSynchronize(lane.fetched);
    lane.fetching = false;
  }
}

CUresult ManagedMemory::Flush(std::string_view runs) { return Copy(runs, true, false); }

CUresult ManagedMemory::Fetch(std::string_view runs) { return Copy(runs, false, false); }

CUresult ManagedMemory::FetchAtWait(std::string_view runs, bool* in_place) {
  MutexLock lock(&mutex_);
  std::vector<Run> copied = RunsLocked(runs);
  if (copied.empty() && !runs.empty()) return CUDA_ERROR_INVALID_VALUE;
  const std::vector<Run> all = copied;
  const CUresult result = CopyNowLocked(&copied, false, false);
  *in_place = result == CUDA_SUCCESS;
  ForEachSegmentLocked(all, [now = uint64_t(NowNs()), in_place](Segment* segment) {
    segment->turns.CameBack(now);
    *in_place = *in_place && StaysOnHost(*segment);
  });
  return result;
}

CUresult ManagedMemory::Fetch(uint64_t address, uint64_t bytes) {
  const Run run = {address, bytes};
  return Fetch(std::string_view(reinterpret_cast<const char*>(&run), sizeof run));
}

}  // namespace cuda_remote::server
