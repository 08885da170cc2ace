// SPDX-License-Identifier: Apache-2.0
// How many blocks of a function fit on a multiprocessor: the usual calculation with this GPU's figures.
#ifndef CUDA_REMOTE_SOFTGPU_CORE_OCCUPANCY_H_
#define CUDA_REMOTE_SOFTGPU_CORE_OCCUPANCY_H_

#include <cstdint>

#include "softgpu/core/module.h"

namespace cuda_remote::softgpu {

// Registers of a thread: the estimate, within what the function's launch bounds leave room for.
uint32_t RegistersOf(const Function& function);

// Resident blocks per multiprocessor; 0 if not even one fits.
int BlocksPerMultiprocessor(const Function& function, uint32_t block_threads, uint64_t dynamic_shared);

}  // namespace cuda_remote::softgpu

#endif  // CUDA_REMOTE_SOFTGPU_CORE_OCCUPANCY_H_
