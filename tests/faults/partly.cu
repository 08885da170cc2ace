// SPDX-License-Identifier: Apache-2.0
// Memory of which a small part is written to all the time: fills, copies and a kernel on that part in each step, while
// the rest keeps what it was given. In each step the part is compared with a model, and a slice of the rest; in the end
// all of it.
//
// Usage: partly [--share] [--steps N] [--size MIB]. A twentieth of the memory changes. With --share a second process
// has memory of its own, which stands still, and a part of the first one's (cudaIpcOpenMemHandle), and compares both
// all the time.
#include <sys/wait.h>

#include <algorithm>
#include <string>
#include <vector>

#include "tests/apps/support/app.h"

namespace {

constexpr size_t kMiB = size_t{1} << 20;
constexpr size_t kBlock = 16 * kMiB;

__global__ void AddTo(unsigned char* bytes, size_t count, size_t stride, unsigned char what) {
  const size_t i = (blockIdx.x * size_t(blockDim.x) + threadIdx.x) * stride;
  if (i < count) bytes[i] += what;
}

struct Memory {
  unsigned char* device = nullptr;
  std::string model;
};

std::string Model(size_t bytes, uint64_t seed) {
  std::string model(bytes, 0);
  for (size_t i = 0; i + 8 <= bytes; i += 8) {
    seed = seed * 6364136223846793005ull + 1442695040888963407ull;
    memcpy(&model[i], &seed, 8);
  }
  return model;
}

Memory Make(size_t bytes, uint64_t seed) {
  Memory memory;
  memory.model = Model(bytes, seed);
  void* pointer = nullptr;
  CUDA_CHECK(cudaMalloc(&pointer, bytes));
  memory.device = static_cast<unsigned char*>(pointer);
  CUDA_CHECK(cudaMemcpy(memory.device, memory.model.data(), bytes, cudaMemcpyHostToDevice));
  return memory;
}

void Compare(const Memory& memory, size_t at, size_t count, app::Digest* digest) {
  std::string found(count, 0);
  CUDA_CHECK(cudaMemcpy(&found[0], memory.device + at, count, cudaMemcpyDeviceToHost));
  APP_CHECK(memcmp(found.data(), memory.model.data() + at, count) == 0);
  digest->Add(found.data(), std::min<size_t>(count, 4096));
}

void Change(Memory* memory, unsigned step) {
  std::string& model = memory->model;
  const size_t third = model.size() / 3;
  CUDA_CHECK(cudaMemset(memory->device, int(step), third));
  std::fill(model.begin(), model.begin() + long(third), char(step));
  // Ranges that overlap must not be copied.
  const size_t from = step % third, count = third - from;
  CUDA_CHECK(cudaMemcpy(memory->device + third, memory->device + from, count, cudaMemcpyDeviceToDevice));
  model.replace(third, count, model.substr(from, count));
  constexpr size_t kStride = 40961;
  const size_t rest = model.size() - 2 * third, threads = (rest + kStride - 1) / kStride;
  AddTo<<<unsigned((threads + 63) / 64), 64>>>(memory->device + 2 * third, rest, kStride, (unsigned char)(step | 1));
  LAUNCH_CHECK();
  for (size_t i = 0; i < rest; i += kStride) model[2 * third + i] = char(model[2 * third + i] + (step | 1));
  CUDA_CHECK(cudaDeviceSynchronize());
}

// The second process: `handle` is that of memory with this model, until the end of file.
void Share(int handles, const std::string& model) {
  cudaIpcMemHandle_t handle;
  APP_CHECK(read(handles, &handle, sizeof(handle)) == ssize_t(sizeof(handle)));
  APP_CHECK(fcntl(handles, F_SETFL, O_NONBLOCK) == 0);
  const Memory own = Make(kBlock, 2);
  Memory opened;
  opened.model = model;
  void* pointer = nullptr;
  CUDA_CHECK(cudaIpcOpenMemHandle(&pointer, handle, cudaIpcMemLazyEnablePeerAccess));
  opened.device = static_cast<unsigned char*>(pointer);
  app::Digest digest;
  char byte;
  while (read(handles, &byte, 1) != 0) {
    Compare(own, 0, own.model.size(), &digest);
    Compare(opened, 0, opened.model.size(), &digest);
    usleep(10000);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const bool share = argc > 1 && !strcmp(argv[1], "--share");
  const app::Options options = app::Parse(argc - share, argv + share, {40, 160});
  const size_t bytes = size_t(options.size) * kMiB;
  constexpr size_t kShared = kMiB;
  int handles[2] = {-1, -1};
  pid_t second = 0;
  if (share) {
    APP_CHECK(pipe(handles) == 0);
    second = fork();
    APP_CHECK(second >= 0);
    if (second == 0) {
      close(handles[1]);
      Share(handles[0], Model(kShared, 3));
      _exit(0);
    }
    close(handles[0]);
  }
  Memory shared;
  if (share) {
    shared = Make(kShared, 3);
    cudaIpcMemHandle_t handle;
    CUDA_CHECK(cudaIpcGetMemHandle(&handle, shared.device));
    APP_CHECK(write(handles[1], &handle, sizeof(handle)) == ssize_t(sizeof(handle)));
  }
  Memory busy = Make(bytes / 20, 1);
  std::vector<Memory> rest;
  for (size_t held = busy.model.size(); held < bytes; held += rest.back().model.size()) {
    rest.push_back(Make(std::min(kBlock, bytes - held), held));
  }
  for (int step = 1; step <= options.steps; ++step) {
    app::Digest digest;
    Change(&busy, unsigned(step));
    Compare(busy, 0, busy.model.size(), &digest);
    const Memory& one = rest[size_t(step) % rest.size()];
    const size_t slice = std::min(kMiB, one.model.size());
    Compare(one, (size_t(step) * 7919 * 512) % (one.model.size() - slice + 1), slice, &digest);
    if (step == options.steps) {
      for (const Memory& memory : rest) Compare(memory, 0, memory.model.size(), &digest);
    }
    printf("step %d: %016" PRIx64 "\n", step, digest.value());
    fflush(stdout);
    app::Step(step);
  }
  if (share) {
    close(handles[1]);
    int status = -1;
    APP_CHECK(waitpid(second, &status, 0) == second && status == 0);
  }
  return 0;
}
