// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/gpu/copy_ahead.h"

#include <algorithm>
#include <string_view>
#include <thread>

#include "checkpoint/gpu/memory_transfer.h"
#include "proto/codec/codec.h"
#include "proto/frame/frame.h"
#include "proto/threads/mutex.h"

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

bool CopyAhead::Run(SideRequests* from, SharedBuffers* shared, const std::function<void()>& progress,
                    const std::function<bool()>& cancelled, std::string* error) {
  progress_ = progress;
  bool ok = copies_.Look(from, cancelled, error) && copies_.Run(from, shared, UINT64_MAX, cancelled, error);
  std::string problem;
  if (!Finish(&problem) && ok) {
    *error = problem;
    ok = false;
  }
  progress_ = nullptr;
  return ok;
}

bool CopyAhead::List(SideRequests* requests, Blocks* blocks, std::string* error) {
  const auto take = [blocks](const wire::OpListBlocks_Reply& listed) {
    for (const wire::Block& block : listed.blocks) (*blocks)[block.address] = {block.bytes, block.device};
    return true;
  };
  return AskForPieces<wire::OpListBlocks_Reply>(requests, wire::OpListBlocks_Request{}, "list its memory", take, error);
}

void CopyAhead::Outdated(const Blocks& now, wire::OpStageBlocks_Request* request,
                         std::vector<std::pair<uint64_t, uint64_t>>* lost) {
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

bool CopyAhead::Stage(const wire::OpStageBlocks_Request& request, const Blocks& wanted,
                      std::vector<std::pair<uint64_t, uint64_t>>* lost, std::string* error) {
  begun_ = true;
  ChannelRequests requests(to_);
  agent::SideAnswer answer;
  if (!AskAndWait(&requests, SideRequestOf(kOpStageBlocks, request), &answer, error)) {
    NoteFailure(*error);
    return false;
  }
  // As of an older server.
  if (answer.result != 0) return Failed("make memory ahead of the move", answer.result, error);
  wire::OpStageBlocks_Reply reply;
  if (!reply.Decode(answer.message)) return Malformed(error);
  for (const uint64_t address : reply.staged) {
    const auto block = wanted.find(address);
    if (block == wanted.end()) return Malformed(error);
    staged_.insert(*block);
    if (lost != nullptr) lost->emplace_back(address, address + block->second.first);
  }
  return true;
}

bool CopyAhead::Follow(SideRequests* requests, std::vector<std::pair<uint64_t, uint64_t>>* lost, std::string* error) {
  Blocks now;
  if (!List(requests, &now, error)) return false;
  wire::OpStageBlocks_Request request;
  Outdated(now, &request, lost);
  Blocks wanted;
  bool ok = true;
  const auto send = [&] {
    ok = (request.drop.empty() && request.blocks.empty()) || Stage(request, wanted, lost, error);
    request = {};
    wanted.clear();
  };
  // What is freed makes room first.
  while (ok && request.drop.size() > kMostBlocks) {
    wire::OpStageBlocks_Request part;
    part.drop.assign(request.drop.end() - kMostBlocks, request.drop.end());
    request.drop.resize(request.drop.size() - kMostBlocks);
    ok = Stage(part, {}, lost, error);
  }
  for (auto it = now.begin(); ok && it != now.end(); ++it) {
    if (staged_.count(it->first) != 0) continue;
    wire::Block block;
    block.address = it->first;
    block.bytes = it->second.first;
    block.device = it->second.second;
    request.blocks.push_back(block);
    wanted.insert(*it);
    if (request.blocks.size() == kMostBlocks) send();
  }
  if (ok) send();
  Index();
  return ok;
}

bool CopyAhead::DropFreed(ClientChannel* from, std::string* error) {
  if (staged_.empty()) return true;
  Blocks now;
  ChannelRequests requests(from);
  wire::OpStageBlocks_Request request;
  if (!List(&requests, &now, error)) return false;
  Outdated(now, &request, nullptr);
  Index();
  while (!request.drop.empty()) {
    wire::OpStageBlocks_Request part;
    const size_t count = std::min(request.drop.size(), kMostBlocks);
    part.drop.assign(request.drop.end() - count, request.drop.end());
    request.drop.resize(request.drop.size() - count);
    if (!Stage(part, {}, nullptr, error)) return false;
  }
  return true;
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
      std::string why;
      Gone(to_, ChannelStatus::kClosed, &why);
      NoteFailure(why);
      return false;
    }
    MutexLock lock(&mutex_);
    open_.push_back(number);
    put_bytes_ += piece.size();
    if (progress_) progress_();
  }
  return true;
}

void CopyAhead::NoteFailure(const std::string& why) {
  MutexLock lock(&mutex_);
  if (!lost_) problem_ = why;
  lost_ = true;
}

void CopyAhead::Await(uint64_t number) {
  Reply reply;
  const ChannelStatus status = to_->Wait(number, &reply);
  std::string why;
  if (status != ChannelStatus::kOk) {
    Gone(to_, status, &why);
  } else if (reply.result != 0) {
    Failed("take memory ahead of the move", reply.result, &why);
  }
  if (!why.empty()) NoteFailure(why);
}

bool CopyAhead::Finish(std::string* error) {
  while (true) {
    uint64_t oldest = 0;
    {
      MutexLock lock(&mutex_);
      if (open_.empty()) {
        if (lost_) *error = problem_;
        return !lost_;
      }
      oldest = open_.front();
      open_.pop_front();
    }
    Await(oldest);
  }
}

bool CopyAhead::Compare(ClientChannel* from, const std::vector<Region>& regions, std::string* error) {
  there_.assign(regions.size(), {});
  kept_bytes_ = 0;
  std::vector<Region> both;
  std::vector<size_t> numbers;
  for (size_t i = 0; i < regions.size(); ++i) {
    if (!Has(regions[i])) continue;
    both.push_back(regions[i]);
    numbers.push_back(i);
  }
  if (both.empty()) return true;
  struct Side {
    ClientChannel* channel;
    std::vector<std::vector<ChunkHash>> hashes;
    std::string error;
    uint32_t refused = 0;
    bool ok = false;
    void Hash(const std::vector<Region>& all) {
      ChannelRequests requests(channel);
      ok = HashRegions(&requests, all, &hashes, &error, &refused);
    }
  } before{from, {}, {}, 0, false}, now{to_, {}, {}, 0, false};
  std::thread other([&] { before.Hash(both); });
  now.Hash(both);
  other.join();
  for (const Side* side : {&before, &now}) {
    if (side->ok) continue;
    *error = side->error;
    // What cannot be hashed is copied.
    return side->refused != 0;
  }
  for (size_t i = 0; i < both.size(); ++i) {
    std::vector<bool>& there = there_[numbers[i]];
    there.resize(before.hashes[i].size());
    for (size_t chunk = 0; chunk < there.size(); ++chunk) {
      there[chunk] = before.hashes[i][chunk] == now.hashes[i][chunk];
      if (there[chunk]) kept_bytes_ += std::min(kChunkBytes, both[i].bytes - chunk * kChunkBytes);
    }
  }
  return true;
}

}  // namespace cuda_remote::checkpoint
