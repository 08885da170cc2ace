// SPDX-License-Identifier: Apache-2.0
#include "server/worker/modules/loaded_modules.h"

#include <string.h>

#include <algorithm>
#include <utility>

#include "proto/base/status.h"
#include "proto/logging/log.h"
#include "server/worker/session/driver_hooks.h"

namespace cuda_remote::server {

template <typename T>
bool LoadedModules::Real(Kind kind, uint64_t handle, T* real) const {
  const HandleMap::Entry* const entry = parts_.handles->Find(kind, handle);
  if (entry != nullptr) *real = reinterpret_cast<T>(entry->real);
  return entry != nullptr;
}

bool LoadedModules::Note(uint64_t handle, bool library, std::string_view image, VariablePlaces* placed) {
  ModuleFacts& module = all_[handle];
  module.library = library;
  module.context = library ? 0 : parts_.contexts->current();
  module.index = next_++;
  std::vector<uint32_t> arches;
  for (const DeviceFacts& facts : *parts_.devices) {
    arches.push_back(uint32_t(facts.attributes[CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR] * 10 +
                              facts.attributes[CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR]));
  }
  if (const Status found = replay::DataSymbols(image, arches, &module.symbols, &module.kernels); !found.ok())
    module.problem = found.message();
  print_ = print_ || module.kernels.print;
  allocating_ += module.kernels.allocate;
  uint64_t bytes = 0;
  for (const replay::DataSymbol& symbol : module.symbols) {
    if (!symbol.managed && __builtin_add_overflow(bytes, symbol.size, &bytes)) return false;
  }
  if (!ChargeWithRoom(bytes)) return false;
  module.charged = bytes;
  *placed = PlaceVariables(handle);
  ReadCode(handle);
  return true;
}

void LoadedModules::Forget(uint64_t handle) {
  const auto module = all_.find(handle);
  const bool has_symbols = module == all_.end() || !module->second.symbols.empty();
  if (module != all_.end()) {
    parts_.arena->Discharge(module->second.charged);
    allocating_ -= module->second.kernels.allocate;
    all_.erase(module);
  }
  // Looking through all memory for each of many modules takes quadratic time; most have no variables.
  if (!has_symbols) return;
  std::vector<uint64_t> symbols;
  for (const auto& [address, range] : parts_.ranges->all()) {
    if (range.kind == DeviceRange::kSymbol && range.owner == handle) symbols.push_back(address);
  }
  for (const uint64_t address : symbols) parts_.ranges->Erase(address);
}

void LoadedModules::ForgetContext(uint64_t context, uint64_t id) {
  for (auto& [module, facts] : all_) facts.code.erase(context);
  code_pads_.erase(
      std::remove_if(code_pads_.begin(), code_pads_.end(), [&](const auto& pad) { return pad.first.id == id; }),
      code_pads_.end());
}

void LoadedModules::PlaceLibraries(uint64_t context) {
  std::vector<std::pair<uint64_t, const ModuleFacts*>> libraries;
  for (const auto& [library, facts] : all_) {
    if (facts.library && !facts.symbols.empty()) libraries.emplace_back(library, &facts);
  }
  std::sort(libraries.begin(), libraries.end(),
            [](const auto& a, const auto& b) { return a.second->index < b.second->index; });
  for (const auto& [library, facts] : libraries) {
    PlaceVariables(library, *facts, parts_.contexts->Find(context)->ref);
    ReadCode(library, context);
  }
}

void LoadedModules::ReadCode(uint64_t handle, uint64_t context) {
  ModuleFacts& module = all_[handle];
  const ContextInfo* const info = parts_.contexts->Find(context);
  const bool any = std::any_of(module.symbols.begin(), module.symbols.end(),
                               [](const replay::DataSymbol& symbol) { return !symbol.code_words.empty(); });
  if (!any || info == nullptr) return;
  CodeWords words;
  std::vector<CodePlace> places;
  CUresult result = MakeCurrent(*parts_.driver, info->ref);
  // In a stream of its own: work that is under way is nobody's concern here, and is not waited for.
  CUstream stream = nullptr;
  if (result == CUDA_SUCCESS) result = parts_.driver->cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING);
  for (size_t i = 0; i < module.symbols.size() && result == CUDA_SUCCESS; ++i) {
    const replay::DataSymbol& symbol = module.symbols[i];
    CUdeviceptr address = 0;
    size_t bytes = 0;
    if (symbol.code_words.empty() ||
        FindVariable(handle, module.library, symbol.name, &address, &bytes) != CUDA_SUCCESS)
      continue;
    const uint64_t begin = symbol.code_words.front();
    const uint64_t end = std::min<uint64_t>(bytes, symbol.code_words.back() + sizeof(uint64_t));
    if (begin >= end) continue;
    std::string contents(size_t(end - begin) + sizeof(uint64_t), '\0');
    result = parts_.driver->cuMemcpyDtoHAsync_v2(contents.data(), address + begin, size_t(end - begin), stream);
    if (result == CUDA_SUCCESS) result = parts_.driver->cuStreamSynchronize(stream);
    for (const uint64_t offset : symbol.code_words) {
      uint64_t word = 0;
      if (offset < end) memcpy(&word, contents.data() + (offset - begin), sizeof(word));
      words.push_back(word);
      places.push_back({i, offset});
    }
  }
  if (stream != nullptr) parts_.driver->cuStreamDestroy_v2(stream);
  parts_.contexts->Restore();
  if (result != CUDA_SUCCESS) {
    module.problem = "the addresses of its functions cannot be read (CUDA error " + std::to_string(int(result)) + ")";
    return;
  }
  module.code[context] = std::move(words);
  module.code_places[context] = std::move(places);
}

void LoadedModules::ReadCode(uint64_t handle) {
  const ModuleFacts& module = all_[handle];
  if (!module.library) {
    ReadCode(handle, module.context);
    return;
  }
  std::vector<uint64_t> contexts;
  for (const auto& [context, info] : parts_.contexts->all()) contexts.push_back(context);
  for (const uint64_t context : contexts) ReadCode(handle, context);
}

CUresult LoadedModules::MoveCode(uint64_t handle, VariablePlaces* placed, const std::vector<uint64_t>& contexts,
                                 const std::vector<uint64_t>& code, const std::function<uint64_t()>& load) {
  const size_t count = contexts.empty() ? 0 : code.size() / contexts.size();
  if (count == 0) return CUDA_SUCCESS;
  const bool library = all_[handle].library;
  bool loaded = true;
  for (size_t i = 0; i < contexts.size() && loaded; ++i) {
    const ContextInfo* const info = parts_.contexts->Find(contexts[i]);
    const auto now = all_[handle].code.find(contexts[i]);
    const CodeWords wanted(code.begin() + ptrdiff_t(i * count), code.begin() + ptrdiff_t((i + 1) * count));
    all_[handle].code_before[contexts[i]] = wanted;
    if (info == nullptr || now == all_[handle].code.end() || now->second == wanted) continue;
    const auto reload = [&](const std::function<void()>& between) -> CodeWords {
      if (!loaded) return {};
      Unload(handle, library);
      MakeCurrent(*parts_.driver, info->ref);
      between();
      parts_.contexts->Restore();
      const uint64_t real = load();
      if (real == 0) {
        loaded = false;
        return {};
      }
      parts_.handles->Rebind(library ? Kind::kLibrary : Kind::kModule, handle, real);
      *placed = PlaceVariables(handle);
      ReadCode(handle);
      return all_[handle].code[contexts[i]];
    };
    std::vector<CUmodule> pads;
    const CodeWords found = MoveCodeTo(*parts_.driver, now->second, wanted, reload, &pads);
    for (const CUmodule pad : pads) code_pads_.emplace_back(info->ref, pad);
    // The tool that replays finds out whether the job can go on with that (OpCodeWords).
    if (loaded && found != wanted) {
      logging::Info("{}: its functions lie elsewhere than before: {} ({} pads)", NameOf(handle),
                    DescribeDistances(found, wanted), pads.size());
    }
  }
  placed->loaded = loaded;
  return loaded ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

void LoadedModules::UnloadPads() {
  for (const auto& [context, pad] : code_pads_) {
    if (MakeCurrent(*parts_.driver, context) == CUDA_SUCCESS) parts_.driver->cuModuleUnload(pad);
  }
  code_pads_.clear();
}

std::string LoadedModules::NameOf(uint64_t handle) {
  const char* name = nullptr;
  CUlibrary library;
  CUmodule module;
  CUkernel kernel;
  CUfunction function;
  if (Real(Kind::kLibrary, handle, &library)) {
    if (parts_.driver->cuLibraryEnumerateKernels(&kernel, 1, library) == CUDA_SUCCESS)
      parts_.driver->cuKernelGetName(&name, kernel);
  } else if (Real(Kind::kModule, handle, &module)) {
    if (parts_.driver->cuModuleEnumerateFunctions(&function, 1, module) == CUDA_SUCCESS)
      parts_.driver->cuFuncGetName(&name, function);
  }
  return name != nullptr ? std::string("the module with the kernel ") + name : "a module without kernels";
}

void LoadedModules::BeginHeaps(uint64_t owner) {
  const auto begin = [this](uint64_t context) {
    const ContextInfo* const info = parts_.contexts->Find(context);
    if (info == nullptr || parts_.heaps->begun(context) || MakeCurrent(*parts_.driver, info->ref) != CUDA_SUCCESS)
      return;
    parts_.heaps->Begin(context);
    parts_.contexts->Restore();
  };
  if (owner != 0) {
    const auto module = all_.find(owner);
    if (module != all_.end() && module->second.kernels.allocate) begin(parts_.contexts->current());
    return;
  }
  for (const auto& [handle, module] : all_) {
    if (module.kernels.allocate) begin(module.library ? parts_.contexts->current() : module.context);
  }
}

VariablePlaces LoadedModules::PlaceVariables(uint64_t handle) {
  const ModuleFacts& module = all_[handle];
  VariablePlaces places{true, {}};
  const auto place_in = [&](uint64_t context, ContextRef ref) {
    std::vector<VariablePart> parts = PlaceVariables(handle, module, ref);
    if (!parts.empty()) places.contexts.push_back({context, std::move(parts)});
  };
  if (!module.library) {
    place_in(module.context, parts_.contexts->current_ref());
  } else {
    for (const uint64_t context : parts_.contexts->OldestFirst())
      place_in(context, parts_.contexts->Find(context)->ref);
  }
  return places;
}

CUresult LoadedModules::MoveVariables(uint64_t handle, VariablePlaces* placed, const std::vector<VariablePlace>& wanted,
                                      const std::function<uint64_t()>& load) {
  if (AreAt(*placed, wanted)) return CUDA_SUCCESS;
  const bool library = all_[handle].library;
  const Kind kind = library ? Kind::kLibrary : Kind::kModule;
  const auto enter = [&](uint64_t context) { return MakeCurrent(*parts_.driver, parts_.contexts->Find(context)->ref); };
  // The thread that loaded a library need not have had a context.
  for (const VariablePlace& place : wanted) {
    if (const CUresult result = enter(place.context); result != CUDA_SUCCESS) return result;
  }
  const auto load_again = [&]() -> VariablePlaces {
    parts_.contexts->Restore();
    const uint64_t real = load();
    if (real == 0) return {};
    parts_.handles->Rebind(kind, handle, real);
    return PlaceVariables(handle);
  };
  *placed = MoveVariablesTo(
      *parts_.driver, *placed, wanted, enter, [&] { Unload(handle, library); }, load_again);
  parts_.contexts->Restore();
  if (!placed->loaded) return CUDA_ERROR_OUT_OF_MEMORY;
  ReadCode(handle);  // it was loaded again, and its functions may have gone elsewhere
  if (AreAt(*placed, wanted)) return CUDA_SUCCESS;
  for (const VariablePlace& place : wanted) LogMisplaced(handle, *placed, place);
  return CUDA_ERROR_INVALID_ADDRESS_SPACE;
}

void LoadedModules::LogMisplaced(uint64_t handle, const VariablePlaces& placed, const VariablePlace& wanted) {
  const VariablePlace* const found = FindPlace(placed, wanted.context);
  const size_t count = found != nullptr ? found->parts.size() : 0;
  const ContextInfo& context = *parts_.contexts->Find(wanted.context);
  for (size_t i = 0; i < std::min(count, wanted.parts.size()); ++i) {
    if (found->parts[i].lowest == wanted.parts[i].lowest) continue;
    logging::Error("{} of {} would be at {:#x} in context {} (GPU {}) instead of {:#x}, the address that pointers hold",
                   NameOfPart(handle, i), NameOf(handle), found->parts[i].lowest, context.ref.id, context.device,
                   wanted.parts[i].lowest);
  }
  if (count != wanted.parts.size()) {
    logging::Error("{} had {} variables in context {} (GPU {}) and has {}", NameOf(handle), wanted.parts.size(),
                   context.ref.id, context.device, count);
  }
}

void LoadedModules::Unload(uint64_t handle, bool library) {
  CUlibrary real_library;
  CUmodule real_module;
  if (library && Real(Kind::kLibrary, handle, &real_library)) {
    parts_.driver->cuLibraryUnload(real_library);
  } else if (!library && Real(Kind::kModule, handle, &real_module)) {
    parts_.driver->cuModuleUnload(real_module);
  }
}

CUresult LoadedModules::FindVariable(uint64_t handle, bool library, const std::string& name, CUdeviceptr* address,
                                     size_t* bytes) {
  if (!library) {
    CUmodule module;
    if (!Real(Kind::kModule, handle, &module)) return CUDA_ERROR_INVALID_HANDLE;
    return parts_.driver->cuModuleGetGlobal_v2(address, bytes, module, name.c_str());
  }
  CUlibrary real;
  if (!Real(Kind::kLibrary, handle, &real)) return CUDA_ERROR_INVALID_HANDLE;
  const CUresult result = parts_.driver->cuLibraryGetGlobal(address, bytes, real, name.c_str());
  return result == CUDA_ERROR_NOT_FOUND ? parts_.driver->cuLibraryGetManaged(address, bytes, real, name.c_str())
                                        : result;
}

std::vector<VariablePart> LoadedModules::PlaceVariables(uint64_t handle, const ModuleFacts& module,
                                                        ContextRef context) {
  if (module.symbols.empty() || MakeCurrent(*parts_.driver, context) != CUDA_SUCCESS) return {};
  std::vector<VariablePart> parts(1);  // the constants
  bool any = false;
  for (const replay::DataSymbol& symbol : module.symbols) {
    if (symbol.managed) continue;
    CUdeviceptr address = 0;
    size_t bytes = 0;
    // Not every variable need be there: the driver chose one of the image's entries, or none for this context's GPU.
    if (FindVariable(handle, module.library, symbol.name, &address, &bytes) != CUDA_SUCCESS) address = bytes = 0;
    any = any || address != 0;
    if (!symbol.constant) {
      parts.push_back({address, bytes});
    } else if (address != 0) {
      VariablePart& constants = parts[0];
      const uint64_t end = std::max<uint64_t>(constants.lowest + constants.extent, address + bytes);
      if (constants.lowest == 0 || address < constants.lowest) constants.lowest = address;
      constants.extent = end - constants.lowest;
    }
  }
  if (!any) parts.clear();
  parts_.contexts->Restore();
  return parts;
}

std::string LoadedModules::NameOfPart(uint64_t handle, size_t part) {
  if (part == 0) return "what is __constant__";
  for (const replay::DataSymbol& symbol : all_[handle].symbols) {
    if (!symbol.managed && !symbol.constant && --part == 0) return "variable " + symbol.name;
  }
  return "a variable";
}

}  // namespace cuda_remote::server
