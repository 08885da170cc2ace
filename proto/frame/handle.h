// SPDX-License-Identifier: Apache-2.0
// Virtual handles: the values that the application holds in place of the driver's own.
//
// The client chooses them, both sides use them on the wire, and they stay the same across restart and migration. They
// are not valid addresses (non-canonical on x86-64), so an application that looks inside one faults at once instead
// of reading something else.
//
// This header is part of the client library: no libprotobuf, no abseil, no logging.
#ifndef CUDA_REMOTE_PROTO_FRAME_HANDLE_H_
#define CUDA_REMOTE_PROTO_FRAME_HANDLE_H_

#include <cstdint>

namespace cuda_remote {

// Kinds of object that have a handle. The numbers are on the wire and in the log: append only.
// Those from kDeviceMemory on are named by their address instead of a virtual handle.
enum class Kind : uint8_t {
  kNone = 0,
  kContext = 1,
  kStream = 2,
  kEvent = 3,
  kModule = 4,
  kLibrary = 5,
  kFunction = 6,
  kKernel = 7,
  kMemoryPool = 8,
  kGraph = 9,
  kGraphNode = 10,
  kGraphExec = 11,
  kArray = 12,
  kMipmappedArray = 13,
  kTextureObject = 14,  // no longer used: see kTexture
  kSurfaceObject = 15,  // no longer used: see kSurface
  kTextureReference = 16,
  kSurfaceReference = 17,
  kLinkState = 18,
  kExternalMemory = 19,
  kExternalSemaphore = 20,
  kPhysicalMemory = 21,  // CUmemGenericAllocationHandle
  kGreenContext = 22,
  kUserObject = 23,
  kConditional = 24,  // CUgraphConditionalHandle
  kDevResourceDesc = 25,
  kAsyncCallback = 26,
  kCapture = 40,       // what a capture added to a graph of the application's; the client's alone, never on the wire
  kDeviceMemory = 64,  // named by its address
  kHostMemory = 65,    // named by its address
  kReservation = 66,   // named by its address
  kMapping = 67,       // named by its address
  kVariable = 68,      // a module's __device__ or __constant__ variable, named by its address
  kTexture = 69,       // a texture object, named by the driver's own value: kernels get it
  kSurface = 70,       // a surface object, likewise
};

// Layout of a virtual handle: kind in bits 48-55, generation in bits 28-43, slot in bits 4-27, the rest zero.
// A slot is an index into the session's one handle table, shared by all kinds; slot 0 is never used. The generation
// counts how often the slot has been used, so a stale handle is recognised.
inline constexpr uint32_t kMaxSlot = (1u << 24) - 1;

constexpr uint64_t MakeHandle(Kind kind, uint32_t slot, uint16_t generation) {
  return uint64_t(kind) << 48 | uint64_t(generation) << 28 | uint64_t(slot) << 4;
}
constexpr Kind KindOf(uint64_t handle) { return Kind(uint8_t(handle >> 48)); }
constexpr uint32_t SlotOf(uint64_t handle) { return uint32_t(handle >> 4) & kMaxSlot; }
constexpr uint16_t GenerationOf(uint64_t handle) { return uint16_t(handle >> 28); }

}  // namespace cuda_remote

#endif  // CUDA_REMOTE_PROTO_FRAME_HANDLE_H_
