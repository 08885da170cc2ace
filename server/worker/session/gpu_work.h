// SPDX-License-Identifier: Apache-2.0
// Work of a session that its GPUs may not have finished, and how to ask for the end of what no stream stands for.
#ifndef CUDA_REMOTE_SERVER_WORKER_SESSION_GPU_WORK_H_
#define CUDA_REMOTE_SERVER_WORKER_SESSION_GPU_WORK_H_

#include <cuda.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "server/driver/driver_table.h"
#include "server/worker/session/contexts.h"
#include "server/worker/session/handle_map.h"

namespace cuda_remote::server {

// An event behind all work of a stream that can no longer be asked for it.
struct WorkMark {
  uint64_t context_id = 0;
  int gpu = 0;
  std::shared_ptr<CUevent_st> event;
};

// A function of the host's that is the last work of a stream, of which this is the virtual handle.
struct LastFunction {
  ContextRef context;
  uint64_t stream;
  uint64_t id;
};

// Real handles of streams and events that take the places of others, by virtual handle.
using Substitutes = std::unordered_map<uint64_t, uint64_t>;

// The executor's own, but for what says that any thread may use it.
class GpuWork {
 public:
  // All of them outlive this object.
  GpuWork(const DriverTable& driver, const Contexts& contexts, const HandleMap& handles, const Substitutes& substitutes)
      : driver_(driver), contexts_(contexts), handles_(handles), substitutes_(substitutes) {}

  // A request that may start work begins.
  void Begin() { ++given_; }
  // Whether everything that was asked for is known to be done.
  bool idle() const { return given_ == synced_.load(std::memory_order_acquire); }
  // For waits: what to pass to NoteSynchronized when the context has been synchronised. Any thread.
  uint64_t now() const { return contexts_.all().size() <= 1 ? given_ : 0; }
  // The same for waits for all contexts.
  uint64_t given() const { return given_; }
  // Any thread.
  void NoteSynchronized(uint64_t work);
  // What these contexts' streams, and the session's that were destroyed, are at: CUDA_ERROR_NOT_READY, or the first
  // error of those that are done. Nothing is captured. Leaves another context current.
  CUresult QueryAll(const std::vector<ContextRef>& contexts);

  // A blocking stream is about to be captured: records events behind the work in the legacy streams, which cannot be
  // looked at any more when it is. Leaves another context current.
  void MarkLegacy();
  // `stream` is about to be destroyed: what waits for all work while a stream is captured could not find its work.
  void MarkStream(CUstream stream);
  // The latest of MarkLegacy.
  const std::vector<WorkMark>& legacy_marks() const { return legacy_marks_; }
  // Behind the work of streams that were destroyed.
  const std::vector<WorkMark>& stream_marks() const { return stream_marks_; }
  bool BlockingStreamIsCaptured() const;

  // The request that is executed puts the host's function `id` into this stream (virtual handle).
  void NoteHostFunction(uint64_t stream, uint64_t id);
  // Those that are the last work of the whole session: none if other work was asked for since then.
  std::vector<LastFunction> LastFunctions() const;

  // A context is gone: events of its own, too.
  void ForgetContext(uint64_t id);

  // A wait for all contexts is on its way that a question about work has begun (OpDrain with at_once). Any thread.
  std::atomic<bool>& draining() { return draining_; }

 private:
  void AddMark(const ContextInfo& context, CUstream stream, std::vector<WorkMark>* marks);

  const DriverTable& driver_;
  const Contexts& contexts_;
  const HandleMap& handles_;
  const Substitutes& substitutes_;
  uint64_t given_ = 0;
  std::atomic<uint64_t> synced_{0};
  std::atomic<bool> draining_{false};
  std::vector<WorkMark> legacy_marks_, stream_marks_;
  std::vector<LastFunction> last_functions_;
  uint64_t last_function_work_ = 0;  // given_ then
};

}  // namespace cuda_remote::server

#endif  // CUDA_REMOTE_SERVER_WORKER_SESSION_GPU_WORK_H_
