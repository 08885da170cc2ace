// What asynchronous copies do to mbarriers.
#ifndef CUDA_REMOTE_SERVER_SOFTGPU_PTX_MBARRIER_H_
#define CUDA_REMOTE_SERVER_SOFTGPU_PTX_MBARRIER_H_

#include <algorithm>

#include "server/softgpu/ptx/decoder.h"

namespace cuda_remote::softgpu::ptx {

// Emits an arrival of one at the barrier.
bool EmitMbarrierArrive(Decoder& d, const Decoder::Address& address);
// Emits that the bytes in slot `bytes` have come.
bool EmitMbarrierComplete(Decoder& d, const Decoder::Address& address, int32_t bytes);

}  // namespace cuda_remote::softgpu::ptx

#endif  // CUDA_REMOTE_SERVER_SOFTGPU_PTX_MBARRIER_H_
