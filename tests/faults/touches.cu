// SPDX-License-Identifier: Apache-2.0
// Managed memory that the host uses while kernels do, which devices without concurrentManagedAccess do not allow. Under
// cuda-remote an access to memory that was allocated waits for all work, so its results are determined; those of a
// `__managed__` variable that both sides change are not, and nothing here depends on them.
#include <cstdlib>
#include <vector>

#include "tests/apps/support/app.h"

namespace {

constexpr unsigned kWords = 20000;
constexpr unsigned kLaunches = 40;

__managed__ unsigned g_sum, g_other_sum;

__global__ void Advance(unsigned* words, unsigned salt) {
  for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < kWords; i += gridDim.x * blockDim.x) {
    words[i] = words[i] * 3 + salt + i;
  }
}

__global__ void Count(unsigned* sum) { atomicAdd_system(sum, 1u); }

void Launch(unsigned* words, std::vector<unsigned>* model) {
  for (unsigned salt = 0; salt < kLaunches; ++salt) {
    for (unsigned i = 0; i < kWords; ++i) (*model)[i] = (*model)[i] * 3 + salt + i;
  }
  // Last, so that a fast GPU is at work when the host goes on.
  for (unsigned salt = 0; salt < kLaunches; ++salt) {
    Advance<<<4, 64>>>(words, salt);
    LAUNCH_CHECK();
  }
}

}  // namespace

int main(int argc, char** argv) {
  const app::Options options = app::Parse(argc, argv, {4, 1});
  unsigned* words;
  CUDA_CHECK(cudaMallocManaged(&words, kWords * sizeof(unsigned)));
  std::vector<unsigned> model(kWords);
  for (unsigned i = 0; i < kWords; ++i) words[i] = model[i] = i;
  for (int step = 0; step < options.steps; ++step) {
    // Reads, and then writes, before anything has waited for the kernels.
    Launch(words, &model);
    const unsigned at = unsigned(step) * 4567 % kWords;
    APP_CHECK(words[at] == model[at]);
    Launch(words, &model);
    words[at] = model[at] = unsigned(step);
    Launch(words, &model);
    CUDA_CHECK(cudaDeviceSynchronize());
    APP_CHECK(memcmp(words, model.data(), kWords * sizeof(unsigned)) == 0);
    // A sum from both sides at once.
    Count<<<2, 32>>>(&g_sum);
    LAUNCH_CHECK();
    __atomic_fetch_add(&g_sum, 1000u, __ATOMIC_SEQ_CST);
    CUDA_CHECK(cudaDeviceSynchronize());
    // The same, and more work is launched before anything has waited. Mostly the first kernel has ended by then.
    for (int i = 0; i < 5; ++i) {
      Count<<<2, 32>>>(&g_other_sum);
      LAUNCH_CHECK();
      usleep(10000);
      __atomic_fetch_add(&g_other_sum, 1000u, __ATOMIC_SEQ_CST);
      Count<<<2, 32>>>(&g_other_sum);
      LAUNCH_CHECK();
      CUDA_CHECK(cudaDeviceSynchronize());
    }
    printf("step %d\n", step);
    fflush(stdout);
    app::Step(step);
  }
  CUDA_CHECK(cudaFree(words));
  return 0;
}
