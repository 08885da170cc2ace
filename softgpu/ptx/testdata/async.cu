// SPDX-License-Identifier: Apache-2.0
// Barriers in shared memory and asynchronous copies, as libcu++ and cooperative groups use them.
#include <cooperative_groups.h>
#include <cooperative_groups/memcpy_async.h>

#include <cuda/barrier>
#include <cuda/pipeline>
namespace cg = cooperative_groups;

extern "C" __global__ void barrier_phases(int* out, int rounds) {
#pragma nv_diag_suppress static_var_with_dynamic_init
  __shared__ cuda::barrier<cuda::thread_scope_block> bar;
  __shared__ int box[256];
  if (threadIdx.x == 0) init(&bar, blockDim.x);
  __syncthreads();
  int v = threadIdx.x;
  for (int i = 0; i < rounds; ++i) {
    box[threadIdx.x] = v;
    bar.arrive_and_wait();
    v = box[(threadIdx.x + 1) % blockDim.x] + 1;
    auto token = bar.arrive();
    bar.wait(std::move(token));
  }
  out[blockIdx.x * blockDim.x + threadIdx.x] = v;
}

extern "C" __global__ void copies(const int* in, int* out) {
  __shared__ cuda::barrier<cuda::thread_scope_block> bar;
  __shared__ alignas(128) int tile[512];
  auto block = cg::this_thread_block();
  if (block.thread_rank() == 0) init(&bar, block.size());
  block.sync();
  cuda::memcpy_async(block, tile, in + blockIdx.x * 512, cuda::aligned_size_t<16>(sizeof(tile)), bar);
  bar.arrive_and_wait();
  for (int i = threadIdx.x; i < 512; i += blockDim.x) out[blockIdx.x * 512 + i] = tile[511 - i];
}

extern "C" __global__ void group_copies(const int* in, int* out) {
  __shared__ alignas(16) int tile[512];
  auto block = cg::this_thread_block();
  cg::memcpy_async(block, tile, in + blockIdx.x * 512, sizeof(tile));
  cg::wait(block);
  for (int i = threadIdx.x; i < 512; i += blockDim.x) out[blockIdx.x * 512 + i] = tile[i] * 2;
}

extern "C" __global__ void pipelined(const int* in, int* out, int n) {
  __shared__ alignas(16) int stages[2][64];
  __shared__ cuda::pipeline_shared_state<cuda::thread_scope_block, 2> state;
  auto block = cg::this_thread_block();
  auto pipe = cuda::make_pipeline(block, &state);
  int sum = 0;
  for (int compute = 0, fetch = 0; compute < n; ++compute) {
    for (; fetch < n && fetch < compute + 2; ++fetch) {
      pipe.producer_acquire();
      cuda::memcpy_async(block, stages[fetch % 2], in + fetch * 64, sizeof(stages[0]), pipe);
      pipe.producer_commit();
    }
    pipe.consumer_wait();
    sum += stages[compute % 2][63 - threadIdx.x];
    pipe.consumer_release();
  }
  out[threadIdx.x] = sum;
}
