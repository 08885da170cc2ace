// SPDX-License-Identifier: Apache-2.0
// Which context is current in a thread of the worker, so that the driver is asked to change it only when it changes.
#ifndef CUDA_REMOTE_SERVER_WORKER_SESSION_CURRENT_CONTEXT_H_
#define CUDA_REMOTE_SERVER_WORKER_SESSION_CURRENT_CONTEXT_H_

#include <cuda.h>

#include <cstdint>

#include "server/driver/driver_table.h"

namespace cuda_remote::server {

// A real context. The id is never used again, unlike the driver's pointer: a thread that still has a destroyed context
// cannot mistake a new one for it.
struct ContextRef {
  CUcontext real = nullptr;
  uint64_t id = 0;  // 0: no context
};

// Makes `context` (or none) current in this thread, which must change its context in no other way.
CUresult MakeCurrent(const DriverTable& driver, ContextRef context);

// Says that the driver changed this thread's context: the next MakeCurrent asks it in any case.
void ForgetCurrent();

}  // namespace cuda_remote::server

#endif  // CUDA_REMOTE_SERVER_WORKER_SESSION_CURRENT_CONTEXT_H_
