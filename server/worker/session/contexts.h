// SPDX-License-Identifier: Apache-2.0
// The contexts of a session, and which of them the request that is executed names.
//
// Not thread-safe: the executor's own. Waiting work gets copies (ContextRef).
#ifndef CUDA_REMOTE_SERVER_WORKER_SESSION_CONTEXTS_H_
#define CUDA_REMOTE_SERVER_WORKER_SESSION_CONTEXTS_H_

#include <cuda.h>

#include <cstdint>
#include <map>
#include <vector>

#include "server/driver/driver_table.h"
#include "server/worker/session/current_context.h"
#include "server/worker/session/handle_map.h"

namespace cuda_remote::server {

struct ContextInfo {
  ContextRef ref;
  int device = 0;
  bool primary = false;
};

class Contexts {
 public:
  // `warm_context`: the primary context of `warm_gpu` that was retained ahead of need, if there is one. The driver and
  // the handles outlive this object.
  Contexts(const DriverTable& driver, const HandleMap& handles, int warm_gpu, CUcontext warm_context)
      : driver_(driver), handles_(handles), warm_gpu_(warm_gpu), warm_context_(warm_context) {}

  // Makes the context in `slot` (0: none) the request's, and current in this thread. An error is the call's result.
  CUresult Enter(uint32_t slot) {
    return slot == SlotOf(current_) && (slot == 0 || current_ref_.id != 0) ? Restore() : Change(slot);
  }
  // Makes the request's context current again, where another one has been.
  CUresult Restore() const { return MakeCurrent(driver_, current_ref_); }
  // The request's context: its virtual handle, 0 if it names none, and what makes it current.
  uint64_t current() const { return current_; }
  ContextRef current_ref() const { return current_ref_; }
  // Makes another one the request's, as it was before Enter, and current.
  void Return(uint64_t context, ContextRef ref);

  // By virtual handle.
  const std::map<uint64_t, ContextInfo>& all() const { return all_; }
  // Null if there is no such context.
  const ContextInfo* Find(uint64_t handle) const;
  // A context of the device, preferring the current one; id 0 if there is none.
  ContextRef On(int device) const;
  // Any context, preferring the current one; id 0 if there is none.
  ContextRef Any() const;
  // Virtual handles.
  std::vector<uint64_t> OldestFirst() const;

  // A context that the driver has made. Returns what is kept of it.
  const ContextInfo& Add(uint64_t handle, CUcontext real, int device, bool primary);
  // One that is gone.
  void Remove(uint64_t handle);
  // Whether the session uses, or used, contexts of several GPUs.
  bool on_several_gpus() const { return on_several_gpus_; }

  // The primary context that was retained ahead, once; null if it is another GPU's or taken.
  CUcontext TakeWarm(int device);
  // The primary context of a device for what comes before the replay; it stays until EndEarly.
  CUresult Early(int device, CUcontext* context);
  void EndEarly();

 private:
  CUresult Change(uint32_t slot);

  const DriverTable& driver_;
  const HandleMap& handles_;
  std::map<uint64_t, ContextInfo> all_;
  uint64_t next_id_ = 1;
  uint64_t current_ = 0;
  ContextRef current_ref_;
  bool on_several_gpus_ = false;
  int warm_gpu_;
  CUcontext warm_context_;          // null: taken
  std::map<int, CUcontext> early_;  // by device
};

}  // namespace cuda_remote::server

#endif  // CUDA_REMOTE_SERVER_WORKER_SESSION_CONTEXTS_H_
