// SPDX-License-Identifier: Apache-2.0
// Uses the driver and NVML as frameworks do: NVML is loaded by its soname, before and after the driver is in use, and
// asked by another thread all the time. Checks that both agree, and prints what tells one server from another. With the
// hook of the test programs (tests/apps/support) it pauses after step 1.

#include <cuda.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <string>
#include <thread>

#include "proto/nvml/types.h"
#include "tests/apps/support/app.h"
#include "tests/faults/driver.h"

using namespace cuda_remote::nvml;  // NOLINT: a test program

namespace {

constexpr size_t kBytes = 48 << 20;

void* g_library;

template <typename... Arguments>
int Nvml(const char* name, Arguments... arguments) {
  void* const function = dlsym(g_library, name);
  if (!function) app::Fail(__FILE__, __LINE__, name, "is not exported");
  return reinterpret_cast<int (*)(Arguments...)>(function)(arguments...);
}

#define NVML_CHECK(...)                                                                                          \
  do {                                                                                                           \
    const int nvml_check = Nvml(__VA_ARGS__);                                                                    \
    if (nvml_check != kSuccess) app::Fail(__FILE__, __LINE__, #__VA_ARGS__, std::to_string(nvml_check).c_str()); \
  } while (0)

std::string Text(const char* call, void* device) {
  char text[96] = {};
  NVML_CHECK(call, device, &text[0], uint32_t(sizeof(text)));
  return text;
}

std::string CudaUuid(CUdevice device) {
  CUuuid uuid;
  CU_CHECK(cuDeviceGetUuid(&uuid, device));
  std::string text = "GPU-";
  for (int i = 0; i < 16; ++i) {
    char hex[4];
    snprintf(hex, sizeof(hex), "%s%02x", i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "", uint8_t(uuid.bytes[i]));
    text += hex;
  }
  return text;
}

uint64_t Used(void* device) {
  Memory memory;
  NVML_CHECK("nvmlDeviceGetMemoryInfo", device, &memory);
  APP_CHECK(memory.used + memory.free == memory.total);
  return memory.used;
}

// What this process has on the device, as NVML lists it; 0 if it is not in the list.
uint64_t OwnBytes(void* device) {
  ProcessInfo infos[64];
  uint32_t count = 64;
  NVML_CHECK("nvmlDeviceGetComputeRunningProcesses_v3", device, &count, &infos[0]);
  for (uint32_t i = 0; i < count; ++i) {
    if (infos[i].pid == uint32_t(getpid())) return infos[i].used_bytes;
  }
  return 0;
}

// Servers count every half second.
void WaitForBytes(void* device, const char* when) {
  for (int i = 0; i < 500; ++i) {
    if (Used(device) >= kBytes && OwnBytes(device) >= kBytes) return;
    usleep(10000);
  }
  app::Fail(__FILE__, __LINE__, when, "NVML does not see this process's GPU memory");
}

void Show(const char* when, void* device) {
  uint32_t count = 0;
  char driver[80] = {};
  NVML_CHECK("nvmlDeviceGetCount_v2", &count);
  NVML_CHECK("nvmlSystemGetDriverVersion", &driver[0], uint32_t(sizeof(driver)));
  APP_CHECK(driver[0] != 0);
  printf("%s: %u GPUs, first %s\n", when, count, Text("nvmlDeviceGetUUID", device).c_str());
  fflush(stdout);
}

}  // namespace

int main() {
  g_library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!g_library) app::Fail(__FILE__, __LINE__, "dlopen", dlerror());
  // Before the driver is touched, as PyTorch counts its devices.
  NVML_CHECK("nvmlInit_v2");
  void* device = nullptr;
  NVML_CHECK("nvmlDeviceGetHandleByIndex_v2", uint32_t(0), &device);
  Show("before", device);
  const pid_t child = fork();
  if (child == 0) {
    uint32_t count = 0;
    _exit(Nvml("nvmlDeviceGetCount_v2", &count) == kSuccess && count > 0 && Text("nvmlDeviceGetName", device).size()
              ? 0
              : 1);
  }
  int status = 0;
  APP_CHECK(waitpid(child, &status, 0) == child && status == 0);

  CU_CHECK(cuInit(0));
  CUdevice first;
  CU_CHECK(cuDeviceGet(&first, 0));
  APP_CHECK(Text("nvmlDeviceGetUUID", device) == CudaUuid(first));
  int devices = 0;
  uint32_t gpus = 0;
  CU_CHECK(cuDeviceGetCount(&devices));
  NVML_CHECK("nvmlDeviceGetCount_v2", &gpus);
  APP_CHECK(getenv("CUDA_VISIBLE_DEVICES") || uint32_t(devices) == gpus);
  char name[96] = {}, bus[32] = {};
  CU_CHECK(cuDeviceGetName(name, sizeof(name), first));
  CU_CHECK(cuDeviceGetPCIBusId(bus, sizeof(bus), first));
  APP_CHECK(Text("nvmlDeviceGetName", device) == name);
  void* by_bus = nullptr;
  NVML_CHECK("nvmlDeviceGetHandleByPciBusId_v2", &bus[0], &by_bus);
  APP_CHECK(by_bus == device);
  size_t total = 0;
  CU_CHECK(cuDeviceTotalMem(&total, first));
  Memory memory;
  NVML_CHECK("nvmlDeviceGetMemoryInfo", device, &memory);
  APP_CHECK(memory.total >= total);  // a driver keeps some for itself
  int version = 0, major = 0, minor = 0, cu_major = 0;
  NVML_CHECK("nvmlSystemGetCudaDriverVersion_v2", &version);
  int cu_version = 0;
  CU_CHECK(cuDriverGetVersion(&cu_version));
  APP_CHECK(version == cu_version);
  NVML_CHECK("nvmlDeviceGetCudaComputeCapability", device, &major, &minor);
  CU_CHECK(cuDeviceGetAttribute(&cu_major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, first));
  APP_CHECK(major == cu_major);

  std::atomic<bool> stop{false};
  std::atomic<long> asked{0};
  std::thread monitor([&] {
    while (!stop.load()) {
      Used(device);
      asked.fetch_add(1);
    }
  });
  CUcontext context;
  CUdeviceptr pointer;
  CU_CHECK(cuDevicePrimaryCtxRetain(&context, first));
  CU_CHECK(cuCtxSetCurrent(context));
  CU_CHECK(cuMemAlloc(&pointer, kBytes));
  CU_CHECK(cuMemsetD32(pointer, 0x5eed, kBytes / 4));
  WaitForBytes(device, "before the pause");
  const long asked_before = asked.load();
  app::Step(1);
  // The same handle; perhaps another server.
  Show("after", device);
  WaitForBytes(device, "after the pause");
  uint32_t word = 0;
  CU_CHECK(cuMemcpyDtoH(&word, pointer + kBytes / 2, sizeof(word)));
  APP_CHECK(word == 0x5eed);
  // On a busy machine the other thread may not have had its turn yet.
  for (int i = 0; i < 1000 && asked.load() == asked_before; ++i) usleep(10000);
  APP_CHECK(asked.load() > asked_before);
  stop.store(true);
  monitor.join();
  NVML_CHECK("nvmlShutdown");
  puts("done");
  return 0;
}
