// SPDX-License-Identifier: Apache-2.0
// TunnelEnd's part for lanes: further connections for bulk.

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "proto/base/clock.h"
#include "proto/codec/wire.h"
#include "proto/control/tunnel_end.h"
#include "proto/threads/mutex.h"
#include "proto/threads/start_thread.h"

namespace cuda_remote::control {
namespace {

// So much bulk is worth further connections.
constexpr uint64_t kBulkBytes = 4 << 20;
// A lane that comes before its run has begun waits so long for it.
constexpr auto kRunWait = std::chrono::seconds(5);
// Batches that a lane is given at a time: one that it writes, and the next.
constexpr size_t kMostLoad = 2;
// How long frames that were sent before a goodbye may take over their lanes.
constexpr int kBehindMs = 2000;

}  // namespace

void TunnelEnd::CountBulk(uint64_t bytes) {
  const uint64_t before = bulk_bytes_.fetch_add(bytes, std::memory_order_relaxed);
  if (before >= kBulkBytes || before + bytes < kBulkBytes) return;
  WakeWaiting();
}

void TunnelEnd::WakeWaiting() {
  { MutexLock lock(&lanes_mutex_); }
  lanes_changed_.NotifyAll();
}

bool TunnelEnd::AwaitBulk(const std::atomic<bool>* stop) {
  MutexLock lock(&lanes_mutex_);
  while (!stop->load() && bulk_bytes_.load() < kBulkBytes) lanes_changed_.Wait(&lanes_mutex_);
  return !stop->load();
}

bool TunnelEnd::Dispatch(const Batch& batch) {
  if (lane_count_.load(std::memory_order_relaxed) == 0) return false;
  MutexLock lock(&lanes_mutex_);
  Lane* chosen = nullptr;
  for (Lane* const lane : lanes_) {
    if (!lane->over && lane->load < kMostLoad && (!chosen || lane->load < chosen->load)) chosen = lane;
  }
  if (!chosen) return false;
  ++chosen->load;
  chosen->waiting.push_back(batch);
  ++given_[chosen->index];
  counts_due_.store(true, std::memory_order_relaxed);
  chosen->awake.store(true, std::memory_order_release);
  // Under the lock: the lane lives as long as it is in the list.
  chosen->changed.NotifyOne();
  return true;
}

void TunnelEnd::LaneLoop(Lane* lane) {
  while (true) {
    // A busy lane's next batch comes soon: waking up would take longer.
    if (!lane->spin.Spin([lane] { return lane->awake.load(std::memory_order_acquire); })) {
      const int64_t start = NowNs();
      MutexLock lock(&lanes_mutex_);
      while (!lane->awake.load(std::memory_order_relaxed)) lane->changed.Wait(&lanes_mutex_);
      lane->spin.Slept(NowNs() - start);
    }
    Batch batch;
    {
      MutexLock lock(&lanes_mutex_);
      if (lane->over) return;
      if (lane->waiting.empty()) {
        lane->awake.store(false, std::memory_order_relaxed);
        continue;
      }
      batch = lane->waiting.front();
      lane->waiting.pop_front();
    }
    const bool written = lane->stream->Write(Encode(batch, TunnelMessage()));
    MutexLock lock(&lanes_mutex_);
    if (!written) {
      // The batch is sent again over the next stream: with any of its lanes this one breaks.
      lane->over = true;
      lane->arriving.NotifyOne();
      lane->stream->Cancel();
      return;
    }
    --lane->load;
  }
}

bool TunnelEnd::AwaitArrival(Lane* lane) {
  const auto arriving = [this, lane] { return lane->read < announced_[lane->index].load(std::memory_order_acquire); };
  if (!lane->arriving_spin.Spin(arriving)) {
    const int64_t start = NowNs();
    MutexLock lock(&lanes_mutex_);
    while (!lane->over && !arriving()) lane->arriving.Wait(&lanes_mutex_);
    lane->arriving_spin.Slept(NowNs() - start);
    if (lane->over) return false;
  }
  ++lane->read;
  if (checked_) lane->since_ns.store(NowNs());
  return true;
}

void TunnelEnd::EndLane(Lane* lane) {
  MutexLock lock(&lanes_mutex_);
  lane->over = true;
  lane->arriving.NotifyOne();
}

std::string TunnelEnd::TakeCounts() {
  std::string counts;
  if (!counts_due_.load(std::memory_order_relaxed)) return counts;
  MutexLock lock(&lanes_mutex_);
  counts_due_.store(false, std::memory_order_relaxed);
  for (const uint64_t given : given_) wire::PutVarint(&counts, given);
  return counts;
}

bool TunnelEnd::LearnCounts(const std::string& counts) {
  MutexLock lock(&lanes_mutex_);
  size_t at = 0;
  for (uint32_t i = 0; i < kMostLanes && at < counts.size(); ++i) {
    uint64_t count = 0;
    for (int shift = 0;; shift += 7) {
      if (at == counts.size() || shift > 56) return false;
      const uint8_t byte = uint8_t(counts[at++]);
      count |= uint64_t(byte & 0x7f) << shift;
      if (byte < 0x80) break;
    }
    if (count < announced_[i].load(std::memory_order_relaxed)) return false;
    announced_[i].store(count, std::memory_order_release);
  }
  for (Lane* const lane : lanes_) lane->arriving.NotifyOne();
  return at == counts.size();
}

bool TunnelEnd::RunLane(TunnelStream* stream, uint64_t number, uint32_t index) {
  Lane lane(stream, index);
  {
    MutexLock lock(&lanes_mutex_);
    const auto end = Now() + kRunWait;
    while (run_ != number && !ended() && lanes_changed_.WaitUntil(&lanes_mutex_, end)) {
    }
    if (run_ != number || number == 0 || index >= kMostLanes) return false;
    for (const Lane* const other : lanes_) {
      if (other->index == index) return false;
    }
    lanes_.push_back(&lane);
    lane_count_.store(int(lanes_.size()), std::memory_order_relaxed);
  }
  std::thread writer = StartThread([this, &lane] { LaneLoop(&lane); });
  Arrivals arrivals;
  std::thread placer = StartThread([this, stream, &arrivals, &lane] { PlaceLoop(stream, &arrivals, &lane); });
  if (writer.joinable() && placer.joinable()) ReadLoop(stream, &arrivals, &lane);
  stream->DoneReading();
  {
    MutexLock lock(&arrivals.mutex);
    arrivals.over = true;
  }
  arrivals.changed.NotifyAll();
  if (placer.joinable()) placer.join();
  {
    MutexLock lock(&lanes_mutex_);
    lane.over = true;
    lane.awake.store(true, std::memory_order_release);
    lane.changed.NotifyOne();
    if (run_ == number) main_->Cancel();
  }
  // The writer may be stuck in a connection that does not move.
  stream->Cancel();
  if (writer.joinable()) writer.join();
  {
    MutexLock lock(&lanes_mutex_);
    lanes_.erase(std::find(lanes_.begin(), lanes_.end(), &lane));
    lane_count_.store(int(lanes_.size()), std::memory_order_relaxed);
    lanes_changed_.NotifyAll();
  }
  return true;
}

void TunnelEnd::EndLanes() {
  MutexLock lock(&lanes_mutex_);
  run_ = 0;
  for (Lane* const lane : lanes_) {
    lane->over = true;
    lane->arriving.NotifyOne();
    lane->stream->Cancel();
  }
  while (!lanes_.empty()) lanes_changed_.Wait(&lanes_mutex_);
  main_ = nullptr;
}

void TunnelEnd::AwaitLanes(uint64_t position) {
  for (int waited = 0; waited < kBehindMs && takes_lanes_.load() && in_[0]->position.load() < position; ++waited) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

}  // namespace cuda_remote::control
