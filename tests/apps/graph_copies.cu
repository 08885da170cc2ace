// SPDX-License-Identifier: Apache-2.0
// A captured graph that copies host memory, pinned and not, in both directions: it reads and writes that memory at
// every launch.
#include <vector>

#include "tests/apps/support/app.h"

__global__ void Blend(unsigned* state, const unsigned* pinned, const unsigned* pageable, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) state[i] = state[i] * 22695477u + (pinned[i] ^ pageable[i] << 3);
}

int main(int argc, char** argv) {
  app::Options options = app::Parse(argc, argv, {20, 3000});
  const int n = options.size;
  const size_t bytes = n * sizeof(unsigned);
  cudaStream_t stream;
  CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  unsigned *state, *in, *in2, *pinned_in, *pinned_out;
  CUDA_CHECK(cudaMalloc(&state, bytes));
  CUDA_CHECK(cudaMalloc(&in, bytes));
  CUDA_CHECK(cudaMalloc(&in2, bytes));
  CUDA_CHECK(cudaMallocHost(&pinned_in, bytes));
  CUDA_CHECK(cudaMallocHost(&pinned_out, bytes));
  std::vector<unsigned> pageable_in(n), pageable_out(n), expected(n);
  CUDA_CHECK(cudaMemset(state, 0, bytes));
  CUDA_CHECK(cudaDeviceSynchronize());

  cudaGraph_t graph;
  cudaGraphExec_t exec;
  CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  CUDA_CHECK(cudaMemcpyAsync(in, pinned_in, bytes, cudaMemcpyHostToDevice, stream));
  CUDA_CHECK(cudaMemcpyAsync(in2, pageable_in.data(), bytes, cudaMemcpyHostToDevice, stream));
  Blend<<<(n + 127) / 128, 128, 0, stream>>>(state, in, in2, n);
  LAUNCH_CHECK();
  CUDA_CHECK(cudaMemcpyAsync(pinned_out, state, bytes, cudaMemcpyDeviceToHost, stream));
  CUDA_CHECK(cudaMemcpyAsync(pageable_out.data(), state, bytes, cudaMemcpyDeviceToHost, stream));
  CUDA_CHECK(cudaStreamEndCapture(stream, &graph));
  CUDA_CHECK(cudaGraphInstantiate(&exec, graph, 0));
  CUDA_CHECK(cudaGraphDestroy(graph));

  app::Digest digest;
  for (int step = 1; step <= options.steps; ++step) {
    for (int i = 0; i < n; ++i) {
      pinned_in[i] = step * 40503u + i;
      pageable_in[i] = step * 2654435761u ^ i;
      expected[i] = expected[i] * 22695477u + (pinned_in[i] ^ pageable_in[i] << 3);
    }
    CUDA_CHECK(cudaGraphLaunch(exec, stream));
    CUDA_CHECK(cudaStreamSynchronize(stream));
    APP_CHECK(memcmp(pinned_out, expected.data(), bytes) == 0);
    APP_CHECK(pageable_out == expected);
    digest.Add(pinned_out, bytes);
    app::Step(step);
  }
  printf("graph_copies n=%d steps=%d digest=%016" PRIx64 "\n", n, options.steps, digest.value());
  CUDA_CHECK(cudaGraphExecDestroy(exec));
  CUDA_CHECK(cudaFreeHost(pinned_in));
  CUDA_CHECK(cudaFreeHost(pinned_out));
  CUDA_CHECK(cudaFree(state));
  CUDA_CHECK(cudaFree(in));
  CUDA_CHECK(cudaFree(in2));
  CUDA_CHECK(cudaStreamDestroy(stream));
  return 0;
}
