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
  for (size_t i = 0; i < SharedBuffers::kCount; ++i) free_buffers_.push_back(i);
  const unsigned count = std::clamp(std::thread::hardware_concurrency() * 3 / 8, 1u, kMostThreads);
  try {
    while (threads_.size() < count) threads_.emplace_back([this] { Work(); });
  } catch (const std::system_error&) {
    // Fewer will do; without any, the caller's thread does it.
  }
}

Peeker::~Peeker() {
  while (!flights_.empty()) FinishOne().IgnoreError();
  {
    MutexLock lock(&mutex_);
    over_ = true;
  }
  changed_.NotifyAll();
  for (std::thread& thread : threads_) thread.join();
}

absl::Status Peeker::Add(const Chunk& chunk, char* slot) {
  Flight flight{{chunk, slot, kNone}, {}, {}, {}};
  absl::Status status;
  if (shared_ == nullptr && flights_.size() >= kChannelFlights) status = FinishOne();
  while (status.ok() && shared_ != nullptr && !TakeBuffer(&flight.what.buffer)) {
    if (!flights_.empty()) {
      status = FinishOne();
      continue;
    }
    MutexLock lock(&mutex_);
    while (free_buffers_.empty()) changed_.Wait(&mutex_);
  }
  const uint64_t piece = shared_ != nullptr ? kChunkBytes : kMaxPayloadBytes;
  for (uint64_t at = 0; status.ok() && at < chunk.bytes; at += piece) {
    wire::OpPeekMemory_Request peek;
    peek.address = chunk.address + at;
    peek.bytes = std::min<uint64_t>(piece, chunk.bytes - at);
    peek.context = chunk.context;
    if (shared_ != nullptr) peek.to = shared_->address(flight.what.buffer);
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
  absl::Status status;
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
  const Arrived& what = flight.what;
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
      if (here) memcpy(what.slot + at, answer->payload.data(), flight.sizes[i]);
    }
    at += flight.sizes[i];
  }
  if (!here || at != what.chunk.bytes) {
    pool_->Give(what.slot);
    GiveBuffer(what.buffer);
  } else if (threads_.empty()) {
    Do(what);
  } else {
    MutexLock lock(&mutex_);
    arrived_.push_back(what);
    changed_.NotifyAll();
  }
  return status;
}

bool Peeker::TakeBuffer(size_t* buffer) {
  MutexLock lock(&mutex_);
  if (free_buffers_.empty()) return false;
  *buffer = free_buffers_.back();
  free_buffers_.pop_back();
  return true;
}

void Peeker::GiveBuffer(size_t buffer) {
  if (buffer == kNone) return;
  MutexLock lock(&mutex_);
  free_buffers_.push_back(buffer);
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
