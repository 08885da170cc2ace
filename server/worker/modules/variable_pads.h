// SPDX-License-Identifier: Apache-2.0
// Puts the variables of a replayed module where they were, also after a history of modules that are gone.
//
// Where the driver puts a module's variables depends on what was loaded and unloaded before. A replay loads only what
// was still alive, so other places may be free, and better in the driver's eyes, than those that the module had. Those
// are taken by modules of ours that hold nothing but a variable - pads - until a pad as long as the module's part comes
// to lie where the part belongs; the module then takes that pad's place, and all pads go.
//
// A library has variables in each context, and one load places all of them. So the pads of all contexts stay until the
// library is loaded. Each context has blocks of its own, for which all may use the same addresses: none keeps a block
// where another one's variables belong.
//
// 580 on an H200: all constants in one piece first, then each other variable in one of its own, in the order of the
// image's symbols; a piece is a multiple of 256 bytes long; blocks of 2 MiB that go when they are empty, longer pieces
// in blocks of their own; the shortest hole that is long enough, of several the one that came to be first; neighbouring
// holes become one. (A simulation with these rules gave all addresses of six histories of 300 to 500 loads.) The search
// relies on one thing only: the same request in the same state gets the same place. The rules make it short.
#ifndef CUDA_REMOTE_SERVER_WORKER_MODULES_VARIABLE_PADS_H_
#define CUDA_REMOTE_SERVER_WORKER_MODULES_VARIABLE_PADS_H_

#include <cuda.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "server/driver/driver_table.h"

namespace cuda_remote::server {

// What the driver places in one piece: a module's constants, or one of its other variables.
struct VariablePart {
  uint64_t lowest = 0;  // 0: there is none
  uint64_t extent = 0;  // bytes from there to the highest one's end
};
// Where a module's variables lie in one context.
struct VariablePlace {
  uint64_t context = 0;             // virtual handle
  std::vector<VariablePart> parts;  // in the order in which they are placed
};
// In each context in which it has any: one for a module, several for a library.
struct VariablePlaces {
  bool loaded = false;
  std::vector<VariablePlace> contexts;  // in the order in which they are placed
};

// Moves a module, which lies at `now`, until its parts begin where `wanted` says, in all these contexts at once.
// `enter` makes a context current, `unload` unloads the module, `load` loads it again and returns where it lies then.
// Returns the last answer of `load`. May leave another context current. Executor only.
VariablePlaces MoveVariablesTo(const DriverTable& driver, const VariablePlaces& now,
                               const std::vector<VariablePlace>& wanted,
                               const std::function<void(uint64_t context)>& enter, const std::function<void()>& unload,
                               const std::function<VariablePlaces()>& load);

// The place in a context; null if there are no variables in it.
const VariablePlace* FindPlace(const VariablePlaces& places, uint64_t context);

// Whether the parts begin at the wanted addresses, in this context or in all of these.
bool AreAt(const VariablePlaces& now, const VariablePlace& wanted);
bool AreAt(const VariablePlaces& now, const std::vector<VariablePlace>& wanted);

// Makes the one variable of a cubin `bytes` long: the section, the segment and the symbol say so. False if the cubin is
// not as the driver's linker makes it from a pad's PTX; it is unchanged then. For tests: pads are made with it.
bool SetPadSize(std::string* cubin, uint64_t bytes);

}  // namespace cuda_remote::server

#endif  // CUDA_REMOTE_SERVER_WORKER_MODULES_VARIABLE_PADS_H_
