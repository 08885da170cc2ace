// SPDX-License-Identifier: Apache-2.0
// Attributes, parameters and names of functions and kernels.
#include <algorithm>

#include "softgpu/api/api.h"
#include "softgpu/core/module.h"
#include "softgpu/core/occupancy.h"

using namespace cuda_remote::softgpu;

namespace {

CUresult GetAttribute(int* value, CUfunction_attribute attribute, const Function& function,
                      const FunctionSettings& settings) {
  if (value == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const ptx::KernelInfo& info = *function.info;
  ModulePtr module = function.module.lock();
  switch (attribute) {
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
      *value = static_cast<int>(info.max_threads);
      break;
    case CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES:
      *value = static_cast<int>(info.static_shared_bytes);
      break;
    case CU_FUNC_ATTRIBUTE_CONST_SIZE_BYTES: {
      uint64_t bytes = 0;
      if (module) {
        for (const ptx::GlobalInfo& global : module->code().globals()) {
          if (global.space == ptx::Space::kConst && !global.external) bytes += global.size;
        }
      }
      *value = static_cast<int>(bytes);
      break;
    }
    case CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES:
      *value = static_cast<int>(info.local_bytes);
      break;
    case CU_FUNC_ATTRIBUTE_NUM_REGS:
      *value = static_cast<int>(RegistersOf(function));
      break;
    case CU_FUNC_ATTRIBUTE_PTX_VERSION:
      *value = module ? module->code().target() : 0;
      break;
    case CU_FUNC_ATTRIBUTE_BINARY_VERSION:
      *value = ComputeMajor() * 10 + ComputeMinor();
      break;
    case CU_FUNC_ATTRIBUTE_CACHE_MODE_CA:
      *value = 0;
      break;
    case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
      *value = function.MaxDynamicShared(settings);
      break;
    case CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT:
      *value = settings.Get(attribute, -1);
      break;
    case CU_FUNC_ATTRIBUTE_CLUSTER_SIZE_MUST_BE_SET:
      *value = info.needs_cluster ? 1 : 0;
      break;
    case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH:
    case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_HEIGHT:
    case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_DEPTH: {
      const int axis = attribute - CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH;
      const int compiled = static_cast<int>(info.required_cluster[axis]);
      *value = compiled != 0 ? compiled : settings.Get(attribute, 0);
      break;
    }
    case CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED:
    case CU_FUNC_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE:
      *value = settings.Get(attribute, 0);
      break;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
  return CUDA_SUCCESS;
}

CUresult SetAttribute(FunctionSettings* settings, const ptx::KernelInfo& info, CUfunction_attribute attribute,
                      int value) {
  switch (attribute) {
    case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
      if (value < 0 || value + static_cast<int64_t>(info.static_shared_bytes) > kSharedPerBlockOptin)
        return CUDA_ERROR_INVALID_VALUE;
      break;
    case CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT:
      if (value < -1 || value > 100) return CUDA_ERROR_INVALID_VALUE;
      break;
    case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH:
    case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_HEIGHT:
    case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_DEPTH:
      if (info.required_cluster[0] != 0) return CUDA_ERROR_NOT_PERMITTED;
      if (value < 0) return CUDA_ERROR_INVALID_VALUE;
      break;
    case CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED:
    case CU_FUNC_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE:
      break;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
  settings->Set(attribute, value);
  return CUDA_SUCCESS;
}

CUresult ParamInfo(const ptx::KernelInfo& info, size_t index, size_t* offset, size_t* size) {
  if (offset == nullptr || index >= info.params.size()) return CUDA_ERROR_INVALID_VALUE;
  *offset = info.params[index].offset;
  if (size != nullptr) *size = info.params[index].size;
  return CUDA_SUCCESS;
}

CUresult FindKernel(CUkernel handle, KernelPtr* kernel) {
  *kernel = Registry<Kernel>::Get().Find(handle);
  return *kernel ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

// The function of a kernel in the primary or, for the current device, the current context.
CUresult KernelFunction(CUkernel handle, CUdevice ordinal, KernelPtr* kernel, FunctionPtr* function) {
  if (CUresult result = FindKernel(handle, kernel); result != CUDA_SUCCESS) return result;
  Device* device = GetDevice(ordinal);
  if (device == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  ContextPtr context = CurrentContext();
  if (!context || !context->active() || context->device() != ordinal) context = device->primary();
  return (*kernel)->FunctionFor(context, function);
}

}  // namespace

SOFTGPU_API cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction handle) {
  SOFTGPU_ENTER_CONTEXT_OF(context, handle);
  FunctionPtr function;
  if (CUresult result = ResolveFunction(context, handle, &function); result != CUDA_SUCCESS) return result;
  return GetAttribute(value, attribute, *function, *function->settings);
}

SOFTGPU_API cuFuncSetAttribute(CUfunction handle, CUfunction_attribute attribute, int value) {
  SOFTGPU_ENTER_CONTEXT_OF(context, handle);
  FunctionPtr function;
  if (CUresult result = ResolveFunction(context, handle, &function); result != CUDA_SUCCESS) return result;
  // A handle of a kernel stands for the kernel itself, as in the log of the client library.
  const KernelPtr kernel = Registry<Kernel>::Get().Find(handle);
  FunctionSettings* const settings = kernel ? kernel->settings[context->device()].get() : function->settings.get();
  return SetAttribute(settings, *function->info, attribute, value);
}

SOFTGPU_API cuFuncSetCacheConfig(CUfunction handle, CUfunc_cache) {
  SOFTGPU_ENTER_CONTEXT_OF(context, handle);
  FunctionPtr function;
  return ResolveFunction(context, handle, &function);
}

SOFTGPU_API cuFuncSetSharedMemConfig(CUfunction handle, CUsharedconfig) {
  SOFTGPU_ENTER_CONTEXT_OF(context, handle);
  FunctionPtr function;
  return ResolveFunction(context, handle, &function);
}

SOFTGPU_API cuFuncGetModule(CUmodule* out, CUfunction handle) {
  SOFTGPU_ENTER_CONTEXT_OF(context, handle);
  if (out == nullptr || handle == nullptr) return CUDA_ERROR_INVALID_VALUE;
  FunctionPtr function;
  if (CUresult result = ResolveFunction(context, handle, &function); result != CUDA_SUCCESS) return result;
  ModulePtr module = function->module.lock();
  if (!module) return CUDA_ERROR_INVALID_HANDLE;
  *out = module->handle();
  return CUDA_SUCCESS;
}

SOFTGPU_API cuFuncGetName(const char** name, CUfunction handle) {
  SOFTGPU_ENTER_CONTEXT_OF(context, handle);
  if (name == nullptr || handle == nullptr) return CUDA_ERROR_INVALID_VALUE;
  FunctionPtr function;
  if (CUresult result = ResolveFunction(context, handle, &function); result != CUDA_SUCCESS) return result;
  *name = function->name.c_str();
  return CUDA_SUCCESS;
}

SOFTGPU_API cuFuncGetParamInfo(CUfunction handle, size_t index, size_t* offset, size_t* size) {
  SOFTGPU_ENTER_CONTEXT_OF(context, handle);
  if (handle == nullptr) return CUDA_ERROR_INVALID_VALUE;
  FunctionPtr function;
  if (CUresult result = ResolveFunction(context, handle, &function); result != CUDA_SUCCESS) return result;
  return ParamInfo(*function->info, index, offset, size);
}

SOFTGPU_API cuFuncIsLoaded(CUfunctionLoadingState* state, CUfunction handle) {
  SOFTGPU_ENTER_CONTEXT_OF(context, handle);
  if (state == nullptr) return CUDA_ERROR_INVALID_VALUE;
  FunctionPtr function;
  if (CUresult result = ResolveFunction(context, handle, &function); result != CUDA_SUCCESS) return result;
  *state = CU_FUNCTION_LOADING_STATE_LOADED;
  return CUDA_SUCCESS;
}

SOFTGPU_API cuFuncLoad(CUfunction handle) {
  SOFTGPU_ENTER_CONTEXT_OF(context, handle);
  FunctionPtr function;
  return ResolveFunction(context, handle, &function);
}

SOFTGPU_API cuKernelGetAttribute(int* value, CUfunction_attribute attribute, CUkernel handle, CUdevice device) {
  SOFTGPU_ENTER();
  KernelPtr kernel;
  FunctionPtr function;
  if (CUresult result = KernelFunction(handle, device, &kernel, &function); result != CUDA_SUCCESS) return result;
  return GetAttribute(value, attribute, *function, *kernel->settings[device]);
}

SOFTGPU_API cuKernelSetAttribute(CUfunction_attribute attribute, int value, CUkernel handle, CUdevice device) {
  SOFTGPU_ENTER();
  KernelPtr kernel;
  FunctionPtr function;
  if (CUresult result = KernelFunction(handle, device, &kernel, &function); result != CUDA_SUCCESS) return result;
  return SetAttribute(kernel->settings[device].get(), *function->info, attribute, value);
}

SOFTGPU_API cuKernelSetCacheConfig(CUkernel handle, CUfunc_cache, CUdevice device) {
  SOFTGPU_ENTER();
  KernelPtr kernel;
  if (CUresult result = FindKernel(handle, &kernel); result != CUDA_SUCCESS) return result;
  return GetDevice(device) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

SOFTGPU_API cuKernelGetName(const char** name, CUkernel handle) {
  SOFTGPU_ENTER();
  if (name == nullptr || handle == nullptr) return CUDA_ERROR_INVALID_VALUE;
  KernelPtr kernel;
  if (CUresult result = FindKernel(handle, &kernel); result != CUDA_SUCCESS) return result;
  *name = kernel->name.c_str();
  return CUDA_SUCCESS;
}

SOFTGPU_API cuKernelGetLibrary(CUlibrary* out, CUkernel handle) {
  SOFTGPU_ENTER();
  if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  KernelPtr kernel;
  if (CUresult result = FindKernel(handle, &kernel); result != CUDA_SUCCESS) return result;
  LibraryPtr library = kernel->library.lock();
  if (!library) return CUDA_ERROR_INVALID_HANDLE;
  *out = library->handle();
  return CUDA_SUCCESS;
}

SOFTGPU_API cuKernelGetFunction(CUfunction* out, CUkernel handle) {
  SOFTGPU_ENTER_CONTEXT(context);
  if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  KernelPtr kernel;
  if (CUresult result = FindKernel(handle, &kernel); result != CUDA_SUCCESS) return result;
  FunctionPtr function;
  if (CUresult result = kernel->FunctionFor(context, &function); result != CUDA_SUCCESS) return result;
  *out = function->handle();
  return CUDA_SUCCESS;
}

SOFTGPU_API cuKernelGetParamInfo(CUkernel handle, size_t index, size_t* offset, size_t* size) {
  SOFTGPU_ENTER_CONTEXT(context);
  if (handle == nullptr) return CUDA_ERROR_INVALID_VALUE;
  KernelPtr kernel;
  if (CUresult result = FindKernel(handle, &kernel); result != CUDA_SUCCESS) return result;
  LibraryPtr library = kernel->library.lock();
  const ptx::KernelInfo* info = library ? library->code->FindKernel(kernel->name) : nullptr;
  return info == nullptr ? CUDA_ERROR_INVALID_HANDLE : ParamInfo(*info, index, offset, size);
}
