// SPDX-License-Identifier: Apache-2.0
// Graphs that kernels launch: beside the graph that launches them, behind it, and again and again by themselves. The
// executables are updated, uploaded anew and launched from the host as well. Others are destroyed in between, so there
// are gaps among the driver's handles. The handles are among the arguments of kernels, in GPU memory and in a variable.
//
// The device runtime that launches graphs is machine code, so this needs a real GPU.
#include <cuda_runtime.h>

#include <vector>

#include "tests/apps/support/app.h"

namespace {

constexpr int kCount = 64;

constexpr int kMost = 64;

// Handles of the executables.
__device__ cudaGraphExec_t table[kMost];

__global__ void Advance(unsigned* data, unsigned factor, unsigned add) {
  const int i = threadIdx.x;
  data[i] = data[i] * factor + add + i;
}

// Launches the graph of each handle, from memory or from the variable: beside this graph, or behind it.
__global__ void LaunchAll(const cudaGraphExec_t* graphs, int count, cudaGraphExec_t last) {
  for (int i = 0; i < count; ++i) {
    cudaGraphLaunch(i % 2 == 0 ? graphs[i] : table[i], cudaStreamGraphFireAndForget);
  }
  if (last) cudaGraphLaunch(last, cudaStreamGraphTailLaunch);
}

// Counts down and launches its own graph again.
__global__ void Again(unsigned* left, unsigned* data) {
  data[0] = data[0] * 3 + 1;
  if (--*left > 0) cudaGraphLaunch(cudaGetCurrentGraphExec(), cudaStreamGraphTailLaunch);
}

template <typename Body>
cudaGraph_t Capture(cudaStream_t stream, Body body) {
  cudaGraph_t graph;
  CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  body();
  LAUNCH_CHECK();
  CUDA_CHECK(cudaStreamEndCapture(stream, &graph));
  return graph;
}

struct Launched {
  unsigned* data = nullptr;
  std::vector<unsigned> want = std::vector<unsigned>(kCount, 1);
  unsigned factor = 5, add = 7;
  cudaGraphExec_t exec = nullptr;

  void OnHost() {
    for (unsigned i = 0; i < kCount; ++i) want[i] = want[i] * factor + add + i;
  }
};

}  // namespace

int main(int argc, char** argv) {
  app::Options options = app::Parse(argc, argv, {20, 3});
  cudaStream_t stream;
  CUDA_CHECK(cudaStreamCreate(&stream));
  std::vector<Launched> all(size_t(options.size) + 1);
  APP_CHECK(all.size() <= size_t(kMost));
  cudaGraphExec_t* there;
  CUDA_CHECK(cudaMalloc(&there, all.size() * sizeof(cudaGraphExec_t)));
  const auto instantiate = [&](Launched& one) {
    cudaGraph_t graph = Capture(stream, [&] { Advance<<<1, kCount, 0, stream>>>(one.data, one.factor, one.add); });
    CUDA_CHECK(cudaGraphInstantiate(&one.exec, graph, cudaGraphInstantiateFlagDeviceLaunch));
    CUDA_CHECK(cudaGraphUpload(one.exec, stream));
    unsigned long long flags = 0;
    CUDA_CHECK(cudaGraphExecGetFlags(one.exec, &flags));
    APP_CHECK(flags & cudaGraphInstantiateFlagDeviceLaunch);
    CUDA_CHECK(cudaGraphDestroy(graph));
    const size_t place = size_t(&one - all.data());
    CUDA_CHECK(cudaMemcpy(there + place, &one.exec, sizeof(one.exec), cudaMemcpyHostToDevice));
    CUDA_CHECK(cudaMemcpyToSymbol(table, &one.exec, sizeof(one.exec), place * sizeof(one.exec)));
    if (getenv("APP_SHOW")) fprintf(stderr, "executable %p\n", (void*)one.exec);
  };
  for (Launched& one : all) {
    CUDA_CHECK(cudaMalloc(&one.data, kCount * sizeof(unsigned)));
    CUDA_CHECK(cudaMemcpy(one.data, one.want.data(), kCount * sizeof(unsigned), cudaMemcpyHostToDevice));
  }
  // Each second one of these goes again, and leaves a gap in front of the next.
  std::vector<cudaGraphExec_t> gaps;
  for (Launched& one : all) {
    instantiate(one);
    gaps.push_back(one.exec);
    instantiate(one);
  }
  for (cudaGraphExec_t gap : gaps) CUDA_CHECK(cudaGraphExecDestroy(gap));
  cudaGraph_t graph = Capture(stream, [&] { LaunchAll<<<1, 1, 0, stream>>>(there, options.size, all.back().exec); });
  cudaGraphExec_t launcher;
  CUDA_CHECK(cudaGraphInstantiate(&launcher, graph, 0));
  CUDA_CHECK(cudaGraphDestroy(graph));

  unsigned *left, *turns, want_turns = 1;
  CUDA_CHECK(cudaMalloc(&left, sizeof(unsigned)));
  CUDA_CHECK(cudaMalloc(&turns, sizeof(unsigned)));
  CUDA_CHECK(cudaMemcpy(turns, &want_turns, sizeof(unsigned), cudaMemcpyHostToDevice));
  graph = Capture(stream, [&] { Again<<<1, 1, 0, stream>>>(left, turns); });
  cudaGraphExec_t again;
  CUDA_CHECK(cudaGraphInstantiate(&again, graph, cudaGraphInstantiateFlagDeviceLaunch));
  CUDA_CHECK(cudaGraphDestroy(graph));

  for (int step = 1; step <= options.steps; ++step) {
    app::Step(step);
    CUDA_CHECK(cudaGraphLaunch(launcher, stream));
    for (Launched& one : all) one.OnHost();
    CUDA_CHECK(cudaStreamSynchronize(stream));
    // From the host.
    Launched& chosen = all[size_t(step) % all.size()];
    CUDA_CHECK(cudaGraphLaunch(chosen.exec, stream));
    chosen.OnHost();
    if (step % 4 == 0) {
      chosen.factor += 2;
      chosen.add = unsigned(step);
      CUDA_CHECK(cudaStreamSynchronize(stream));
      graph = Capture(stream, [&] { Advance<<<1, kCount, 0, stream>>>(chosen.data, chosen.factor, chosen.add); });
      cudaGraphExecUpdateResultInfo info;
      CUDA_CHECK(cudaGraphExecUpdate(chosen.exec, graph, &info));
      CUDA_CHECK(cudaGraphDestroy(graph));
      CUDA_CHECK(cudaGraphUpload(chosen.exec, stream));
    } else if (step % 4 == 2 && &chosen != &all.back()) {
      // Into a gap. A kernel has the last one's handle as an argument.
      CUDA_CHECK(cudaStreamSynchronize(stream));
      cudaGraphExec_t old = chosen.exec;
      chosen.factor += 4;
      instantiate(chosen);
      CUDA_CHECK(cudaGraphExecDestroy(old));
    }
    const unsigned count = unsigned(step) % 5 + 1;
    CUDA_CHECK(cudaMemcpyAsync(left, &count, sizeof(count), cudaMemcpyHostToDevice, stream));
    CUDA_CHECK(cudaGraphLaunch(again, stream));
    for (unsigned i = 0; i < count; ++i) want_turns = want_turns * 3 + 1;
    CUDA_CHECK(cudaStreamSynchronize(stream));
  }
  app::Digest digest;
  for (const Launched& one : all) {
    std::vector<unsigned> got(kCount);
    CUDA_CHECK(cudaMemcpy(got.data(), one.data, kCount * sizeof(unsigned), cudaMemcpyDeviceToHost));
    APP_CHECK(got == one.want);
    digest.Add(got.data(), got.size() * sizeof(unsigned));
    CUDA_CHECK(cudaGraphExecDestroy(one.exec));
  }
  unsigned got_turns;
  CUDA_CHECK(cudaMemcpy(&got_turns, turns, sizeof(unsigned), cudaMemcpyDeviceToHost));
  APP_CHECK(got_turns == want_turns);
  digest.Add(&got_turns, sizeof(got_turns));
  CUDA_CHECK(cudaGraphExecDestroy(again));
  printf("graph_device_launch graphs=%d steps=%d digest=%016" PRIx64 "\n", options.size, options.steps, digest.value());
  return 0;
}
