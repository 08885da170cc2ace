// SPDX-License-Identifier: Apache-2.0
// The worker's Session: everything that one client has on this server.
//
// The hand-written handlers see this class; the generated ones see Session. A subject has a part of its own (contexts,
// modules, work, answers, ...); this class tells the parts what concerns several of them: a request begins, a context
// or another object is made or gone. All parts are the executor thread's own unless they say otherwise; waiting work
// gets copies of what it needs (ContextRef, real handles).
#ifndef CUDA_REMOTE_SERVER_WORKER_SESSION_WORKER_SESSION_H_
#define CUDA_REMOTE_SERVER_WORKER_SESSION_WORKER_SESSION_H_

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "proto/channel/server_channel.h"
#include "proto/threads/mutex.h"
#include "server/dispatch/session.h"
#include "server/worker/graphs/exec_pads.h"
#include "server/worker/memory/address_space.h"
#include "server/worker/memory/device_arena.h"
#include "server/worker/memory/device_ranges.h"
#include "server/worker/memory/gpu_reach.h"
#include "server/worker/memory/host_ranges.h"
#include "server/worker/memory/kernel_heaps.h"
#include "server/worker/memory/pending_frees.h"
#include "server/worker/memory/registered_pages.h"
#include "server/worker/memory/side_work.h"
#include "server/worker/memory/staging.h"
#include "server/worker/memory/uploads.h"
#include "server/worker/modules/jit_options.h"
#include "server/worker/modules/loaded_modules.h"
#include "server/worker/session/answers.h"
#include "server/worker/session/contexts.h"
#include "server/worker/session/current_context.h"
#include "server/worker/session/driver_hooks.h"
#include "server/worker/session/gpu_work.h"
#include "server/worker/session/handle_map.h"
#include "server/worker/session/host_functions.h"
#include "server/worker/session/ipc.h"
#include "server/worker/session/loaded_driver.h"
#include "server/worker/session/output_capture.h"
#include "server/worker/session/timeline.h"

namespace cuda_remote::server {

// What a context leaves that may be in use until it is idle.
struct ContextRemains {
  std::vector<uint64_t> memory;             // of the arena
  std::vector<IpcImport> imports;           // memory of other sessions
  std::vector<std::shared_ptr<char>> lent;  // sources of copies
};

// Managed or pinned memory that the client does not share (proto/mirror): what its bytes were when both sides last
// agreed.
struct Mirrored {
  uint64_t bytes = 0;   // of the range
  uint64_t shown = 0;   // those that are mirrored; the rest is its last page's
  uint64_t owner = 0;   // of a variable: its module or library
  bool pinned = false;  // lies in a HostRange of this process's own, and goes with it
  bool lost = false;    // the client has written over what the GPU had written, which it has not been told
  // Of a variable: from here on its bytes may be those of its module's image, which a client that has been restarted or
  // moved writes over. Nothing is lost then.
  uint64_t fresh = 0;
  std::shared_ptr<char> base;
};

// Physical memory of the application's own making.
struct PhysicalFacts {
  uint64_t real = 0;
  uint64_t bytes = 0;  // of what another session has made; else PhysicalBytes(real)
  uint64_t mappings = 0;
  bool used = false;  // it was mapped once, so it may hold something
  bool released = false;
  bool keep_unmapped = false;  // released in a replay before it was mapped
};

// A linker's state: the options that the driver goes on writing to, and what was linked, until the client has it.
struct LinkFacts {
  std::unique_ptr<JitOptions> options;
  std::string image;
};

class ManagedMemory;

class WorkerSession : public Session {
 public:
  struct Parts {
    const LoadedDriver* driver = nullptr;
    // Makes the hand-written handlers of a session (server/worker/calls/handlers.gen.h: CallsOf).
    std::unique_ptr<CustomCalls> (*calls)(WorkerSession& session) = nullptr;
    DeviceArena* arena = nullptr;
    ServerChannel* channel = nullptr;
    OutputCapture* output = nullptr;
    StagingPool* staging = nullptr;
    // A primary context that was retained ahead of need; the client's first retain takes it over.
    int warm_gpu = -1;
    CUcontext warm_context = nullptr;
    IpcSelf sharing;  // who this session is to those that it shares with
  };
  explicit WorkerSession(const Parts& parts);
  ~WorkerSession() override;

  // Session.
  const DriverTable& driver() const override { return table_; }
  using Session::Real;
  bool Real(Kind kind, uint64_t handle, uint64_t* real) const override;
  bool RealStream(uint64_t wire, CUstream* real) const override;
  uint64_t Virtual(Kind kind, uint64_t real) const override { return handles_.Virtual(kind, real); }
  bool MayBind(Kind kind, uint64_t handle) const override { return handles_.MayBind(kind, handle); }
  void Bind(Kind kind, uint64_t handle, uint64_t real, uint64_t parent) override;
  void Unbind(uint64_t handle) override;
  bool IsUnder(uint64_t handle, uint64_t ancestor) const override { return handles_.IsUnder(handle, ancestor); }
  void SetParent(Kind kind, uint64_t handle, uint64_t parent) override { handles_.SetParent(kind, handle, parent); }
  bool OwnsDeviceRange(CUdeviceptr address, uint64_t bytes) const override {
    if (contexts_.on_several_gpus()) NameGpuOf(address);
    return ranges_.Contains(address, bytes);
  }
  bool MayUse(CUdeviceptr address, uint64_t bytes) const override {
    return OwnsDeviceRange(address, bytes) || host_ranges_.Owns(address, bytes);
  }
  uint64_t CurrentContext() const override { return contexts_.current(); }
  void Defer(ReplyBuilder* reply, std::function<CUresult(std::string*, std::string*)> wait) override;
  uint64_t KernelOfFunction(CUfunction function) const override;
  CUhostFn HostFunction(uint64_t id, void** data) override { return host_functions_.ForNode(id, data); }
  uint64_t HostFunctionId(CUhostFn function, void* data) const override { return host_functions_.IdOf(function, data); }

  // --- For the executor -------------------------------------------------------------------------------------------

  // Makes the request's context current. An error is the call's result.
  CUresult Enter(const FrameHeader& header);
  // For requests inside another: makes the context in `slot` current (0: none), and says that nobody waits for an
  // answer. LeaveNested puts back what was before.
  struct Outer {
    FrameHeader header;
    uint64_t context;
    ContextRef ref;
  };
  CUresult EnterNested(uint32_t slot, Outer* outer);
  void LeaveNested(const Outer& outer);

  // Empty in the end.
  Substitutes& substitutes() { return substitutes_; }

  // Whether later requests may have been executed before the present one.
  void set_executes_kept(bool kept) { executes_kept_ = kept; }
  bool executes_kept() const { return executes_kept_; }

  // Lets waiting host functions go, so that threads can end.
  void Stop();

  // --- For handlers -----------------------------------------------------------------------------------------------

  // User objects whose destructors the driver has called: it may do so on any thread, at any time, and when this
  // session is long over.
  struct GoneObjects {
    Mutex mutex;
    WorkerSession* session CR_GUARDED_BY(mutex);  // null: over
    std::vector<uint64_t> handles CR_GUARDED_BY(mutex);
    std::atomic<bool> any{false};
    // Tells the client, and has the executor forget the handle before its next request.
    void Announce(uint64_t handle);
  };
  const std::shared_ptr<GoneObjects>& gone_objects() const { return gone_objects_; }

  // --- Parts of the session ---------------------------------------------------------------------------------------

  Answers& answers() { return answers_; }
  Contexts& contexts() { return contexts_; }
  const Contexts& contexts() const { return contexts_; }
  GpuWork& work() { return work_; }
  LoadedModules& modules() { return modules_; }
  PendingFrees& frees() { return frees_; }
  HostRanges& host_ranges() { return host_ranges_; }
  ServerChannel& channel() { return *parts_.channel; }
  DeviceArena& arena() { return *parts_.arena; }
  StagingPool& staging() { return *parts_.staging; }
  Uploads& uploads() { return uploads_; }
  // Any thread.
  Timeline& timeline() { return timeline_; }
  const LoadedDriver& loaded() const { return *parts_.driver; }
  HandleMap& handles() { return handles_; }
  DeviceRanges& ranges() { return ranges_; }
  HostFunctions& host_functions() { return host_functions_; }
  RegisteredPages& registered_pages() { return registered_pages_; }
  // Memory that the client mirrors. Under the mutex: mirror_requests.h.
  std::map<uint64_t, Mirrored>& mirrored() CR_REQUIRES(mirror_mutex_) { return mirrored_; }
  Mutex& mirror_mutex() CR_RETURNS(mirror_mutex_) { return mirror_mutex_; }
  // Managed memory that lies on the GPU. Any thread.
  ManagedMemory& managed_memory() { return *managed_memory_; }
  // Makes sure that it can copy: there may be a context by now. Executor only; may leave another context current.
  void PrepareManagedMemory();
  // Texture and surface objects: context (virtual handle) and the driver's value.
  using ContextValues = std::set<std::pair<uint64_t, uint64_t>>;
  ContextValues& textures() { return textures_; }
  ContextValues& surfaces() { return surfaces_; }
  std::map<uint64_t, uint64_t>& reservations() { return reservations_; }
  // Addresses for the application's own reservations, taken from the driver at the first call. Null if it gives none.
  AddressSpace* ReservationSpace();
  std::unordered_map<uint64_t, PhysicalFacts>& physical() { return physical_; }
  std::unordered_map<uint64_t, LinkFacts>& links() { return links_; }
  Ipc& ipc() { return ipc_; }

  // A context that the driver has made. `parent`: virtual handle of the green context that it was made from, 0 for
  // others.
  void BindContext(uint64_t handle, CUcontext real, int device, bool primary, uint64_t parent = 0);
  // Forgets a context and what lived in it; returns what is to be freed once the context is idle.
  ContextRemains ForgetContext(uint64_t handle);
  // The GPU of what dies with a context; GpuReach::kAny if it is not known.
  int GpuOf(uint64_t handle) const;
  // Whether work of one GPU may use memory of another one.
  bool MayUseMemoryOf(int user, int owner) const { return reach_.MayUse(user, owner); }

  // In a replay: instantiates a graph that kernels may launch, so that the executable has the handle `wanted`
  // (ExecPads::MakeAt).
  void InstantiateAt(uint64_t wanted, const std::function<uint64_t()>& instantiate);

  KernelHeaps& heaps() { return heaps_; }
  SideWork& side_work() { return side_work_; }

 private:
  DriverHooks HooksOf();
  // Work begins, and some managed memory is host memory: has it go back if the host does not use it any more.
  void LeaveUnusedHostMemory();
  CUresult EnterContext(const FrameHeader& header);
  // For GpuReach, if the session uses several GPUs: what the request names.
  void NameGpu(int gpu) const;
  void NameGpuOf(CUdeviceptr address) const;
  void Gone(const HandleMap::Entry& entry);
  // Lets a device that the session now uses, and the others that it uses, reach each other's memory.
  void ShareArena(int device);
  void DestroyExec(uint64_t real);

  const Parts parts_;
  DriverTable table_;
  HandleMap handles_;
  Contexts contexts_;
  Substitutes substitutes_;
  mutable GpuReach reach_;
  std::shared_ptr<GoneObjects> gone_objects_ = std::make_shared<GoneObjects>();
  DeviceRanges ranges_;
  HostRanges host_ranges_;
  RegisteredPages registered_pages_;
  Mutex mirror_mutex_;
  std::map<uint64_t, Mirrored> mirrored_ CR_GUARDED_BY(mirror_mutex_);
  const std::unique_ptr<ManagedMemory> managed_memory_;
  ContextValues textures_, surfaces_;
  std::map<uint64_t, uint64_t> reservations_;  // address -> bytes
  std::optional<AddressSpace> reservation_space_;
  // Executable graphs that take up handles, until the replay is over.
  ExecPads exec_pads_;
  KernelHeaps heaps_;
  LoadedModules modules_;
  SideWork side_work_;
  std::unordered_map<uint64_t, PhysicalFacts> physical_;
  PendingFrees frees_;
  std::unordered_map<uint64_t, LinkFacts> links_;
  Ipc ipc_;
  bool executes_kept_ = false;
  GpuWork work_;
  HostFunctions host_functions_;
  Timeline timeline_;
  Uploads uploads_;
  const std::unique_ptr<CustomCalls> calls_;
  Answers answers_;  // ends first: what it waits for uses the others
};

}  // namespace cuda_remote::server

#endif  // CUDA_REMOTE_SERVER_WORKER_SESSION_WORKER_SESSION_H_
