// SPDX-License-Identifier: Apache-2.0
// Managed memory and `__managed__` variables that all GPUs and the host use in turn: memory of each GPU, changed by
// kernels and copies of every other one, prefetched to any GPU or the host, advised, attached to a stream of another
// GPU. With one GPU it does the same with that one.
#include <vector>

#include "tests/apps/support/app.h"

namespace {

constexpr int kMost = 4;
constexpr int kCounters = 100;

__managed__ unsigned g_counters[kCounters];

__global__ void Advance(unsigned* words, unsigned count, unsigned step, unsigned who) {
  for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
    words[i] = words[i] * 5 + step * 7 + who + i;
  }
  if (blockIdx.x == 0 && threadIdx.x < kCounters) g_counters[threadIdx.x] += who + step;
}

struct Memory {
  unsigned* words;
  std::vector<unsigned> model;
};

void AdvanceModel(std::vector<unsigned>* words, unsigned step, unsigned who) {
  for (size_t i = 0; i < words->size(); ++i) (*words)[i] = (*words)[i] * 5 + step * 7 + who + unsigned(i);
}

}  // namespace

int main(int argc, char** argv) {
  const app::Options options = app::Parse(argc, argv, {12, 5000});
  const unsigned count = unsigned(options.size);
  int devices = 0;
  CUDA_CHECK(cudaGetDeviceCount(&devices));
  if (devices > kMost) devices = kMost;
  std::vector<Memory> all(static_cast<size_t>(devices));
  std::vector<cudaStream_t> streams(static_cast<size_t>(devices));
  std::vector<unsigned> counters(kCounters);
  for (int d = 0; d < devices; ++d) {
    CUDA_CHECK(cudaSetDevice(d));
    CUDA_CHECK(cudaStreamCreateWithFlags(&streams[d], cudaStreamNonBlocking));
    CUDA_CHECK(cudaMallocManaged(&all[d].words, count * sizeof(unsigned)));
    all[d].model.resize(count);
    for (unsigned i = 0; i < count; ++i) all[d].words[i] = all[d].model[i] = i + unsigned(d);
  }
  app::Digest digest;
  for (int step = 0; step < options.steps; ++step) {
    // Every GPU after the other uses the memory of all.
    for (int d = 0; d < devices; ++d) {
      CUDA_CHECK(cudaSetDevice(d));
      cudaMemLocation place = {};
      place.type = step % 3 == 0 ? cudaMemLocationTypeHost : cudaMemLocationTypeDevice;
      place.id = step % 3 == 0 ? 0 : (d + step) % devices;
      CUDA_CHECK(cudaMemPrefetchAsync(all[d].words, count * sizeof(unsigned), place, 0, streams[d]));
      if (step % 3 == 1)
        CUDA_CHECK(cudaMemAdvise(all[d].words, count * sizeof(unsigned), cudaMemAdviseSetAccessedBy, place));
      for (int m = 0; m < devices; ++m) {
        Advance<<<2, 128, 0, streams[d]>>>(all[m].words, count, unsigned(step), unsigned(d));
        LAUNCH_CHECK();
        AdvanceModel(&all[m].model, unsigned(step), unsigned(d));
        for (unsigned& counter : counters) counter += unsigned(d + step);
      }
      CUDA_CHECK(cudaStreamSynchronize(streams[d]));
    }
    // From one GPU's memory to another's, by a stream of the last one; and memory that one stream has for itself.
    Memory &from = all[size_t(step % devices)], &to = all[size_t((step + 1) % devices)];
    if (&from != &to) {
      const size_t words = count / 2;
      CUDA_CHECK(
          cudaMemcpyAsync(to.words + 3, from.words, words * sizeof(unsigned), cudaMemcpyDefault, streams.back()));
      memcpy(&to.model[3], from.model.data(), words * sizeof(unsigned));
    }
    CUDA_CHECK(cudaStreamSynchronize(streams.back()));
    CUDA_CHECK(cudaStreamAttachMemAsync(streams.back(), from.words));
    CUDA_CHECK(cudaStreamSynchronize(streams.back()));
    for (unsigned i = unsigned(step); i < count; i += 17) from.words[i] = from.model[i] ^= 0x1111u;
    CUDA_CHECK(cudaStreamAttachMemAsync(streams.back(), from.words, 0, cudaMemAttachGlobal));
    CUDA_CHECK(cudaStreamSynchronize(streams.back()));
    for (const Memory& memory : all) {
      APP_CHECK(memcmp(memory.words, memory.model.data(), count * sizeof(unsigned)) == 0);
      digest.Add(memory.model.data(), count * sizeof(unsigned));
    }
    APP_CHECK(memcmp(g_counters, counters.data(), sizeof(g_counters)) == 0);
    g_counters[step % kCounters] = counters[size_t(step % kCounters)] = unsigned(step);
    printf("step %d digest %016llx\n", step, (unsigned long long)digest.value());
    fflush(stdout);
    app::Step(step);
  }
  for (const Memory& memory : all) CUDA_CHECK(cudaFree(memory.words));
  return 0;
}
