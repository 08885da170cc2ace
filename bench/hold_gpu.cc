// SPDX-License-Identifier: Apache-2.0
// Takes the GPU's free memory natively, so that other programs find no room there, until its input ends.
//
// Usage: hold_gpu MIB. Leaves MIB free, prints {"free_mib": ..., "held_mib": ...} or {"error": ...}, and waits.
#include <cuda.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

namespace {

constexpr size_t kMib = 1 << 20;
// Large pieces first: each costs the driver a call.
constexpr size_t kPieces[] = {1024 * kMib, 64 * kMib, 2 * kMib};

int Fail(const char* what, int code) {
  printf("{\"error\": \"%s: CUDA error %d\"}\n", what, code);
  return 1;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    fprintf(stderr, "usage: hold_gpu MIB\n");
    return 2;
  }
  const size_t leave = strtoull(argv[1], nullptr, 10) * kMib;
  void* const library = dlopen("libcuda.so.1", RTLD_NOW);
  if (!library) return Fail("no libcuda.so.1", 0);
  const auto init = reinterpret_cast<CUresult (*)(unsigned)>(dlsym(library, "cuInit"));
  const auto retain = reinterpret_cast<CUresult (*)(CUcontext*, CUdevice)>(dlsym(library, "cuDevicePrimaryCtxRetain"));
  const auto set = reinterpret_cast<CUresult (*)(CUcontext)>(dlsym(library, "cuCtxSetCurrent"));
  const auto info = reinterpret_cast<CUresult (*)(size_t*, size_t*)>(dlsym(library, "cuMemGetInfo_v2"));
  const auto allocate = reinterpret_cast<CUresult (*)(CUdeviceptr*, size_t)>(dlsym(library, "cuMemAlloc_v2"));
  if (!init || !retain || !set || !info || !allocate) return Fail("no driver", 0);
  CUcontext context = nullptr;
  size_t free_bytes = 0, all_bytes = 0, held = 0;
  if (const CUresult result = init(0)) return Fail("cuInit", result);
  if (const CUresult result = retain(&context, 0)) return Fail("cuDevicePrimaryCtxRetain", result);
  if (const CUresult result = set(context)) return Fail("cuCtxSetCurrent", result);
  for (const size_t piece : kPieces) {
    while (info(&free_bytes, &all_bytes) == CUDA_SUCCESS && free_bytes >= leave + piece) {
      CUdeviceptr ignored = 0;
      if (allocate(&ignored, piece) != CUDA_SUCCESS) break;
      held += piece;
    }
  }
  if (const CUresult result = info(&free_bytes, &all_bytes)) return Fail("cuMemGetInfo", result);
  printf("{\"free_mib\": %zu, \"held_mib\": %zu}\n", free_bytes / kMib, held / kMib);
  fflush(stdout);
  for (char byte; read(STDIN_FILENO, &byte, 1) > 0;) continue;
  return 0;
}
