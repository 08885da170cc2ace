// SPDX-License-Identifier: Apache-2.0
// What asynchronous copies and stores do to mbarriers.
#ifndef CUDA_REMOTE_SOFTGPU_PTX_MBARRIER_H_
#define CUDA_REMOTE_SOFTGPU_PTX_MBARRIER_H_

#include <algorithm>

#include "softgpu/ptx/decoder.h"

namespace cuda_remote::softgpu::ptx {

// Emits an arrival of one at the barrier.
bool EmitMbarrierArrive(Decoder& d, const Decoder::Address& address);
// Emits that the bytes in slot `bytes` have come.
bool EmitMbarrierComplete(Decoder& d, const Decoder::Address& address, int32_t bytes);
// The same for st.async and red.async, whose third operand is the barrier.
bool EmitAsyncCompletion(Decoder& d, uint32_t bytes);
// The same when it runs: for the barrier at `place`.
void CompleteMbarrier(uint8_t* place, uint32_t bytes);
// Copies `data` to the same place in the shared memory of every block of the thread's cluster that has a bit in
// `blocks`; the barrier in the same place as `barrier` of each gets the bytes. False: the fault is raised.
bool Multicast(Thread* t, const Op* op, uint32_t blocks, uint64_t to, uint64_t barrier,
               const std::vector<uint8_t>& data);

// The part of decode_async.cc that knows of tensor maps; see decode_tensor.cc.
bool DecodeTensorCopy(Decoder& d);

}  // namespace cuda_remote::softgpu::ptx

#endif  // CUDA_REMOTE_SOFTGPU_PTX_MBARRIER_H_
