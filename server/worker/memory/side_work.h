// SPDX-License-Identifier: Apache-2.0
// What the worker does with the session's device memory beside the job, for checkpoints: hashes and copies in a stream
// and a module of its own, of the lowest priority, one of each for a context. Results lie in staging buffers, so no
// address of the job's changes.
//
// It may run while the job does. Then it reads what it finds, torn or not; and nothing that it reads is unmapped before
// it is done (AwaitSideReads). Executor only, except where it says otherwise.
#ifndef CUDA_REMOTE_SERVER_WORKER_MEMORY_SIDE_WORK_H_
#define CUDA_REMOTE_SERVER_WORKER_MEMORY_SIDE_WORK_H_

#include <cuda.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "server/driver/driver_table.h"
#include "server/worker/memory/staging.h"

namespace cuda_remote::server {

// Replaces those functions of the table that end addresses: they wait for reads that are on their way, which take
// milliseconds. For the table that everything in this process uses.
void GuardUnmapping(DriverTable* table);

// Unmaps what no side work reads any more, without a look at other memory's. Any thread, those of side work too.
CUresult UnmapAtOnce(const DriverTable& driver, uint64_t address, uint64_t bytes);

class SideWork {
 public:
  struct Piece {
    uint64_t address, bytes;
  };
  // Waits until the work is done, on any thread with its context current; to be called exactly once.
  using Wait = std::function<CUresult()>;

  // `software`: device memory is this process's memory, and its processors are faster than kernels.
  SideWork(const DriverTable& driver, StagingPool* staging, bool software)
      : driver_(driver), staging_(staging), software_(software) {}

  // Whether hashing in this context loads code first.
  bool MustLoad(uint64_t context) const {
    const auto place = places_.find(context);
    return !software_ && (place == places_.end() || place->second.hash == nullptr);
  }

  // Begins in the current context, ContextRef::id `context`. On failure *wait is not to be called.
  //
  // The hash of each piece (proto/chunkhash, HashRows; 1: all rows) comes to *hashes, 16 bytes each.
  CUresult Hash(uint64_t context, const std::vector<Piece>& pieces, uint32_t every, std::shared_ptr<char>* hashes,
                Wait* wait);
  // `to` stays valid until the wait is over.
  CUresult CopyOut(uint64_t context, const Piece& piece, void* to, Wait* wait);
  // The same to host memory, but the wait gives the copies to the driver: each takes it some microseconds, in which the
  // job's calls would wait for the executor.
  CUresult CopyOutInWait(uint64_t context, const Piece& piece, void* to, Wait* wait);
  // From device memory to device memory, of other GPUs or other processes too, as far as it is mapped for this context.
  CUresult CopyBetween(uint64_t context, const Piece& piece, uint64_t to, Wait* wait);

  // The context is gone.
  void Forget(uint64_t context) { places_.erase(context); }

 private:
  struct Place {
    CUstream stream = nullptr;
    CUfunction hash = nullptr;
  };
  CUresult StreamIn(uint64_t context, CUstream* stream);
  CUresult KernelIn(uint64_t context, CUfunction* kernel);
  CUresult GiveCopies(CUstream stream, const Piece& piece, void* to) const;
  CUresult WaitFor(CUstream stream, Wait* wait);

  const DriverTable& driver_;
  StagingPool* const staging_;
  const bool software_;
  std::map<uint64_t, Place> places_;
};

}  // namespace cuda_remote::server

#endif  // CUDA_REMOTE_SERVER_WORKER_MEMORY_SIDE_WORK_H_
