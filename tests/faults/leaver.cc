// SPDX-License-Identifier: Apache-2.0
// Ends with exit code 7 soon after step 1: `leaver` without a further CUDA call, `leaver --call` right after one.
// Restarted from a checkpoint in step 1, it ends while it is being given its GPU session, or just after.
#include <unistd.h>

#include "tests/apps/support/driver.h"

int main(int argc, char** argv) {
  constexpr unsigned kValue = 0x12345678;
  const bool call = argc > 1 && strcmp(argv[1], "--call") == 0;
  CUcontext context;
  CUdeviceptr memory;
  CU_CHECK(cuInit(0));
  CU_CHECK(cuDevicePrimaryCtxRetain(&context, 0));
  CU_CHECK(cuCtxSetCurrent(context));
  CU_CHECK(cuMemAlloc(&memory, sizeof(kValue)));
  CU_CHECK(cuMemcpyHtoD(memory, &kValue, sizeof(kValue)));
  app::Step(1);
  unsigned got = kValue;
  if (call) {
    CU_CHECK(cuMemcpyDtoH(&got, memory, sizeof(got)));
  } else {
    usleep(200000);  // CRIU fails if a process ends while its threads are let go one by one
  }
  _exit(got == kValue ? 7 : 1);
}
