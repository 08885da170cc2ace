// SPDX-License-Identifier: Apache-2.0
// Contexts: the state that streams, modules and memory belong to, and the calling thread's stack of them.
//
// A CUcontext is the address of a Context. The primary context of a device is one object for the life of the process:
// it goes from inactive to active and back. A failing kernel leaves its error in the context ("sticky"): every later
// call that needs the context answers with it, and work that is already queued is dropped, as on a real GPU.
//
// Thread-safe.
#ifndef CUDA_REMOTE_SOFTGPU_CORE_CONTEXT_H_
#define CUDA_REMOTE_SOFTGPU_CORE_CONTEXT_H_

#include <cuda.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "proto/threads/mutex.h"
#include "softgpu/core/code_space.h"
#include "softgpu/core/kernel_heap.h"
#include "softgpu/core/registry.h"

namespace cuda_remote::softgpu {

class Context;
class Stream;
class Task;
using ContextPtr = std::shared_ptr<Context>;
using StreamPtr = std::shared_ptr<Stream>;
using TaskPtr = std::shared_ptr<Task>;

class Context : public std::enable_shared_from_this<Context> {
 public:
  // A new, active context. A primary one starts inactive.
  static ContextPtr Create(int device, unsigned flags, bool primary);
  ~Context();

  CUcontext handle() { return reinterpret_cast<CUcontext>(this); }
  int device() const { return device_; }
  bool primary() const { return primary_; }
  uint64_t id() const { return id_; }
  bool active() const { return active_.load(std::memory_order_acquire); }

  CUresult error() const { return static_cast<CUresult>(error_.load(std::memory_order_acquire)); }
  // The context whose modules and variables this one uses: its own but for a green context's, which uses the primary
  // one's.
  ContextPtr Home() { return home_ ? home_ : shared_from_this(); }
  // Before the context is handed out.
  void SetHome(const ContextPtr& home) { home_ = home; }

  // The first error stays.
  void SetError(CUresult error);

  // Makes an inactive primary context usable again.
  void Activate();
  // Ends all work, destroys everything that belongs to the context, and makes it inactive.
  void Deactivate();

  // The legacy default stream.
  StreamPtr legacy();
  // The calling thread's own default stream in this context, created at first use.
  StreamPtr PerThread();

  // Takes a new stream in; lets one go that gets no more work.
  void Adopt(const StreamPtr& stream);
  void Retire(const StreamPtr& stream);

  // Waits for all work that was submitted before. Returns the sticky error, if any.
  CUresult Synchronize();
  // CUDA_ERROR_NOT_READY while any stream has work.
  CUresult Query();

  // Last tasks of all streams that are not done.
  std::vector<TaskPtr> Pending();
  // All streams that can get work, the legacy one too.
  std::vector<StreamPtr> AllStreams();

  // Set while the context is being destroyed: running kernels end soon.
  const std::atomic<bool>* cancel() const { return &cancel_; }

  // Text of device printf: kept until FlushOutput, which the synchronising calls do.
  void Print(std::string_view text);
  // The same for texts of assertions, which go to standard error.
  void Complain(std::string_view text);
  void FlushOutput();

  std::atomic<unsigned> flags{0};
  std::atomic<CUfunc_cache> cache_config{CU_FUNC_CACHE_PREFER_NONE};
  std::atomic<int> shared_config{0};
  std::atomic<unsigned> api_version{3020};
  std::atomic<int> attached{1};  // cuCtxAttach
  std::atomic<size_t> limits[CU_LIMIT_MAX];

  KernelHeap heap;

  // Places for code of modules, which are loaded and unloaded under this mutex.
  Mutex code_mutex;
  CodeSpace code CR_GUARDED_BY(code_mutex);

  // Whether it was not as wanted before. `peer`: the id of a context of another device.
  bool EnablePeer(uint64_t peer);
  bool DisablePeer(uint64_t peer);

 private:
  friend class Stream;
  friend TaskPtr SubmitLocked(Context& context, const StreamPtr& stream, TaskPtr task);

  Context(int device, unsigned flags, bool primary);
  void ResetState();
  void PruneLocked() CR_REQUIRES(submit_);

  const int device_;
  const bool primary_;
  const uint64_t id_;
  ContextPtr home_;
  std::atomic<bool> active_{false};
  std::atomic<bool> cancel_{false};
  std::atomic<int> error_{CUDA_SUCCESS};

  // Guards the set of streams and the order of submissions to all of them.
  Mutex submit_;
  StreamPtr legacy_ CR_GUARDED_BY(submit_);
  std::vector<StreamPtr> streams_ CR_GUARDED_BY(submit_);  // all others

  Mutex peers_mutex_;
  // Whose memory is accessible: all is in one process, so only the answers differ.
  std::set<uint64_t> peers_ CR_GUARDED_BY(peers_mutex_);

  Mutex output_mutex_;
  std::string output_ CR_GUARDED_BY(output_mutex_);
  std::string complaints_ CR_GUARDED_BY(output_mutex_);
};

// Waits for the work of all contexts.
void SynchronizeAllContexts();

// Notes that work of `user`, a device, may use memory of `owner`, another one; kAnyDevice: of any. That stays so.
inline constexpr int kAnyDevice = -1;
void NoteReach(int user, int owner);
// Waits for the work that may use memory of `device`: of its own contexts, and of devices of which that was noted.
void SynchronizeUsersOf(int device);

// Top of the calling thread's stack; null if none.
ContextPtr CurrentContext();

// CUDA_ERROR_INVALID_CONTEXT for none, CUDA_ERROR_CONTEXT_IS_DESTROYED, or the context's sticky error.
CUresult Usable(const ContextPtr& context);

// The current context if it can be used: CUDA_ERROR_INVALID_CONTEXT without one, CUDA_ERROR_CONTEXT_IS_DESTROYED, or
// its sticky error.
CUresult UsableContext(ContextPtr* context);

// The same for a call that names an object: without a current context `own()`, the object's, is the call's, as in the
// driver. It may be null.
template <typename Own>
CUresult UsableContextOr(Own own, ContextPtr* context) {
  if (CurrentContext()) return UsableContext(context);
  return Usable(*context = own());
}

// The context for a handle that a caller passed: null means the current one.
CUresult ContextFor(CUcontext handle, ContextPtr* context);

}  // namespace cuda_remote::softgpu

#endif  // CUDA_REMOTE_SOFTGPU_CORE_CONTEXT_H_
