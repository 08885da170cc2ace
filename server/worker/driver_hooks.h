// SPDX-License-Identifier: Apache-2.0
// Driver calls that handlers make, where the worker has to know or add something: the session's own view of free
// memory, the memory limit, memory that is kept although it is free, peer access to the arena, captures in progress.
#ifndef CUDA_REMOTE_SERVER_WORKER_DRIVER_HOOKS_H_
#define CUDA_REMOTE_SERVER_WORKER_DRIVER_HOOKS_H_

#include <functional>

#include "server/driver/driver_table.h"
#include "server/worker/device_arena.h"

namespace cuda_remote::server {

// A table like `real` with some functions replaced. One session for each process: the replacements refer to `arena`.
// `collect_frees` gives memory to the arena that the session has freed and that no stream uses any more, if true
// waiting for streams; it is called on the thread that called HookDriver, and on no other. `settle` is called before a
// capture begins and before streams are destroyed: the last moment to record events in any stream.
DriverTable HookDriver(const DriverTable& real, DeviceArena* arena, std::function<void(bool wait)> collect_frees,
                       std::function<void()> settle);

// Streams with a capture in progress that was begun in them. Executor only.
int CapturesInProgress();

// Whether work that is put into `stream` now is captured instead of run.
bool IsCaptured(CUstream stream);

// Whether a captured stream may be a blocking one. Unknown for streams that have joined a capture: they count as such.
bool MayBeBlocking(CUstream captured);

// A stream died with its context, and its capture with it.
void ForgetCapture(CUstream stream);

// What a pool of cuMemPoolCreate was made with; false for other pools.
bool PropsOfPool(CUmemoryPool pool, CUmemPoolProps* props);

// How long physical memory from cuMemCreate is; 0 for what was imported.
uint64_t PhysicalBytes(CUmemGenericAllocationHandle handle);

// Physical memory from cuMemCreate has been released, an array (of the plain kind or mipmapped) is gone: they no longer
// count.
void PhysicalMemoryReleased(CUmemGenericAllocationHandle handle);
void ArrayGone(uint64_t array);

// Counts memory that the driver is about to take for the session; what is kept although it is free makes room. False if
// it does not fit. Executor only.
bool ChargeWithRoom(uint64_t bytes);

}  // namespace cuda_remote::server

#endif  // CUDA_REMOTE_SERVER_WORKER_DRIVER_HOOKS_H_
