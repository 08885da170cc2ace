// SPDX-License-Identifier: Apache-2.0
// What the GPUs have been given and have to do before memory may be looked at, changed or given back.
#ifndef CUDA_REMOTE_SERVER_WORKER_CALLS_WORK_H_
#define CUDA_REMOTE_SERVER_WORKER_CALLS_WORK_H_

#include <cuda.h>

#include <functional>
#include <utility>
#include <vector>

#include "server/worker/session/worker_session.h"

namespace cuda_remote::server {

struct Work {
  std::vector<ContextRef> contexts;                      // all that was put into these
  std::vector<std::pair<ContextRef, CUstream>> streams;  // and into these
  std::vector<WorkMark> marks;                           // and what is behind these
  // If these contexts are all that there are: the session's work by now, for GpuWork::NoteSynchronized.
  uint64_t session = 0;
};

// All work of the session; nothing if it is known to have none. While streams are being captured, contexts cannot be
// waited for: then it is the work of all streams that are not captured, which has what the GPUs are doing, and of those
// that were destroyed. No call may look at the legacy stream while a blocking stream is captured, so events were
// recorded there before (GpuWork::MarkLegacy). Executor only.
Work AllWork(WorkerSession& session);

// The part of it that may use memory of `gpu` (gpu_reach.h).
Work WorkOnMemoryOf(WorkerSession& session, int gpu);

// What waits for it, on any thread, once. Leaves another context current. Gives the first error of any context, which
// need not be that of the caller's. Call WaitFor itself on the executor: a stream may be destroyed before the wait is
// over.
std::function<CUresult()> WaitFor(WorkerSession& session, const Work& work);

// What waits for that work, too, and not for side work (side_work.h), for which a wait for the context would wait: a
// checkpoint has copies on their way all the time. As QueryAll, for one context that is all that there is. Null if only
// a wait for the context will do.
std::function<CUresult()> WaitBesideSideWork(WorkerSession& session, const ContextRef& context);

// Gives memory for payloads back if much of it is unused and the GPUs have nothing to do. For calls that need more of
// it: a session with several contexts is seldom known to be idle. Executor only.
void GiveBackStaging(WorkerSession& session);

}  // namespace cuda_remote::server

#endif  // CUDA_REMOTE_SERVER_WORKER_CALLS_WORK_H_
