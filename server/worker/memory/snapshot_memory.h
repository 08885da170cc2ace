// SPDX-License-Identifier: Apache-2.0
// Device memory that a checkpoint borrows in the pause: chunks are copied there, the job continues, and a tool reads
// them behind it (PeekMemory). A piece goes when all that was put into it has been read.
//
// It is nobody's memory: at addresses of its own, outside of the session's limits, and only as much as leaves the GPU
// kReserve free. Where the driver has no memory for the job, the pieces move to host memory and the job's call is made
// again; a tool that reads later finds them there. Pieces that nobody reads for a while, since their tool is gone, are
// freed.
//
// One for each process. Any thread.
#ifndef CUDA_REMOTE_SERVER_WORKER_MEMORY_SNAPSHOT_MEMORY_H_
#define CUDA_REMOTE_SERVER_WORKER_MEMORY_SNAPSHOT_MEMORY_H_

#include <cuda.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>

#include "proto/base/clock.h"
#include "proto/driverabi/job_addresses.h"
#include "proto/threads/mutex.h"
#include "server/driver/driver_table.h"

namespace cuda_remote::server {

class SnapshotMemory {
 public:
  static constexpr uint64_t kGrain = 2 << 20;
  // Of a GPU's memory this many parts in a hundred, but so much at least.
  static constexpr uint64_t kReservePercent = 3;
  static constexpr uint64_t kLeastReserve = 256 << 20;

  // The process's, which stays.
  static SnapshotMemory& Get();
  SnapshotMemory(const SnapshotMemory&) = delete;
  SnapshotMemory& operator=(const SnapshotMemory&) = delete;

  // Replaces functions of the table that take device memory: they are called again once pieces have given way. For the
  // table that everything in this process uses.
  void GiveWayIn(DriverTable* table);

  // A piece on `device`, whose context is current; CUDA_ERROR_OUT_OF_MEMORY if not enough would be left.
  CUresult Allocate(int device, uint64_t bytes, uint64_t* address);
  // False: no piece begins there.
  bool Free(uint64_t address);

  // Whether these bytes lie in one piece, wherever that is now, and for which device it was made.
  bool Owns(uint64_t address, uint64_t bytes, int* device);

  // Begins to fill a part of a piece by `copy`, which only puts work into a stream. CUDA_ERROR_OUT_OF_MEMORY if the
  // piece has moved to host memory.
  CUresult Fill(uint64_t address, uint64_t bytes, const std::function<CUresult()>& copy);
  // Reads a part: by `copy`, as above, or from host memory into `to`; *copied says that it was the latter, and is over.
  CUresult Read(uint64_t address, uint64_t bytes, void* to, const std::function<CUresult()>& copy, bool* copied);
  // A part has been read for good.
  void WasRead(uint64_t address, uint64_t bytes);

  // Moves all pieces to host memory, and drops those for which there is none. False: there were none on the device.
  bool GiveWay();

  // How much of a device it takes.
  uint64_t bytes_on(int device);
  // For tests: how long pieces stay that nobody reads.
  void SetPatience(std::chrono::milliseconds patience);

 private:
  struct Piece {
    uint64_t bytes = 0;
    int device = 0;
    uint64_t unread = 0;  // of what was put into it
    CUcontext context = nullptr;
    char* host = nullptr;  // it has moved there
    bool lost = false;     // there was no room for it
  };
  SnapshotMemory() = default;
  std::map<uint64_t, Piece>::iterator FindLocked(uint64_t address, uint64_t bytes) CR_REQUIRES(mutex_);
  void FreeLocked(std::map<uint64_t, Piece>::iterator piece) CR_REQUIRES(mutex_);
  void UnmapLocked(uint64_t address, uint64_t bytes) CR_REQUIRES(mutex_);
  void Watch();

  Mutex mutex_;
  DriverTable real_;
  std::map<uint64_t, Piece> pieces_ CR_GUARDED_BY(mutex_);
  uint64_t reserved_ CR_GUARDED_BY(mutex_) = 0;  // bytes of addresses
  uint64_t next_ CR_GUARDED_BY(mutex_) = 0;      // the first address after the last piece
  std::chrono::milliseconds patience_ CR_GUARDED_BY(mutex_) = std::chrono::seconds(60);
  Moment used_ CR_GUARDED_BY(mutex_);
  bool watched_ CR_GUARDED_BY(mutex_) = false;
};

}  // namespace cuda_remote::server

#endif  // CUDA_REMOTE_SERVER_WORKER_MEMORY_SNAPSHOT_MEMORY_H_
