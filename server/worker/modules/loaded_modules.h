// SPDX-License-Identifier: Apache-2.0
// The modules and libraries that a session has loaded: where their variables and functions lie, and how a replay brings
// them back there.
//
// Not thread-safe: the executor's own.
#ifndef CUDA_REMOTE_SERVER_WORKER_MODULES_LOADED_MODULES_H_
#define CUDA_REMOTE_SERVER_WORKER_MODULES_LOADED_MODULES_H_

#include <cuda.h>

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "replay/modimg/modimg.h"
#include "server/driver/driver_table.h"
#include "server/worker/memory/device_arena.h"
#include "server/worker/memory/device_ranges.h"
#include "server/worker/memory/kernel_heaps.h"
#include "server/worker/modules/code_pads.h"
#include "server/worker/modules/variable_pads.h"
#include "server/worker/session/contexts.h"
#include "server/worker/session/handle_map.h"
#include "server/worker/session/loaded_driver.h"

namespace cuda_remote::server {

// A word of one of a module's variables.
struct CodePlace {
  size_t symbol = 0;  // of ModuleFacts::symbols
  uint64_t offset = 0;
};

// A module or library: its variables, for checkpoints.
struct ModuleFacts {
  bool library = false;
  uint64_t context = 0;  // virtual handle; modules only
  uint32_t index = 0;    // in the order of loading
  std::vector<replay::DataSymbol> symbols;
  replay::KernelFacts kernels;
  // By context (virtual handle): what loading put into the words of its variables that hold addresses of functions, and
  // which words these are.
  std::map<uint64_t, CodeWords> code;
  std::map<uint64_t, std::vector<CodePlace>> code_places;
  // After a replay: what was there before it.
  std::map<uint64_t, CodeWords> code_before;
  uint64_t charged = 0;  // what the variables count as device memory: once, in however many contexts a library is
  std::string problem;   // not empty: the image could not be understood
};

class LoadedModules {
 public:
  // They outlive this object.
  struct Parts {
    const DriverTable* driver;
    const std::vector<DeviceFacts>* devices;
    DeviceArena* arena;
    DeviceRanges* ranges;
    HandleMap* handles;
    const Contexts* contexts;
    KernelHeaps* heaps;
  };
  explicit LoadedModules(const Parts& parts) : parts_(parts) {}

  // By virtual handle.
  const std::unordered_map<uint64_t, ModuleFacts>& all() const { return all_; }
  // Null if there is none.
  ModuleFacts* Find(uint64_t handle) {
    const auto it = all_.find(handle);
    return it == all_.end() ? nullptr : &it->second;
  }
  // Whether kernels that were loaded may print. The driver puts their text out in waits of its own, not where it is
  // only asked whether work is done.
  bool print() const { return print_; }

  // A module or library was loaded: remembers its variables, and lets the driver place them at once. Left to itself it
  // would place a library's when something of it is first used; so their order would not be that of the log, and a
  // replay would find them elsewhere. *placed is where they are, for a library in the oldest context first. False if
  // the session may not have as much memory: the caller unloads it.
  bool Note(uint64_t handle, bool library, std::string_view image, VariablePlaces* placed);
  // It was unloaded.
  void Forget(uint64_t handle);
  // Libraries exist in every context: places the variables of all in a new one (virtual handle).
  void PlaceLibraries(uint64_t context);
  // A context is gone, and what was loaded in it.
  void ForgetContext(uint64_t context, uint64_t id);

  // In a replay: a module whose variables are at `*placed` and belong where `wanted` says (VariablePart::lowest alone;
  // 0: there was none), in contexts that exist. `load` loads it once more and gives the real handle, 0 on failure. Logs
  // what is not where it belongs, and fails then; `placed->loaded` says whether the module is still loaded, and the
  // caller unloads it.
  CUresult MoveVariables(uint64_t handle, VariablePlaces* placed, const std::vector<VariablePlace>& wanted,
                         const std::function<uint64_t()>& load);
  // In a replay, after MoveVariables: tries to bring the module's functions to where they were in each of `contexts`,
  // as `code`, equally many words for each, tells. Whether they lie there is for the tools to compare (Region::code),
  // so a failure is only that of loading the module again.
  CUresult MoveCode(uint64_t handle, VariablePlaces* placed, const std::vector<uint64_t>& contexts,
                    const std::vector<uint64_t>& code, const std::function<uint64_t()>& load);
  // The replay is over, and so is the need for the pads in front of code.
  void EndPads() {
    if (!code_pads_.empty()) UnloadPads();
  }

  // For messages: "the module with KERNEL".
  std::string NameOf(uint64_t handle);

  // A kernel of `module` is about to be launched in the current context. (0: some kernels of a graph.)
  void BeforeLaunch(uint64_t module) {
    if (allocating_ != 0) BeginHeaps(module);
  }

  // Unloads the driver's module or library behind a handle, which stays bound.
  void Unload(uint64_t handle, bool library);
  // Where a variable of a module or library lies in the current context, and how long it is.
  CUresult FindVariable(uint64_t handle, bool library, const std::string& name, CUdeviceptr* address, size_t* bytes);

 private:
  template <typename T>
  bool Real(Kind kind, uint64_t handle, T* real) const;
  // Makes the variables of a library (in `context`) or module (in its own) exist. Empty if it has none there.
  std::vector<VariablePart> PlaceVariables(uint64_t handle, const ModuleFacts& module, ContextRef context);
  // In all contexts, the oldest one first.
  VariablePlaces PlaceVariables(uint64_t handle);
  // Remembers ModuleFacts::code, in one context or in all in which the module is. They are made current.
  void ReadCode(uint64_t handle, uint64_t context);
  void ReadCode(uint64_t handle);
  void BeginHeaps(uint64_t module);
  void UnloadPads();
  // For messages: what VariablePlace::parts[part] of a module is.
  std::string NameOfPart(uint64_t handle, size_t part);
  void LogMisplaced(uint64_t handle, const VariablePlaces& placed, const VariablePlace& wanted);

  const Parts parts_;
  std::unordered_map<uint64_t, ModuleFacts> all_;
  uint32_t next_ = 0;
  bool print_ = false;
  int allocating_ = 0;  // those whose kernels use their context's heap
  // Pads in front of modules' code, until the replay is over.
  std::vector<std::pair<ContextRef, CUmodule>> code_pads_;
};

}  // namespace cuda_remote::server

#endif  // CUDA_REMOTE_SERVER_WORKER_MODULES_LOADED_MODULES_H_
