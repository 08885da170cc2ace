// SPDX-License-Identifier: Apache-2.0
// The GPU's side of a job, through a channel: list, save, load and copy its memory, and make its objects again.
//
// Memory goes as memory_transfer.h says. Functions return false and one sentence in *error. Not thread-safe.
#ifndef CUDA_REMOTE_CHECKPOINT_GPU_GPU_STATE_H_
#define CUDA_REMOTE_CHECKPOINT_GPU_GPU_STATE_H_

#include <memory>
#include <string>
#include <vector>

#include "checkpoint/gpu/chunk_pool.h"
#include "checkpoint/gpu/gpu_snapshot.h"
#include "checkpoint/gpu/memory_transfer.h"
#include "checkpoint/gpu/precopy.h"
#include "checkpoint/gpu/shared_buffers.h"
#include "ckptfmt/image_reader.h"
#include "ckptfmt/image_writer.h"
#include "ckptfmt/types.h"
#include "proto/channel/client_channel.h"
#include "replay/log/log.h"

namespace cuda_remote::checkpoint {

// Opens a session for a job that is being restarted or moved. `path`: GpuHost::socket_path(); `pid`: of the program, as
// it knows itself; `gpus`: the only ones that it sees, in this order; empty: all; `driver_settings`: Hello's.
std::unique_ptr<ClientChannel> OpenSession(const std::string& path, uint32_t pid, const std::string& program,
                                           const std::string& job, const std::vector<int>& gpus,
                                           const std::string& driver_settings, std::string* error);

// Whether a process that saw the GPUs `before` can go on with `after`, at `where` (for messages): there are as many,
// and they can run its modules.
bool CheckDevices(const replay::Log& log, const std::vector<ckptfmt::DeviceFacts>& before,
                  const std::vector<ckptfmt::DeviceFacts>& after, const std::string& where, std::string* error);

// What a log has that cannot be made again elsewhere: names of calls; empty if it has nothing.
std::string NotReplayableIn(const replay::Log& log);

// How much memory GPU `gpu` of the server at `address` (GpuHost::server()) has free. False if it does not say.
bool AskFreeMemory(const std::string& address, int gpu, uint64_t* bytes);

// Tells the server at `address` (GpuHost::server()) when and how large the session's job was saved last, for cr-ps.
// Nothing depends on it, so failures are not told.
void TellSaved(const std::string& address, uint64_t session, uint64_t unix_ms, uint64_t bytes);

// Waits until the GPU is idle. Fails if the GPU has an error, or a stream capture is in progress.
bool Drain(ClientChannel* channel, std::string* error);

// What must be saved. Fails with the server's words if there is state that cannot be. `sessions`: of the same server,
// that are saved together with this one; what it shares with any other cannot be saved.
bool ListRegions(ClientChannel* channel, std::vector<ckptfmt::Region>* regions, std::string* error,
                 const std::vector<uint64_t>& sessions = {});

// The server's GPUs and driver, for the manifest.
bool DescribeServer(ClientChannel* channel, ckptfmt::ProcessInfo* info, std::string* error);

// How much of a pool these regions need, if it is to hold all of them at once.
uint64_t PoolBytesFor(const std::vector<ckptfmt::Region>& regions);

// How reading GPU memory went.
struct SaveTimes {
  double attaching = 0;  // letting the worker map the shared buffers
  double detaching = 0;
  double hashing = 0;         // waiting for the GPU's hashes
  uint64_t unread_bytes = 0;  // zeros, and what an earlier image has, by these hashes
  double taking = 0;          // copies inside the GPU
  TransferTimes reading;
};

// Reads the regions of a process, whose number Region::process is, into `pool` and has the image's threads hash and
// write them. When it returns all is read, but not all written: the pool must live as long as the image. `shared`:
// null, or not attached. `copies`: null, or copies of this process's memory, in slots of the same pool, which are used
// as far as they are right. `snapshot`: null, or what takes chunks on the GPU; these are to be given to *later when the
// job runs again. What an earlier image has (ImageWriter::AddUnread) is not read at all. Adds to *times.
bool SaveMemory(ClientChannel* channel, const std::vector<ckptfmt::Region>& regions, ckptfmt::ImageWriter* image,
                ChunkPool* pool, bool fits, SharedBuffers* shared, Precopy* copies, GpuSnapshot* snapshot,
                UseChunk* later, const Continue& go_on, SaveTimes* times, std::string* error);
// The memory of one process; `process`: its number in the image. Each chunk is compared with its checksum before it is
// sent.
bool LoadMemory(const ckptfmt::ImageReader& image, uint32_t process, ClientChannel* channel, const Continue& go_on,
                std::string* error);
// From one server to another. `shared`: null, or not attached. Adds to *direct what did not go through the host.
bool CopyMemory(ClientChannel* from, const std::vector<ckptfmt::Region>& regions, ClientChannel* to,
                SharedBuffers* shared, const Continue& go_on, uint64_t* direct, std::string* error);

// Makes the objects of the log again, in their order, and compares the answers with those of the first time. What needs
// the process's pinned memory is left to the process (replay::Part). `scope`: of the sessions that are replayed
// together (replay::ShareIn), `ownerless`: replay::Ownerless of all their logs; without a scope it is replayed alone.
// `ahead`: null, or the log of which ReplayCode has made the code here.
bool ReplayLog(const replay::Log& log, ClientChannel* channel, std::string* error, const std::string& scope = "",
               const std::vector<std::string>& ownerless = {}, const replay::Log* ahead = nullptr);
// The job's contexts, modules and functions, while it runs on elsewhere. On failure the session is of no use.
bool ReplayCode(const replay::Log& log, ClientChannel* channel);
// Whether functions whose addresses these regions hold lie elsewhere in this session than before, or that is not known.
bool HasMovedCode(ClientChannel* channel, const std::vector<ckptfmt::Region>& regions);

}  // namespace cuda_remote::checkpoint

#endif  // CUDA_REMOTE_CHECKPOINT_GPU_GPU_STATE_H_
