// SPDX-License-Identifier: Apache-2.0
// Where the memory of a job lies: the ranges of addresses that client, worker and tools agree on, lowest first.
// docs/memory.md explains them. A job keeps addresses in its own memory, so images depend on all of them.
#ifndef CUDA_REMOTE_PROTO_DRIVERABI_JOB_ADDRESSES_H_
#define CUDA_REMOTE_PROTO_DRIVERABI_JOB_ADDRESSES_H_

#include <cstdint>

namespace cuda_remote::driverabi {

// Device memory: the worker's arena.
#if defined(__SANITIZE_ADDRESS__)
// The usual place is the sanitizer's own.
inline constexpr uint64_t kArenaBase = 0x500000000000;
#else
inline constexpr uint64_t kArenaBase = 0x100000000000;
#endif
inline constexpr uint64_t kArenaBytes = uint64_t{1} << 44;

// Pinned memory, and managed memory that stays in host memory. The kernel hands out addresses from the top of the
// address space down, and device memory lies below, so nothing else comes here unasked.
inline constexpr uint64_t kHostBase = 0x200000000000;
inline constexpr uint64_t kHostBytes = uint64_t{1} << 41;

// Managed memory whose home is the GPU. Workers reserve all of it on the GPU when a job has any.
inline constexpr uint64_t kManagedBase = 0x220000000000;
inline constexpr uint64_t kManagedBytes = uint64_t{1} << 41;
static_assert(kHostBase + kHostBytes == kManagedBase, "HostArena and OpHostMap take the two for one range");

// From 0x240000000000 on the worker has mappings of its own (server/worker/memory/mapping_places.h).

// The program's own reservations (cuMemAddressReserve).
inline constexpr uint64_t kReservationBase = 0x300000000000;
inline constexpr uint64_t kReservationBytes = uint64_t{1} << 45;

// What a checkpoint keeps on the GPU for a while (server/worker/memory/snapshot_memory.h): outside of all addresses
// that a job can have.
inline constexpr uint64_t kSnapshotBase = 0x600000000000;
inline constexpr uint64_t kSnapshotBytes = uint64_t{1} << 40;

}  // namespace cuda_remote::driverabi

#endif  // CUDA_REMOTE_PROTO_DRIVERABI_JOB_ADDRESSES_H_
