// SPDX-License-Identifier: Apache-2.0
// Memory of the arena that the program has freed in the order of a stream, until the stream has come so far.
//
// Not thread-safe: the executor's own.
#ifndef CUDA_REMOTE_SERVER_WORKER_MEMORY_PENDING_FREES_H_
#define CUDA_REMOTE_SERVER_WORKER_MEMORY_PENDING_FREES_H_

#include <cuda.h>

#include <cstdint>
#include <list>
#include <vector>

#include "server/driver/driver_table.h"
#include "server/worker/memory/device_arena.h"
#include "server/worker/session/contexts.h"

namespace cuda_remote::server {

class PendingFrees {
 public:
  struct PendingFree {
    CUevent event;    // behind the free; Collect destroys it
    uint64_t stream;  // as on the wire: the driver may give the handle of a stream that is gone to another one
    ContextRef context;
    uint64_t address;
  };
  // All of them outlive this object.
  PendingFrees(const DriverTable& driver, const Contexts& contexts, DeviceArena* arena)
      : driver_(driver), contexts_(contexts), arena_(arena) {}

  void Add(const PendingFree& free) { all_.push_back(free); }
  bool empty() const { return all_.empty(); }
  // Frees what the streams have passed; `wait`: waits for all of it. Leaves the current context as it was.
  void Collect(bool wait);
  // Events of the context die with it; appends the memory that they stand for, which is free once the context is idle.
  void ForgetContext(uint64_t id, std::vector<uint64_t>* memory);

 private:
  const DriverTable& driver_;
  const Contexts& contexts_;
  DeviceArena* const arena_;
  std::list<PendingFree> all_;
};

}  // namespace cuda_remote::server

#endif  // CUDA_REMOTE_SERVER_WORKER_MEMORY_PENDING_FREES_H_
