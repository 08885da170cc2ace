// SPDX-License-Identifier: Apache-2.0
// Forks after the driver is in use: the child's copy must be inert (every call fails as the native driver's does in a
// forked child, nothing hangs, nothing reaches the parent's session), and the parent goes on undisturbed.
#include <cuda.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/faults/driver.h"

int main() {
  CUdevice device;
  CUcontext context;
  CUdeviceptr memory;
  CU_CHECK(cuInit(0));
  CU_CHECK(cuDeviceGet(&device, 0));
  CU_CHECK(cuCtxCreate(&context, nullptr, 0, device));
  CU_CHECK(cuMemAlloc(&memory, 4096));
  CU_CHECK(cuMemsetD32(memory, 0x1234, 1024));

  for (int round = 0; round < 3; ++round) {
    pid_t child = fork();
    if (child == 0) {
      alarm(20);  // a hang is a failure, too
      int bad = 0;
      unsigned value = 0;
      CUdeviceptr other = 0;
      CUcontext another = nullptr;
      if (cuMemcpyDtoH(&value, memory, 4) == CUDA_SUCCESS) bad |= 1;
      if (cuMemAlloc(&other, 4096) == CUDA_SUCCESS) bad |= 2;
      if (cuCtxCreate(&another, nullptr, 0, device) == CUDA_SUCCESS) bad |= 4;
      if (cuMemFree(memory) == CUDA_SUCCESS) bad |= 8;
      if (cuCtxSynchronize() == CUDA_SUCCESS) bad |= 16;
      if (round == 1) exit(bad);  // with destructors and atexit handlers; otherwise without
      _exit(bad);
    }
    int status = 0;
    EXPECT(waitpid(child, &status, 0) == child);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
      fprintf(stderr, "the forked child: wait status 0x%x (exit code bits name the calls that succeeded)\n", status);
      return 1;
    }
    unsigned value = 0;
    CU_CHECK(cuMemcpyDtoH(&value, memory + 4 * (100 + round), 4));
    EXPECT(value == 0x1234);
  }
  // fork and exec is an ordinary new program.
  pid_t child = fork();
  if (child == 0) {
    execl("/bin/true", "true", nullptr);
    _exit(127);
  }
  int status = 0;
  EXPECT(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
  CU_CHECK(cuMemFree(memory));
  CU_CHECK(cuCtxDestroy(context));
  printf("forker ok\n");
  return 0;
}
