// SPDX-License-Identifier: Apache-2.0
// A weak stub for every name that the driver exports: what no other file defines is refused here, by name.
#include <cuda.h>
#include <cudaProfiler.h>

#include <string>

#include "proto/api/entry_points.gen.h"
#include "softgpu/core/settings.h"

namespace {

CUresult Unsupported(const char* name) {
  cuda_remote::softgpu::LogOnce(std::string("unsupported call ") + name);
  return CUDA_ERROR_NOT_SUPPORTED;
}

}  // namespace

#define STUB_EXPORT extern "C" __attribute__((weak, visibility("default"))) CUresult CUDAAPI

#define STUB(symbol, type, parameters, arguments) \
  STUB_EXPORT symbol parameters { return Unsupported(#symbol); }
CUDA_REMOTE_ENTRY_POINTS(STUB)
#undef STUB

#define STUB(symbol) \
  STUB_EXPORT symbol() { return Unsupported(#symbol); }
CUDA_REMOTE_UNDOCUMENTED_ENTRY_POINTS(STUB)
#undef STUB
