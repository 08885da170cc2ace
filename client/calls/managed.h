// SPDX-License-Identifier: Apache-2.0
// Managed memory: what the calls of other families need of it.
#ifndef CUDA_REMOTE_CLIENT_CALLS_MANAGED_H_
#define CUDA_REMOTE_CLIENT_CALLS_MANAGED_H_

#include <cuda.h>

#include <cstddef>
#include <cstdint>

#include "client/core/call.h"
#include "client/core/session.h"

namespace cuda_remote::client {

// cuMemFree of managed memory: waits for the GPU, as natively. False if none begins at `address`; `call` is then
// unused.
bool FreeManaged(Call& call, uint64_t address, CUresult* result);

// A `__managed__` variable that the server named: from now on the host may use it at its address. Fails, and says so
// once, if something else of this process lies there.
CUresult ShareVariable(Call& call, uint64_t address, uint64_t bytes, const char* name);

// Whether all of [address, address + bytes) is managed memory, which the server has at the same address. Costs nothing
// for programs that have none: every copy asks.
bool FindManaged(Session& session, uint64_t address, size_t bytes);
inline bool IsManaged(Session& session, uint64_t address, size_t bytes) {
  return session.memory().uses_managed() && FindManaged(session, address, bytes);
}

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_CALLS_MANAGED_H_
