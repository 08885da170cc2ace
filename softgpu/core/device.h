// SPDX-License-Identifier: Apache-2.0
// The devices: what they are said to be, their memory budget, their primary contexts.
//
// Thread-safe; devices exist from the first use to the end of the process.
#ifndef CUDA_REMOTE_SOFTGPU_CORE_DEVICE_H_
#define CUDA_REMOTE_SOFTGPU_CORE_DEVICE_H_

#include <cuda.h>

#include <atomic>
#include <cstdint>

#include "proto/threads/mutex.h"
#include "softgpu/core/context.h"

namespace cuda_remote::softgpu {

constexpr int kDriverVersion = 13000;
constexpr int kMultiprocessors = 16;  // libraries count on room for a cluster of the portable size, and for the largest
constexpr int kThreadsPerMultiprocessor = 2048;
constexpr int kBlocksPerMultiprocessor = 32;
constexpr int kRegistersPerMultiprocessor = 65536;
constexpr int kSharedPerMultiprocessor = 228 * 1024;
constexpr int kSharedPerBlock = 48 * 1024;
constexpr int kSharedPerBlockOptin = 227 * 1024;
constexpr int kReservedSharedPerBlock = 1024;
constexpr uint64_t kGranularity = 2 << 20;  // of cuMemCreate and cuMemMap
constexpr uint64_t kAllocationAlignment = 512;
constexpr uint64_t kPitchAlignment = 512;
constexpr uint64_t kTextureAlignment = 512;
constexpr uint64_t kTexturePitchAlignment = 32;

class Device {
 public:
  // `number`: which one of the machine's, whatever CUDA_VISIBLE_DEVICES makes of it.
  Device(int ordinal, int number);

  int ordinal() const { return ordinal_; }
  int number() const { return number_; }
  const CUuuid& uuid() const { return uuid_; }

  uint64_t total() const { return total_; }
  // By this process, or by all that share the GPU (machine_memory.h).
  uint64_t used() const;
  // Takes bytes from the budget; false if it does not have them. `thing`: what names the memory in all processes that
  // may have it; 0: it is this process's alone.
  bool TakeMemory(uint64_t bytes, uint64_t thing = 0);
  void GiveMemory(uint64_t bytes, uint64_t thing = 0);

  const ContextPtr& primary() const { return primary_; }

  RecursiveMutex primary_mutex;  // what ends with a context may call the driver again
  unsigned primary_retained = 0;

 private:
  const int ordinal_;
  const int number_;
  const uint64_t total_;
  CUuuid uuid_;
  std::atomic<uint64_t> used_{0};
  ContextPtr primary_;
};

// What the devices say that they are: SOFTGPU_CAPABILITY, or 9.0.
int ComputeMajor();
int ComputeMinor();

// Null if there is no such device.
Device* GetDevice(CUdevice ordinal);
int DeviceCount();
// Whether CUDA_VISIBLE_DEVICES names one twice; there are none then.
bool DeviceNamedTwice();

// CUDA_ERROR_INVALID_VALUE for an attribute that the driver does not know.
CUresult DeviceAttribute(int* value, CUdevice_attribute attribute, CUdevice device);

}  // namespace cuda_remote::softgpu

#endif  // CUDA_REMOTE_SOFTGPU_CORE_DEVICE_H_
