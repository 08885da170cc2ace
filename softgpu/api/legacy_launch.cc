// SPDX-License-Identifier: Apache-2.0
// The launch interface of before CUDA 4: a function carries its block shape, its dynamic shared memory and a buffer of
// parameters, and is launched by grid alone.
#include <algorithm>
#include <cstring>
#include <map>
#include <string>

#include "proto/threads/mutex.h"
#include "softgpu/api/api.h"
#include "softgpu/core/module.h"

using namespace cuda_remote::softgpu;

namespace {

constexpr size_t kMostParameterBytes = 32764;

struct Carried {
  int block[3] = {1, 1, 1};
  unsigned shared_bytes = 0;
  size_t parameter_bytes = 0;
  std::string parameters;
};

Mutex g_mutex;

// What each function carries. An entry of one that is gone does no harm.
std::map<CUfunction, Carried>& AllCarried() CR_REQUIRES(g_mutex) {
  static auto* const all = new std::map<CUfunction, Carried>;
  return *all;
}

// Lets `change` change what a function carries.
template <typename Change>
CUresult Update(CUfunction function, Change change) {
  if (!Registry<Function>::Get().Find(function)) return CUDA_ERROR_INVALID_HANDLE;
  MutexLock lock(&g_mutex);
  change(&AllCarried()[function]);
  return CUDA_SUCCESS;
}

CUresult SetParameter(CUfunction function, int offset, const void* data, size_t bytes) {
  if (data == nullptr || offset < 0 || size_t(offset) > kMostParameterBytes ||
      bytes > kMostParameterBytes - size_t(offset)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  return Update(function, [=](Carried* carried) {
    carried->parameters.resize(std::max(carried->parameters.size(), size_t(offset) + bytes));
    std::memcpy(&carried->parameters[size_t(offset)], data, bytes);
  });
}

CUresult Launch(CUfunction function, int width, int height, CUstream stream) {
  if (width <= 0 || height <= 0) return CUDA_ERROR_INVALID_VALUE;
  Carried now;
  if (CUresult result = Update(function, [&now](Carried* carried) { now = *carried; }); result != CUDA_SUCCESS)
    return result;
  now.parameters.resize(now.parameter_bytes);
  size_t bytes = now.parameters.size();
  void* extra[] = {CU_LAUNCH_PARAM_BUFFER_POINTER, now.parameters.data(), CU_LAUNCH_PARAM_BUFFER_SIZE, &bytes,
                   CU_LAUNCH_PARAM_END};
  return cuLaunchKernel(function, unsigned(width), unsigned(height), 1, unsigned(now.block[0]), unsigned(now.block[1]),
                        unsigned(now.block[2]), now.shared_bytes, stream, nullptr, extra);
}

}  // namespace

SOFTGPU_API cuFuncSetBlockShape(CUfunction function, int x, int y, int z) {
  SOFTGPU_ENTER();
  if (x <= 0 || y <= 0 || z <= 0) return CUDA_ERROR_INVALID_VALUE;
  return Update(function, [=](Carried* carried) {
    carried->block[0] = x;
    carried->block[1] = y;
    carried->block[2] = z;
  });
}

SOFTGPU_API cuFuncSetSharedSize(CUfunction function, unsigned int bytes) {
  SOFTGPU_ENTER();
  return Update(function, [=](Carried* carried) { carried->shared_bytes = bytes; });
}

SOFTGPU_API cuParamSetSize(CUfunction function, unsigned int bytes) {
  SOFTGPU_ENTER();
  if (bytes > kMostParameterBytes) return CUDA_ERROR_INVALID_VALUE;
  return Update(function, [=](Carried* carried) { carried->parameter_bytes = bytes; });
}

SOFTGPU_API cuParamSeti(CUfunction function, int offset, unsigned int value) {
  SOFTGPU_ENTER();
  return SetParameter(function, offset, &value, sizeof value);
}
SOFTGPU_API cuParamSetf(CUfunction function, int offset, float value) {
  SOFTGPU_ENTER();
  return SetParameter(function, offset, &value, sizeof value);
}
SOFTGPU_API cuParamSetv(CUfunction function, int offset, void* data, unsigned int bytes) {
  SOFTGPU_ENTER();
  return SetParameter(function, offset, data, bytes);
}

SOFTGPU_API cuLaunch(CUfunction function) {
  SOFTGPU_ENTER();
  return Launch(function, 1, 1, nullptr);
}
SOFTGPU_API cuLaunchGrid(CUfunction function, int width, int height) {
  SOFTGPU_ENTER();
  return Launch(function, width, height, nullptr);
}
SOFTGPU_API cuLaunchGridAsync(CUfunction function, int width, int height, CUstream stream) {
  SOFTGPU_ENTER();
  return Launch(function, width, height, stream);
}
