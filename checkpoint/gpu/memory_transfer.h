// SPDX-License-Identifier: Apache-2.0
// GPU memory through a channel, a chunk of the image at a time, with several threads and many requests on the way.
//
// With a server on the same machine large allocations go through shared buffers (shared_buffers.h): the GPU copies, and
// the threads do what memory bandwidth and hashing cost. Everything else, and everything where there are no such
// buffers, goes as payload of requests through the channel.
//
// When functions return, also after a failure, no request is on the way and no thread left.
#ifndef CUDA_REMOTE_CHECKPOINT_GPU_MEMORY_TRANSFER_H_
#define CUDA_REMOTE_CHECKPOINT_GPU_MEMORY_TRANSFER_H_

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "checkpoint/gpu/chunk_pool.h"
#include "checkpoint/gpu/shared_buffers.h"
#include "checkpoint/gpu/side_requests.h"
#include "ckptfmt/types.h"
#include "proto/channel/client_channel.h"

namespace cuda_remote::checkpoint {

// Called with the bytes done and the bytes in all; returns false to stop. Called from several threads, one at a time.
using Continue = std::function<bool(uint64_t done, uint64_t total)>;

// Called with a chunk (kChunkBytes, the last one of a region shorter) in memory of the pool. The callee has to give
// that back, also if it fails. Called from several threads at once, in any order.
using UseChunk = std::function<absl::Status(size_t region, uint64_t index, char* slot, size_t bytes)>;
// Writes a chunk's bytes to `out`. Called from several threads at once.
using FillChunk = std::function<absl::Status(size_t region, uint64_t index, char* out, size_t bytes)>;

// Whether a chunk is to be left out. Called before the transfer begins.
using SkipChunk = std::function<bool(size_t region, uint64_t index)>;

// Where the time of a transfer went. Seconds are those of all threads together.
struct TransferTimes {
  size_t threads = 0;
  uint64_t regions = 0;
  // Chunks that went through the channel, and through shared buffers.
  uint64_t channel_chunks = 0, channel_bytes = 0, shared_chunks = 0, shared_bytes = 0;
  double slots = 0;     // for slots of the pool: waiting for them, and finding memory that was not prepared
  double requests = 0;  // putting requests into the channel
  double channel = 0;   // waiting for answers through the channel
  double copies = 0;    // waiting for the GPU's copies to shared buffers
  double emptying = 0;  // copying out of those
  double using_ = 0;    // handing chunks on
  double longest = 0;   // the longest wait for one chunk, and which one it was
  std::string longest_chunk;
  uint64_t page_faults = 0;  // of this process
  void Add(const TransferTimes& other);
};

// Reads all regions into slots of `pool` and gives them to `use`; other threads may give slots back at the same time.
// `shared`: null, or attached to this channel's server. Adds to *times if that is not null.
absl::Status ReadMemory(ClientChannel* channel, const std::vector<ckptfmt::Region>& regions, ChunkPool* pool,
                        SharedBuffers* shared, const UseChunk& use, const Continue& go_on,
                        TransferTimes* times = nullptr, const SkipChunk& skip = nullptr);

// May change a chunk on its way. Called by several threads at once.
using ChangeChunk = std::function<absl::Status(size_t region, uint64_t index, char* bytes, size_t count)>;

// Copies all regions from one server on this machine to another, through buffers that both have mapped: one GPU writes
// to them, the other one reads. What goes wrong at the second server is only known after a Drain.
absl::Status CopyBetween(ClientChannel* from, ClientChannel* to, const std::vector<ckptfmt::Region>& regions,
                         SharedBuffers* shared, const ChangeChunk& change, const Continue& go_on,
                         const SkipChunk& skip = nullptr);

// Writes all regions. Call Drain afterwards: only it reports errors of the server. `shared` as above.
absl::Status WriteMemory(ClientChannel* channel, const std::vector<ckptfmt::Region>& regions, SharedBuffers* shared,
                         const FillChunk& fill, const Continue& go_on);

// Sends bytes of one region, at `offset`, without waiting: a Drain tells whether all went well. Thread-safe.
absl::Status SendBytes(ClientChannel* channel, const ckptfmt::Region& region, uint64_t offset, std::string_view bytes);

// For tests: so many threads, at most SharedBuffers::kCount; 0: by the number of processors.
extern unsigned g_transfer_threads_for_testing;

}  // namespace cuda_remote::checkpoint

#endif  // CUDA_REMOTE_CHECKPOINT_GPU_MEMORY_TRANSFER_H_
