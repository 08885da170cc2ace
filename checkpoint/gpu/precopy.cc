// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/gpu/precopy.h"

#include <cuda.h>

#include <algorithm>
#include <chrono>
#include <thread>
#include <unordered_set>
#include <utility>

#include "proto/base/clock.h"
#include "proto/base/status_macros.h"
#include "proto/threads/mutex.h"

namespace cuda_remote::checkpoint {
namespace {

using ckptfmt::kChunkBytes;
using ckptfmt::Region;
using ckptfmt::RegionKind;

// Between the two looks that tell what changes all the time: several steps of most jobs.
constexpr auto kLook = std::chrono::milliseconds(250);
// Looks that are to tell what changes hash one row of each chunk in so many.
constexpr uint32_t kPart = 16;
// A chunk of less is read as quickly in the pause.
constexpr size_t kWorthCopying = kWorthHashing;
// Rounds end when less than this has changed, or not much less than in the round before, or after so many.
constexpr uint64_t kLittle = 64 << 20;
// The same for copies that go to a sink, which is slower in the pause.
constexpr uint64_t kLittleToSink = 8 << 20;
constexpr double kHelps = 0.7;
constexpr int kMostRounds = 5;
// How often the memory is looked at again if some of it is freed meanwhile, or a stream is being captured.
constexpr int kMostLooks = 8;
constexpr int kMostIdleLooks = 20;  // each may hold the job's next calls up for 50 ms
constexpr auto kPause = std::chrono::milliseconds(10);
constexpr uint32_t kNotReady = CUDA_ERROR_NOT_READY;

// False: cancelled.
bool Sleep(std::chrono::milliseconds time, const std::function<bool()>& cancelled) {
  constexpr auto kNap = std::chrono::milliseconds(10);
  for (const Moment end = Now() + time; Now() < end;) {
    if (cancelled && cancelled()) return false;
    std::this_thread::sleep_for(kNap);
  }
  return true;
}

size_t BytesOf(const Region& region, uint64_t index) {
  return size_t(std::min(kChunkBytes, region.bytes - index * kChunkBytes));
}

}  // namespace

void PrecopyTimes::Add(const PrecopyTimes& other) {
  rounds = std::max(rounds, other.rounds);
  copied_bytes += other.copied_bytes;
  kept_bytes += other.kept_bytes;
  seconds += other.seconds;
}

bool Precopy::MayCopy(const Region& region, size_t bytes) const {
  return region.kind == RegionKind::kAllocation && bytes >= kWorthCopying && (sink_ == nullptr || sink_->Has(region));
}

void Precopy::Drop(uint64_t address) {
  const auto copy = copies_.find(address);
  if (copy == copies_.end()) return;
  if (copy->second.slot != nullptr) pool_->Give(copy->second.slot);
  copies_.erase(copy);
}

uint64_t Precopy::held_bytes() const {
  uint64_t bytes = 0;
  for (const auto& [address, copy] : copies_) bytes += copy.slot != nullptr ? copy.bytes : 0;
  return bytes;
}

void Precopy::Clear() {
  for (const auto& [address, copy] : copies_) {
    if (copy.slot != nullptr) pool_->Give(copy.slot);
  }
  copies_.clear();
}

absl::Status Precopy::Follow(SideRequests* requests) {
  if (sink_ == nullptr) return absl::OkStatus();
  CR_ASSIGN_OR_RETURN(CopySink::Ranges lost, sink_->Follow(requests));
  std::sort(lost.begin(), lost.end());
  const auto is_lost = [&](uint64_t address) {
    const auto after = std::upper_bound(lost.begin(), lost.end(), std::make_pair(address, UINT64_MAX));
    return after != lost.begin() && address < std::prev(after)->second;
  };
  for (auto it = copies_.begin(); it != copies_.end();) it = is_lost(it->first) ? copies_.erase(it) : std::next(it);
  return absl::OkStatus();
}

absl::Status Precopy::Round(SideRequests* requests, SharedBuffers* shared, uint64_t most_bytes,
                            const std::vector<Peeker::Chunk>& wanted, const std::function<bool()>& cancelled) {
  ++times_.rounds;
  for (const Peeker::Chunk& chunk : wanted) Drop(chunk.address);
  Mutex mutex;
  {
    Peeker peeker(requests, shared, pool_, [&](const Peeker::Chunk& chunk, char* slot) {
      // Of the copy: the memory may be another one by now.
      const ChunkHash hash = HashChunk(slot, chunk.bytes);
      if (sink_ != nullptr) {
        const bool taken = sink_->Put(chunk, slot);
        pool_->Give(slot);
        if (!taken) return;
        slot = nullptr;
      }
      MutexLock lock(&mutex);
      copies_[chunk.address] = {slot, chunk.bytes, hash};
      times_.copied_bytes += chunk.bytes;
    });
    for (const Peeker::Chunk& chunk : wanted) {
      // A stream that is being captured, for one: another round may have more luck.
      if (peeker.refused() != 0 || (cancelled && cancelled())) break;
      if (sink_ != nullptr && sink_->is_lost()) break;
      // On the way to a sink there are fewer chunks than slots.
      char* const slot = sink_ != nullptr ? pool_->Take() : pool_->TryTake(chunk.bytes, most_bytes);
      if (slot == nullptr) break;
      CR_RETURN_IF_ERROR(peeker.Add(chunk, slot));
    }
  }
  return sink_ == nullptr ? absl::OkStatus() : sink_->Finish();
}

absl::Status Precopy::Look(SideRequests* requests, const std::function<bool()>& cancelled, bool whole,
                           uint32_t* refused) {
  absl::Status status;
  // The job may free memory in between; and the first time the GPU has to be idle for a moment.
  int left = kMostLooks;
  for (int attempt = 0; attempt < kMostIdleLooks && left > 0; ++attempt) {
    *refused = 0;
    absl::StatusOr<std::vector<Region>> regions = ListNow(requests);
    status = regions.status();
    if (!status.ok()) break;
    using Hashes = std::vector<std::vector<ChunkHash>>;
    absl::StatusOr<Hashes> parts = HashRegions(requests, *regions, refused, kPart), hashes = Hashes();
    if (parts.ok() && whole) hashes = HashRegions(requests, *regions, refused);
    status = parts.ok() ? hashes.status() : parts.status();
    if (status.ok()) {
      regions_ = *std::move(regions);
      parts_ = *std::move(parts);
      hashes_ = *std::move(hashes);
      looked_ = Now();
      return status;
    }
    if (*refused == 0 || !Sleep(kPause, cancelled)) break;
    if (*refused != kNotReady) --left;
  }
  regions_.clear();
  parts_.clear();
  hashes_.clear();
  return status;
}

absl::Status Precopy::Look(SideRequests* requests, const std::function<bool()>& cancelled) {
  const Moment start = Now();
  uint32_t refused = 0;
  known_bytes_ = pool_bytes_ = 0;
  const absl::Status status = Look(requests, cancelled, is_known_ != nullptr, &refused);
  times_.seconds += SecondsSince(start);
  if (!status.ok()) return refused != 0 ? absl::OkStatus() : status;
  std::vector<size_t> unknown;
  for (size_t i = 0; i < regions_.size(); ++i) {
    for (uint64_t index = 0; index * kChunkBytes < regions_[i].bytes; ++index) {
      const size_t bytes = BytesOf(regions_[i], index);
      const bool known = is_known_ && index < hashes_[i].size() && is_known_(regions_[i], index, hashes_[i][index]);
      if (known) known_bytes_ += bytes;
      if (!known) unknown.push_back(bytes);
    }
  }
  pool_bytes_ = ChunkPool::MostTaken(unknown);
  return absl::OkStatus();
}

absl::Status Precopy::Run(SideRequests* requests, SharedBuffers* shared, uint64_t most_bytes,
                          const std::function<bool()>& cancelled) {
  const Moment start = Now();
  struct Stop {
    Precopy* owner;
    Moment start;
    ~Stop() { owner->times_.seconds += SecondsSince(start); }
  } stop{this, start};
  // By address, as of the look before.
  std::unordered_map<uint64_t, Seen> before;
  // What may be copied, as of the last look. The hash is null where only parts were hashed: then a chunk is known that
  // was known before and has not changed.
  const auto for_each = [&](const auto& use) {
    for (size_t i = 0; i < regions_.size(); ++i) {
      const Region& region = regions_[i];
      for (uint64_t index = 0; index < parts_[i].size(); ++index) {
        const size_t bytes = BytesOf(region, index);
        if (!MayCopy(region, bytes)) continue;
        const Peeker::Chunk chunk{region.address + index * kChunkBytes, bytes, region.context, 0, i + 1};
        const ChunkHash* const hash = hashes_.empty() ? nullptr : &hashes_[i][index];
        Seen seen{parts_[i][index]};
        if (hash != nullptr) {
          seen.known = is_known_ && is_known_(region, index, *hash);
        } else if (const auto was = before.find(chunk.address); was != before.end()) {
          seen.known = was->second.known && was->second.part == seen.part;
        }
        use(chunk, seen, hash);
      }
    }
  };
  CR_RETURN_IF_ERROR(Follow(requests));
  const uint64_t little = sink_ != nullptr ? kLittleToSink : kLittle;
  uint64_t unknown = 0;
  std::unordered_map<uint64_t, Seen> now;
  for_each([&](const Peeker::Chunk& chunk, const Seen& seen, const ChunkHash*) {
    now[chunk.address] = seen;
    if (!seen.known) unknown += chunk.bytes;
  });
  before.swap(now);
  // With most of it known, the wait for another look would be longer than reading this in the pause.
  if (unknown == 0 || (known_bytes_ > 0 && unknown <= kLittle)) return absl::OkStatus();
  CR_ASSIGN_OR_RETURN(SharedBuffers* const attached, Peeker::Attach(requests, shared));
  const auto rest = std::chrono::duration_cast<std::chrono::milliseconds>(looked_ + kLook - Now());
  uint64_t last = UINT64_MAX;
  for (int round = 0; round < kMostRounds && Sleep(round == 0 ? rest : std::chrono::milliseconds(0), cancelled);
       ++round) {
    uint32_t refused = 0;
    // Copies are compared with the whole.
    if (const absl::Status status = Look(requests, cancelled, !copies_.empty(), &refused); !status.ok()) {
      return refused != 0 ? absl::OkStatus() : status;
    }
    CR_RETURN_IF_ERROR(Follow(requests));
    // What has not changed since the last look, and is not there already. What has changed may go on changing.
    std::vector<Peeker::Chunk> wanted;
    std::unordered_set<uint64_t> there;
    uint64_t bytes = 0;
    now.clear();
    for_each([&](const Peeker::Chunk& chunk, const Seen& seen, const ChunkHash* hash) {
      now[chunk.address] = seen;
      if (seen.known) return;
      there.insert(chunk.address);
      const auto copy = copies_.find(chunk.address);
      const auto was = before.find(chunk.address);
      const bool stands = was != before.end() && !was->second.known && was->second.part == seen.part;
      if (hash != nullptr && copy != copies_.end() && copy->second.bytes == chunk.bytes && copy->second.hash == *hash) {
        return;
      }
      // A copy of something else is wanted again even so: it stood still once.
      if (!stands && copy == copies_.end()) return;
      wanted.push_back(chunk);
      bytes += chunk.bytes;
    });
    for (auto it = copies_.begin(); it != copies_.end();) {
      if (there.count(it->first) != 0) {
        ++it;
        continue;
      }
      if (it->second.slot != nullptr) pool_->Give(it->second.slot);
      it = copies_.erase(it);
    }
    before.swap(now);
    if (wanted.empty() || (round > 0 && (bytes <= little || double(bytes) > kHelps * double(last)))) break;
    last = bytes;
    CR_RETURN_IF_ERROR(Round(requests, attached, most_bytes, wanted, cancelled));
  }
  return absl::OkStatus();
}

void Precopy::Compare(const std::vector<Region>& regions, const std::vector<std::vector<ChunkHash>>& hashes) {
  std::unordered_map<uint64_t, Copy> right;
  for (size_t i = 0; i < regions.size(); ++i) {
    for (uint64_t index = 0; index < hashes[i].size(); ++index) {
      const size_t bytes = BytesOf(regions[i], index);
      if (!MayCopy(regions[i], bytes)) continue;
      const auto copy = copies_.find(regions[i].address + index * kChunkBytes);
      if (copy == copies_.end() || copy->second.bytes != bytes || copy->second.hash != hashes[i][index]) continue;
      times_.kept_bytes += bytes;
      right.insert(*copy);
      copies_.erase(copy);
    }
  }
  Clear();
  copies_ = std::move(right);
}

char* Precopy::Take(const Region& region, uint64_t index) {
  if (region.kind != RegionKind::kAllocation) return nullptr;
  const auto copy = copies_.find(region.address + index * kChunkBytes);
  if (copy == copies_.end() || copy->second.bytes != BytesOf(region, index)) return nullptr;
  char* const slot = copy->second.slot;
  copies_.erase(copy);
  return slot;
}

}  // namespace cuda_remote::checkpoint
