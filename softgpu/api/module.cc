// SPDX-License-Identifier: Apache-2.0
// Modules and libraries.
#include "softgpu/core/module.h"

#include <fstream>
#include <iterator>

#include "proto/threads/mutex.h"
#include "softgpu/api/api.h"

using namespace cuda_remote::softgpu;

namespace {

CUresult LoadModule(CUmodule* out, const void* image, JitOptions jit) {
  ContextPtr context;
  if (CUresult result = UsableContext(&context); result != CUDA_SUCCESS) return result;
  if (out == nullptr || image == nullptr) return CUDA_ERROR_INVALID_VALUE;
  std::string ptx, log;
  if (CUresult result = PtxFromImage(image, &ptx, &log); result != CUDA_SUCCESS) {
    jit.SetErrorLog(log);
    return result;
  }
  ModulePtr module;
  if (CUresult result = Module::Load(context->Home(), ptx, {}, &module, &log); result != CUDA_SUCCESS) {
    jit.SetErrorLog(log);
    return result;
  }
  jit.SetErrorLog("");
  jit.SetInfoLog("");
  *out = Registry<Module>::Get().Add(module)->handle();
  return CUDA_SUCCESS;
}

// Reads a file with a zero after it, which ends PTX text.
bool ReadFile(const char* path, std::string* bytes) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return false;
  bytes->assign(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  bytes->push_back(0);
  return true;
}

CUresult FindModule(CUmodule handle, ModulePtr* module) {
  *module = Registry<Module>::Get().Find(handle);
  return *module ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult LoadLibrary(CUlibrary* out, const void* image, JitOptions jit) {
  if (out == nullptr || image == nullptr) return CUDA_ERROR_INVALID_VALUE;
  auto library = std::make_shared<Library>();
  std::string log;
  if (CUresult result = PtxFromImage(image, &library->ptx, &log); result != CUDA_SUCCESS) {
    jit.SetErrorLog(log);
    return result;
  }
  auto parsed = ptx::Module::Parse(library->ptx);
  if (!parsed.ok()) {
    LogOnce("PTX cannot be used: " + parsed.status().message());
    jit.SetErrorLog(parsed.status().message());
    return CUDA_ERROR_INVALID_PTX;
  }
  library->code = *std::move(parsed);
  for (const ptx::KernelInfo& info : library->code->kernels()) {
    auto kernel = std::make_shared<Kernel>();
    kernel->library = library;
    kernel->name = info.name;
    for (int device = 0; device < DeviceCount(); ++device)
      kernel->settings[device] = std::make_shared<FunctionSettings>();
    library->kernels.push_back(kernel);
    Registry<Kernel>::Get().Add(kernel);
  }
  if (CUresult result = library->AllocateManaged(); result != CUDA_SUCCESS) return result;
  jit.SetErrorLog("");
  jit.SetInfoLog("");
  *out = Registry<Library>::Get().Add(library)->handle();
  return CUDA_SUCCESS;
}

CUresult FindLibrary(CUlibrary handle, LibraryPtr* library) {
  *library = Registry<Library>::Get().Find(handle);
  return *library ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult LibraryVariable(CUdeviceptr* address, size_t* bytes, CUlibrary handle, const char* name) {
  ContextPtr context;
  if (CUresult result = UsableContext(&context); result != CUDA_SUCCESS) return result;
  if (name == nullptr) return CUDA_ERROR_INVALID_VALUE;
  LibraryPtr library;
  if (CUresult result = FindLibrary(handle, &library); result != CUDA_SUCCESS) return result;
  ModulePtr module;
  if (CUresult result = library->ModuleFor(context, &module); result != CUDA_SUCCESS) return result;
  AllocationPtr variable = module->FindGlobal(name);
  if (!variable) return CUDA_ERROR_NOT_FOUND;
  if (address != nullptr) *address = variable->begin;
  if (bytes != nullptr) *bytes = variable->size;
  return CUDA_SUCCESS;
}

}  // namespace

SOFTGPU_API cuModuleLoad(CUmodule* out, const char* path) {
  SOFTGPU_ENTER();
  if (path == nullptr) return CUDA_ERROR_INVALID_VALUE;
  std::string bytes;
  if (!ReadFile(path, &bytes)) return CUDA_ERROR_FILE_NOT_FOUND;
  return LoadModule(out, bytes.data(), JitOptions(0, nullptr, nullptr));
}
SOFTGPU_API cuModuleLoadData(CUmodule* out, const void* image) {
  SOFTGPU_ENTER();
  return LoadModule(out, image, JitOptions(0, nullptr, nullptr));
}
SOFTGPU_API cuModuleLoadDataEx(CUmodule* out, const void* image, unsigned int count, CUjit_option* options,
                               void** values) {
  SOFTGPU_ENTER();
  return LoadModule(out, image, JitOptions(count, options, values));
}
SOFTGPU_API cuModuleLoadFatBinary(CUmodule* out, const void* image) {
  SOFTGPU_ENTER();
  return LoadModule(out, image, JitOptions(0, nullptr, nullptr));
}

SOFTGPU_API cuModuleUnload(CUmodule handle) {
  SOFTGPU_ENTER_CONTEXT_OF(context, handle);
  ModulePtr module;
  if (CUresult result = FindModule(handle, &module); result != CUDA_SUCCESS) return result;
  SynchronizeAllContexts();
  if (!Registry<Module>::Get().Remove(handle)) return CUDA_ERROR_INVALID_HANDLE;
  module->Unload();
  return CUDA_SUCCESS;
}

SOFTGPU_API cuModuleGetLoadingMode(CUmoduleLoadingMode* mode) {
  SOFTGPU_ENTER();
  if (mode == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *mode = GetSettings().eager_loading ? CU_MODULE_EAGER_LOADING : CU_MODULE_LAZY_LOADING;
  return CUDA_SUCCESS;
}

SOFTGPU_API cuModuleGetFunction(CUfunction* out, CUmodule handle, const char* name) {
  SOFTGPU_ENTER_CONTEXT_OF(context, handle);
  if (out == nullptr || name == nullptr) return CUDA_ERROR_INVALID_VALUE;
  ModulePtr module;
  if (CUresult result = FindModule(handle, &module); result != CUDA_SUCCESS) return result;
  FunctionPtr function = module->FindFunction(name);
  if (!function) return CUDA_ERROR_NOT_FOUND;
  module->LoadKernel(*function);
  *out = function->handle();
  return CUDA_SUCCESS;
}

SOFTGPU_API cuModuleGetFunctionCount(unsigned int* count, CUmodule handle) {
  SOFTGPU_ENTER_CONTEXT_OF(context, handle);
  if (count == nullptr) return CUDA_ERROR_INVALID_VALUE;
  ModulePtr module;
  if (CUresult result = FindModule(handle, &module); result != CUDA_SUCCESS) return result;
  *count = static_cast<unsigned>(module->functions().size());
  return CUDA_SUCCESS;
}

SOFTGPU_API cuModuleEnumerateFunctions(CUfunction* functions, unsigned int count, CUmodule handle) {
  SOFTGPU_ENTER_CONTEXT_OF(context, handle);
  if (functions == nullptr || count == 0) return CUDA_ERROR_INVALID_VALUE;
  ModulePtr module;
  if (CUresult result = FindModule(handle, &module); result != CUDA_SUCCESS) return result;
  for (unsigned i = 0; i < count && i < module->functions().size(); ++i)
    functions[i] = module->functions()[i]->handle();
  return CUDA_SUCCESS;
}

SOFTGPU_API cuModuleGetGlobal_v2(CUdeviceptr* address, size_t* bytes, CUmodule handle, const char* name) {
  SOFTGPU_ENTER_CONTEXT_OF(context, handle);
  if (name == nullptr) return CUDA_ERROR_INVALID_VALUE;
  ModulePtr module;
  if (CUresult result = FindModule(handle, &module); result != CUDA_SUCCESS) return result;
  AllocationPtr variable = module->FindGlobal(name);
  if (!variable) return CUDA_ERROR_NOT_FOUND;
  if (address != nullptr) *address = variable->begin;
  if (bytes != nullptr) *bytes = variable->size;
  return CUDA_SUCCESS;
}

SOFTGPU_API cuLibraryLoadData(CUlibrary* out, const void* image, CUjit_option* jit, void** jit_values,
                              unsigned int jit_count, CUlibraryOption*, void**, unsigned int) {
  SOFTGPU_ENTER();
  return LoadLibrary(out, image, JitOptions(jit_count, jit, jit_values));
}

SOFTGPU_API cuLibraryLoadFromFile(CUlibrary* out, const char* path, CUjit_option* jit, void** jit_values,
                                  unsigned int jit_count, CUlibraryOption*, void**, unsigned int) {
  SOFTGPU_ENTER();
  if (path == nullptr) return CUDA_ERROR_INVALID_VALUE;
  std::string bytes;
  if (!ReadFile(path, &bytes)) return CUDA_ERROR_FILE_NOT_FOUND;
  return LoadLibrary(out, bytes.data(), JitOptions(jit_count, jit, jit_values));
}

SOFTGPU_API cuLibraryUnload(CUlibrary handle) {
  SOFTGPU_ENTER();
  LibraryPtr library = Registry<Library>::Get().Remove(handle);
  if (!library) return CUDA_ERROR_INVALID_HANDLE;
  for (const KernelPtr& kernel : library->kernels) Registry<Kernel>::Get().Remove(kernel.get());
  std::map<const Context*, ModulePtr> modules;
  {
    MutexLock lock(&library->mutex);
    modules.swap(library->modules);
  }
  SynchronizeAllContexts();
  for (auto& [context, module] : modules) {
    Registry<Module>::Get().Remove(module.get());
    module->Unload();
  }
  library->ReleaseManaged();
  return CUDA_SUCCESS;
}

SOFTGPU_API cuLibraryGetKernel(CUkernel* out, CUlibrary handle, const char* name) {
  SOFTGPU_ENTER();
  if (out == nullptr || name == nullptr) return CUDA_ERROR_INVALID_VALUE;
  LibraryPtr library;
  if (CUresult result = FindLibrary(handle, &library); result != CUDA_SUCCESS) return result;
  KernelPtr kernel = library->FindKernel(name);
  if (!kernel) return CUDA_ERROR_NOT_FOUND;
  *out = kernel->handle();
  return CUDA_SUCCESS;
}

SOFTGPU_API cuLibraryGetKernelCount(unsigned int* count, CUlibrary handle) {
  SOFTGPU_ENTER();
  if (count == nullptr) return CUDA_ERROR_INVALID_VALUE;
  LibraryPtr library;
  if (CUresult result = FindLibrary(handle, &library); result != CUDA_SUCCESS) return result;
  *count = static_cast<unsigned>(library->kernels.size());
  return CUDA_SUCCESS;
}

SOFTGPU_API cuLibraryEnumerateKernels(CUkernel* kernels, unsigned int count, CUlibrary handle) {
  SOFTGPU_ENTER();
  if (kernels == nullptr || count == 0) return CUDA_ERROR_INVALID_VALUE;
  LibraryPtr library;
  if (CUresult result = FindLibrary(handle, &library); result != CUDA_SUCCESS) return result;
  for (unsigned i = 0; i < count && i < library->kernels.size(); ++i) kernels[i] = library->kernels[i]->handle();
  return CUDA_SUCCESS;
}

SOFTGPU_API cuLibraryGetModule(CUmodule* out, CUlibrary handle) {
  SOFTGPU_ENTER_CONTEXT(context);
  if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  LibraryPtr library;
  if (CUresult result = FindLibrary(handle, &library); result != CUDA_SUCCESS) return result;
  ModulePtr module;
  if (CUresult result = library->ModuleFor(context, &module); result != CUDA_SUCCESS) return result;
  *out = module->handle();
  return CUDA_SUCCESS;
}

SOFTGPU_API cuLibraryGetGlobal(CUdeviceptr* address, size_t* bytes, CUlibrary handle, const char* name) {
  SOFTGPU_ENTER();
  return LibraryVariable(address, bytes, handle, name);
}

SOFTGPU_API cuLibraryGetManaged(CUdeviceptr* address, size_t* bytes, CUlibrary handle, const char* name) {
  SOFTGPU_ENTER();
  // Without a context: the runtime asks when it registers variables.
  LibraryPtr library;
  if (CUresult result = FindLibrary(handle, &library); result != CUDA_SUCCESS) return result;
  if (name == nullptr) return CUDA_ERROR_INVALID_VALUE;
  auto it = library->managed.find(name);
  if (it == library->managed.end()) return CUDA_ERROR_NOT_FOUND;
  if (address != nullptr) *address = it->second->begin;
  if (bytes != nullptr) *bytes = it->second->size;
  return CUDA_SUCCESS;
}
