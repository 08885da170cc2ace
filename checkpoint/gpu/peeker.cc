// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/gpu/peeker.h"

#include <cuda.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <system_error>
#include <utility>

#include "ckptfmt/types.h"
#include "proto/base/clock.h"
#include "proto/base/status_macros.h"
#include "proto/codec/operations.gen.h"
#include "proto/frame/frame.h"
#include "proto/threads/mutex.h"

namespace cuda_remote::checkpoint {
namespace {

using ckptfmt::kChunkBytes;

// Each copies some gigabytes a second.
constexpr unsigned kMostThreads = 6;
// Chunks on the way without shared memory, in pieces that a message has room for.
constexpr size_t kChannelFlights = 4;
// How long a job may capture, and how often the server is asked meanwhile.
constexpr uint32_t kCapturing = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
constexpr std::chrono::seconds kLongestCapture(60);
constexpr std::chrono::milliseconds kBetweenQuestions(5);

}  // namespace

absl::StatusOr<SharedBuffers*> Peeker::Attach(SideRequests* requests, SharedBuffers* shared) {
  if (shared == nullptr || !requests->shared_memory()) return nullptr;
  agent::SideRequest map;
  shared->MapRequest(&map);
  CR_ASSIGN_OR_RETURN(const agent::SideAnswer answer, AskAndWait(requests, map));
  return answer.result == 0 ? shared : nullptr;
}

Peeker::Peeker(SideRequests* requests, SharedBuffers* shared, ChunkPool* pool, Use use, Captures captures)
    : requests_(requests), shared_(shared), pool_(pool), use_(std::move(use)), captures_(captures) {
  if (shared == nullptr) return;
  free_buffers_.fill(true);
  const unsigned count = std::clamp(std::thread::hardware_concurrency() * 3 / 8, 1u, kMostThreads);
  try {
    while (threads_.size() < count) threads_.emplace_back([this] { Work(); });
  } catch (const std::system_error&) {
    // Fewer will do; without any, the caller's thread does it.
  }
}

Peeker::~Peeker() {
  Finish().IgnoreError();
  {
    MutexLock lock(&mutex_);
    over_ = true;
  }
  changed_.NotifyAll();
  for (std::thread& thread : threads_) thread.join();
}

bool Peeker::Follows(const Chunk& chunk) const {
  if (shared_ == nullptr || next_.empty() || next_.size() == kMostTogether) return false;
  const Chunk& last = next_.back().chunk;
  return chunk.allocation != 0 && chunk.allocation == last.allocation && chunk.context == last.context &&
         last.bytes == kChunkBytes && chunk.address == last.address + kChunkBytes;
}

absl::Status Peeker::Add(const Chunk& chunk, char* slot) {
  absl::Status status;
  if (!Follows(chunk)) status = Send();
  next_.push_back({chunk, slot, kNone});
  // Nothing can follow these.
  const bool ends = shared_ == nullptr || chunk.allocation == 0 || chunk.bytes != kChunkBytes;
  if (status.ok() && (ends || next_.size() == kMostTogether)) status = Send();
  return status;
}

absl::Status Peeker::Send() {
  if (next_.empty()) return absl::OkStatus();
  Flight flight{std::exchange(next_, {}), {}, {}, {}};
  absl::Status status;
  if (shared_ == nullptr && flights_.size() >= kChannelFlights) status = FinishOne();
  size_t first = 0;
  for (bool taken = shared_ == nullptr; status.ok() && !taken;) {
    const bool waits = flights_.empty();
    {
      MutexLock lock(&mutex_);
      while (!(taken = TakeBuffersLocked(flight.what.size(), &first)) && waits) changed_.Wait(&mutex_);
    }
    if (!taken) status = FinishOne();
  }
  uint64_t bytes = 0;
  for (size_t i = 0; i < flight.what.size(); ++i) {
    bytes += flight.what[i].chunk.bytes;
    if (shared_ != nullptr && status.ok()) flight.what[i].buffer = first + i;
  }
  const uint64_t piece = shared_ != nullptr ? bytes : kMaxPayloadBytes;
  for (uint64_t at = 0; status.ok() && at < bytes; at += piece) {
    const Chunk& chunk = flight.what[0].chunk;
    wire::OpPeekMemory_Request peek;
    peek.address = chunk.address + at;
    peek.bytes = std::min<uint64_t>(piece, bytes - at);
    peek.context = chunk.context;
    if (shared_ != nullptr) peek.to = shared_->address(first);
    agent::SideRequest asked = SideRequestOf(kOpPeekMemory, peek);
    if (shared_ == nullptr) asked.payload_bytes = peek.bytes;
    const absl::StatusOr<uint64_t> number = requests_->Begin(asked);
    status = number.status();
    if (!status.ok()) break;
    flight.asked.push_back(std::move(asked));
    flight.numbers.push_back(*number);
    flight.sizes.push_back(peek.bytes);
  }
  flights_.push_back(std::move(flight));
  return status;
}

absl::Status Peeker::Finish() {
  absl::Status status = Send();
  while (!flights_.empty()) status.Update(FinishOne());
  return status;
}

absl::StatusOr<agent::SideAnswer> Peeker::WaitFor(const agent::SideRequest& asked, uint64_t number) {
  const auto end = Now() + kLongestCapture;
  while (true) {
    CR_ASSIGN_OR_RETURN(agent::SideAnswer answer, requests_->Wait(number));
    // After one that was refused for so long, no other waits.
    if (captures_ == Captures::kRefuse || refused_ != 0 || answer.result != kCapturing || Now() > end) return answer;
    std::this_thread::sleep_for(kBetweenQuestions);
    CR_ASSIGN_OR_RETURN(number, requests_->Begin(asked));
  }
}

// Waits for the oldest chunk.
absl::Status Peeker::FinishOne() {
  const Flight flight = std::move(flights_.front());
  flights_.pop_front();
  size_t bytes = 0;
  for (const Arrived& what : flight.what) bytes += what.chunk.bytes;
  absl::Status status;
  bool here = true;
  size_t at = 0;
  for (size_t i = 0; i < flight.numbers.size(); ++i) {
    const absl::StatusOr<agent::SideAnswer> answer = WaitFor(flight.asked[i], flight.numbers[i]);
    status.Update(answer.status());
    if (!answer.ok()) {
      here = false;
    } else if (answer->result != 0) {
      refused_ = answer->result;
      here = false;
    } else if (shared_ == nullptr) {
      here = here && answer->payload.size() == flight.sizes[i];
      if (here) memcpy(flight.what[0].slot + at, answer->payload.data(), flight.sizes[i]);
    }
    at += flight.sizes[i];
  }
  for (const Arrived& what : flight.what) {
    if (!here || at != bytes) {
      pool_->Give(what.slot);
      GiveBuffer(what.buffer);
    } else if (threads_.empty()) {
      Do(what);
    } else {
      MutexLock lock(&mutex_);
      arrived_.push_back(what);
      changed_.NotifyAll();
    }
  }
  return status;
}

bool Peeker::TakeBuffersLocked(size_t count, size_t* first) {
  const auto begin = std::search_n(free_buffers_.begin(), free_buffers_.end(), int(count), true);
  if (begin == free_buffers_.end()) return false;
  std::fill_n(begin, count, false);
  *first = size_t(begin - free_buffers_.begin());
  return true;
}

void Peeker::GiveBuffer(size_t buffer) {
  if (buffer == kNone) return;
  MutexLock lock(&mutex_);
  free_buffers_[buffer] = true;
  changed_.NotifyAll();
}

void Peeker::Work() {
  while (true) {
    Arrived arrived;
    {
      MutexLock lock(&mutex_);
      while (!over_ && arrived_.empty()) changed_.Wait(&mutex_);
      if (arrived_.empty()) return;
      arrived = arrived_.front();
      arrived_.pop_front();
    }
    Do(arrived);
  }
}

void Peeker::Do(const Arrived& arrived) {
  if (arrived.buffer != kNone) memcpy(arrived.slot, shared_->data(arrived.buffer), arrived.chunk.bytes);
  GiveBuffer(arrived.buffer);
  use_(arrived.chunk, arrived.slot);
}

}  // namespace cuda_remote::checkpoint
