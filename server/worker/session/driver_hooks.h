// SPDX-License-Identifier: Apache-2.0
// Driver calls that handlers make, where the worker has to know or add something: the session's own view of free
// memory, the memory limit, memory that is kept although it is free, peer access to the arena, captures in progress.
#ifndef CUDA_REMOTE_SERVER_WORKER_SESSION_DRIVER_HOOKS_H_
#define CUDA_REMOTE_SERVER_WORKER_SESSION_DRIVER_HOOKS_H_

#include <functional>
#include <vector>

#include "server/driver/driver_table.h"
#include "server/worker/memory/device_arena.h"

namespace cuda_remote::server {

// What the session does beside driver calls. Called on the thread that called HookDriver, and on no other; each may
// leave another context current.
struct DriverHooks {
  // Gives memory to the arena that the session has freed and that no stream uses any more, if `wait` waiting for
  // streams.
  std::function<void(bool wait)> collect_frees;
  // Before a capture begins and before streams are destroyed: the last moment to record events in these streams.
  std::function<void()> settle;
  // Before a blocking stream is captured: the last moment to record events in the legacy streams.
  std::function<void()> mark_legacy;
  // Before a stream is destroyed that is not captured.
  std::function<void(CUstream stream)> mark_stream;
  // Kernels of `user`, a GPU, have got access to memory of `owner`; GpuReach::kAny: it is not known whose.
  std::function<void(int user, int owner)> allow;
};

// A table like `real` with some functions replaced. One session for each process: the replacements refer to `arena`.
DriverTable HookDriver(const DriverTable& real, DeviceArena* arena, DriverHooks hooks);

// Streams with a capture in progress that was begun in them. Executor only.
int CapturesInProgress();

// The nodes that the graph of the capture that was begun in `stream` had then. Executor only.
std::vector<CUgraphNode> NodesBeforeCapture(CUstream stream);

// Whether work that is put into `stream` now is captured instead of run.
bool IsCaptured(CUstream stream);

// Whether a stream waits for the legacy stream and the other way round. Without asking the driver (580), which refuses
// to answer for a captured stream, and invalidates the capture. Executor only.
bool IsBlocking(CUstream stream);

// A stream died with its context, and its capture with it.
void ForgetStream(CUstream stream);

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
// The GPU of the current context, and its memory, whatever the session's limit is. What a checkpoint has borrowed is
// free.
CUresult GpuMemoryInfo(CUdevice* device, size_t* free, size_t* total);

}  // namespace cuda_remote::server

#endif  // CUDA_REMOTE_SERVER_WORKER_SESSION_DRIVER_HOOKS_H_
