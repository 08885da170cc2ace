// SPDX-License-Identifier: Apache-2.0
// Settings of the software GPU, read from the environment once, and its messages.
//
// CUDA_VISIBLE_DEVICES (ordinals), CUDA_MODULE_LOADING, SOFTGPU_DEVICES, SOFTGPU_CAPABILITY (as in 8.0), SOFTGPU_MEMORY
// (bytes, with K, M or G), SOFTGPU_MEMORY_FILE (machine_memory.h), SOFTGPU_UUID, SOFTGPU_THREADS, SOFTGPU_FAIL,
// SOFTGPU_DELAY_US, SOFTGPU_PLACES, SOFTGPU_LATE_MS, SOFTGPU_LAST_IS_FASTEST: README.md. Thread-safe.
#ifndef CUDA_REMOTE_SOFTGPU_CORE_SETTINGS_H_
#define CUDA_REMOTE_SOFTGPU_CORE_SETTINGS_H_

#include <cuda.h>

#include <cstdint>
#include <string>
#include <vector>

namespace cuda_remote::softgpu {

struct Settings {
  int devices = 1;
  uint64_t memory_bytes = uint64_t{2} << 30;  // of each device
  int capability = 90;                        // 90 for 9.0
  bool strict_capability = false;             // it was set: code for newer GPUs is refused, as by a real one
  std::string uuid;                           // as given; empty: derived from the machine
  uint32_t kernel_threads = 0;                // 0: as many as the machine has
  uint32_t delay_us = 0;                      // before every kernel and copy
  uint64_t places_seed = 0;                   // where code, heaps and exec_slots.h lie; 0: where in every process
  bool places_behind_streams = false;         // variables of contexts that are not primary: by the streams made before
  bool places_by_loads = false;               // variables: one place further at every other load
  bool eager_loading = false;                 // kernels get their places when their module is loaded
  bool last_is_fastest = false;               // which is then the first device, but with CUDA_DEVICE_ORDER=PCI_BUS_ID
  uint32_t late_ms = 0;                       // 0: streams begin their work at once
};

const Settings& GetSettings();

// CUDA_SUCCESS, CUDA_ERROR_NOT_INITIALIZED before cuInit, or the failure that SOFTGPU_FAIL asks for at this call.
CUresult Enter(const char* function);
// Only the failure that SOFTGPU_FAIL asks for: for functions that work before cuInit.
CUresult InjectedFailure(const char* function);

// From cuInit on.
void SetInitialized();

// Sleeps for SOFTGPU_DELAY_US.
void Delay();

// One line on stderr, "softgpu: " before it.
void Log(const std::string& line);
// The same, but each distinct line once per process.
void LogOnce(const std::string& line);

}  // namespace cuda_remote::softgpu

#endif  // CUDA_REMOTE_SOFTGPU_CORE_SETTINGS_H_
