// SPDX-License-Identifier: Apache-2.0
// Threads that work together: warps, blocks, grids, atomics.
#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>
#include <cooperative_groups/scan.h>
namespace cg = cooperative_groups;

extern "C" __global__ void block_sum(const int* in, int* out, int n) {
  extern __shared__ int part[];
  int s = 0;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) s += in[i];
  part[threadIdx.x] = s;
  __syncthreads();
  for (int step = blockDim.x / 2; step > 0; step /= 2) {
    if (threadIdx.x < step) part[threadIdx.x] += part[threadIdx.x + step];
    __syncthreads();
  }
  if (threadIdx.x == 0) atomicAdd(out, part[0]);
}

extern "C" __global__ void warp_ops(unsigned* out) {
  unsigned lane = threadIdx.x % 32, v = lane * lane + 1;
  unsigned* o = out + 20 * threadIdx.x;
  o[0] = __shfl_sync(~0u, v, 5);
  o[1] = __shfl_up_sync(~0u, v, 3);
  o[2] = __shfl_down_sync(~0u, v, 4);
  o[3] = __shfl_xor_sync(~0u, v, 9);
  o[4] = __shfl_sync(~0u, v, lane + 1, 8);
  o[5] = __ballot_sync(~0u, lane % 3 == 0);
  o[6] = __any_sync(~0u, lane == 40);
  o[7] = __all_sync(~0u, lane < 32);
  if (lane < 8)
    o[8] = __shfl_down_sync(0xff, v, 1);
  else
    o[8] = __ballot_sync(0xffffff00, lane & 1);
  o[9] = __match_any_sync(~0u, lane / 4);
  int all = 0;
  o[10] = __match_all_sync(~0u, 7, &all);
  o[11] = all;
  if (lane & 1)
    o[12] = __activemask();
  else
    o[12] = __activemask() + 1;
  __syncwarp();
  double d = lane;
  for (int i = 16; i; i /= 2) d += __shfl_xor_sync(~0u, d, i);
  o[13] = (unsigned)d;
#if __CUDA_ARCH__ >= 800
  o[14] = __reduce_add_sync(~0u, lane);
  o[15] = (unsigned)__reduce_max_sync(~0u, (int)lane - 40);
  o[16] = __reduce_xor_sync(~0u, v);
#else
  o[14] = 496;
  o[15] = 0xfffffff7u;
  o[16] = 0;
  for (unsigned i = 0; i < 32; ++i) o[16] ^= i * i + 1;
#endif
  o[17] = __syncthreads_count(lane == 0);
  o[18] = __syncthreads_and(lane < 32);
  o[19] = __syncthreads_or(lane == 77);
}

extern "C" __global__ void cooperative(int* out) {
  cg::thread_block block = cg::this_thread_block();
  cg::thread_block_tile<16> tile = cg::tiled_partition<16>(block);
  int v = threadIdx.x;
  out[threadIdx.x * 4] = cg::reduce(tile, v, cg::plus<int>());
  out[threadIdx.x * 4 + 1] = cg::inclusive_scan(tile, v);
  if (threadIdx.x % 3 == 0) {
    cg::coalesced_group g = cg::coalesced_threads();
    out[threadIdx.x * 4 + 2] = g.size() * 100 + g.thread_rank();
  } else
    out[threadIdx.x * 4 + 2] = -1;
  out[threadIdx.x * 4 + 3] = tile.meta_group_rank();
  block.sync();
}

extern "C" __global__ void grid_sync(int* data, int rounds) {
  cg::grid_group grid = cg::this_grid();
  int n = gridDim.x * blockDim.x, i = grid.thread_rank();
  for (int round = 0; round < rounds; ++round) {
    int next = data[(i + 1) % n];
    grid.sync();
    data[i] = next + 1;
    grid.sync();
  }
}

extern "C" __global__ void atomics(int* i, unsigned* u, unsigned long long* l, float* f, double* d) {
  int t = blockIdx.x * blockDim.x + threadIdx.x;
  atomicAdd(&i[0], t);
  atomicSub(&i[1], t);
  atomicMin(&i[2], -t);
  atomicMax(&i[3], t);
  atomicAnd(&u[0], ~(1u << (t % 32)));
  atomicOr(&u[1], 1u << (t % 32));
  atomicXor(&u[2], t);
  atomicInc(&u[3], 9);
  atomicDec(&u[4], 9);
  atomicExch(&u[5], 77u);
  atomicAdd(&l[0], (unsigned long long)t);
  atomicMax(&l[1], (unsigned long long)t << 33);
  atomicMin((long long*)&l[2], -(long long)t);
  atomicAdd(&f[0], 1.0f);
  atomicAdd(&d[0], 0.5);
  unsigned old = *(volatile unsigned*)&u[6], seen;
  do {
    seen = old;
    old = atomicCAS(&u[6], seen, seen + 2);
  } while (old != seen);
  __shared__ int s;
  if (threadIdx.x == 0) s = 0;
  __syncthreads();
  atomicAdd(&s, 1);
  __syncthreads();
  if (threadIdx.x == 0) atomicAdd(&i[4], s);
}

extern "C" __global__ void spin_lock(int* lock, int* value) {
  for (int done = 0; !done;) {
    if (atomicCAS(lock, 0, 1) == 0) {
      *(volatile int*)value = *(volatile int*)value + 1;
      __threadfence();
      atomicExch(lock, 0);
      done = 1;
    }
  }
}

// Producer and consumer warps at named barriers.
extern "C" __global__ void named_barriers(int* out) {
  __shared__ int box[32];
  int lane = threadIdx.x % 32;
  if (threadIdx.x < 32) {
    for (int i = 0; i < 10; ++i) {
      asm volatile("bar.sync 1, 64;");
      box[lane] = i * 100 + lane;
      asm volatile("bar.arrive 2, 64;");
    }
  } else {
    asm volatile("bar.arrive 1, 64;");
    int s = 0;
    for (int i = 0; i < 10; ++i) {
      asm volatile("bar.sync 2, 64;");
      s += box[31 - lane];
      if (i < 9) asm volatile("bar.arrive 1, 64;");
    }
    out[lane] = s;
  }
}
extern "C" __global__ void early_exit(int* out) {
  if (threadIdx.x % 5 == 0) return;
  __syncthreads();
  atomicAdd(out, 1);
  __syncthreads();
}
