// SPDX-License-Identifier: Apache-2.0
// Managed memory with a home on the GPU.
//
// The client has a file (memfd) mapped at some addresses; here, device memory is mapped at the same addresses, and the
// file somewhere else. Which of the two has the newest bytes of a page is the client's to know
// (client/session/managed_pages.h): it has pages copied from the file to the device (Flush) and back (Fetch).
//
// Copies are made in streams of this class's own, which wait for no other stream, and have ended when the functions
// return. Thread-safe: the executor, its watcher and waiters copy. The caller makes sure that no work on the GPU uses
// the same pages.
#ifndef CUDA_REMOTE_SERVER_WORKER_MANAGED_MEMORY_H_
#define CUDA_REMOTE_SERVER_WORKER_MANAGED_MEMORY_H_

#include <cuda.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <string_view>
#include <vector>

#include "server/driver/driver_table.h"
#include "server/worker/current_context.h"

namespace cuda_remote::server {

// Where it may lie: the upper half of the client's host arena (client/session/host_arena.h).
inline constexpr uint64_t kManagedBase = 0x220000000000;
inline constexpr uint64_t kManagedBytes = uint64_t{1} << 41;

class ManagedMemory {
 public:
  static constexpr uint64_t kPage = 2 << 20;

  explicit ManagedMemory(const DriverTable& driver) : driver_(driver) {}

  // Device memory on `device`, which all `devices` may use, for [address, address + bytes), and the file's part there.
  // All of it zero. The caller keeps `fd`. With a context of the device current.
  CUresult Map(uint64_t address, uint64_t bytes, int device, const std::vector<int>& devices, int fd, uint64_t offset);
  // Frees it. CUDA_ERROR_INVALID_VALUE if nothing begins at `address`.
  CUresult Unmap(uint64_t address);
  // Makes device memory zero that stays, and lets go of the file's pages, which the client may then cut out of it.
  CUresult Clear(uint64_t address);

  // How many bytes begin at `address`, 0: none. Whether a range lies in one piece.
  uint64_t BytesAt(uint64_t address) const;
  bool Contains(uint64_t address, uint64_t bytes) const;

  // `runs`: pairs of address and length. CUDA_ERROR_INVALID_VALUE, and nothing is copied, if one does not lie in one
  // piece, or `runs` is malformed.
  CUresult Flush(std::string_view runs);
  CUresult Fetch(uint64_t address, uint64_t bytes);

  // The context to copy in, if that of the memory's device is not known; executor only, before the functions above.
  void UseContext(int device, ContextRef context);
  // The context is about to die, and the stream in it.
  void ContextDies(uint64_t id);

 private:
  // Registered with the driver piece by piece, which costs as much as copying several times.
  static constexpr uint64_t kRegistered = 32 << 20;
  struct Piece {
    uint64_t moved = 0;
    bool registered = false;
  };
  struct Segment {
    uint64_t bytes = 0;
    int device = 0;
    char* file = nullptr;
    std::vector<Piece> pieces;
  };
  struct Lane {
    ContextRef context;
    CUstream stream = nullptr;
  };

  bool ReserveLocked();
  const Segment* FindLocked(uint64_t address, uint64_t bytes, uint64_t* start) const;
  Segment* FindLocked(uint64_t address, uint64_t bytes, uint64_t* start) {
    return const_cast<Segment*>(static_cast<const ManagedMemory*>(this)->FindLocked(address, bytes, start));
  }
  // The stream of the device's, with its context current in this thread. Null: there is no context.
  CUstream EnterLocked(int device);
  // Begins to copy a range of one segment.
  CUresult CopyLocked(Segment* segment, uint64_t start, uint64_t address, uint64_t bytes, bool to_device);
  void RegisterLocked(Segment* segment, size_t piece);
  void UnregisterLocked(Segment* segment);
  CUresult ClearLocked(const Segment& segment, uint64_t address);
  CUresult BackLocked(uint64_t address, uint64_t bytes, int device, const std::vector<int>& devices);

  const DriverTable& driver_;
  mutable std::mutex mutex_;
  uint64_t reserved_ = 0;  // bytes of addresses, 0: none yet
  std::map<uint64_t, Segment> segments_;
  std::map<int, Lane> lanes_;
};

}  // namespace cuda_remote::server

#endif  // CUDA_REMOTE_SERVER_WORKER_MANAGED_MEMORY_H_
