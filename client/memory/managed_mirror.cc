// SPDX-License-Identifier: Apache-2.0
#include "client/memory/managed_mirror.h"

#include <sys/mman.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "client/core/log.h"
#include "client/memory/host_arena.h"
#include "proto/base/clock.h"
#include "proto/codec/operations.gen.h"
#include "proto/mirror/mirror.h"

#ifndef MAP_FIXED_NOREPLACE
#define MAP_FIXED_NOREPLACE 0x100000
#endif

namespace cuda_remote::client {
namespace {

constexpr uint64_t kPage = 4096;
// So many kernels are looked at, and then one in so many.
constexpr uint64_t kLooks = 64;
// Comparing less than this takes no longer than to ask the kernel.
constexpr uint64_t kWorthWatching = 16 << 10;
// The same for asking whether transfers are possible, too.
constexpr uint64_t kWorthAsking = 1 << 20;

char* MapZeroes(size_t bytes) {
  void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return memory == MAP_FAILED ? nullptr : static_cast<char*>(memory);
}

// Whether the program, whose own memory it may be, has not unmapped it. Natively it may, while it is registered.
bool IsMapped(const char* memory, uint64_t bytes) {
  const uint64_t start = reinterpret_cast<uint64_t>(memory), page = start & ~(kPage - 1);
  // With MS_ASYNC it looks at mappings, and does nothing else.
  return msync(reinterpret_cast<void*>(page), start + bytes - page, MS_ASYNC) == 0;
}

// Once.
void SayLost(const char* whose, bool* said) {
  if (std::exchange(*said, true)) return;
  LogLine(
      "the host and a kernel changed the same bytes of managed memory at the same time, which devices without "
      "concurrentManagedAccess do not allow; what the %s wrote is lost",
      whose);
}

}  // namespace

void ManagedMirror::Unmapper::operator()(char* memory) const { munmap(memory, bytes); }

bool ManagedMirror::MapVariable(uint64_t address, uint64_t bytes) {
  if (bytes == 0 || address + bytes < address) return false;
  MutexLock lock(&mutex_);
  for (uint64_t page = address & ~(kPage - 1); page < address + bytes; page += kPage) {
    if (variable_pages_.count(page) != 0) continue;
    void* const wanted = reinterpret_cast<void*>(page);
    void* const got =
        mmap(wanted, kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    if (got == MAP_FAILED) return false;
    if (got != wanted) {  // a kernel that does not know the flag
      munmap(got, kPage);
      return false;
    }
    HostArena::KeepFromChildren(got, kPage);
    variable_pages_.insert(page);
  }
  return true;
}

CUresult ManagedMirror::AddOnServer(ClientChannel* channel, uint64_t address, uint64_t bytes) {
  wire::OpMirrorAdd_Request request;
  request.address = address;
  request.bytes = bytes;
  std::string message;
  request.Encode(&message);
  FrameHeader header;
  header.call = kOpMirrorAdd;
  Reply reply;
  const ChannelStatus status = channel->Call(header, message, {}, nullptr, 0, &reply);
  return status == ChannelStatus::kOk ? CUresult(reply.result) : CUDA_ERROR_DEVICE_UNAVAILABLE;
}

CUresult ManagedMirror::Add(ClientChannel* channel, uint64_t address, uint64_t bytes, uint64_t memory,
                            Writers writers) {
  MutexLock lock(&mutex_);
  return AddLocked(channel, address, bytes, memory, writers);
}

CUresult ManagedMirror::AddVariable(ClientChannel* channel, uint64_t address, uint64_t bytes) {
  MutexLock lock(&mutex_);
  if (IsMirroredLocked(address, bytes)) return CUDA_SUCCESS;
  memset(reinterpret_cast<void*>(address), 0, bytes);
  return AddLocked(channel, address, bytes, address, Writers::kNobodyBesideTheGpu);
}

bool ManagedMirror::IsMirroredLocked(uint64_t address, uint64_t bytes) const {
  const auto it = ranges_.find(address);
  return it != ranges_.end() && it->second.bytes == bytes;
}

CUresult ManagedMirror::AddLocked(ClientChannel* channel, uint64_t address, uint64_t bytes, uint64_t memory,
                                  Writers writers) {
  if (IsMirroredLocked(address, bytes)) return CUDA_SUCCESS;
  char* const base = MapZeroes(bytes);
  if (!base) return CUDA_ERROR_OUT_OF_MEMORY;
  Range range;
  range.bytes = bytes;
  range.memory = reinterpret_cast<char*>(memory);
  range.writers = writers;
  range.base = std::unique_ptr<char, Unmapper>(base, Unmapper{bytes});
  if (const CUresult result = AddOnServer(channel, address, bytes); result != CUDA_SUCCESS) return result;
  ranges_[address] = std::move(range);
  ranges_count_.store(ranges_.size(), std::memory_order_release);
  return CUDA_SUCCESS;
}

void ManagedMirror::RemoveRange(uint64_t address) {
  MutexLock lock(&mutex_);
  if (const auto it = ranges_.find(address); it != ranges_.end()) {
    UnwatchLocked(&it->second);
    ranges_.erase(it);
  }
  ranges_count_.store(ranges_.size(), std::memory_order_release);
}

ChannelStatus ManagedMirror::SendRuns(ClientChannel* channel, std::string* runs) {
  if (runs->empty()) return ChannelStatus::kOk;
  FrameHeader header;
  header.call = kOpMirrorWrite;
  header.flags = kFlagNoReply;
  const ChannelStatus status = channel->Send(header, {}, *runs);
  runs->clear();
  return status;
}

void ManagedMirror::WatchLocked(Range* range) {
  range->watch = Range::kCompared;
  if (range->writers == Writers::kAnybody) return;
  const uint64_t start = reinterpret_cast<uint64_t>(range->memory), end = start + range->bytes;
  const uint64_t first = (start + kPage - 1) & ~(kPage - 1), last = end & ~(kPage - 1);
  if (first + (range->writers == Writers::kTransfers ? kWorthAsking : kWorthWatching) > last) return;
  if (!writes_.Watch(first, last - first)) return;
  range->watch = Range::kWatched;
  range->first = first - start;
  range->last = last - start;
  range->recent = RecentPages(first, last - first);
}

void ManagedMirror::UnwatchLocked(Range* range) {
  if (range->watch != Range::kWatched) return;
  range->watch = Range::kCompared;
  writes_.Unwatch(reinterpret_cast<uint64_t>(range->memory) + range->first, range->last - range->first);
}

void ManagedMirror::WatchShared(uint64_t address, uint64_t bytes) {
  MutexLock lock(&mutex_);
  if (said_of_shared_ || !writes_.Watch(address, bytes)) return;
  shared_[address] = bytes;
  watches_shared_.store(true, std::memory_order_release);
}

void ManagedMirror::UnwatchShared(uint64_t address) {
  if (!watches_shared()) return;
  MutexLock lock(&mutex_);
  const auto it = shared_.find(address);
  if (it == shared_.end()) return;
  writes_.Unwatch(address, it->second);
  shared_.erase(it);
  watches_shared_.store(!shared_.empty(), std::memory_order_release);
}

void ManagedMirror::UnwatchShared() {
  MutexLock lock(&mutex_);
  said_of_shared_ = true;
  UnwatchSharedLocked();
}

void ManagedMirror::UnwatchSharedLocked() {
  for (const auto& [address, bytes] : shared_) writes_.Unwatch(address, bytes);
  shared_.clear();
  working_ = false;
  watches_shared_.store(false, std::memory_order_release);
}

void ManagedMirror::WorkBegins() {
  MutexLock lock(&mutex_);
  if (working_ || host_functions_ != 0) return;
  if (++looked_at_ > kLooks && looked_at_ % kLooks != 0) return;
  // What was written until now was written beside nothing.
  for (const auto& [address, bytes] : shared_) writes_.Collect(address, bytes, &collected_);
  working_ = true;
}

void ManagedMirror::WorkEnded() {
  MutexLock lock(&mutex_);
  if (!std::exchange(working_, false)) return;
  bool written = false;
  for (const auto& [address, bytes] : shared_) {
    written = written || (writes_.Collect(address, bytes, &collected_) && !collected_.empty());
  }
  if (!written) return;
  LogLine(
      "the host wrote to managed memory while the GPU was at work, which devices without concurrentManagedAccess do "
      "not allow; what both change at the same time is lost or wrong");
  said_of_shared_ = true;
  UnwatchSharedLocked();
}

void ManagedMirror::WorkMayHaveEnded() {
  MutexLock lock(&mutex_);
  working_ = false;
}

void ManagedMirror::HostFunctionBegins() {
  MutexLock lock(&mutex_);
  working_ = false;
  ++host_functions_;
}

void ManagedMirror::HostFunctionEnds() {
  MutexLock lock(&mutex_);
  --host_functions_;
}

void ManagedMirror::StopWatching() {
  MutexLock lock(&mutex_);
  UnwatchSharedLocked();
  writes_.Close();
  for (auto* ranges : {&ranges_, &former_}) {
    for (auto& [address, range] : *ranges) range.watch = Range::kUnknown;
  }
}

ChannelStatus ManagedMirror::PushPartLocked(ClientChannel* channel, uint64_t address, const Range& range, uint64_t from,
                                            uint64_t to) {
  uint64_t at = 0;
  // Exact: the GPU may be changing the bytes between at this moment.
  while (!mirror::CollectChanges(address + from, range.memory + from, range.base.get() + from, to - from, true, &at,
                                 &runs_)) {
    if (const ChannelStatus status = SendRuns(channel, &runs_); status != ChannelStatus::kOk) return status;
  }
  return ChannelStatus::kOk;
}

bool ManagedMirror::CollectLocked(Range* range) {
  range->written.clear();
  if (!IsMapped(range->memory, range->bytes)) return false;
  const uint64_t start = reinterpret_cast<uint64_t>(range->memory);
  range->all = range->watch != Range::kWatched;
  if (range->watch == Range::kUnknown) {
    WatchLocked(range);
  } else if (!range->all && !writes_.Collect(start + range->first, range->last - range->first, &range->written)) {
    UnwatchLocked(range);
    range->all = true;
  }
  return true;
}

ChannelStatus ManagedMirror::PushRangeLocked(ClientChannel* channel, uint64_t address, const Range& range) {
  const uint64_t start = reinterpret_cast<uint64_t>(range.memory);
  ChannelStatus status = PushPartLocked(channel, address, range, 0, range.all ? range.bytes : range.first);
  if (range.all || status != ChannelStatus::kOk) return status;
  for (const auto& [begin, end] : range.written) {
    status = PushPartLocked(channel, address, range, begin - start, end - start);
    if (status != ChannelStatus::kOk) return status;
  }
  return PushPartLocked(channel, address, range, range.last, range.bytes);
}

ChannelStatus ManagedMirror::PushLocked(ClientChannel* channel, const std::vector<Ranges::iterator>& ranges) {
  std::vector<Ranges::iterator> there;
  bool any = false;
  for (const Ranges::iterator& it : ranges) {
    if (!CollectLocked(&it->second)) continue;
    there.push_back(it);
    any = any || (it->second.watch == Range::kWatched && it->second.writers == Writers::kTransfers);
  }
  // Only now: what began before, and so was reported just now, and has ended since then, has brought its bytes. What
  // has not is still here to be seen.
  const bool transfers = any && (writes_.forked() || TransfersPossible());
  const Moment now = any ? Now() : Moment();
  for (const Ranges::iterator& it : there) {
    Range& range = it->second;
    if (range.watch == Range::kWatched && range.writers == Writers::kTransfers) {
      range.written = range.recent.Add(range.written, now);
      // All: it has just begun to be watched, and what began before was not reported.
      const bool unsure = transfers || range.all;
      range.all = unsure || range.doubted;
      range.doubted = unsure;
    }
    const ChannelStatus status = PushRangeLocked(channel, it->first, range);
    if (status != ChannelStatus::kOk) return status;
  }
  return SendRuns(channel, &runs_);
}

ChannelStatus ManagedMirror::PushLocked(ClientChannel* channel) {
  std::vector<Ranges::iterator> all;
  for (auto it = ranges_.begin(); it != ranges_.end(); ++it) all.push_back(it);
  return PushLocked(channel, all);
}

ChannelStatus ManagedMirror::Push(ClientChannel* channel) {
  MutexLock lock(&mutex_);
  return PushLocked(channel);
}

ChannelStatus ManagedMirror::Push(ClientChannel* channel, const std::vector<uint64_t>& addresses) {
  MutexLock lock(&mutex_);
  std::vector<Ranges::iterator> named;
  for (const uint64_t address : addresses) {
    const auto it = FindLocked(address);
    if (it != ranges_.end() && std::find(named.begin(), named.end(), it) == named.end()) named.push_back(it);
  }
  return PushLocked(channel, named);
}

ManagedMirror::Ranges::iterator ManagedMirror::FindLocked(uint64_t address) {
  auto it = ranges_.upper_bound(address);
  if (it == ranges_.begin()) return ranges_.end();
  --it;
  return address - it->first < it->second.bytes ? it : ranges_.end();
}

bool ManagedMirror::ApplyLocked(std::string_view runs) {
  const Range* last = nullptr;
  bool is_mapped = false;
  return mirror::ForEachRun(runs, [&](uint64_t address, std::string_view bytes) {
    mutex_.AssertHeld();
    const auto it = FindLocked(address);
    if (it == ranges_.end()) return false;
    const uint64_t offset = address - it->first;
    if (bytes.size() > it->second.bytes - offset) return false;
    const Range& range = it->second;
    if (last != &range) is_mapped = IsMapped(range.memory, range.bytes);
    last = &range;
    if (!is_mapped) return true;
    const bool alone = mirror::ApplyRun(bytes.data(), bytes.size(), range.memory + offset, range.base.get() + offset);
    if (!alone && range.writers == Writers::kNobodyBesideTheGpu) SayLost("host", &said_);
    return true;
  });
}

ChannelStatus ManagedMirror::Pull(ClientChannel* channel) {
  // Held over the wait: an answer must not cross what another thread sends, or it would bring old bytes back.
  MutexLock lock(&mutex_);
  if (ranges_.empty()) return ChannelStatus::kOk;
  pulled_.resize(mirror::kMostRuns);
  wire::OpMirrorRead_Request request;
  std::string message;
  Reply reply;
  do {
    message.clear();
    request.Encode(&message);
    FrameHeader header;
    header.call = kOpMirrorRead;
    const ChannelStatus status = channel->Call(header, message, {}, &pulled_[0], pulled_.size(), &reply);
    if (status != ChannelStatus::kOk) return status;
    // A context that a kernel has broken: there is nothing to fetch, and the calls themselves say so.
    if (reply.result != CUDA_SUCCESS) return ChannelStatus::kOk;
    wire::OpMirrorRead_Reply answer;
    if (!answer.Decode(reply.message) || reply.payload_bytes > pulled_.size() ||
        !ApplyLocked(std::string_view(pulled_.data(), reply.payload_bytes))) {
      return ChannelStatus::kProtocolError;
    }
    if (answer.lost) SayLost("kernel", &said_of_kernel_);
    if (answer.next != 0 && answer.next <= request.from) return ChannelStatus::kProtocolError;
    request.from = answer.next;
  } while (request.from != 0);
  return ChannelStatus::kOk;
}

CUresult ManagedMirror::MoveTo(ClientChannel* channel, const std::vector<Place>& places) {
  MutexLock lock(&mutex_);
  former_.clear();
  former_.swap(ranges_);
  const CUresult result = MoveToLocked(channel, places);
  // Memory stays mirrored with the other server: what it knows is what it knew.
  if (result != CUDA_SUCCESS) MoveBackLocked();
  runs_.clear();
  ranges_count_.store(ranges_.size(), std::memory_order_release);
  return result;
}

void ManagedMirror::MoveBackLocked() {
  ranges_.swap(former_);
  former_.clear();
}

void ManagedMirror::MoveBack() {
  MutexLock lock(&mutex_);
  MoveBackLocked();
  ranges_count_.store(ranges_.size(), std::memory_order_release);
}

void ManagedMirror::ForgetFormer() {
  MutexLock lock(&mutex_);
  former_.clear();
}

CUresult ManagedMirror::MoveToLocked(ClientChannel* channel, const std::vector<Place>& places) {
  for (const Place& place : places) {
    const CUresult result = AddLocked(channel, place.address, place.bytes, place.memory, place.writers);
    if (result != CUDA_SUCCESS) return result;
    if (place.fresh) continue;
    // All bytes, whether they are zero or not.
    char* const base = ranges_[place.address].base.get();
    const char* const now = reinterpret_cast<const char*>(place.memory);
    constexpr uint64_t kPiece = 256 << 10;
    for (uint64_t at = 0; at < place.bytes; at += kPiece) {
      const uint64_t bytes = std::min(kPiece, place.bytes - at);
      memcpy(base + at, now + at, bytes);
      mirror::AppendRun(place.address + at, base + at, bytes, &runs_);
      if (SendRuns(channel, &runs_) != ChannelStatus::kOk) return CUDA_ERROR_DEVICE_UNAVAILABLE;
    }
  }
  return PushLocked(channel) == ChannelStatus::kOk ? CUDA_SUCCESS : CUDA_ERROR_DEVICE_UNAVAILABLE;
}

}  // namespace cuda_remote::client
