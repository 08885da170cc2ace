// SPDX-License-Identifier: Apache-2.0
#include "server/worker/memory/device_arena.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "proto/base/text.h"
#include "proto/driverabi/error_names.h"
#include "proto/threads/mutex.h"

namespace cuda_remote::server {
namespace {

// Fewer addresses than these are of no use.
constexpr uint64_t kLeastReserved = uint64_t{1} << 36;

}  // namespace

uint64_t ReserveAddressesAt(const DriverTable& driver, uint64_t base, uint64_t most, CUresult* result) {
  *result = CUDA_SUCCESS;
  for (uint64_t bytes = most; bytes >= kLeastReserved; bytes /= 4) {
    CUdeviceptr address = 0;
    *result = driver.cuMemAddressReserve(&address, bytes, 0, base, 0);
    if (*result != CUDA_SUCCESS) continue;
    if (address == base) return bytes;
    driver.cuMemAddressFree(address, bytes);
    *result = CUDA_ERROR_ILLEGAL_ADDRESS;
  }
  return 0;
}

absl::StatusOr<std::unique_ptr<DeviceArena>> DeviceArena::Create(const DriverTable& driver, int devices,
                                                                 uint64_t memory_limit) {
  CUresult result = CUDA_SUCCESS;
  const uint64_t bytes = ReserveAddressesAt(driver, kArenaBase, kArenaBytes, &result);
  if (bytes != 0) return std::unique_ptr<DeviceArena>(new DeviceArena(driver, devices, bytes, memory_limit));
  return absl::FailedPreconditionError("the driver does not give device addresses at " + Hex(kArenaBase) + ": " +
                                       driverabi::DescribeError(result) +
                                       "; device memory would not keep its addresses over a restart");
}

DeviceArena::DeviceArena(const DriverTable& driver, int devices, uint64_t bytes, uint64_t memory_limit)
    : driver_(driver), bytes_(bytes), memory_limit_(memory_limit) {
  pages_.Give(kArenaBase, bytes);
  for (int device = 0; device < devices; ++device) small_.emplace(device, AddressSpace(kUnit, kPage));
}

CUresult DeviceArena::Allocate(int device, uint64_t bytes, uint64_t at, uint64_t* address) {
  MutexLock lock(&mutex_);
  if (bytes == 0 || small_.count(device) == 0) return CUDA_ERROR_INVALID_VALUE;
  if (bytes > bytes_) return CUDA_ERROR_OUT_OF_MEMORY;
  if (at != 0 && (!Contains(at) || at % kUnit != 0 || bytes > kArenaBase + bytes_ - at))
    return CUDA_ERROR_INVALID_VALUE;
  // Only a replay asks for addresses. When it is over, the process that this one replaces is gone, or about to go.
  if (at == 0) twice_bytes_ = 0;
  const bool small = bytes < kSmall;
  bytes = small ? (bytes + kUnit - 1) / kUnit * kUnit : (bytes + kPage - 1) / kPage * kPage;
  const CUresult result = small ? AllocateSmall(device, bytes, at, address) : AllocateLarge(device, bytes, at, address);
  if (result != CUDA_SUCCESS) return result;
  live_[*address] = Live{bytes, device, small};
  live_bytes_ += bytes;
  live_by_device_[device] += bytes;
  return CUDA_SUCCESS;
}

CUresult DeviceArena::AllocateSmall(int device, uint64_t bytes, uint64_t at, uint64_t* address) {
  AddressSpace& space = small_.at(device);
  if (at != 0) {
    const uint64_t page = at & ~(kPage - 1);
    if (at + bytes > page + kPage) return CUDA_ERROR_INVALID_VALUE;
    if (slabs_.count(page) == 0) {
      if (!Claim(device, page, kPage)) {
        EvictOverlapping(page, kPage);
        if (!pages_.TakeAt(page, kPage)) return CUDA_ERROR_INVALID_VALUE;
        if (const CUresult result = Back(device, page, kPage); result != CUDA_SUCCESS) return result;
      }
      slabs_[page].device = device;
      space.Give(page, kPage);
    }
    // Also where the page belongs to another device, whose free parts are not in `space`.
    if (!space.TakeAt(at, bytes)) return CUDA_ERROR_INVALID_VALUE;
    *address = at;
  } else {
    *address = space.Take(bytes);
    if (*address == 0) {
      const uint64_t page = pages_.Take(kPage);
      if (page == 0) return CUDA_ERROR_OUT_OF_MEMORY;
      if (const CUresult result = Back(device, page, kPage); result != CUDA_SUCCESS) return result;
      slabs_[page].device = device;
      space.Give(page, kPage);
      *address = space.Take(bytes);
    }
  }
  slabs_[*address & ~(kPage - 1)].used += bytes;
  return CUDA_SUCCESS;
}

CUresult DeviceArena::AllocateLarge(int device, uint64_t bytes, uint64_t at, uint64_t* address) {
  if (at != 0) {
    if (at % kPage != 0) return CUDA_ERROR_INVALID_VALUE;
    *address = at;
    if (Claim(device, at, bytes)) return CUDA_SUCCESS;
    EvictOverlapping(at, bytes);
    if (!pages_.TakeAt(at, bytes)) return CUDA_ERROR_INVALID_VALUE;
    return Back(device, at, bytes);
  }
  for (auto it = cached_.begin(); it != cached_.end(); ++it) {
    if (it->bytes != bytes || it->device != device) continue;
    *address = it->address;
    cached_bytes_ -= bytes;
    cached_.erase(it);
    return CUDA_SUCCESS;
  }
  *address = pages_.Take(bytes);
  if (*address == 0) {
    TrimLocked();
    *address = pages_.Take(bytes);
  }
  return *address != 0 ? Back(device, *address, bytes) : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult DeviceArena::Back(int device, uint64_t address, uint64_t bytes) {
  CUresult result = CUDA_ERROR_OUT_OF_MEMORY;
  while (true) {
    if (TakeOfLimits(bytes)) {
      result = MapOnce(device, address, bytes);
      if (result != CUDA_SUCCESS) GiveToLimits(bytes);
    }
    if (result != CUDA_ERROR_OUT_OF_MEMORY || !EvictSome()) break;
  }
  if (result != CUDA_SUCCESS) {
    pages_.Give(address, bytes);
    return result;
  }
  backed_[address] = {bytes, device};
  backed_bytes_ += bytes;
  return CUDA_SUCCESS;
}

CUresult DeviceArena::MapOnce(int device, uint64_t address, uint64_t bytes) {
  CUmemAllocationProp prop = {};
  prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  prop.location.id = device;
  if (shareable_) prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  CUmemGenericAllocationHandle physical = 0;
  CUresult result = driver_.cuMemCreate(&physical, bytes, &prop, 0);
  if (result != CUDA_SUCCESS && result != CUDA_ERROR_OUT_OF_MEMORY && shareable_) {
    prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_NONE;
    result = driver_.cuMemCreate(&physical, bytes, &prop, 0);
    shareable_ = result != CUDA_SUCCESS;  // it may have been something else
  }
  if (result != CUDA_SUCCESS) return result;
  result = driver_.cuMemMap(address, bytes, 0, physical, 0);
  // The mapping keeps the memory alive; the handle is not needed any more.
  driver_.cuMemRelease(physical);
  if (result != CUDA_SUCCESS) return result;
  result = SetAccess(device, address, bytes);
  if (result != CUDA_SUCCESS) driver_.cuMemUnmap(address, bytes);
  return result;
}

std::vector<DeviceArena::Block> DeviceArena::LiveBlocks(uint64_t from, size_t most) const {
  MutexLock lock(&mutex_);
  std::vector<Block> blocks;
  for (auto it = live_.lower_bound(from); it != live_.end() && blocks.size() < most;) {
    auto backed = backed_.upper_bound(it->first);
    if (backed == backed_.begin()) break;
    --backed;
    blocks.push_back({backed->first, backed->second.first, backed->second.second});
    it = live_.lower_bound(backed->first + backed->second.first);
  }
  return blocks;
}

bool DeviceArena::MayMapLocked(const Block& block) const {
  return block.bytes != 0 && block.bytes % kPage == 0 && block.address % kPage == 0 && Contains(block.address) &&
         block.bytes <= kArenaBase + bytes_ - block.address && small_.count(block.device) != 0;
}

CUresult DeviceArena::Adopt(const Block& block, int fd, bool counted_twice) {
  MutexLock lock(&mutex_);
  if (!MayMapLocked(block)) return CUDA_ERROR_INVALID_VALUE;
  EvictOverlapping(block.address, block.bytes);
  if (!pages_.TakeAt(block.address, block.bytes)) return CUDA_ERROR_INVALID_VALUE;
  if (counted_twice && budget_) twice_bytes_ += block.bytes;
  CUresult result = TakeOfLimits(block.bytes) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
  int kept = -1;
  if (result == CUDA_SUCCESS) {
    kept = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    result = kept < 0 ? CUDA_ERROR_OPERATING_SYSTEM : MapAdopted(block, fd);
    if (result != CUDA_SUCCESS) GiveToLimits(block.bytes);
  }
  if (result != CUDA_SUCCESS) {
    if (kept >= 0) close(kept);
    if (counted_twice && budget_) twice_bytes_ -= block.bytes;
    pages_.Give(block.address, block.bytes);
    return result;
  }
  backed_[block.address] = {block.bytes, block.device};
  backed_bytes_ += block.bytes;
  adopted_[block.address] = {false, kept};
  return CUDA_SUCCESS;
}

CUresult DeviceArena::MapAdopted(const Block& block, int fd) {
  constexpr CUmemAllocationHandleType kDescriptor = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  CUmemGenericAllocationHandle physical = 0;
  CUresult result =
      driver_.cuMemImportFromShareableHandle(&physical, reinterpret_cast<void*>(intptr_t(fd)), kDescriptor);
  if (result != CUDA_SUCCESS) return result;
  result = driver_.cuMemMap(block.address, block.bytes, 0, physical, 0);
  driver_.cuMemRelease(physical);  // the mapping keeps it
  if (result != CUDA_SUCCESS) return result;
  result = SetAccess(block.device, block.address, block.bytes);
  if (result != CUDA_SUCCESS) driver_.cuMemUnmap(block.address, block.bytes);
  return result;
}

CUresult DeviceArena::Export(uint64_t address, int* fd) const {
  {
    MutexLock lock(&mutex_);
    const auto adopted = adopted_.find(address);
    const auto exported = exported_.find(address);
    if (adopted != adopted_.end() || exported != exported_.end()) {
      *fd = fcntl(adopted != adopted_.end() ? adopted->second.fd : exported->second, F_DUPFD_CLOEXEC, 0);
      return *fd < 0 ? CUDA_ERROR_OPERATING_SYSTEM : CUDA_SUCCESS;
    }
  }
  return AskForExport(address, fd);
}

void DeviceArena::ExportAhead(uint64_t address) {
  MutexLock lock(&mutex_);
  if (backed_.count(address) == 0 || adopted_.count(address) != 0 || exported_.count(address) != 0) return;
  int fd = -1;
  if (exported_.size() < kMostExported && AskForExport(address, &fd) == CUDA_SUCCESS) exported_[address] = fd;
}

CUresult DeviceArena::AskForExport(uint64_t address, int* fd) const {
  CUmemGenericAllocationHandle physical = 0;
  CUresult result = driver_.cuMemRetainAllocationHandle(&physical, reinterpret_cast<void*>(address));
  if (result != CUDA_SUCCESS) return result;
  result = driver_.cuMemExportToShareableHandle(fd, physical, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
  driver_.cuMemRelease(physical);
  return result;
}

bool DeviceArena::Claim(int device, uint64_t address, uint64_t bytes) {
  if (staged_.count(address) != 0 && backed_.at(address) == std::make_pair(bytes, device)) {
    staged_.erase(address);
    return true;
  }
  const auto adopted = adopted_.find(address);
  if (adopted == adopted_.end() || adopted->second.given) return false;
  if (backed_.at(address) != std::make_pair(bytes, device)) return false;
  adopted->second.given = true;
  return true;
}

void DeviceArena::DropUnclaimed() {
  MutexLock lock(&mutex_);
  std::vector<Block> unclaimed;
  for (const auto& [address, adopted] : adopted_) {
    if (!adopted.given) unclaimed.push_back({address, backed_.at(address).first, backed_.at(address).second});
  }
  for (const Block& block : unclaimed) Unback(block.address, block.bytes, block.device);
  while (EvictStaged()) {
  }
}

CUresult DeviceArena::Stage(const Block& block) {
  MutexLock lock(&mutex_);
  if (!MayMapLocked(block)) return CUDA_ERROR_INVALID_VALUE;
  if (staged_.count(block.address) != 0 && backed_.at(block.address) == std::make_pair(block.bytes, block.device)) {
    return CUDA_SUCCESS;
  }
  if (budget_ && budget_->Left() < block.bytes + std::min(kBudgetReserve, budget_->limit() / 8)) {
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  EvictOverlapping(block.address, block.bytes);
  if (!pages_.TakeAt(block.address, block.bytes)) return CUDA_ERROR_INVALID_VALUE;
  CUresult result = CUDA_ERROR_OUT_OF_MEMORY;
  if (TakeOfLimits(block.bytes)) {
    result = MapOnce(block.device, block.address, block.bytes);
    if (result != CUDA_SUCCESS) GiveToLimits(block.bytes);
  }
  if (result != CUDA_SUCCESS) {
    pages_.Give(block.address, block.bytes);
    return result;
  }
  backed_[block.address] = {block.bytes, block.device};
  backed_bytes_ += block.bytes;
  staged_.insert(block.address);
  return CUDA_SUCCESS;
}

void DeviceArena::Unstage(uint64_t address) {
  MutexLock lock(&mutex_);
  if (staged_.count(address) == 0) return;
  const auto [bytes, device] = backed_.at(address);
  Unback(address, bytes, device);
}

bool DeviceArena::IsStaged(uint64_t address, uint64_t bytes, int* device) const {
  MutexLock lock(&mutex_);
  auto it = staged_.upper_bound(address);
  if (it == staged_.begin()) return false;
  --it;
  const auto& [length, owner] = backed_.at(*it);
  if (address - *it >= length || bytes > length - (address - *it)) return false;
  *device = owner;
  return true;
}

std::vector<DeviceArena::Block> DeviceArena::ClaimedBlocks(uint64_t from, size_t most) const {
  MutexLock lock(&mutex_);
  std::vector<Block> blocks;
  for (auto it = adopted_.lower_bound(from); it != adopted_.end() && blocks.size() < most; ++it) {
    if (it->second.given) blocks.push_back({it->first, backed_.at(it->first).first, backed_.at(it->first).second});
  }
  return blocks;
}

CUresult DeviceArena::SetAccess(int device, uint64_t address, uint64_t bytes) {
  std::vector<CUmemAccessDesc> access;
  CUmemAccessDesc one = {};
  one.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  one.location.id = device;
  one.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  access.push_back(one);
  for (const int peer : accessors_[device]) {
    one.location.id = peer;
    access.push_back(one);
  }
  return driver_.cuMemSetAccess(address, bytes, access.data(), access.size());
}

void DeviceArena::Unback(uint64_t address, uint64_t bytes, int device) {
  // A descriptor would keep the memory.
  if (const auto exported = exported_.find(address); exported != exported_.end()) {
    close(exported->second);
    exported_.erase(exported);
  }
  driver_.cuMemUnmap(address, bytes);
  backed_.erase(address);
  staged_.erase(address);
  if (const auto adopted = adopted_.find(address); adopted != adopted_.end()) {
    close(adopted->second.fd);
    adopted_.erase(adopted);
    twice_bytes_ -= std::min(twice_bytes_, bytes);
  }
  backed_bytes_ -= bytes;
  GiveToLimits(bytes);
  pages_.Give(address, bytes);
}

void DeviceArena::Free(uint64_t address) {
  MutexLock lock(&mutex_);
  const auto it = live_.find(address);
  if (it == live_.end()) return;
  const Live dead = it->second;
  live_.erase(it);
  live_bytes_ -= dead.bytes;
  live_by_device_[dead.device] -= dead.bytes;
  if (!dead.small) {
    if (dead.bytes > kMaxCachedBlock) {
      Unback(address, dead.bytes, dead.device);
      return;
    }
    while (cached_bytes_ + dead.bytes > kMaxCached) EvictOldest();
    cached_.push_back({address, dead.bytes, dead.device});
    cached_bytes_ += dead.bytes;
    return;
  }
  AddressSpace& space = small_.at(dead.device);
  space.Give(address, dead.bytes);
  const uint64_t page = address & ~(kPage - 1);
  Slab& slab = slabs_[page];
  slab.used -= dead.bytes;
  // One empty page for each device is kept, so that a single allocation that comes and goes costs nothing.
  if (slab.used == 0 && space.free_bytes() > 2 * kPage) {
    space.TakeAt(page, kPage);
    slabs_.erase(page);
    Unback(page, kPage, dead.device);
  }
}

bool DeviceArena::Backing(uint64_t address, uint64_t* start, uint64_t* bytes) const {
  MutexLock lock(&mutex_);
  auto it = backed_.upper_bound(address);
  if (it == backed_.begin()) return false;
  --it;
  if (address - it->first >= it->second.first) return false;
  *start = it->first;
  *bytes = it->second.first;
  return true;
}

void DeviceArena::EvictOldest() {
  const Cached oldest = cached_.front();
  cached_.pop_front();
  cached_bytes_ -= oldest.bytes;
  Unback(oldest.address, oldest.bytes, oldest.device);
}

bool DeviceArena::EvictStaged() {
  if (staged_.empty()) return false;
  const uint64_t address = *staged_.rbegin();
  const auto [bytes, device] = backed_.at(address);
  Unback(address, bytes, device);
  return true;
}

bool DeviceArena::EvictSome() {
  if (cached_.empty()) return EvictStaged();
  EvictOldest();
  return true;
}

void DeviceArena::EvictOverlapping(uint64_t address, uint64_t bytes) {
  for (auto it = cached_.begin(); it != cached_.end();) {
    const Cached part = *it;
    if (part.address + part.bytes <= address || address + bytes <= part.address) {
      ++it;
      continue;
    }
    it = cached_.erase(it);
    cached_bytes_ -= part.bytes;
    Unback(part.address, part.bytes, part.device);
  }
  for (auto it = staged_.begin(); it != staged_.end() && *it < address + bytes;) {
    const uint64_t start = *it++;
    const auto [length, device] = backed_.at(start);
    if (start + length > address) Unback(start, length, device);
  }
  // Empty pages of small allocations are in the way of large ones.
  for (auto it = slabs_.lower_bound(address); it != slabs_.end() && it->first < address + bytes;) {
    const auto slab = it++;
    if (slab->second.used != 0) continue;
    const uint64_t page = slab->first;
    const int device = slab->second.device;
    small_.at(device).TakeAt(page, kPage);
    slabs_.erase(slab);
    Unback(page, kPage, device);
  }
}

void DeviceArena::TrimLocked(uint64_t keep) {
  while (cached_bytes_ > keep) EvictOldest();
  if (keep != 0) return;
  for (auto it = slabs_.begin(); it != slabs_.end();) {
    const auto slab = it++;
    if (slab->second.used != 0) continue;
    const uint64_t page = slab->first;
    const int device = slab->second.device;
    small_.at(device).TakeAt(page, kPage);
    slabs_.erase(slab);
    Unback(page, kPage, device);
  }
}

void DeviceArena::Trim(uint64_t keep) {
  MutexLock lock(&mutex_);
  TrimLocked(keep);
}

CUresult DeviceArena::EnablePeer(int device, int peer) {
  MutexLock lock(&mutex_);
  if (device == peer || !accessors_[device].insert(peer).second) return CUDA_SUCCESS;
  for (const auto& [address, part] : backed_) {
    if (part.second != device) continue;
    if (const CUresult result = SetAccess(device, address, part.first); result != CUDA_SUCCESS) return result;
  }
  return CUDA_SUCCESS;
}

bool DeviceArena::TakeOfLimits(uint64_t bytes) {
  if (memory_limit_ != 0 && (bytes > memory_limit_ || backed_bytes_ + charged_bytes_ + bytes > memory_limit_))
    return false;
  return !budget_ || budget_->Take(bytes, twice_bytes_);
}

void DeviceArena::GiveToLimits(uint64_t bytes) {
  if (budget_) budget_->Give(bytes);
}

void DeviceArena::SetBudget(std::unique_ptr<MemoryBudget> budget) {
  MutexLock lock(&mutex_);
  budget_ = std::move(budget);
  budget_->TakeAnyway(backed_bytes_ + charged_bytes_);
}

uint64_t DeviceArena::memory_limit() const {
  MutexLock lock(&mutex_);
  if (!budget_) return memory_limit_;
  return memory_limit_ != 0 ? std::min(memory_limit_, budget_->limit()) : budget_->limit();
}

bool DeviceArena::Charge(uint64_t bytes) {
  MutexLock lock(&mutex_);
  bool fits = TakeOfLimits(bytes);
  while (!fits && EvictSome()) fits = TakeOfLimits(bytes);
  if (fits) charged_bytes_ += bytes;
  return fits;
}

void DeviceArena::Discharge(uint64_t bytes) {
  MutexLock lock(&mutex_);
  const uint64_t charged = std::min(bytes, charged_bytes_);
  charged_bytes_ -= charged;
  GiveToLimits(charged);
}

void DeviceArena::Adjust(int device, size_t* free, size_t* total) const {
  MutexLock lock(&mutex_);
  uint64_t cached = 0;
  for (const Cached& part : cached_) {
    if (part.device == device) cached += part.bytes;
  }
  *free = std::min<uint64_t>(*free + cached, *total);
  if (budget_) {
    *free = std::min<uint64_t>(*free, budget_->Left() + cached_bytes_);
    *total = std::min<uint64_t>(*total, budget_->limit());
  }
  if (memory_limit_ == 0) return;
  const uint64_t taken = backed_bytes_ - cached_bytes_ + charged_bytes_;
  *free = std::min<uint64_t>(*free, memory_limit_ > taken ? memory_limit_ - taken : 0);
  *total = std::min<uint64_t>(*total, memory_limit_);
}

uint64_t DeviceArena::used_bytes() const {
  MutexLock lock(&mutex_);
  return live_bytes_ + charged_bytes_;
}

std::vector<uint64_t> DeviceArena::used_by_device() const {
  MutexLock lock(&mutex_);
  std::vector<uint64_t> bytes;
  for (const auto& [device, live] : live_by_device_) {
    if (size_t(device) >= bytes.size()) bytes.resize(size_t(device) + 1);
    bytes[size_t(device)] = live;
  }
  return bytes;
}

}  // namespace cuda_remote::server
