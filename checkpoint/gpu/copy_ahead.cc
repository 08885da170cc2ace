// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/gpu/copy_ahead.h"

#include <algorithm>
#include <string>
#include <string_view>
#include <thread>

#include "checkpoint/gpu/memory_transfer.h"
#include "proto/base/status_macros.h"
#include "proto/codec/codec.h"
#include "proto/frame/frame.h"
#include "proto/threads/mutex.h"
#include "proto/threads/start_thread.h"

namespace cuda_remote::checkpoint {
namespace {

using ckptfmt::kChunkBytes;
using ckptfmt::Region;

// Blocks in one request, which takes some milliseconds, and pieces of chunks on their way: enough for a network with a
// long round trip.
constexpr size_t kMostBlocks = 256;
constexpr size_t kMostOpen = 64;

}  // namespace

CopyAhead::~CopyAhead() {
  while (!open_.empty()) {
    Await(open_.front());
    open_.pop_front();
  }
}

PrecopyTimes CopyAhead::times() const {
  PrecopyTimes times = copies_.times();
  times.kept_bytes = kept_bytes_;
  return times;
}

absl::Status CopyAhead::Run(SideRequests* from, SharedBuffers* shared, const std::function<void()>& progress,
                            const std::function<bool()>& cancelled) {
  progress_ = progress;
  absl::Status status = copies_.Look(from, cancelled);
  if (status.ok()) status = copies_.Run(from, shared, UINT64_MAX, cancelled);
  status.Update(Finish());
  progress_ = nullptr;
  return status;
}

absl::StatusOr<CopyAhead::Blocks> CopyAhead::List(SideRequests* requests) {
  Blocks blocks;
  const auto take = [&blocks](const wire::OpListBlocks_Reply& listed) {
    for (const wire::Block& block : listed.blocks) blocks[block.address] = {block.bytes, block.device};
    return true;
  };
  CR_RETURN_IF_ERROR(
      AskForPieces<wire::OpListBlocks_Reply>(requests, wire::OpListBlocks_Request{}, "list its memory", take));
  return blocks;
}

void CopyAhead::Outdated(const Blocks& now, wire::OpStageBlocks_Request* request, Ranges* lost) {
  for (auto it = staged_.begin(); it != staged_.end();) {
    const auto same = now.find(it->first);
    if (same != now.end() && same->second == it->second) {
      ++it;
      continue;
    }
    request->drop.push_back(it->first);
    if (lost != nullptr) lost->emplace_back(it->first, it->first + it->second.first);
    it = staged_.erase(it);
  }
}

void CopyAhead::Index() {
  blocks_ = SharedBlocks();
  for (const auto& [address, block] : staged_) blocks_.Add(address, block.first);
}

absl::Status CopyAhead::Stage(const wire::OpStageBlocks_Request& request, const Blocks& wanted, Ranges* lost) {
  begun_ = true;
  ChannelRequests requests(to_);
  const absl::StatusOr<agent::SideAnswer> answer = AskAndWait(&requests, SideRequestOf(kOpStageBlocks, request));
  if (!answer.ok()) {
    NoteFailure(answer.status());
    return answer.status();
  }
  if (answer->result != 0) return Failed("make memory ahead of the move", answer->result);
  wire::OpStageBlocks_Reply reply;
  if (!reply.Decode(answer->message)) return Malformed();
  for (const uint64_t address : reply.staged) {
    const auto block = wanted.find(address);
    if (block == wanted.end()) return Malformed();
    staged_.insert(*block);
    if (lost != nullptr) lost->emplace_back(address, address + block->second.first);
  }
  return absl::OkStatus();
}

absl::StatusOr<CopySink::Ranges> CopyAhead::Follow(SideRequests* requests) {
  CR_ASSIGN_OR_RETURN(const Blocks now, List(requests));
  wire::OpStageBlocks_Request request;
  Ranges lost;
  Outdated(now, &request, &lost);
  Blocks wanted;
  absl::Status status;
  const auto send = [&] {
    if (!request.drop.empty() || !request.blocks.empty()) status = Stage(request, wanted, &lost);
    request = {};
    wanted.clear();
  };
  // What is freed makes room first.
  while (status.ok() && request.drop.size() > kMostBlocks) {
    wire::OpStageBlocks_Request part;
    part.drop.assign(request.drop.end() - kMostBlocks, request.drop.end());
    request.drop.resize(request.drop.size() - kMostBlocks);
    status = Stage(part, {}, &lost);
  }
  for (auto it = now.begin(); status.ok() && it != now.end(); ++it) {
    if (staged_.count(it->first) != 0) continue;
    wire::Block block;
    block.address = it->first;
    block.bytes = it->second.first;
    block.device = it->second.second;
    request.blocks.push_back(block);
    wanted.insert(*it);
    if (request.blocks.size() == kMostBlocks) send();
  }
  if (status.ok()) send();
  Index();
  CR_RETURN_IF_ERROR(status);
  return lost;
}

absl::Status CopyAhead::DropFreed(ClientChannel* from) {
  if (staged_.empty()) return absl::OkStatus();
  ChannelRequests requests(from);
  wire::OpStageBlocks_Request request;
  CR_ASSIGN_OR_RETURN(const Blocks now, List(&requests));
  Outdated(now, &request, nullptr);
  Index();
  while (!request.drop.empty()) {
    wire::OpStageBlocks_Request part;
    const size_t count = std::min(request.drop.size(), kMostBlocks);
    part.drop.assign(request.drop.end() - count, request.drop.end());
    request.drop.resize(request.drop.size() - count);
    CR_RETURN_IF_ERROR(Stage(part, {}, nullptr));
  }
  return absl::OkStatus();
}

bool CopyAhead::Put(const Peeker::Chunk& chunk, const char* bytes) {
  for (size_t at = 0; at < chunk.bytes; at += kMaxPayloadBytes) {
    wire::OpFillBlock_Request fill;
    fill.address = chunk.address + at;
    FrameHeader header;
    header.call = kOpFillBlock;
    std::string message;
    fill.Encode(&message);
    const std::string_view piece(bytes + at, std::min<size_t>(kMaxPayloadBytes, chunk.bytes - at));
    uint64_t oldest = 0;
    {
      MutexLock lock(&mutex_);
      if (lost_) return false;
      if (open_.size() >= kMostOpen) {
        oldest = open_.front();
        open_.pop_front();
      }
    }
    if (oldest != 0) Await(oldest);
    const uint64_t number = to_->Begin(header, message, piece, nullptr, 0);
    if (number == 0) {
      NoteFailure(Gone(to_, ChannelStatus::kClosed));
      return false;
    }
    MutexLock lock(&mutex_);
    open_.push_back(number);
    put_bytes_ += piece.size();
    if (progress_) progress_();
  }
  return true;
}

void CopyAhead::NoteFailure(const absl::Status& why) {
  MutexLock lock(&mutex_);
  problem_.Update(why);
  lost_ = true;
}

void CopyAhead::Await(uint64_t number) {
  Reply reply;
  const ChannelStatus status = to_->Wait(number, &reply);
  if (status != ChannelStatus::kOk) {
    NoteFailure(Gone(to_, status));
  } else if (reply.result != 0) {
    NoteFailure(Failed("take memory ahead of the move", reply.result));
  }
}

absl::Status CopyAhead::Finish() {
  while (true) {
    uint64_t oldest = 0;
    {
      MutexLock lock(&mutex_);
      if (open_.empty()) return problem_;
      oldest = open_.front();
      open_.pop_front();
    }
    Await(oldest);
  }
}

absl::Status CopyAhead::Compare(ClientChannel* from, const std::vector<Region>& regions) {
  there_.assign(regions.size(), {});
  kept_bytes_ = 0;
  std::vector<Region> both;
  std::vector<size_t> numbers;
  for (size_t i = 0; i < regions.size(); ++i) {
    if (!Has(regions[i])) continue;
    both.push_back(regions[i]);
    numbers.push_back(i);
  }
  if (both.empty()) return absl::OkStatus();
  struct Side {
    ClientChannel* channel;
    uint32_t refused = 0;
    absl::StatusOr<std::vector<std::vector<ChunkHash>>> hashes{};
    void Hash(const std::vector<Region>& all) {
      ChannelRequests requests(channel);
      hashes = HashRegions(&requests, all, &refused);
    }
  } before{from}, now{to_};
  std::thread other = StartThread([&] { before.Hash(both); });
  now.Hash(both);
  if (other.joinable()) {
    other.join();
  } else {
    before.Hash(both);
  }
  for (const Side* side : {&before, &now}) {
    if (side->hashes.ok()) continue;
    // What cannot be hashed is copied.
    return side->refused != 0 ? absl::OkStatus() : side->hashes.status();
  }
  for (size_t i = 0; i < both.size(); ++i) {
    std::vector<bool>& there = there_[numbers[i]];
    const std::vector<ChunkHash>&hashes_before = (*before.hashes)[i], &hashes_now = (*now.hashes)[i];
    there.resize(hashes_before.size());
    for (size_t chunk = 0; chunk < there.size(); ++chunk) {
      there[chunk] = hashes_before[chunk] == hashes_now[chunk];
      if (there[chunk]) kept_bytes_ += std::min(kChunkBytes, both[i].bytes - chunk * kChunkBytes);
    }
  }
  return absl::OkStatus();
}

}  // namespace cuda_remote::checkpoint
