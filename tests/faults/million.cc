// Makes and destroys a million objects (events, streams, memory, modules) and watches the process's own memory: what is
// destroyed must leave nothing behind, neither in the replay log nor in the handle tables.
//
// Usage: million [COUNT (1000000)]. Prints the growth after a warm-up; exit code 1 if it is more than a few MiB.
#include <cuda.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>

#include "tests/faults/driver.h"

namespace {

const char kModule[] =
    ".version 7.0\n.target sm_52\n.address_size 64\n"
    ".visible .global .align 4 .u32 word = 3;\n"
    ".visible .entry nothing() { ret; }\n";

long ResidentKiB() {
  FILE* status = fopen("/proc/self/status", "r");
  char line[256];
  long kib = -1;
  while (status && fgets(line, sizeof(line), status)) {
    if (sscanf(line, "RssAnon: %ld", &kib) == 1) break;
  }
  if (status) fclose(status);
  return kib;
}

void Round(int i) {
  CUevent event;
  CU_CHECK(cuEventCreate(&event, i % 2 ? CU_EVENT_DISABLE_TIMING : CU_EVENT_DEFAULT));
  if (i % 64 == 0) {
    CUstream stream;
    CU_CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    CU_CHECK(cuEventRecord(event, stream));
    CU_CHECK(cuStreamDestroy(stream));
  }
  if (i % 128 == 0) {
    CUdeviceptr memory;
    CU_CHECK(cuMemAlloc(&memory, 256 + i % 4096));
    CU_CHECK(cuMemFree(memory));
  }
  if (i % 4096 == 0) {
    CUmodule module;
    CUfunction function;
    CU_CHECK(cuModuleLoadData(&module, kModule));
    CU_CHECK(cuModuleGetFunction(&function, module, "nothing"));
    CU_CHECK(cuModuleUnload(module));
  }
  CU_CHECK(cuEventDestroy(event));
}

}  // namespace

int main(int argc, char** argv) {
  const int count = argc > 1 ? atoi(argv[1]) : 1000000;
  CUdevice device;
  CUcontext context;
  CU_CHECK(cuInit(0));
  CU_CHECK(cuDeviceGet(&device, 0));
  CU_CHECK(cuCtxCreate(&context, nullptr, 0, device));
  const int warm_up = count / 10;
  for (int i = 0; i < warm_up; ++i) Round(i);
  CU_CHECK(cuCtxSynchronize());
  const long before = ResidentKiB();
  for (int i = warm_up; i < count; ++i) Round(i);
  CU_CHECK(cuCtxSynchronize());
  const long growth = ResidentKiB() - before;
  fprintf(stderr, "million: %d objects, %ld KiB before, growth %ld KiB\n", count, before, growth);
  EXPECT(growth < 4096);
  printf("million ok\n");
  return 0;
}
