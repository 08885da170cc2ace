// SPDX-License-Identifier: Apache-2.0
// Device memory at addresses of our own choice.
//
// A range of device addresses is reserved once, at the same place in every worker. Allocations are placed in it by this
// class and backed with physical memory (cuMemCreate, cuMemMap), so a restarted job gets the same bytes at the same
// addresses. Large ones have pages (2 MiB) of their own; small ones share a page. Freed pages stay mapped for a while,
// up to a limit, because mapping costs as much as it does natively and most programs ask for the same sizes again.
//
// Thread-safe. Frees are immediate: the caller makes sure that no work on the GPU uses the memory any more.
#ifndef CUDA_REMOTE_SERVER_WORKER_MEMORY_DEVICE_ARENA_H_
#define CUDA_REMOTE_SERVER_WORKER_MEMORY_DEVICE_ARENA_H_

#include <cuda.h>

#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <set>
#include <vector>

#include "absl/status/statusor.h"
#include "proto/driverabi/job_addresses.h"
#include "proto/threads/mutex.h"
#include "server/driver/driver_table.h"
#include "server/worker/memory/address_space.h"
#include "server/worker_link/memory_budget.h"

namespace cuda_remote::server {

using driverabi::kArenaBase, driverabi::kArenaBytes;
// The application's own reservations are parts of one reservation, because the driver does not follow a hint for small
// ones (580 on an H200: not for 16 MiB, but for 64 MiB).
using driverabi::kReservationBase, driverabi::kReservationBytes;

// Reserves device addresses from `base` on: `most` bytes (a power of two), or a smaller power where the machine has not
// so many to give; what matters is that they begin where they always do. Returns how many; 0 and *result: why there are
// none.
uint64_t ReserveAddressesAt(const DriverTable& driver, uint64_t base, uint64_t most, CUresult* result);

class DeviceArena {
 public:
  static constexpr uint64_t kPage = 2 << 20;
  static constexpr uint64_t kUnit = 512;
  // Below this an allocation shares its page with others.
  static constexpr uint64_t kSmall = 1 << 20;
  // Longest freed allocation that stays mapped, and how much in all.
  static constexpr uint64_t kMaxCachedBlock = 128 << 20;
  static constexpr uint64_t kMaxCached = 512 << 20;
  // A descriptor each.
  static constexpr size_t kMostExported = 1024;
  // What staged memory leaves of a budget, or an eighth of the budget if that is less.
  static constexpr uint64_t kBudgetReserve = 256 << 20;

  // Reserves the addresses. Fails if the driver gives none of them. `memory_limit`: most bytes that the session may
  // have, 0: as many as the GPU has.
  static absl::StatusOr<std::unique_ptr<DeviceArena>> Create(const DriverTable& driver, int devices,
                                                             uint64_t memory_limit);

  // What the session may hold is bounded by this, too. Before the first Allocate or Charge of a client.
  void SetBudget(std::unique_ptr<MemoryBudget> budget);

  // Memory on `device`, at exactly `at` if that is not 0. CUDA_ERROR_OUT_OF_MEMORY if there is none;
  // CUDA_ERROR_INVALID_VALUE if `at` is not free, or no address of the arena.
  CUresult Allocate(int device, uint64_t bytes, uint64_t at, uint64_t* address);

  // Gives back what Allocate returned; other addresses are ignored.
  void Free(uint64_t address);

  // The physical memory behind an address of a live allocation: where it is mapped, and how long it is. It can be
  // exported as a file descriptor, if the driver can do that at all.
  bool Backing(uint64_t address, uint64_t* start, uint64_t* bytes) const;

  // --- Memory that goes from one process to another: both have it mapped until one of them lets go of it.

  struct Block {
    uint64_t address = 0;
    uint64_t bytes = 0;
    int device = 0;
  };
  // What is mapped behind live allocations, in address order, from `from` on, `most` of it.
  std::vector<Block> LiveBlocks(uint64_t from, size_t most) const;
  // Maps such a block of another process, whose memory `fd` is (not taken over). Its pages are taken from now on, and
  // Allocate at exactly its addresses gives it out with its contents. `counted_twice`: the other process's share of the
  // budget has it until that process ends, so it is taken even if both do not fit. On failure nothing has changed:
  // CUDA_ERROR_OUT_OF_MEMORY if the session may not have so much.
  CUresult Adopt(const Block& block, int fd, bool counted_twice);
  // A descriptor of the memory that is mapped at `address`, the begin of a block; the caller closes it. NVIDIA's driver
  // (580) exports nothing that it has imported, so adopted memory goes by the descriptor with which it came.
  CUresult Export(uint64_t address, int* fd) const;
  // Keeps such a descriptor for later calls of Export, until the block is unmapped. Of kMostExported blocks at most; of
  // others, and where the driver says no, nothing is kept.
  void ExportAhead(uint64_t address);
  // Unmaps adopted and staged blocks that Allocate has not given out.
  void DropUnclaimed();
  // Adopted blocks that Allocate has given out and that were mapped ever since, in address order, from `from` on,
  // `most` of them.
  std::vector<Block> ClaimedBlocks(uint64_t from, size_t most) const;

  // --- Memory that is filled before a replay: this process's own, at the addresses of another one's blocks.

  // Backs such a block. Allocate at exactly its addresses gives it out with its contents, and from then on it is memory
  // like other memory. Until then it gives way to allocations that lie across it, and where the limits or the driver
  // leave no more. Does nothing if it is staged already. On failure nothing has changed: CUDA_ERROR_OUT_OF_MEMORY also
  // if it would leave the owner's other sessions too little of the budget: the job may be among them.
  CUresult Stage(const Block& block);
  // Unmaps the staged block that begins at `address` and that Allocate has not given out.
  void Unstage(uint64_t address);
  // Whether these bytes lie in such a block, and on which device.
  bool IsStaged(uint64_t address, uint64_t bytes, int* device) const;

  // Unmaps what is free, all but `keep` bytes.
  void Trim(uint64_t keep = 0);

  // From now on `peer` may use the memory of `device`, also what is allocated already.
  CUresult EnablePeer(int device, int peer);

  // Physical memory made by the application itself counts against the limit. False if it does not fit.
  bool Charge(uint64_t bytes);
  void Discharge(uint64_t bytes);

  // cuMemGetInfo as the session should see it: `free` and `total` come from the driver.
  void Adjust(int device, size_t* free, size_t* total) const;

  // Bytes that live allocations and the application's own physical memory take.
  uint64_t used_bytes() const;
  // Of live allocations, by device; the last ones may be missing. Without the application's own physical memory.
  std::vector<uint64_t> used_by_device() const;
  uint64_t base() const { return kArenaBase; }
  uint64_t bytes() const { return bytes_; }
  // Most bytes that the session can ever hold; 0: no limit.
  uint64_t memory_limit() const;
  bool Contains(uint64_t address) const { return address >= kArenaBase && address - kArenaBase < bytes_; }

 private:
  struct Live {
    uint64_t bytes;  // rounded
    int device;
    bool small;
  };
  struct Slab {
    int device;
    uint64_t used = 0;
  };
  struct Cached {
    uint64_t address;
    uint64_t bytes;
    int device;
  };

  DeviceArena(const DriverTable& driver, int devices, uint64_t bytes, uint64_t memory_limit);
  CUresult AllocateSmall(int device, uint64_t bytes, uint64_t at, uint64_t* address) CR_REQUIRES(mutex_);
  CUresult AllocateLarge(int device, uint64_t bytes, uint64_t at, uint64_t* address) CR_REQUIRES(mutex_);
  // Backs pages that were taken from pages_; on failure they are given back.
  CUresult Back(int device, uint64_t address, uint64_t bytes) CR_REQUIRES(mutex_);
  CUresult MapOnce(int device, uint64_t address, uint64_t bytes) CR_REQUIRES(mutex_);
  // Whether its addresses and its device are the arena's.
  bool MayMapLocked(const Block& block) const CR_REQUIRES(mutex_);
  CUresult MapAdopted(const Block& block, int fd) CR_REQUIRES(mutex_);
  CUresult AskForExport(uint64_t address, int* fd) const;
  // Whether this is exactly a block that was adopted or staged and not given out yet; it is given out now.
  bool Claim(int device, uint64_t address, uint64_t bytes) CR_REQUIRES(mutex_);
  CUresult SetAccess(int device, uint64_t address, uint64_t bytes) CR_REQUIRES(mutex_);
  void Unback(uint64_t address, uint64_t bytes, int device) CR_REQUIRES(mutex_);
  // Takes so much of what the session, and its owner, may hold. False: it does not fit.
  bool TakeOfLimits(uint64_t bytes) CR_REQUIRES(mutex_);
  void GiveToLimits(uint64_t bytes) CR_REQUIRES(mutex_);
  void EvictOldest() CR_REQUIRES(mutex_);
  // Unmaps one staged block. False: there is none.
  bool EvictStaged() CR_REQUIRES(mutex_);
  // Unmaps what is kept although it is free. False: there is nothing.
  bool EvictSome() CR_REQUIRES(mutex_);
  void TrimLocked(uint64_t keep = 0) CR_REQUIRES(mutex_);
  // Unmaps cached and staged parts that lie in the way of a request for exactly these addresses.
  void EvictOverlapping(uint64_t address, uint64_t bytes) CR_REQUIRES(mutex_);

  const DriverTable driver_;
  const uint64_t bytes_;
  const uint64_t memory_limit_;
  std::unique_ptr<MemoryBudget> budget_ CR_GUARDED_BY(mutex_);
  mutable Mutex mutex_;
  AddressSpace pages_ CR_GUARDED_BY(mutex_){kPage};
  std::map<uint64_t, Live> live_ CR_GUARDED_BY(mutex_);
  std::map<uint64_t, Slab> slabs_ CR_GUARDED_BY(mutex_);
  std::map<int, AddressSpace> small_ CR_GUARDED_BY(mutex_);       // by device
  std::map<int, std::set<int>> accessors_ CR_GUARDED_BY(mutex_);  // by device: peers that may use its memory
  std::map<uint64_t, std::pair<uint64_t, int>> backed_ CR_GUARDED_BY(mutex_);  // address -> bytes, device
  struct Adopted {
    bool given = false;  // out, by Allocate
    int fd = -1;         // of the memory
  };
  std::map<uint64_t, Adopted> adopted_ CR_GUARDED_BY(mutex_);  // blocks of backed_
  std::map<uint64_t, int> exported_ CR_GUARDED_BY(mutex_);     // descriptors of others of them
  std::set<uint64_t> staged_ CR_GUARDED_BY(mutex_);            // the same, not given out
  std::list<Cached> cached_ CR_GUARDED_BY(mutex_);             // oldest first
  uint64_t cached_bytes_ CR_GUARDED_BY(mutex_) = 0;
  uint64_t live_bytes_ CR_GUARDED_BY(mutex_) = 0;  // of allocations, rounded
  std::map<int, uint64_t> live_by_device_ CR_GUARDED_BY(mutex_);
  uint64_t backed_bytes_ CR_GUARDED_BY(mutex_) = 0;  // physical memory of the arena
  bool shareable_ CR_GUARDED_BY(mutex_) =
      true;  // until the driver refuses to make physical memory that can be exported
  uint64_t charged_bytes_ CR_GUARDED_BY(mutex_) = 0;  // physical memory of the application's own making
  uint64_t twice_bytes_ CR_GUARDED_BY(mutex_) =
      0;  // of the budget: the process that this session replaces has them, too
};

}  // namespace cuda_remote::server

#endif  // CUDA_REMOTE_SERVER_WORKER_MEMORY_DEVICE_ARENA_H_
