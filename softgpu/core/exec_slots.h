// SPDX-License-Identifier: Apache-2.0
// Handles of executable graphs that kernels may launch, as a driver gives them.
//
// NVIDIA's driver (580) reserves 64 MiB of address space. The handle of such an executable is the address of a slot of
// 0xc0 bytes in there: the lowest one that is free, whatever is in the graph. A destroyed executable's slot is used
// again. Where the driver reserves the space is the same in each process here, but with SOFTGPU_PLACES=process.
//
// Thread-safe.
#ifndef CUDA_REMOTE_SOFTGPU_CORE_EXEC_SLOTS_H_
#define CUDA_REMOTE_SOFTGPU_CORE_EXEC_SLOTS_H_

#include <cstdint>

namespace cuda_remote::softgpu {

// The lowest slot that is free, which is taken then; 0 if there is none.
uint64_t TakeExecSlot();
void GiveExecSlot(uint64_t slot);

}  // namespace cuda_remote::softgpu

#endif  // CUDA_REMOTE_SOFTGPU_CORE_EXEC_SLOTS_H_
