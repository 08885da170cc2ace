// SPDX-License-Identifier: Apache-2.0
// Managed memory and fork: a child does not have it, so what a child does changes nothing of its parent's. Asked by
// system calls, which fail with EFAULT where an access would end the child.
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>

#include "tests/apps/support/app.h"

namespace {

constexpr size_t kLong = 3 << 20;

__managed__ unsigned char g_variable[20000];

__global__ void Advance(unsigned char* bytes, unsigned count) {
  for (unsigned i = threadIdx.x; i < count; i += blockDim.x) bytes[i] += 1;
}

// The error that a child gets for its access to `memory`; 0: none.
int ErrorInChild(unsigned char* memory, bool writes) {
  int ends[2];
  APP_CHECK(pipe(ends) == 0);
  APP_CHECK(write(ends[1], "x", 1) == 1);
  const pid_t child = fork();
  APP_CHECK(child >= 0);
  if (child == 0) {
    const ssize_t moved = writes ? read(ends[0], memory, 1) : write(ends[1], memory, 1);
    _exit(moved < 0 ? errno : 0);
  }
  int status;
  APP_CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status));
  close(ends[0]);
  close(ends[1]);
  return WEXITSTATUS(status);
}

}  // namespace

int main(int argc, char** argv) {
  const app::Options options = app::Parse(argc, argv, {4, 1});
  unsigned char *small, *large, *host;
  CUDA_CHECK(cudaMallocManaged(&small, 1000));
  CUDA_CHECK(cudaMallocManaged(&large, kLong));
  CUDA_CHECK(cudaMallocManaged(&host, 5000, cudaMemAttachHost));
  unsigned char* const all[] = {small, large, large + kLong - 1, host, g_variable};
  const auto check = [&] {
    for (unsigned char* memory : all) {
      APP_CHECK(ErrorInChild(memory, false) == EFAULT);
      APP_CHECK(ErrorInChild(memory, true) == EFAULT);
    }
  };
  for (unsigned char* memory : all) *memory = 7;
  for (int step = 0; step < options.steps; ++step) {
    check();
    for (unsigned char* memory : all) APP_CHECK(*memory == 7 + (memory == host ? 0 : step));
    check();
    for (unsigned char* memory : all) {
      if (memory != host) Advance<<<1, 32>>>(memory, 1);
    }
    LAUNCH_CHECK();
    CUDA_CHECK(cudaDeviceSynchronize());
    check();
    printf("step %d\n", step);
    fflush(stdout);
    app::Step(step);
  }
  return 0;
}
