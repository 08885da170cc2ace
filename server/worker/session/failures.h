// SPDX-License-Identifier: Apache-2.0
// Whether work of this session has failed for good. A failed kernel leaves its context with an error that every driver
// call gives from then on; what the worker does by itself, without asking the driver, must give it too.
//
// Thread-safe.
#ifndef CUDA_REMOTE_SERVER_WORKER_SESSION_FAILURES_H_
#define CUDA_REMOTE_SERVER_WORKER_SESSION_FAILURES_H_

#include <cuda.h>

#include "server/driver/driver_table.h"

namespace cuda_remote::server {

// Looks at the result of a request; cheap.
void NoteResult(CUresult result);

// The error that the current context is stuck with; CUDA_SUCCESS if it is not. Asks the driver only if something has
// failed.
CUresult StickyError(const DriverTable& driver);

}  // namespace cuda_remote::server

#endif  // CUDA_REMOTE_SERVER_WORKER_SESSION_FAILURES_H_
