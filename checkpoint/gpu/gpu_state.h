// SPDX-License-Identifier: Apache-2.0
// The GPU's side of a process, through its channel: list, save, load and copy its memory, and recreate its objects.
//
// memory_transfer.h says how memory is transferred. Functions borrow all pointers for the call only. Not thread-safe:
// nobody else may use the channels meanwhile.
#ifndef CUDA_REMOTE_CHECKPOINT_GPU_GPU_STATE_H_
#define CUDA_REMOTE_CHECKPOINT_GPU_GPU_STATE_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "checkpoint/gpu/chunk_pool.h"
#include "checkpoint/gpu/gpu_snapshot.h"
#include "checkpoint/gpu/hand_over.h"
#include "checkpoint/gpu/memory_transfer.h"
#include "checkpoint/gpu/moved_code.h"
#include "checkpoint/gpu/precopy.h"
#include "checkpoint/gpu/shared_buffers.h"
#include "ckptfmt/image_reader.h"
#include "ckptfmt/image_writer.h"
#include "ckptfmt/types.h"
#include "proto/channel/client_channel.h"
#include "replay/log/log.h"

namespace cuda_remote::checkpoint {

// Opens a session for a job that is being restarted or moved. `path`: GpuHost::socket_path(); `pid`: of the program, as
// it knows itself; `gpus`: the only ones that it sees, in this order; empty: all; `driver_settings`: those
// of the session that it had.
absl::StatusOr<std::unique_ptr<ClientChannel>> OpenSession(const std::string& path, uint32_t pid,
                                                           const std::string& program, const std::string& job,
                                                           const std::vector<int>& gpus,
                                                           const std::string& driver_settings);

// The calls in a log that created objects which cannot be recreated on another server; empty if it has nothing.
std::string NotReplayableIn(const replay::Log& log);

// How much memory GPU `gpu` of the server at `address` (GpuHost::server()) has free. False if it does not say.
bool AskFreeMemory(const std::string& address, int gpu, uint64_t* bytes);

// Reports to the server at `address` (GpuHost::server()) when the session's job was saved last, and the image's size,
// for cr-ps and the server's log; `unix_ms` 0: never, and nothing is reported. Nothing depends on it, so failures are
// ignored.
void TellSaved(const std::string& address, uint64_t session, uint64_t unix_ms, uint64_t bytes);
// The same just before the session ends, because its job was saved and is ended.
void TellStopped(const std::string& address, uint64_t session, uint64_t unix_ms, uint64_t bytes);
// Just before the session ends, because its job continues at the server `to`.
void TellMoved(const std::string& address, uint64_t session, const std::string& to);

// Waits until the GPU is idle. Fails if the GPU has an error, or a stream capture is in progress.
absl::Status Drain(ClientChannel* channel);

// Lists the regions that must be saved. Fails with the server's message if there is state that cannot be saved.
// `sessions`: the sessions of the same server that are saved together with this one. If this one shares objects with
// any other session, that is such state.
absl::StatusOr<std::vector<ckptfmt::Region>> ListRegions(ClientChannel* channel,
                                                         const std::vector<uint64_t>& sessions = {});

// Adds the server's GPUs and driver, for the manifest.
absl::Status DescribeServer(ClientChannel* channel, ckptfmt::ProcessInfo* info);

// The size of a pool, in bytes, that holds all chunks of these regions at once, but for what `skip` leaves out. Null:
// nothing.
uint64_t PoolBytesFor(const std::vector<ckptfmt::Region>& regions, const SkipChunk& skip = nullptr);

// How reading GPU memory went.
struct SaveTimes {
  double attaching = 0;  // letting the worker map the shared buffers
  double detaching = 0;
  double hashing = 0;         // waiting for the GPU's hashes
  uint64_t unread_bytes = 0;  // zeros, and what an earlier image has, by these hashes
  double taking = 0;          // copies inside the GPU
  TransferTimes reading;
};

// Reads the regions of a process (its number is Region::process) into `pool`, and has the image's threads hash and
// write them. Does not read what an earlier image has (ImageWriter::AddUnread). When it returns, everything is read but
// not everything is written: the pool must outlive the image. `shared`: null, or not attached. `copies`: null, or
// copies of this process's memory in slots of the same pool, which are used as far as they are right. `snapshot`: null,
// or what copies chunks on the GPU; give these to *later when the job runs again. Adds to *times.
//
// `holds`: the image holds chunks (ImageWriter::HoldChunks). Here they are released if the pool has no room for what is
// read in the pause: what earlier images have, what was copied before and what stays on the GPU needs none.
absl::Status SaveMemory(ClientChannel* channel, const std::vector<ckptfmt::Region>& regions,
                        ckptfmt::ImageWriter* image, ChunkPool* pool, bool holds, SharedBuffers* shared,
                        Precopy* copies, GpuSnapshot* snapshot, UseChunk* later, const Continue& go_on,
                        SaveTimes* times);

// Loads the memory of one process; `process`: its number in the image. Compares each chunk with its checksum before it
// sends it.
absl::Status LoadMemory(const ckptfmt::ImageReader& image, uint32_t process, ClientChannel* channel,
                        const Continue& go_on);

// How a copy went: bytes.
struct CopiedBytes {
  uint64_t handed_over = 0;  // not copied at all: the second server has the same memory
  uint64_t direct = 0;       // of the rest, what did not go through the host
  uint64_t there = 0;        // of the rest, what the second server had already
  uint64_t copied = 0;       // through the host
};

// Copies the regions from one server to another, all but those that both have (`handed_over`). `moved`: of
// FindMovedCode for `to`; where functions have moved, nothing may have been handed over. `is_there`: null, or which
// chunks the second server has, after CopyAhead::Compare; where functions have moved, that does not count. `shared`:
// null, or not attached. Adds to *bytes.
absl::Status CopyMemory(ClientChannel* from, const std::vector<ckptfmt::Region>& regions, ClientChannel* to,
                        const MovedCode& moved, const SharedBlocks& handed_over, const SkipChunk& is_there,
                        SharedBuffers* shared, const Continue& go_on, CopiedBytes* bytes);

// Recreates the objects of the log in their order, and compares the answers with the recorded ones. Leaves to the
// process what needs its pinned memory (replay::Part). `scope`: of the sessions that are replayed together
// (replay::ShareIn); empty: this one is replayed alone.
// `ahead`: null, or the log of which ReplayCode has made the code here.
absl::Status ReplayLog(const replay::Log& log, ClientChannel* channel, const std::string& scope = "",
                       const replay::Log* ahead = nullptr);
// The job's contexts, modules and functions, while it runs on elsewhere. On failure the session is of no use.
bool ReplayCode(const replay::Log& log, ClientChannel* channel);
// After a replay: fails, with the name of one, if a variable among these regions lies elsewhere in this session. Heaps
// are not compared: a new session has none before its memory is there.
absl::Status CheckVariables(ClientChannel* channel, const std::vector<ckptfmt::Region>& regions);
// Functions that lie elsewhere in this session than before, of the modules whose variables, in these regions, hold
// addresses of functions. After a replay. Fails also if that cannot be known.
absl::StatusOr<MovedCode> FindMovedCode(ClientChannel* channel, const std::vector<ckptfmt::Region>& regions);

}  // namespace cuda_remote::checkpoint

#endif  // CUDA_REMOTE_CHECKPOINT_GPU_GPU_STATE_H_
