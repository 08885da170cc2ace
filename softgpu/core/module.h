// SPDX-License-Identifier: Apache-2.0
// Modules, libraries, functions and kernels: PTX that the interpreter has parsed and bound to memory of a context.
//
// A Library is an image without a context; each context that uses it gets a Module of it at first use. A Kernel is a
// library's kernel, a Function that of a module. Thread-safe.
#ifndef CUDA_REMOTE_SOFTGPU_CORE_MODULE_H_
#define CUDA_REMOTE_SOFTGPU_CORE_MODULE_H_

#include <cuda.h>

#include <atomic>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "proto/threads/mutex.h"
#include "softgpu/core/context.h"
#include "softgpu/core/device.h"
#include "softgpu/core/memory_map.h"
#include "softgpu/ptx/ptx.h"

namespace cuda_remote::softgpu {

class Module;
struct Function;
struct Kernel;
struct Library;
using ModulePtr = std::shared_ptr<Module>;
using FunctionPtr = std::shared_ptr<Function>;
using KernelPtr = std::shared_ptr<Kernel>;
using LibraryPtr = std::shared_ptr<Library>;

class FunctionSettings;
using FunctionSettingsPtr = std::shared_ptr<FunctionSettings>;

// What cuFuncSetAttribute has set of a function, or cuKernelSetAttribute of a kernel on a device. Thread-safe.
class FunctionSettings {
 public:
  // `of_kernel`: of a kernel's function, the kernel's, which count where the function has none of its own.
  explicit FunctionSettings(FunctionSettingsPtr of_kernel = nullptr) : of_kernel_(std::move(of_kernel)) {
    for (std::atomic<int>& value : values_) value = kUnset;
  }
  void Set(CUfunction_attribute attribute, int value) { values_[attribute] = value; }
  // `otherwise`: where nothing is set.
  int Get(CUfunction_attribute attribute, int otherwise) const {
    const int value = values_[attribute];
    if (value != kUnset) return value;
    return of_kernel_ ? of_kernel_->Get(attribute, otherwise) : otherwise;
  }
  // Clusters may have up to ptx::kMaxCluster blocks.
  bool non_portable_cluster() const { return Get(CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 0) != 0; }

 private:
  static constexpr int kUnset = std::numeric_limits<int>::min();
  std::atomic<int> values_[CU_FUNC_ATTRIBUTE_MAX];
  const FunctionSettingsPtr of_kernel_;
};

struct Function {
  std::weak_ptr<Module> module;
  const ptx::KernelInfo* info = nullptr;  // of the module's code
  FunctionSettingsPtr settings;
  Mutex mutex;
  std::atomic<int> supported{0};    // 1: yes, -1: no, 0: not looked at yet
  std::atomic<bool> loaded{false};  // its code has a place
  std::string name;

  CUfunction handle() { return reinterpret_cast<CUfunction>(this); }
  int MaxDynamicShared() const { return MaxDynamicShared(*settings); }
  // Under other settings: the kernel's.
  int MaxDynamicShared(const FunctionSettings& other) const;
};

class Module : public std::enable_shared_from_this<Module> {
 public:
  // Variables that are there already, by name.
  using Variables = std::map<std::string, AllocationPtr>;

  // Parses PTX and gives its variables memory in `context`, except those that are in `shared`. CUDA_ERROR_INVALID_PTX:
  // *log says why.
  static CUresult Load(const ContextPtr& context, const std::string& ptx, const Variables& shared, ModulePtr* module,
                       std::string* log, bool of_library = false);
  ~Module();

  CUmodule handle() { return reinterpret_cast<CUmodule>(this); }
  const Context* context() const { return context_; }
  const ptx::Module& code() const { return *code_; }
  const std::vector<FunctionPtr>& functions() const { return functions_; }
  FunctionPtr FindFunction(const std::string& name) const;
  // Null for references too, as with the driver.
  AllocationPtr FindGlobal(const std::string& name) const;
  // The variable that stands for a .texref or a .surfref; null if there is none of this name and kind.
  AllocationPtr FindReference(const std::string& name, ptx::Reference kind) const;
  // Gives a kernel's code its place: at the kernel's first use, or when its module is loaded (CUDA_MODULE_LOADING).
  void LoadKernel(Function& function);
  // Takes the variables out of the memory map and the functions out of the registry. No kernel of the module may run.
  void Unload();

 private:
  Module() = default;

  const Context* context_ = nullptr;
  std::unique_ptr<ptx::Module> code_;
  std::vector<FunctionPtr> functions_;
  Variables globals_;  // without references
  Variables texture_references_, surface_references_;
  Variables shared_;  // somebody else's
  Mutex mutex_;
  bool unloaded_ CR_GUARDED_BY(mutex_) = false;

  std::weak_ptr<Context> home_;           // whose code space the code lies in; guarded by its code_mutex:
  std::vector<uint64_t> code_addresses_;  // of functions and of kernels that were used
};

struct Kernel {
  std::weak_ptr<Library> library;
  std::string name;
  std::map<int, FunctionSettingsPtr> settings;  // by device; filled when it is made

  CUkernel handle() { return reinterpret_cast<CUkernel>(this); }
  // The function in this context. Loads the library there if it is not yet.
  CUresult FunctionFor(const ContextPtr& context, FunctionPtr* function);
};

struct Library : std::enable_shared_from_this<Library> {
  std::string ptx;
  std::unique_ptr<ptx::Module> code;  // for names and parameters alone
  std::vector<KernelPtr> kernels;

  Module::Variables managed;  // managed variables are the same in all contexts, and there before any

  CUlibrary handle() { return reinterpret_cast<CUlibrary>(this); }
  // Gives the managed variables their memory.
  CUresult AllocateManaged();
  void ReleaseManaged();
  KernelPtr FindKernel(const std::string& name) const;
  CUresult ModuleFor(const ContextPtr& context, ModulePtr* module);

  Mutex mutex;
  std::map<const Context*, ModulePtr> modules CR_GUARDED_BY(mutex);
};

// The PTX text to run from an image in any form. CUDA_ERROR_NO_BINARY_FOR_GPU: there is machine code alone.
CUresult PtxFromImage(const void* image, std::string* ptx, std::string* log);

// The function that a caller's CUfunction means, which may be a CUkernel too. CUDA_ERROR_INVALID_HANDLE.
CUresult ResolveFunction(const ContextPtr& context, CUfunction handle, FunctionPtr* function);

// The context that a module or function lies in; null for what is neither, and for kernels, which lie in none.
ContextPtr OwnContext(CUmodule handle);
ContextPtr OwnContext(CUfunction handle);

// What the private export tables ask.
CUresult ModuleFunctions(CUmodule module, std::vector<CUfunction>* functions);

// Log buffers and sizes of the options that module-loading calls take.
class JitOptions {
 public:
  JitOptions(unsigned count, CUjit_option* options, void** values);
  // Fills the error log buffer and says how much is in it.
  void SetErrorLog(const std::string& text);
  void SetInfoLog(const std::string& text);

 private:
  static void Fill(char* buffer, void** size, const std::string& text);
  char* error_ = nullptr;
  void** error_size_ = nullptr;
  char* info_ = nullptr;
  void** info_size_ = nullptr;
};

}  // namespace cuda_remote::softgpu

#endif  // CUDA_REMOTE_SOFTGPU_CORE_MODULE_H_
