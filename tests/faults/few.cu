// SPDX-License-Identifier: Apache-2.0
// Memory of --size MiB that host and kernels use, of which the steps use more or less: what a step uses is what has to
// travel. CR_TEST_MEMORY: which memory, `managed` (the default), `pinned` or `registered`.
//
// Step 0: the host fills all, and a kernel uses it. 1: the host reads three words. 2: it writes three others. 3:
// kernels use all, the host nothing. 4: the host reads all.
#include <string>
#include <vector>

#include "tests/apps/support/app.h"

namespace {

constexpr size_t kStride = 1024;  // words: kernels change one of so many

__global__ void Advance(unsigned* words, size_t count) {
  for (size_t i = (blockIdx.x * blockDim.x + threadIdx.x) * kStride; i < count; i += gridDim.x * blockDim.x * kStride) {
    words[i] = words[i] * 3 + 1;
  }
}

}  // namespace

int main(int argc, char** argv) {
  const app::Options options = app::Parse(argc, argv, {5, 32});
  const size_t count = (size_t(options.size) << 20) / sizeof(unsigned);
  const char* const chosen = getenv("CR_TEST_MEMORY");
  const std::string memory = chosen == nullptr ? "managed" : chosen;
  unsigned *words, *device;
  std::vector<unsigned> own;
  if (memory == "managed") {
    CUDA_CHECK(cudaMallocManaged(&words, count * sizeof(unsigned)));
    device = words;
  } else {
    if (memory == "pinned") {
      CUDA_CHECK(cudaHostAlloc(&words, count * sizeof(unsigned), cudaHostAllocMapped));
    } else {
      own.resize(count);
      words = own.data();
      CUDA_CHECK(cudaHostRegister(words, count * sizeof(unsigned), cudaHostRegisterMapped));
    }
    CUDA_CHECK(cudaHostGetDevicePointer(&device, words, 0));
  }
  std::vector<unsigned> model(count);
  const auto advance = [&] {
    Advance<<<8, 64>>>(device, count);
    LAUNCH_CHECK();
    CUDA_CHECK(cudaDeviceSynchronize());
    for (size_t i = 0; i < count; i += kStride) model[i] = model[i] * 3 + 1;
  };
  const size_t few[] = {kStride * 3, count / 2 + kStride * 5, count - kStride * 2};
  for (int step = 0; step < options.steps; ++step) {
    if (step == 0) {
      for (size_t i = 0; i < count; ++i) words[i] = model[i] = unsigned(i * 2654435761u);
    } else if (step == 1) {
      for (const size_t i : few) APP_CHECK(words[i] == model[i]);
    } else if (step == 2) {
      for (const size_t i : few) words[i + 1] = model[i + 1] = unsigned(step);
    } else if (step == 3) {
      for (int i = 0; i < 10; ++i) advance();
    } else {
      APP_CHECK(memcmp(words, model.data(), count * sizeof(unsigned)) == 0);
    }
    if (step < 4) advance();
    app::Digest digest;
    digest.Add(&model[few[size_t(step) % 3]], kStride);
    printf("step %d digest %016llx\n", step, (unsigned long long)digest.value());
    fflush(stdout);
    app::Step(step);
  }
  if (memory == "managed") CUDA_CHECK(cudaFree(words));
  if (memory == "pinned") CUDA_CHECK(cudaFreeHost(words));
  if (memory == "registered") CUDA_CHECK(cudaHostUnregister(words));
  return 0;
}
