// SPDX-License-Identifier: Apache-2.0
#include "softgpu/core/module.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <unordered_map>

#include "proto/base/hash.h"
#include "proto/base/status.h"
#include "proto/threads/mutex.h"
#include "replay/modimg/image_size.h"
#include "replay/modimg/modimg.h"
#include "softgpu/core/allocate.h"
#include "softgpu/core/settings.h"
#include "softgpu/core/texture_objects.h"

namespace cuda_remote::softgpu {

int Function::MaxDynamicShared(const FunctionSettings& other) const {
  return other.Get(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                   std::max(0, kSharedPerBlock - static_cast<int>(info->static_shared_bytes)));
}

CUresult PtxFromImage(const void* image, std::string* ptx, std::string* log) {
  const StatusOr<std::string_view> located = replay::LocateImage(image);
  if (!located.ok()) {
    *log = "the image cannot be read: " + located.status().message();
    return CUDA_ERROR_INVALID_IMAGE;
  }
  // The newest PTX that this GPU could take; else the oldest of those that are too new, as it may still run.
  uint32_t best = 0;
  bool found = false, found_fitting = false, sass = false;
  const uint32_t own = static_cast<uint32_t>(GetSettings().capability);
  bool newer = false;
  const Status parsed = replay::ForEachEntry(*located, [&](replay::ImageEntry& entry) {
    if (entry.kind != replay::ImageEntry::kPtx) {
      sass = true;
      return true;
    }
    bool fits = entry.arch <= own;
    if (!fits && GetSettings().strict_capability) {
      newer = true;
      return true;
    }
    bool better = !found || (fits ? !found_fitting || entry.arch > best : !found_fitting && entry.arch < best);
    if (better) {
      found = true;
      found_fitting = fits;
      best = entry.arch;
      *ptx = std::move(entry.bytes);
    }
    return true;
  });
  if (!parsed.ok() && !found) {
    *log = "the image cannot be read: " + parsed.message();
    return CUDA_ERROR_INVALID_IMAGE;
  }
  if (!found) {
    *log =
        newer ? "the image's code is for GPUs that are newer than SOFTGPU_CAPABILITY says"
        : sass
            ? "the image has machine code alone, as most kernels of cuBLAS, cuDNN and similar libraries; the software "
              "GPU runs PTX only (nvcc -gencode arch=compute_75,code=compute_75), so they need a real GPU"
            : "the image has no code that the software GPU can run; it needs PTX "
              "(nvcc -gencode arch=compute_75,code=compute_75)";
    LogOnce(*log);
    return CUDA_ERROR_NO_BINARY_FOR_GPU;
  }
  return CUDA_SUCCESS;
}

namespace {

// How many slots of a context are taken by what it has made before, with SOFTGPU_PLACES=streams: as with a driver that
// places variables and its own memory for other objects in one part of the address space.
// With SOFTGPU_PLACES=loads, every other load of a module in a context finds one slot taken.
uint64_t SlotsInFront(Context& context, const std::string& ptx, bool of_library) {
  if (GetSettings().places_by_loads && !of_library) {
    static Mutex mutex;
    static auto* const loads = new std::unordered_map<std::string, uint64_t>;
    MutexLock lock(&mutex);
    return ++(*loads)[std::to_string(context.id()) + ptx] % 2;
  }
  if (!GetSettings().places_behind_streams || context.primary()) return 0;
  return context.AllStreams().size();
}

// Memory for a module's variables. A program may keep their addresses anywhere, also in the memory of a checkpoint, so
// the same module gets the same address in every process, whatever was loaded before: one that follows from its text.
// The range is away from those of cr-worker (device memory, pinned memory, reservations). `behind`: how many slots
// further it lies.
void* MapVariables(uint64_t bytes, const std::string& ptx, uint64_t behind) {
  constexpr uint64_t kFirst = 0x500000000000, kSlotBytes = 4 << 20, kSlots = 1 << 18;
  constexpr int kProt = PROT_READ | PROT_WRITE, kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  const uint64_t hash = Hash64Of(ptx);
#ifdef __SANITIZE_THREAD__
  constexpr uint64_t kAttempts = 0;  // these addresses are the sanitizer's
#else
  constexpr uint64_t kAttempts = 64;
#endif
  // The same module in several contexts: the next place that is free.
  for (uint64_t attempt = 0; attempt < kAttempts; ++attempt) {
    const uint64_t address = kFirst + ((hash >> 20) + behind + attempt * 37) % kSlots * kSlotBytes;
    void* const memory = mmap(reinterpret_cast<void*>(address), bytes, kProt, kFlags | MAP_FIXED_NOREPLACE, -1, 0);
    if (memory == MAP_FAILED) continue;
    if (memory == reinterpret_cast<void*>(address)) return memory;
    munmap(memory, bytes);  // a kernel that does not know the flag
  }
  void* const anywhere = mmap(nullptr, bytes, kProt, kFlags, -1, 0);
  return anywhere == MAP_FAILED ? nullptr : anywhere;
}

}  // namespace

CUresult Module::Load(const ContextPtr& context, const std::string& ptx, const Variables& shared, ModulePtr* out,
                      std::string* log, bool of_library) {
  auto parsed = ptx::Module::Parse(ptx);
  if (!parsed.ok()) {
    *log = parsed.status().message();
    LogOnce("PTX cannot be used: " + *log);
    return CUDA_ERROR_INVALID_PTX;
  }
  std::unique_ptr<ptx::Module> code = *std::move(parsed);
  // All variables in one piece of memory, each one with its own entry in the map.
  uint64_t bytes = 0;
  std::vector<uint64_t> offsets;
  for (const ptx::GlobalInfo& global : code->globals()) {
    uint64_t align = std::max<uint64_t>(global.align, 256);
    bytes = (bytes + align - 1) / align * align;
    offsets.push_back(bytes);
    if (!global.external && shared.count(global.name) == 0)
      bytes += std::max<uint64_t>(global.size, 1) + 64;  // a gap finds accesses past the end
  }
  Device* device = GetDevice(context->device());
  const ContextPtr home = context->Home();
  std::vector<uint64_t> code_addresses;
  {
    MutexLock lock(&home->code_mutex);
    code_addresses = code->PlaceFunctions([&home](uint64_t instructions) {
      home->code_mutex.AssertHeld();
      return home->code.Take(instructions);
    });
  }
  // Gives the places back, if nothing comes of it.
  struct Places {
    const ContextPtr& home;
    std::vector<uint64_t>* addresses;
    ~Places() {
      MutexLock lock(&home->code_mutex);
      for (const uint64_t address : *addresses) home->code.Give(address);
    }
  } places{home, &code_addresses};
  std::shared_ptr<char> block;
  if (bytes != 0) {
    if (!device->TakeMemory(bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
    void* memory = MapVariables(bytes, ptx, SlotsInFront(*home, ptx, of_library));
    if (memory == nullptr) {
      device->GiveMemory(bytes);
      return CUDA_ERROR_OUT_OF_MEMORY;
    }
    block.reset(static_cast<char*>(memory), [bytes, device](char* p) {
      munmap(p, bytes);
      device->GiveMemory(bytes);
    });
  }
  ptx::SymbolAddresses addresses;
  for (size_t i = 0; i < offsets.size(); ++i) {
    const ptx::GlobalInfo& global = code->globals()[i];
    if (global.external) continue;
    auto existing = shared.find(global.name);
    addresses[global.name] =
        existing != shared.end() ? existing->second->begin : reinterpret_cast<uint64_t>(block.get()) + offsets[i];
  }
  if (const Status bound = code->Bind(addresses); !bound.ok()) {
    *log = bound.message();
    LogOnce("PTX cannot be linked: " + *log);
    return CUDA_ERROR_INVALID_PTX;
  }

  ModulePtr module(new Module);
  module->context_ = context.get();
  module->shared_ = shared;
  for (size_t i = 0; i < offsets.size(); ++i) {
    const ptx::GlobalInfo& global = code->globals()[i];
    if (global.external || shared.count(global.name) != 0) continue;
    std::string image = code->Image(global);
    std::memcpy(block.get() + offsets[i], image.data(), std::min<uint64_t>(image.size(), global.size));
    auto allocation = std::make_shared<Allocation>();
    allocation->begin = reinterpret_cast<uint64_t>(block.get()) + offsets[i];
    allocation->size = std::max<uint64_t>(global.size, 1);
    allocation->kind = global.managed ? MemoryKind::kManaged : MemoryKind::kSymbol;
    allocation->of_variable = global.managed;
    allocation->device = context->device();
    allocation->context = context.get();
    allocation->kernel_writable = global.space != ptx::Space::kConst;
    allocation->release = [block]() mutable { block.reset(); };
    MemoryMap::Get().Add(allocation);
    Variables& variables = global.reference == ptx::Reference::kTexture   ? module->texture_references_
                           : global.reference == ptx::Reference::kSurface ? module->surface_references_
                                                                          : module->globals_;
    variables[global.name] = allocation;
  }
  for (const ptx::KernelInfo& info : code->kernels()) {
    auto function = std::make_shared<Function>();
    function->module = module;
    function->info = &info;
    function->name = info.name;
    function->settings = std::make_shared<FunctionSettings>();
    module->functions_.push_back(function);
    Registry<Function>::Get().Add(function);
  }
  module->code_ = std::move(code);
  module->home_ = home;
  module->code_addresses_.swap(code_addresses);
  if (GetSettings().eager_loading) {
    for (const FunctionPtr& function : module->functions_) module->LoadKernel(*function);
  }
  *out = std::move(module);
  return CUDA_SUCCESS;
}

Module::~Module() { Unload(); }

void Module::Unload() {
  {
    MutexLock lock(&mutex_);
    if (unloaded_) return;
    unloaded_ = true;
  }
  for (const FunctionPtr& function : functions_) Registry<Function>::Get().Remove(function.get());
  for (const auto& [name, allocation] : texture_references_) TextureObjects().Erase(allocation->begin);
  for (const auto& [name, allocation] : surface_references_) SurfaceObjects().Erase(allocation->begin);
  for (const Variables* variables : {&globals_, &texture_references_, &surface_references_}) {
    for (const auto& [name, allocation] : *variables) {
      MemoryMap::Get().Release(MemoryMap::Get().Remove(allocation->begin));
    }
  }
  if (const ContextPtr home = home_.lock()) {
    MutexLock lock(&home->code_mutex);
    for (const uint64_t address : code_addresses_) home->code.Give(address);
    code_addresses_.clear();
  }
}

void Module::LoadKernel(Function& function) {
  if (function.loaded) return;
  const ContextPtr home = home_.lock();
  if (!home) return;
  MutexLock lock(&home->code_mutex);
  if (function.loaded.exchange(true)) return;
  code_addresses_.push_back(home->code.Take(code_->KernelInstructions(function.name)));
}

FunctionPtr Module::FindFunction(const std::string& name) const {
  for (const FunctionPtr& function : functions_) {
    if (function->name == name) return function;
  }
  return nullptr;
}

AllocationPtr Module::FindGlobal(const std::string& name) const {
  auto it = globals_.find(name);
  if (it != globals_.end()) return it->second;
  it = shared_.find(name);
  return it == shared_.end() ? nullptr : it->second;
}

AllocationPtr Module::FindReference(const std::string& name, ptx::Reference kind) const {
  const Variables& references = kind == ptx::Reference::kTexture ? texture_references_ : surface_references_;
  const auto it = references.find(name);
  return it == references.end() ? nullptr : it->second;
}

CUresult Kernel::FunctionFor(const ContextPtr& context, FunctionPtr* function) {
  LibraryPtr owner = library.lock();
  if (!owner) return CUDA_ERROR_INVALID_HANDLE;
  ModulePtr module;
  if (CUresult result = owner->ModuleFor(context, &module); result != CUDA_SUCCESS) return result;
  *function = module->FindFunction(name);
  if (!*function) return CUDA_ERROR_NOT_FOUND;
  module->LoadKernel(**function);
  return CUDA_SUCCESS;
}

KernelPtr Library::FindKernel(const std::string& name) const {
  for (const KernelPtr& kernel : kernels) {
    if (kernel->name == name) return kernel;
  }
  return nullptr;
}

CUresult Library::AllocateManaged() {
  // In one piece, at an address that follows from the text, as for other variables: cuda-remote's client has them at
  // the same addresses.
  std::vector<std::pair<const ptx::GlobalInfo*, uint64_t>> places;
  uint64_t total = 0;
  for (const ptx::GlobalInfo& global : code->globals()) {
    if (!global.managed || global.external) continue;
    const uint64_t align = std::max<uint64_t>(global.align, 256);
    total = (total + align - 1) / align * align;
    places.emplace_back(&global, total);
    total += std::max<uint64_t>(global.size, 1) + 64;
  }
  if (places.empty()) return CUDA_SUCCESS;
  void* const memory = MapVariables(total, "managed\n" + ptx, 0);
  if (memory == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
  std::shared_ptr<char> block(static_cast<char*>(memory), [total](char* p) { munmap(p, total); });
  for (const auto& [global, offset] : places) {
    // Addresses in it would be those of one context: the language does not allow them.
    std::memcpy(block.get() + offset, global->initial.data(), std::min<uint64_t>(global->initial.size(), global->size));
    auto allocation = std::make_shared<Allocation>();
    allocation->begin = reinterpret_cast<uint64_t>(block.get()) + offset;
    allocation->size = std::max<uint64_t>(global->size, 1);
    allocation->kind = MemoryKind::kManaged;
    allocation->of_variable = true;
    allocation->release = [block]() mutable { block.reset(); };
    MemoryMap::Get().Add(allocation);
    managed[global->name] = allocation;
  }
  return CUDA_SUCCESS;
}

void Library::ReleaseManaged() {
  for (const auto& [name, allocation] : managed) MemoryMap::Get().Release(MemoryMap::Get().Remove(allocation->begin));
}

CUresult Library::ModuleFor(const ContextPtr& user, ModulePtr* module) {
  const ContextPtr context = user->Home();
  MutexLock lock(&mutex);
  ModulePtr& slot = modules[context.get()];
  if (!slot) {
    std::string log;
    ModulePtr loaded;
    if (CUresult result = Module::Load(context, ptx, managed, &loaded, &log, /*of_library=*/true);
        result != CUDA_SUCCESS)
      return result;
    for (const FunctionPtr& function : loaded->functions()) {
      if (KernelPtr kernel = FindKernel(function->name)) {
        function->settings = std::make_shared<FunctionSettings>(kernel->settings[context->device()]);
      }
    }
    slot = loaded;
    Registry<Module>::Get().Add(slot);
  }
  *module = slot;
  return CUDA_SUCCESS;
}

CUresult ResolveFunction(const ContextPtr& context, CUfunction handle, FunctionPtr* function) {
  *function = Registry<Function>::Get().Find(handle);
  if (*function) return CUDA_SUCCESS;
  KernelPtr kernel = Registry<Kernel>::Get().Find(handle);
  if (!kernel) return CUDA_ERROR_INVALID_HANDLE;
  return kernel->FunctionFor(context, function);
}

ContextPtr OwnContext(CUmodule handle) {
  ModulePtr module = Registry<Module>::Get().Find(handle);
  return module ? Registry<Context>::Get().Find(module->context()) : nullptr;
}

ContextPtr OwnContext(CUfunction handle) {
  FunctionPtr function = Registry<Function>::Get().Find(handle);
  ModulePtr module = function ? function->module.lock() : nullptr;
  return module ? OwnContext(module->handle()) : nullptr;
}

CUresult ModuleFunctions(CUmodule handle, std::vector<CUfunction>* functions) {
  ModulePtr module = Registry<Module>::Get().Find(handle);
  if (!module) return CUDA_ERROR_INVALID_HANDLE;
  for (const FunctionPtr& function : module->functions()) functions->push_back(function->handle());
  return CUDA_SUCCESS;
}

JitOptions::JitOptions(unsigned count, CUjit_option* options, void** values) {
  if (options == nullptr || values == nullptr) return;
  for (unsigned i = 0; i < count; ++i) {
    switch (options[i]) {
      case CU_JIT_ERROR_LOG_BUFFER:
        error_ = static_cast<char*>(values[i]);
        break;
      case CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES:
        error_size_ = &values[i];
        break;
      case CU_JIT_INFO_LOG_BUFFER:
        info_ = static_cast<char*>(values[i]);
        break;
      case CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES:
        info_size_ = &values[i];
        break;
      case CU_JIT_WALL_TIME: {
        float zero = 0;
        std::memcpy(&values[i], &zero, sizeof zero);
        break;
      }
      default:
        break;
    }
  }
}

void JitOptions::Fill(char* buffer, void** size, const std::string& text) {
  if (size == nullptr) return;
  size_t room = reinterpret_cast<uintptr_t>(*size) & 0xffffffff;
  size_t used = 0;
  if (buffer != nullptr && room != 0) {
    used = std::min(room - 1, text.size());
    std::memcpy(buffer, text.data(), used);
    buffer[used] = 0;
  }
  *size = reinterpret_cast<void*>(used);
}

void JitOptions::SetErrorLog(const std::string& text) { Fill(error_, error_size_, text); }
void JitOptions::SetInfoLog(const std::string& text) { Fill(info_, info_size_, text); }

}  // namespace cuda_remote::softgpu
