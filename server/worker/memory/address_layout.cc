// SPDX-License-Identifier: Apache-2.0
#include "server/worker/memory/address_layout.h"

#include <cuda.h>
#include <dlfcn.h>
#include <malloc.h>
#include <sys/personality.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "proto/logging/log.h"

namespace cuda_remote::server {
namespace {

// For the oldest GPUs that today's drivers know.
constexpr char kAnchor[] = R"(.version 6.3
.target sm_75
.address_size 64
.visible .global .align 8 .b8 cuda_remote_anchor[8];
.visible .entry cuda_remote_anchor_kernel() { ret; }
)";

bool g_random = false;

}  // namespace

bool HasRandomAddresses() { return g_random; }

void FixAddressLayout(char** argv, bool random) {
  // One heap for all threads: a heap for each would be mapped when a thread first needs it, whenever that is.
  mallopt(M_ARENA_MAX, 1);
  g_random = random;
  if (random) return;
  constexpr unsigned long kAsk = 0xffffffff;
  const int now = personality(kAsk);
  if (now >= 0 && (now & ADDR_NO_RANDOMIZE)) {
    // The new start below is by another name, which is what ps and top would show.
    prctl(PR_SET_NAME, "cr-worker");
    return;
  }
  if (now >= 0 && personality(unsigned(now) | ADDR_NO_RANDOMIZE) >= 0 && (personality(kAsk) & ADDR_NO_RANDOMIZE)) {
    execv("/proc/self/exe", argv);
  }
  logging::Warn(
      "this system does not let a process fix its address layout: jobs with __device__ variables may not restart");
}

void PreloadCompiler() {
  // Never unloaded. Where it is missing, the driver cannot compile either.
  if (!dlopen("libnvidia-ptxjitcompiler.so.1", RTLD_NOW | RTLD_LOCAL)) logging::Debug("no PTX compiler: {}", dlerror());
}

void TakeFirstVariableBlock(const DriverTable& driver) {
  // Never unloaded either.
  CUmodule module = nullptr;
  CUdeviceptr address = 0;
  size_t bytes = 0;
  CUresult result = driver.cuModuleLoadData(&module, kAnchor);
  if (result == CUDA_SUCCESS) result = driver.cuModuleGetGlobal_v2(&address, &bytes, module, "cuda_remote_anchor");
  if (result != CUDA_SUCCESS) {
    logging::Warn("the anchor module does not load (CUDA error {}): jobs with __device__ variables may not restart",
                  int(result));
  }
  logging::Debug("variables begin at {:#x}", address);
}

}  // namespace cuda_remote::server
