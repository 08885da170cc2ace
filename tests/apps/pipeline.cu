// SPDX-License-Identifier: Apache-2.0
// A pipeline over several streams: upload from pinned memory, two kernels, download, and host functions that fold the
// results in; events order the stages, streams have priorities, and both kinds of host callback are used.
#include <pthread.h>

#include <vector>

#include "tests/apps/support/app.h"

constexpr int kLanes = 3;

__global__ void Mix(const unsigned* in, unsigned* out, unsigned* carry, int n, unsigned salt) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  unsigned v = in[i] * 1664525u + salt;
  v ^= carry[i];
  carry[i] = v * 22695477u + 1u;
  out[i] = v;
}

__global__ void Rotate(unsigned* data, int n, unsigned bits) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) data[i] = (data[i] << bits) | (data[i] >> (32 - bits));
}

struct Lane {
  cudaStream_t upload, compute;
  cudaEvent_t uploaded, computed, free_again;
  unsigned *host_in, *host_out, *in, *out, *carry;
  int n = 0;
  int batches = 0;  // written by host functions of this lane only
  int callbacks = 0;
  app::Digest digest;
};

static void Fold(void* user) {
  Lane* lane = static_cast<Lane*>(user);
  lane->digest.Add(lane->host_out, lane->n * sizeof(unsigned));
  ++lane->batches;
}

static void CUDART_CB Counted(cudaStream_t stream, cudaError_t status, void* user) {
  Lane* lane = static_cast<Lane*>(user);
  if (status == cudaSuccess && stream == lane->compute) ++lane->callbacks;
}

int main(int argc, char** argv) {
  app::Options options = app::Parse(argc, argv, {30, 2048});
  const int n = options.size;
  int least = 0, greatest = 0;
  CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));

  std::vector<Lane> lanes(kLanes);
  for (int l = 0; l < kLanes; ++l) {
    Lane& lane = lanes[l];
    lane.n = n;
    int priority = l == 0 ? greatest : least;
    CUDA_CHECK(cudaStreamCreateWithFlags(&lane.upload, cudaStreamNonBlocking));
    CUDA_CHECK(cudaStreamCreateWithPriority(&lane.compute, cudaStreamNonBlocking, priority));
    int got = 12345;
    CUDA_CHECK(cudaStreamGetPriority(lane.compute, &got));
    APP_CHECK(got == priority);
    CUDA_CHECK(cudaEventCreate(&lane.uploaded));
    CUDA_CHECK(cudaEventCreate(&lane.computed));
    CUDA_CHECK(cudaEventCreateWithFlags(&lane.free_again, cudaEventBlockingSync | cudaEventDisableTiming));
    CUDA_CHECK(cudaMallocHost(&lane.host_in, n * sizeof(unsigned)));
    CUDA_CHECK(cudaHostAlloc(&lane.host_out, n * sizeof(unsigned), cudaHostAllocDefault));
    CUDA_CHECK(cudaMalloc(&lane.in, n * sizeof(unsigned)));
    CUDA_CHECK(cudaMalloc(&lane.out, n * sizeof(unsigned)));
    CUDA_CHECK(cudaMalloc(&lane.carry, n * sizeof(unsigned)));
    CUDA_CHECK(cudaMemset(lane.carry, 0x5a + l, n * sizeof(unsigned)));
  }
  CUDA_CHECK(cudaDeviceSynchronize());

  const dim3 grid((n + 127) / 128), block(128);
  for (int step = 1; step <= options.steps; ++step) {
    int l = step % kLanes;
    Lane& lane = lanes[l];
    if (step > kLanes) CUDA_CHECK(cudaEventSynchronize(lane.free_again));  // the lane's buffers are ours again
    for (int i = 0; i < n; ++i) lane.host_in[i] = step * 40503u + i;
    CUDA_CHECK(cudaMemcpyAsync(lane.in, lane.host_in, n * sizeof(unsigned), cudaMemcpyHostToDevice, lane.upload));
    CUDA_CHECK(cudaEventRecord(lane.uploaded, lane.upload));
    CUDA_CHECK(cudaStreamWaitEvent(lane.compute, lane.uploaded, 0));
    Mix<<<grid, block, 0, lane.compute>>>(lane.in, lane.out, lane.carry, n, step);
    Rotate<<<grid, block, 0, lane.compute>>>(lane.out, n, 1 + step % 30);
    LAUNCH_CHECK();
    CUDA_CHECK(cudaEventRecord(lane.computed, lane.compute));
    CUDA_CHECK(cudaMemcpyAsync(lane.host_out, lane.out, n * sizeof(unsigned), cudaMemcpyDeviceToHost, lane.compute));
    CUDA_CHECK(cudaLaunchHostFunc(lane.compute, Fold, &lane));
    CUDA_CHECK(cudaStreamAddCallback(lane.compute, Counted, &lane, 0));
    CUDA_CHECK(cudaEventRecord(lane.free_again, lane.compute));
    cudaError_t query = cudaEventQuery(lane.free_again);
    APP_CHECK(query == cudaSuccess || query == cudaErrorNotReady);
    app::Step(step);
  }
  for (Lane& lane : lanes) CUDA_CHECK(cudaStreamSynchronize(lane.compute));
  for (Lane& lane : lanes) {
    if (lane.batches == 0) continue;
    float ms = -1;
    CUDA_CHECK(cudaEventElapsedTime(&ms, lane.uploaded, lane.computed));
    APP_CHECK(ms >= 0);
  }

  // The same on the host.
  int batches = 0, callbacks = 0;
  for (int l = 0; l < kLanes; ++l) {
    std::vector<unsigned> carry(n, 0x01010101u * (0x5a + l)), out(n);
    app::Digest digest;
    for (int step = 1; step <= options.steps; ++step) {
      if (step % kLanes != l) continue;
      unsigned bits = 1 + step % 30;
      for (int i = 0; i < n; ++i) {
        unsigned v = (step * 40503u + i) * 1664525u + step;
        v ^= carry[i];
        carry[i] = v * 22695477u + 1u;
        out[i] = (v << bits) | (v >> (32 - bits));
      }
      digest.Add(out.data(), n * sizeof(unsigned));
    }
    APP_CHECK(digest.value() == lanes[l].digest.value());
    batches += lanes[l].batches;
    callbacks += lanes[l].callbacks;
    printf("pipeline lane=%d batches=%d digest=%016" PRIx64 "\n", l, lanes[l].batches, lanes[l].digest.value());
  }
  APP_CHECK(batches == options.steps && callbacks == options.steps);
  printf("pipeline n=%d steps=%d batches=%d callbacks=%d\n", n, options.steps, batches, callbacks);

  for (Lane& lane : lanes) {
    CUDA_CHECK(cudaFreeHost(lane.host_in));
    CUDA_CHECK(cudaFreeHost(lane.host_out));
    CUDA_CHECK(cudaFree(lane.in));
    CUDA_CHECK(cudaFree(lane.out));
    CUDA_CHECK(cudaFree(lane.carry));
    CUDA_CHECK(cudaEventDestroy(lane.uploaded));
    CUDA_CHECK(cudaEventDestroy(lane.computed));
    CUDA_CHECK(cudaEventDestroy(lane.free_again));
    CUDA_CHECK(cudaStreamDestroy(lane.upload));
    CUDA_CHECK(cudaStreamDestroy(lane.compute));
  }
  return 0;
}
