// SPDX-License-Identifier: Apache-2.0
// Large copies between a file in memory and the GPU. Several threads move the bytes between the file and registered
// buffers, while the GPU copies others. Registering the file itself with the driver costs more than ten such copies.
//
// Bytes are read from the file, but written through its mapping: the kernel lets only one thread at a time write to a
// file, and several read from it.
//
// Not thread-safe, except that ContextDies may come from another thread between copies.
#ifndef CUDA_REMOTE_SERVER_WORKER_MEMORY_BULK_COPIES_H_
#define CUDA_REMOTE_SERVER_WORKER_MEMORY_BULK_COPIES_H_

#include <cuda.h>

#include <cstdint>
#include <functional>
#include <map>
#include <vector>

#include "server/driver/driver_table.h"
#include "server/worker/memory/staging.h"
#include "server/worker/session/current_context.h"
#include "server/worker/session/waiters.h"

namespace cuda_remote::server {

class BulkCopies {
 public:
  // Less in all is done sooner without.
  static constexpr uint64_t kWorth = 512 << 10;

  // `threads`: 0: as the machine allows. `start` runs first in each helping thread.
  BulkCopies(const DriverTable& driver, StagingPool* staging, unsigned threads, std::function<void()> start);

  struct Part {
    int file;
    uint64_t offset;
    char* memory;     // where the file is mapped at this offset
    uint64_t device;  // address
    uint64_t bytes;
  };
  // Copies all parts, and has ended when it returns. `context`: of the device; is current afterwards.
  CUresult Copy(ContextRef context, const std::vector<Part>& parts, bool to_device);

  // The streams in it die, too.
  void ContextDies(uint64_t id) { lanes_.erase(id); }

 private:
  static constexpr uint64_t kMostPiece = StagingPool::kLarge, kLeastPiece = 128 << 10;
  static constexpr size_t kMostThreads = 8;
  static constexpr size_t kBuffers = 2;  // of each thread
  struct Lane {
    CUstream streams[kBuffers] = {};
  };

  struct Job;
  // Moves pieces until there are no more; and, in another thread, if that has not been done already.
  void Work(Job* job, Lane* lane) const;
  void Help(Job* job, Lane* lane) const;

  const DriverTable& driver_;
  StagingPool* const staging_;
  const size_t threads_;
  std::map<uint64_t, std::vector<Lane>> lanes_;  // by context
  Waiters helpers_;
};

}  // namespace cuda_remote::server

#endif  // CUDA_REMOTE_SERVER_WORKER_MEMORY_BULK_COPIES_H_
