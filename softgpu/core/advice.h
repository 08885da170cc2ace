// SPDX-License-Identifier: Apache-2.0
// What was advised about managed memory: nothing follows from it, but it can be asked for.
#ifndef CUDA_REMOTE_SOFTGPU_CORE_ADVICE_H_
#define CUDA_REMOTE_SOFTGPU_CORE_ADVICE_H_

#include <cstdint>

namespace cuda_remote::softgpu {

// New memory lies there. Thread-safe.
void ForgetAdvice(uint64_t address, uint64_t bytes);

}  // namespace cuda_remote::softgpu

#endif  // CUDA_REMOTE_SOFTGPU_CORE_ADVICE_H_
