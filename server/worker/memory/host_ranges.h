// SPDX-License-Identifier: Apache-2.0
// Host memory of the client that is mapped in the worker at the same addresses, and its registration with the driver.
//
// Not thread-safe: the executor's own.
#ifndef CUDA_REMOTE_SERVER_WORKER_MEMORY_HOST_RANGES_H_
#define CUDA_REMOTE_SERVER_WORKER_MEMORY_HOST_RANGES_H_

#include <cuda.h>

#include <cstdint>
#include <map>

#include "server/driver/driver_table.h"
#include "server/worker/session/current_context.h"

namespace cuda_remote::server {

// One range: pinned, managed, or registered by the program.
struct HostRange {
  uint64_t bytes = 0;
  unsigned flags = 0;
  uint64_t registered_in = 0;  // ContextRef::id, 0: not registered
  bool own = false;            // memory of this process, not of the client's file
  bool of_pages = false;       // the program's own memory, which it has registered (registered_pages.h)
};

class HostRanges {
 public:
  // `driver` outlives this object.
  explicit HostRanges(const DriverTable& driver) : driver_(driver) {}

  // By address.
  std::map<uint64_t, HostRange>& all() { return all_; }
  // Whether [address, address + bytes) lies in one range.
  bool Owns(uint64_t address, uint64_t bytes) const;
  // Whether any of it lies in one: where the same addresses are host memory, the driver has another use for them.
  bool Overlaps(uint64_t address, uint64_t bytes) const;

  // Registers one of them, at this address, in the context that is current.
  CUresult Register(uint64_t address, const HostRange& range);
  // Registers those that are not (there was no context, or theirs died), as far as possible. `context` is the current
  // one; without one (id 0) nothing is done.
  void RegisterAll(ContextRef context);
  bool AllRegistered() const;
  // A context is gone, and what was registered in it.
  void ForgetContext(uint64_t id);

 private:
  const DriverTable& driver_;
  std::map<uint64_t, HostRange> all_;
};

}  // namespace cuda_remote::server

#endif  // CUDA_REMOTE_SERVER_WORKER_MEMORY_HOST_RANGES_H_
