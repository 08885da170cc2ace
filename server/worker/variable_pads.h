// Puts the variables of a replayed module where they were, also after a history of modules that are gone.
//
// Where the driver puts a module's variables depends on what was loaded and unloaded before: best-fit, the __constant__
// ones apart from the others (580 on an H200). A replay loads only what was still alive, so other places may be free,
// and better in the driver's eyes, than those that the module had. Those are taken by modules of ours that hold nothing
// but a variable - pads - until the driver has no better place left; then the pads go again. How exactly the driver
// chooses is not assumed, only that it chooses the same way for the same room: each pad leaves less room in front of,
// or instead of, the wanted place. Where a module has both parts, pads as long as these are brought to the two places
// first, and the module then finds the room that they leave.
#ifndef CUDA_REMOTE_SERVER_WORKER_VARIABLE_PADS_H_
#define CUDA_REMOTE_SERVER_WORKER_VARIABLE_PADS_H_

#include <cuda.h>

#include <array>
#include <cstdint>
#include <functional>

#include "server/driver/driver_table.h"

namespace cuda_remote::server {

// What the driver places in one piece: a module's variables, or its constants.
struct VariablePart {
  uint64_t lowest = 0;  // 0: there is none
  uint64_t extent = 0;  // bytes from there to the highest one's end
};
struct VariablePlace {
  bool loaded = false;
  std::array<VariablePart, 2> parts;  // variables, constants
};

// Moves a module, which lies at `now`, until its parts begin where those of `wanted` do. `unload` unloads the module,
// `load` loads it again and returns where it lies then. The module's context is current. Returns the last answer of
// `load`. Executor only.
VariablePlace MoveVariablesTo(const DriverTable& driver, const VariablePlace& now, const VariablePlace& wanted,
                              const std::function<void()>& unload, const std::function<VariablePlace()>& load);

// Whether the parts begin at the same addresses.
bool SamePlace(const VariablePlace& a, const VariablePlace& b);

}  // namespace cuda_remote::server

#endif  // CUDA_REMOTE_SERVER_WORKER_VARIABLE_PADS_H_
