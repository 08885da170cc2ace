// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/gpu/gpu_snapshot.h"

#include <algorithm>
#include <deque>
#include <map>
#include <utility>

#include "proto/base/status_macros.h"
#include "proto/codec/operations.gen.h"
#include "proto/driverabi/job_addresses.h"
#include "proto/driverabi/requests.h"
#include "proto/frame/handle.h"
#include "proto/threads/mutex.h"

namespace cuda_remote::checkpoint {
namespace {

using ckptfmt::kChunkBytes;
using ckptfmt::Region;
using ckptfmt::RegionKind;

// What is freed at once, when it has been read. Longer pieces cost less to make and give memory back later.
constexpr uint64_t kPieceBytes = uint64_t{256} << 20;
// Least that is worth a piece: less is read as quickly.
constexpr uint64_t kWorthIt = 4 << 20;
// Copies begin where the driver's are fastest.
constexpr uint64_t kAlign = 512;
constexpr size_t kMostOpen = 48;

// Chunks of one region that follow each other.
struct Run {
  size_t region;
  uint64_t first, chunks, bytes;
};

struct Piece {
  uint64_t bytes = 0;  // wanted
  uint64_t address = 0;
  std::vector<std::pair<Run, uint64_t>> runs;  // and where in it
};

uint64_t RunBytes(const Region& region, uint64_t first, uint64_t chunks) {
  return std::min(chunks * kChunkBytes, region.bytes - first * kChunkBytes);
}

}  // namespace

absl::Status GpuSnapshot::Take(ClientChannel* channel, const std::vector<Region>& regions, const SkipChunk& skip) {
  taken_.assign(regions.size(), {});
  contexts_.clear();
  std::map<int32_t, std::vector<Piece>> by_device;
  uint64_t all = 0;
  for (size_t i = 0; i < regions.size(); ++i) {
    const Region& region = regions[i];
    contexts_.push_back(region.context);
    const uint64_t chunks = (region.bytes + kChunkBytes - 1) / kChunkBytes;
    taken_[i].resize(chunks);
    if (region.kind != RegionKind::kAllocation) continue;
    for (uint64_t index = 0; index < chunks;) {
      uint64_t end = index;
      while (end < chunks && !skip(i, end) && (end - index) * kChunkBytes < kPieceBytes) ++end;
      if (end == index) {
        ++index;
        continue;
      }
      const Run run{i, index, end - index, RunBytes(region, index, end - index)};
      std::vector<Piece>& pieces = by_device[region.device];
      if (pieces.empty() || pieces.back().bytes + run.bytes > kPieceBytes) pieces.emplace_back();
      Piece& piece = pieces.back();
      piece.runs.emplace_back(run, piece.bytes);
      piece.bytes += (run.bytes + kAlign - 1) / kAlign * kAlign;
      all += run.bytes;
      index = end;
    }
  }
  if (all < kWorthIt) return absl::OkStatus();
  ChannelRequests requests(channel);
  struct Open {
    uint64_t number;
    Run run;
    uint64_t at;
    size_t piece;
  };
  std::deque<Open> open;
  const auto finish = [&]() -> absl::Status {
    const Open one = open.front();
    open.pop_front();
    CR_ASSIGN_OR_RETURN(const agent::SideAnswer answer, requests.Wait(one.number));
    if (answer.result != 0) return absl::OkStatus();  // it is read in the pause
    for (uint64_t i = 0; i < one.run.chunks; ++i) {
      const uint64_t index = one.run.first + i;
      const size_t bytes = size_t(std::min(kChunkBytes, regions[one.run.region].bytes - index * kChunkBytes));
      chunks_.push_back({one.run.region, index, bytes, one.at + i * kChunkBytes, one.piece});
      taken_[one.run.region][index] = true;
      bytes_ += bytes;
    }
    return absl::OkStatus();
  };
  for (auto& [device, pieces] : by_device) {
    for (Piece& piece : pieces) {
      wire::OpMemAlloc_Request allocate;
      allocate.bytes = piece.bytes;
      allocate.device = device;
      allocate.flags = driverabi::kAllocateSnapshot;
      CR_ASSIGN_OR_RETURN(const agent::SideAnswer answer, AskAndWait(&requests, SideRequestOf(kOpMemAlloc, allocate)));
      wire::OpMemAlloc_Reply reply;
      // No room, or a server that has no such memory.
      if (answer.result != 0 || !reply.Decode(answer.message)) break;
      piece.address = reply.address;
      pieces_.push_back(piece.address);
      for (const auto& [run, offset] : piece.runs) {
        wire::OpPeekMemory_Request copy;
        copy.address = regions[run.region].address + run.first * kChunkBytes;
        copy.bytes = run.bytes;
        copy.context = regions[run.region].context;
        copy.to = piece.address + offset;
        if (open.size() >= kMostOpen) CR_RETURN_IF_ERROR(finish());
        CR_ASSIGN_OR_RETURN(const uint64_t number, requests.Begin(SideRequestOf(kOpPeekMemory, copy)));
        open.push_back({number, run, copy.to, pieces_.size()});
      }
    }
  }
  while (!open.empty()) CR_RETURN_IF_ERROR(finish());
  return absl::OkStatus();
}

absl::Status GpuSnapshot::Read(SideRequests* requests, SharedBuffers* shared, ChunkPool* pool, const UseChunk& use,
                               const Continue& go_on) {
  if (chunks_.empty()) return absl::OkStatus();
  CR_ASSIGN_OR_RETURN(SharedBuffers* const attached, Peeker::Attach(requests, shared));
  Mutex mutex;
  absl::Status status, problem;
  uint64_t done = 0;
  size_t used = 0;
  {
    const auto use_chunk = [&](const Peeker::Chunk& chunk, char* slot) {
      const Chunk& from = chunks_[chunk.number];
      const absl::Status handed_on = use(from.region, from.index, slot, from.bytes);
      MutexLock lock(&mutex);
      if (!handed_on.ok()) problem = handed_on;
      used += handed_on.ok();
      done += from.bytes;
      if (problem.ok() && go_on && !go_on(done, bytes_)) problem = absl::CancelledError("interrupted");
    };
    Peeker peeker(requests, attached, pool, use_chunk, Peeker::Captures::kAwait);
    const auto failed = [&] {
      MutexLock lock(&mutex);
      return !problem.ok();
    };
    for (size_t i = 0; status.ok() && i < chunks_.size() && peeker.refused() == 0 && !failed(); ++i) {
      // The image's threads give slots back; this one must not wait for those that it holds up itself.
      const Chunk& chunk = chunks_[i];
      char* slot = pool->TryTake(chunk.bytes);
      if (slot == nullptr) status = peeker.Finish();
      if (status.ok() && slot == nullptr) slot = pool->Take(chunk.bytes);
      if (status.ok()) status = peeker.Add({chunk.at, chunk.bytes, contexts_[chunk.region], i, chunk.piece}, slot);
    }
    if (const absl::Status rest = peeker.Finish(); !rest.ok()) status = rest;
    if (status.ok() && peeker.refused() != 0) status = Failed("read what it kept on the GPU", peeker.refused());
  }
  CR_RETURN_IF_ERROR(problem);
  CR_RETURN_IF_ERROR(status);
  // An answer was shorter than its chunk.
  return used == chunks_.size() ? absl::OkStatus() : Malformed();
}

void GpuSnapshot::Drop(ClientChannel* channel) {
  ChannelRequests requests(channel);
  for (const uint64_t address : pieces_) {
    wire::OpMemFree_Request free;
    free.address = address;
    if (!AskAndWait(&requests, SideRequestOf(kOpMemFree, free)).ok()) break;
  }
  pieces_.clear();
  chunks_.clear();
}

}  // namespace cuda_remote::checkpoint
