// SPDX-License-Identifier: Apache-2.0
// Kernels that launch kernels: a tree of them (fire and forget), a chain in which each one launches the next (tail
// launches), and several in the order of a stream. What they leave in memory and in a variable of the module is
// compared with the host's own account of it after every step.
//
// The device runtime is machine code alone, so this needs a real GPU.
#include <cuda_runtime.h>

#include <vector>

#include "tests/apps/support/app.h"

namespace {

constexpr int kDepth = 4, kFan = 3;  // of the tree
constexpr int kChain = 12;
constexpr int kCount = 64;
constexpr int kNodes = 1 + kFan + kFan * kFan + kFan * kFan * kFan;  // kDepth levels

__device__ unsigned long long launched = 3;  // by kernels, over all steps

// Every node adds to its own word and launches its children.
__global__ void Tree(unsigned* words, unsigned step, int node, int depth) {
  words[node] = words[node] * 3 + step + unsigned(node);
  if (depth + 1 == kDepth) return;
  for (int child = 0; child < kFan; ++child) {
    atomicAdd(&launched, 1ull);
    Tree<<<1, 1, 0, cudaStreamFireAndForget>>>(words, step, node * kFan + child + 1, depth + 1);
  }
}

__global__ void Mix(unsigned* data, unsigned step) {
  const int i = int(threadIdx.x);
  data[i] = data[i] * 1664525u + 1013904223u + step + unsigned(i);
}

// Each one launches the next when it has ended, and its own mix before: the mixes come one after the other.
__global__ void Chain(unsigned* data, unsigned step, int left) {
  if (left == 0) return;
  atomicAdd(&launched, 2ull);
  Mix<<<1, kCount, 0, cudaStreamTailLaunch>>>(data, step + unsigned(left));
  Chain<<<1, 1, 0, cudaStreamTailLaunch>>>(data, step, left - 1);
}

// In the order of its own stream.
__global__ void Ordered(unsigned* data, unsigned step) {
  for (unsigned i = 0; i < 5; ++i) {
    atomicAdd(&launched, 1ull);
    Mix<<<1, kCount>>>(data, step * i);
  }
}

void MixOnHost(std::vector<unsigned>* data, unsigned step) {
  for (size_t i = 0; i < data->size(); ++i) (*data)[i] = (*data)[i] * 1664525u + 1013904223u + step + unsigned(i);
}

unsigned* Memory(const std::vector<unsigned>& words) {
  unsigned* memory;
  CUDA_CHECK(cudaMalloc(&memory, words.size() * sizeof(unsigned)));
  CUDA_CHECK(cudaMemcpy(memory, words.data(), words.size() * sizeof(unsigned), cudaMemcpyHostToDevice));
  return memory;
}

void MustBe(const unsigned* memory, const std::vector<unsigned>& want, app::Digest* digest) {
  std::vector<unsigned> got(want.size());
  CUDA_CHECK(cudaMemcpy(got.data(), memory, got.size() * sizeof(unsigned), cudaMemcpyDeviceToHost));
  APP_CHECK(got == want);
  digest->Add(got.data(), got.size() * sizeof(unsigned));
}

}  // namespace

int main(int argc, char** argv) {
  const app::Options options = app::Parse(argc, argv, {10, 1});
  CUDA_CHECK(cudaDeviceSetLimit(cudaLimitDevRuntimePendingLaunchCount, 4096));
  std::vector<unsigned> nodes(kNodes, 1), chain(kCount, 2), ordered(kCount, 3);
  unsigned* const on_gpu[] = {Memory(nodes), Memory(chain), Memory(ordered)};
  unsigned long long count = 3;
  cudaStream_t stream;
  CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  for (int number = 1; number <= options.steps; ++number) {
    const auto step = unsigned(number);
    Tree<<<1, 1>>>(on_gpu[0], step, 0, 0);
    LAUNCH_CHECK();
    Chain<<<1, 1, 0, stream>>>(on_gpu[1], step, kChain);
    LAUNCH_CHECK();
    Ordered<<<1, 1>>>(on_gpu[2], step);
    LAUNCH_CHECK();
    app::Step(number);  // the kernels may still launch others here
    CUDA_CHECK(cudaDeviceSynchronize());
    for (int node = 0; node < kNodes; ++node) nodes[size_t(node)] = nodes[size_t(node)] * 3 + step + unsigned(node);
    for (int left = kChain; left > 0; --left) MixOnHost(&chain, step + unsigned(left));
    for (unsigned i = 0; i < 5; ++i) MixOnHost(&ordered, step * i);
    count += kNodes - 1 + 2 * kChain + 5;
    app::Digest digest;
    MustBe(on_gpu[0], nodes, &digest);
    MustBe(on_gpu[1], chain, &digest);
    MustBe(on_gpu[2], ordered, &digest);
    unsigned long long so_far = 0;
    CUDA_CHECK(cudaMemcpyFromSymbol(&so_far, launched, sizeof so_far));
    APP_CHECK(so_far == count);
    size_t limit = 0;
    CUDA_CHECK(cudaDeviceGetLimit(&limit, cudaLimitDevRuntimePendingLaunchCount));
    APP_CHECK(limit == 4096);
    printf("step %d %016" PRIx64 "\n", number, digest.value());
  }
  return 0;
}
