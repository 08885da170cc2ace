// Puts the variables of replayed modules where they were, also after a history of modules that are gone.
//
// The driver places variables first-fit: a module loaded after another one was unloaded may lie in the place that
// became free. A replay loads only what was still alive, so there the places of the others have to be taken, by modules
// of ours that hold nothing but a variable of the right size - pads. A pad is given up when a replayed module turns out
// to belong where it lies. Pads stay for the session's life; what is loaded later lies behind them, and is recorded
// there.
//
// Not thread-safe: executor only.
#ifndef CUDA_REMOTE_SERVER_WORKER_VARIABLE_PADS_H_
#define CUDA_REMOTE_SERVER_WORKER_VARIABLE_PADS_H_

#include <cuda.h>

#include <cstdint>
#include <functional>
#include <map>

#include "server/driver/driver_table.h"

namespace cuda_remote::server {

class VariablePads {
 public:
  explicit VariablePads(const DriverTable& driver) : driver_(driver) {}

  // Moves a module, whose lowest variable lies at `lowest`, until that lies at `wanted`. `unload` unloads the module,
  // `load` loads it again and returns where its lowest variable lies then (0: it does not load any more). The module's
  // context is current. Returns the last answer of `load`, `wanted` if all is well; the module is loaded unless it is
  // 0.
  uint64_t Move(uint64_t lowest, uint64_t wanted, const std::function<void()>& unload,
                const std::function<uint64_t()>& load);

 private:
  struct Pad {
    CUmodule module;
    uint64_t bytes;
    CUcontext context;
  };
  // Adds a pad of `bytes`, or fewer, that lies in front of `until`. False if there is no room for any.
  bool Fill(uint64_t bytes, uint64_t until);
  // Gives up the pads that reach beyond `from` and begin before `until`. False if there are none.
  bool Uncover(uint64_t from, uint64_t until);

  const DriverTable& driver_;
  std::multimap<uint64_t, Pad> pads_;  // by address; each context has addresses of its own
};

}  // namespace cuda_remote::server

#endif  // CUDA_REMOTE_SERVER_WORKER_VARIABLE_PADS_H_
