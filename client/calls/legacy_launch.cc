// SPDX-License-Identifier: Apache-2.0
// The launch interface of before CUDA 4: a function carries its block shape, its dynamic shared memory and a buffer of
// parameters, and is then launched by grid alone. Kept here, on top of cuLaunchKernel.

#include <cuda.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <unordered_map>

#include "client/calls/bodies.gen.h"
#include "client/calls/function_info.h"
#include "client/calls/kernel_params.h"
#include "client/core/call.h"
#include "client/core/session.h"

namespace cuda_remote::client {
namespace {

struct LegacyState {
  int block[3] = {1, 1, 1};
  unsigned shared_bytes = 0;
  size_t parameter_bytes = 0;  // cuParamSetSize
  std::string parameters;
};

Mutex g_mutex;
// By the function's handle; a handle is never used twice, so an entry of a dead function does no harm.
std::unordered_map<uint64_t, LegacyState>& StatesLocked() CR_REQUIRES(g_mutex) {
  static auto* const states = new std::unordered_map<uint64_t, LegacyState>;
  return *states;
}

// Lets `change` change what the function carries.
template <typename Change>
CUresult Update(const char* name, CUfunction function, Change change) {
  const CallInfo info = Under(info::k_cuFuncSetBlockShape, name);
  Call call(info);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  const auto handle = reinterpret_cast<uint64_t>(function);
  if (!call.Valid(Kind::kFunction, handle)) return CUDA_ERROR_INVALID_HANDLE;
  MutexLock lock(&g_mutex);
  return change(StatesLocked()[handle]);
}

CUresult SetParameter(const char* name, CUfunction function, int offset, const void* data, size_t bytes) {
  if (!data || offset < 0 || size_t(offset) > kMaxParameterBytes || bytes > kMaxParameterBytes - size_t(offset)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  return Update(name, function, [=](LegacyState& state) {
    state.parameters.resize(std::max(state.parameters.size(), size_t(offset) + bytes));
    memcpy(&state.parameters[size_t(offset)], data, bytes);
    return CUDA_SUCCESS;
  });
}

CUresult Launch(const char* name, CUfunction function, int width, int height, CUstream stream) {
  if (width <= 0 || height <= 0) return CUDA_ERROR_INVALID_VALUE;
  LegacyState state;
  const CUresult result = Update(name, function, [&state](LegacyState& kept) {
    state = kept;
    return CUDA_SUCCESS;
  });
  if (result != CUDA_SUCCESS) return result;
  // The size says how much of the buffer counts; what nobody has set is zero.
  state.parameters.resize(state.parameter_bytes);
  size_t bytes = state.parameters.size();
  void* extra[] = {CU_LAUNCH_PARAM_BUFFER_POINTER, &state.parameters[0], CU_LAUNCH_PARAM_BUFFER_SIZE, &bytes,
                   CU_LAUNCH_PARAM_END};
  return Custom_cuLaunchKernel(function, unsigned(width), unsigned(height), 1, unsigned(state.block[0]),
                               unsigned(state.block[1]), unsigned(state.block[2]), state.shared_bytes, stream, nullptr,
                               extra, false);
}

}  // namespace

CUresult Custom_cuFuncSetBlockShape(CUfunction hfunc, int x, int y, int z) {
  if (x <= 0 || y <= 0 || z <= 0) return CUDA_ERROR_INVALID_VALUE;
  return Update("cuFuncSetBlockShape", hfunc, [=](LegacyState& state) {
    state.block[0] = x;
    state.block[1] = y;
    state.block[2] = z;
    return CUDA_SUCCESS;
  });
}

CUresult Custom_cuFuncSetSharedSize(CUfunction hfunc, unsigned int bytes) {
  return Update("cuFuncSetSharedSize", hfunc, [=](LegacyState& state) {
    state.shared_bytes = bytes;
    return CUDA_SUCCESS;
  });
}

CUresult Custom_cuParamSetSize(CUfunction hfunc, unsigned int numbytes) {
  if (numbytes > kMaxParameterBytes) return CUDA_ERROR_INVALID_VALUE;
  return Update("cuParamSetSize", hfunc, [=](LegacyState& state) {
    state.parameter_bytes = numbytes;
    return CUDA_SUCCESS;
  });
}

CUresult Custom_cuParamSeti(CUfunction hfunc, int offset, unsigned int value) {
  return SetParameter("cuParamSeti", hfunc, offset, &value, sizeof(value));
}

CUresult Custom_cuParamSetf(CUfunction hfunc, int offset, float value) {
  return SetParameter("cuParamSetf", hfunc, offset, &value, sizeof(value));
}

CUresult Custom_cuParamSetv(CUfunction hfunc, int offset, void* ptr, unsigned int numbytes) {
  return SetParameter("cuParamSetv", hfunc, offset, ptr, numbytes);
}

// A texture reference of the function's own module is there for every launch, so there is nothing to add to the
// parameters.
CUresult Custom_cuParamSetTexRef(CUfunction hfunc, int texunit, CUtexref hTexRef) {
  if (texunit != CU_PARAM_TR_DEFAULT) return CUDA_ERROR_INVALID_VALUE;
  Call call(info::k_cuParamSetTexRef);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  return call.Valid(Kind::kFunction, hfunc) && call.Valid(Kind::kTextureReference, hTexRef) ? CUDA_SUCCESS
                                                                                            : CUDA_ERROR_INVALID_HANDLE;
}

CUresult Custom_cuLaunch(CUfunction f) { return Launch("cuLaunch", f, 1, 1, nullptr); }

CUresult Custom_cuLaunchGrid(CUfunction f, int grid_width, int grid_height) {
  return Launch("cuLaunchGrid", f, grid_width, grid_height, nullptr);
}

CUresult Custom_cuLaunchGridAsync(CUfunction f, int grid_width, int grid_height, CUstream hStream) {
  return Launch("cuLaunchGridAsync", f, grid_width, grid_height, hStream);
}

}  // namespace cuda_remote::client
