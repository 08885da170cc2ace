// Puts the variables of a replayed module where they were, also after a history of modules that are gone.
//
// Where the driver puts a module's variables depends on what was loaded and unloaded before. A replay loads only what
// was still alive, so other places may be free, and better in the driver's eyes, than the one that the module had.
// Those are taken by modules of ours that hold nothing but a variable - pads - until the driver has no better place
// left; then the pads go again. How the driver chooses is not assumed, only that it chooses the same way for the same
// room: each pad leaves less room in front of, or instead of, the wanted place.
#ifndef CUDA_REMOTE_SERVER_WORKER_VARIABLE_PADS_H_
#define CUDA_REMOTE_SERVER_WORKER_VARIABLE_PADS_H_

#include <cuda.h>

#include <cstdint>
#include <functional>

#include "server/driver/driver_table.h"

namespace cuda_remote::server {

// Moves a module, whose variables take `extent` bytes from `lowest` on, until they begin at `wanted`. `unload` unloads
// the module, `load` loads it again and returns where its lowest variable lies then (0: it does not load any more). The
// module's context is current. Returns the last answer of `load`, `wanted` if all is well; the module is loaded unless
// it is 0. Executor only.
uint64_t MoveVariablesTo(const DriverTable& driver, uint64_t lowest, uint64_t wanted, uint64_t extent,
                         const std::function<void()>& unload, const std::function<uint64_t()>& load);

}  // namespace cuda_remote::server

#endif  // CUDA_REMOTE_SERVER_WORKER_VARIABLE_PADS_H_
