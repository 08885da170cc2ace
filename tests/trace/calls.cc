// SPDX-License-Identifier: Apache-2.0
// Makes known numbers of driver calls of every kind, and ends in a way of choice: what tests/trace compares traces
// with.
//
// Usage: calls COUNT WAY
//   COUNT  so many copies of 1000 bytes to the device, so many questions for the current context, and so many rounds of
//          what libraries do before each launch
//   WAY    exit, _exit, abort, kill: how the process ends (all but the first after a pause of 1.5 s)
//          exec: first runs itself in a child with COUNT 3, then as exit
//          fork: a child made by fork asks for the driver's version 5 times, and ends by exit
//          threads: half of the copies in each of two threads
//          steady: repeats the copies and questions about every 2 ms while the file $CALLS_WHILE is there
#include <cuda.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "tests/faults/driver.h"

namespace {

CUdeviceptr memory;
CUcontext context;

void Copies(int count) {
  CU_CHECK(cuCtxSetCurrent(context));
  const std::vector<char> bytes(1000);
  for (int i = 0; i < count; ++i) CU_CHECK(cuMemcpyHtoD(memory, bytes.data(), bytes.size()));
}

void Questions(int count) {
  CUcontext current;
  for (int i = 0; i < count; ++i) CU_CHECK(cuCtxGetCurrent(&current));
}

// A function of a private table: the current context.
void AskTable() {
  static const unsigned char kTable[16] = {0x42, 0xd8, 0x5a, 0x81, 0x23, 0xf6, 0xcb, 0x47,
                                           0x82, 0x98, 0xf6, 0xe7, 0x8a, 0x3a, 0xec, 0xdc};
  CUuuid id;
  memcpy(id.bytes, kTable, sizeof(kTable));
  const void* table = nullptr;
  CU_CHECK(cuGetExportTable(&table, &id));
  CUcontext current = nullptr;
  CU_CHECK(reinterpret_cast<CUresult (*)(CUcontext*)>(static_cast<void* const*>(table)[2])(&current));
  EXPECT(current == context);
}

// What libraries ask, set and say again and again; the answers are as right as the first time.
void Habits(int count) {
  static const char kImage[] = ".version 7.0\n.target sm_52\n.address_size 64\n.visible .entry nothing() { ret; }\n";
  CUlibrary library;
  CUkernel kernel;
  CU_CHECK(cuLibraryLoadData(&library, kImage, nullptr, nullptr, 0, nullptr, nullptr, 0));
  CU_CHECK(cuLibraryGetKernel(&kernel, library, "nothing"));
  CUdevice device;
  CU_CHECK(cuCtxGetDevice(&device));
  size_t before = 0, limit = 0;
  CU_CHECK(cuCtxGetLimit(&before, CU_LIMIT_STACK_SIZE));
  CUlaunchAttribute attribute{};
  attribute.id = CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
  attribute.value.cooperative = 1;
  CUlaunchConfig config{};
  config.gridDimX = config.gridDimY = config.gridDimZ = config.blockDimX = config.blockDimY = config.blockDimZ = 1;
  config.attrs = &attribute;
  config.numAttrs = 1;
  for (int i = 0; i < count; ++i) {
    CU_CHECK(cuCtxGetLimit(&limit, CU_LIMIT_STACK_SIZE));
    EXPECT(limit == before);
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_ACTIVE;
    CU_CHECK(cuStreamIsCapturing(CU_STREAM_LEGACY, &status));
    EXPECT(status == CU_STREAM_CAPTURE_STATUS_NONE);
    CU_CHECK(cuKernelSetAttribute(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 8192, kernel, device));
    CU_CHECK(cuLaunchKernelEx(&config, reinterpret_cast<CUfunction>(kernel), nullptr, nullptr));
  }
  // Another value: nothing of before may be answered.
  CU_CHECK(cuCtxSetLimit(CU_LIMIT_STACK_SIZE, 2 * before));
  CU_CHECK(cuCtxGetLimit(&limit, CU_LIMIT_STACK_SIZE));
  EXPECT(limit == 2 * before);
  int bytes = 0;
  for (const int wanted : {4096, 8192}) {
    CU_CHECK(cuKernelSetAttribute(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, wanted, kernel, device));
    CU_CHECK(cuKernelGetAttribute(&bytes, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, kernel, device));
    EXPECT(bytes == wanted);
  }
  // A launch that cannot work fails at the call, whatever was accepted before.
  config.blockDimX = 1 << 20;
  EXPECT(cuLaunchKernelEx(&config, reinterpret_cast<CUfunction>(kernel), nullptr, nullptr) != CUDA_SUCCESS);
  CUstream stream;
  CU_CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  CU_CHECK(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  CU_CHECK(cuStreamIsCapturing(stream, &status));
  EXPECT(status == CU_STREAM_CAPTURE_STATUS_ACTIVE);
  CUgraph graph;
  CU_CHECK(cuStreamEndCapture(stream, &graph));
  CU_CHECK(cuGraphDestroy(graph));
  CU_CHECK(cuStreamDestroy(stream));
  CU_CHECK(cuLibraryUnload(library));
  // A reset takes the limit back.
  CUcontext primary;
  CU_CHECK(cuDevicePrimaryCtxRetain(&primary, device));
  CU_CHECK(cuCtxPushCurrent(primary));
  CU_CHECK(cuCtxGetLimit(&before, CU_LIMIT_STACK_SIZE));
  CU_CHECK(cuCtxSetLimit(CU_LIMIT_STACK_SIZE, 2 * before));
  CU_CHECK(cuCtxGetLimit(&limit, CU_LIMIT_STACK_SIZE));
  EXPECT(limit == 2 * before);
  CU_CHECK(cuDevicePrimaryCtxReset(device));
  CU_CHECK(cuDevicePrimaryCtxRetain(&primary, device));
  CU_CHECK(cuCtxSetCurrent(primary));
  CU_CHECK(cuCtxGetLimit(&limit, CU_LIMIT_STACK_SIZE));
  EXPECT(limit == before);
  CUcontext popped;
  CU_CHECK(cuCtxPopCurrent(&popped));
}

void WaitFor(pid_t child) {
  int status = -1;
  EXPECT(waitpid(child, &status, 0) == child && status == 0);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  const int count = atoi(argv[1]);
  const std::string way = argv[2];
  if (way == "exec") {
    const pid_t child = fork();
    if (child == 0) {
      execl("/proc/self/exe", argv[0], "3", "exit", nullptr);
      _exit(127);
    }
    WaitFor(child);
  }
  CUdevice device;
  CU_CHECK(cuInit(0));
  CU_CHECK(cuDeviceGet(&device, 0));
  CU_CHECK(cuCtxCreate(&context, nullptr, 0, device));
  CU_CHECK(cuMemAlloc(&memory, 4096));
  if (way == "threads") {
    std::thread other(Copies, count / 2);
    Copies(count - count / 2);
    other.join();
  } else {
    Copies(count);
  }
  Questions(count);
  AskTable();
  Habits(count);
  EXPECT(cuMemFree(12345) == CUDA_ERROR_INVALID_VALUE);
  CUgraphicsResource none = nullptr;
  EXPECT(cuGraphicsMapResources(1, &none, nullptr) == CUDA_ERROR_NOT_SUPPORTED);
  if (way == "fork") {
    const pid_t child = fork();
    if (child == 0) {
      int version;
      for (int i = 0; i < 5; ++i) cuDriverGetVersion(&version);
      exit(0);
    }
    WaitFor(child);
  }
  if (way == "steady") {
    printf("steady\n");
    fflush(stdout);
    // Until the file that is named in the environment is gone.
    const char* const file = getenv("CALLS_WHILE");
    EXPECT(file != nullptr);
    while (access(file, F_OK) == 0) {
      Copies(count);
      Questions(count);
      CU_CHECK(cuCtxSynchronize());
      usleep(2000);
    }
  }
  printf("done\n");
  fflush(stdout);
  if (way == "_exit" || way == "abort" || way == "kill") usleep(1500000);
  if (way == "_exit") _exit(0);
  if (way == "abort") abort();
  if (way == "kill") kill(getpid(), SIGKILL);
  return 0;
}
