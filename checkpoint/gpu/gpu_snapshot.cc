// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/gpu/gpu_snapshot.h"

#include <algorithm>
#include <deque>
#include <map>
#include <utility>

#include "proto/codec/operations.gen.h"
#include "proto/driverabi/job_addresses.h"
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

bool GpuSnapshot::Take(ClientChannel* channel, const std::vector<Region>& regions, const SkipChunk& skip,
                       std::string* error) {
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
  if (all < kWorthIt) return true;
  ChannelRequests requests(channel);
  struct Open {
    uint64_t number;
    Run run;
    uint64_t at;
  };
  std::deque<Open> open;
  const auto finish = [&] {
    const Open one = open.front();
    open.pop_front();
    agent::SideAnswer answer;
    if (!requests.Wait(one.number, &answer, error)) return false;
    if (answer.result != 0) return true;  // it is read in the pause
    for (uint64_t i = 0; i < one.run.chunks; ++i) {
      const uint64_t index = one.run.first + i;
      const size_t bytes = size_t(std::min(kChunkBytes, regions[one.run.region].bytes - index * kChunkBytes));
      chunks_.push_back({one.run.region, index, bytes, one.at + i * kChunkBytes});
      taken_[one.run.region][index] = true;
      bytes_ += bytes;
    }
    return true;
  };
  bool ok = true;
  for (auto& [device, pieces] : by_device) {
    for (Piece& piece : pieces) {
      wire::OpMemAlloc_Request allocate;
      allocate.bytes = piece.bytes;
      allocate.device = device;
      allocate.flags = driverabi::kAllocateSnapshot;
      agent::SideAnswer answer;
      ok = ok && AskAndWait(&requests, SideRequestOf(kOpMemAlloc, allocate), &answer, error);
      wire::OpMemAlloc_Reply reply;
      // No room, or a server that has no such memory.
      if (!ok || answer.result != 0 || !reply.Decode(answer.message)) break;
      piece.address = reply.address;
      pieces_.push_back(piece.address);
      for (const auto& [run, offset] : piece.runs) {
        wire::OpPeekMemory_Request copy;
        copy.address = regions[run.region].address + run.first * kChunkBytes;
        copy.bytes = run.bytes;
        copy.context = regions[run.region].context;
        copy.to = piece.address + offset;
        if (open.size() >= kMostOpen) ok = ok && finish();
        uint64_t number = 0;
        ok = ok && requests.Begin(SideRequestOf(kOpPeekMemory, copy), &number, error);
        if (!ok) break;
        open.push_back({number, run, copy.to});
      }
    }
  }
  while (ok && !open.empty()) ok = finish();
  return ok;
}

bool GpuSnapshot::Read(SideRequests* requests, SharedBuffers* shared, ChunkPool* pool, const UseChunk& use,
                       const Continue& go_on, std::string* error) {
  if (chunks_.empty()) return true;
  bool ok = true;
  SharedBuffers* const attached = Peeker::Attach(requests, shared, &ok, error);
  if (!ok) return false;
  Mutex mutex;
  std::string problem;
  uint64_t done = 0;
  size_t used = 0;
  {
    const auto use_chunk = [&](const Peeker::Chunk& chunk, char* slot) {
      const Chunk& from = chunks_[chunk.number];
      std::string why;
      const bool fine = use(from.region, from.index, slot, from.bytes, &why);
      MutexLock lock(&mutex);
      if (!fine) problem = why;
      used += fine;
      done += from.bytes;
      if (fine && problem.empty() && go_on && !go_on(done, bytes_)) problem = "interrupted";
    };
    Peeker peeker(requests, attached, pool, use_chunk, Peeker::Captures::kAwait);
    const auto failed = [&] {
      MutexLock lock(&mutex);
      return !problem.empty();
    };
    for (size_t i = 0; ok && i < chunks_.size() && peeker.refused() == 0 && !failed(); ++i) {
      // The image's threads give slots back; this one must not wait for those that it holds up itself.
      char* slot = pool->TryTake();
      if (slot == nullptr) ok = peeker.Finish(error);
      if (ok && slot == nullptr) slot = pool->Take();
      if (ok) ok = peeker.Add({chunks_[i].at, chunks_[i].bytes, contexts_[chunks_[i].region], i}, slot, error);
    }
    ok = peeker.Finish(error) && ok;
    if (ok && peeker.refused() != 0) ok = Failed("read what it kept on the GPU", peeker.refused(), error);
  }
  if (!problem.empty()) {
    *error = problem;
    ok = false;
  }
  return ok && used == chunks_.size();
}

void GpuSnapshot::Drop(ClientChannel* channel) {
  ChannelRequests requests(channel);
  for (const uint64_t address : pieces_) {
    wire::OpMemFree_Request free;
    free.address = address;
    agent::SideAnswer answer;
    std::string ignored;
    if (!AskAndWait(&requests, SideRequestOf(kOpMemFree, free), &answer, &ignored)) break;
  }
  pieces_.clear();
  chunks_.clear();
}

}  // namespace cuda_remote::checkpoint
