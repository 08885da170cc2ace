// SPDX-License-Identifier: Apache-2.0
// Prints which GPUs the program sees: UUID, place on the bus, and whether each one can be used; and when their driver
// loads code. With FILE as its argument it then waits until that is there.
#include <cuda.h>
#include <unistd.h>

#include <cstdio>
#include <string>

#include "tests/faults/driver.h"

namespace {

void PrintLoading() {
  CUmoduleLoadingMode mode;
  CU_CHECK(cuModuleGetLoadingMode(&mode));
  printf("code is loaded %s\n", mode == CU_MODULE_EAGER_LOADING ? "at once" : "when it is used");
  fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  const CUresult started = cuInit(0);
  printf("cuInit: %s\n", cuda_remote::faults::NameOf(started));
  int count = -1;
  const CUresult counted = cuDeviceGetCount(&count);
  printf("%s, %d\n", cuda_remote::faults::NameOf(counted), count);
  for (int i = 0; i < count; ++i) {
    CUdevice device;
    CUuuid uuid;
    char bus[32];
    CU_CHECK(cuDeviceGet(&device, i));
    CU_CHECK(cuDeviceGetUuid(&uuid, device));
    CU_CHECK(cuDeviceGetPCIBusId(bus, sizeof(bus), device));
    printf("%d: ", i);
    for (const char byte : uuid.bytes) printf("%02x", (unsigned char)(byte));
    CUcontext context;
    CUdeviceptr memory;
    unsigned word = 0;
    CU_CHECK(cuDevicePrimaryCtxRetain(&context, device));
    CU_CHECK(cuCtxSetCurrent(context));
    CU_CHECK(cuMemAlloc(&memory, 4096));
    CU_CHECK(cuMemsetD32(memory, 1000 + i, 4));
    CU_CHECK(cuMemcpyDtoH(&word, memory, sizeof(word)));
    printf(" %s %u\n", bus, word);
    CU_CHECK(cuMemFree(memory));
  }
  if (count > 0) PrintLoading();
  while (argc > 1 && access(argv[1], F_OK) != 0) usleep(5000);
  return 0;
}
