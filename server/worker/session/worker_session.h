// SPDX-License-Identifier: Apache-2.0
// The worker's Session: everything that one client has on this server.
//
// The hand-written handlers see this class (Worker(session)); the generated ones see Session. All members are the
// executor thread's own unless they say otherwise; waiting work gets copies of what it needs (ContextRef, real
// handles).
#ifndef CUDA_REMOTE_SERVER_WORKER_SESSION_WORKER_SESSION_H_
#define CUDA_REMOTE_SERVER_WORKER_SESSION_WORKER_SESSION_H_

#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "proto/channel/server_channel.h"
#include "proto/threads/mutex.h"
#include "replay/modimg/modimg.h"
#include "server/dispatch/session.h"
#include "server/worker/memory/address_space.h"
#include "server/worker/memory/device_arena.h"
#include "server/worker/memory/device_ranges.h"
#include "server/worker/memory/gpu_reach.h"
#include "server/worker/memory/kernel_heaps.h"
#include "server/worker/memory/registered_pages.h"
#include "server/worker/memory/side_work.h"
#include "server/worker/memory/staging.h"
#include "server/worker/memory/uploads.h"
#include "server/worker/modules/code_pads.h"
#include "server/worker/modules/exec_pads.h"
#include "server/worker/modules/jit_options.h"
#include "server/worker/modules/variable_pads.h"
#include "server/worker/session/current_context.h"
#include "server/worker/session/driver_hooks.h"
#include "server/worker/session/handle_map.h"
#include "server/worker/session/host_functions.h"
#include "server/worker/session/ipc.h"
#include "server/worker/session/loaded_driver.h"
#include "server/worker/session/output_capture.h"
#include "server/worker/session/timeline.h"
#include "server/worker/session/waiters.h"

namespace cuda_remote::server {

// What a deferred call answers besides its result.
struct Answer {
  std::string message;
  std::string payload;
  std::string_view view;         // payload that lies elsewhere; used if `payload` is empty
  std::shared_ptr<void> keeper;  // keeps that memory until the reply is sent
};

struct ContextInfo {
  ContextRef ref;
  int device = 0;
  bool primary = false;
};

// What a context leaves that may be in use until it is idle.
struct ContextRemains {
  std::vector<uint64_t> memory;             // of the arena
  std::vector<IpcImport> imports;           // memory of other sessions
  std::vector<std::shared_ptr<char>> lent;  // sources of copies
};

// Host memory of the client that is mapped here at the same address: pinned, managed, or registered by the program.
struct HostRange {
  uint64_t bytes = 0;
  unsigned flags = 0;
  uint64_t registered_in = 0;  // ContextRef::id, 0: not registered
  bool own = false;            // memory of this process, not of the client's file
  bool of_pages = false;       // the program's own memory, which it has registered (registered_pages.h)
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

// A word of one of a module's variables.
struct CodePlace {
  size_t symbol = 0;  // of ModuleFacts::symbols
  uint64_t offset = 0;
};

// A module or library: its variables, for checkpoints.
struct ModuleFacts {
  bool library = false;
  uint64_t context = 0;  // virtual handle; modules only
  uint32_t index = 0;    // in the order of loading
  std::vector<replay::DataSymbol> symbols;
  replay::KernelFacts kernels;
  // By context (virtual handle): what loading put into the words of its variables that hold addresses of functions, and
  // which words these are.
  std::map<uint64_t, CodeWords> code;
  std::map<uint64_t, std::vector<CodePlace>> code_places;
  // After a replay: what was there before it.
  std::map<uint64_t, CodeWords> code_before;
  uint64_t charged = 0;  // what the variables count as device memory: once, in however many contexts a library is
  std::string problem;   // not empty: the image could not be understood
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

// An event behind all work of a stream that can no longer be asked for it.
struct WorkMark {
  uint64_t context_id = 0;
  int gpu = 0;
  std::shared_ptr<CUevent_st> event;
};

class ManagedMemory;

class WorkerSession : public Session {
 public:
  struct Parts {
    const LoadedDriver* driver = nullptr;
    const CustomHandlers* custom = nullptr;  // server/worker/calls/handlers.gen.h has the worker's
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
  const CustomHandlers& custom() const override { return *parts_.custom; }
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
    if (several_gpus_) NameGpuOf(address);
    return ranges_.Contains(address, bytes);
  }
  bool MayUse(CUdeviceptr address, uint64_t bytes) const override {
    return OwnsDeviceRange(address, bytes) || OwnsHostRange(address, bytes);
  }
  uint64_t CurrentContext() const override { return current_; }
  void Defer(ReplyBuilder* reply, std::function<CUresult(std::string*, std::string*)> wait) override;
  uint64_t KernelOfFunction(CUfunction function) const override;
  CUhostFn HostFunction(uint64_t id, void** data) override { return host_functions_.ForNode(id, data); }
  uint64_t HostFunctionId(CUhostFn function, void* data) const override { return host_functions_.IdOf(function, data); }

  // --- For the executor -------------------------------------------------------------------------------------------

  // Makes the request's context current. An error is the call's result.
  CUresult Enter(const FrameHeader& header);
  // Answers the request that was entered last, or notes its failure if nobody waits for it.
  void Finish(CUresult result, const ReplyBuilder& reply);
  // For requests inside another: makes the context in `slot` current (0: none), and says that nobody waits for an
  // answer. LeaveNested puts back what was before.
  struct Outer {
    FrameHeader header;
    uint64_t context;
    ContextRef ref;
  };
  CUresult EnterNested(uint32_t slot, Outer* outer);
  void LeaveNested(const Outer& outer);

  // Real handles of streams and events that take the places of others, by virtual handle. Empty in the end.
  std::unordered_map<uint64_t, uint64_t>& substitutes() { return substitutes_; }

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

  // As Defer, with the current context, and with an answer that need not be copied. `wait` must not touch the session's
  // members other than those that say that they may be used from any thread. `ready`, for waits that a program may have
  // any number of: whether `wait` would return at once (Waiters::Run); asked in the same context.
  using Wait = std::function<CUresult(Answer*)>;
  void DeferAnswer(ReplyBuilder* reply, Wait wait, std::function<bool()> ready = nullptr) {
    DeferIn(current_ref_, reply, std::move(wait), std::move(ready));
  }
  void DeferIn(ContextRef context, ReplyBuilder* reply, Wait wait, std::function<bool()> ready = nullptr);
  // For the waits of side_work.h, which depend on nothing that other waits do.
  void DeferSide(ContextRef context, ReplyBuilder* reply, Wait wait);
  // In no context, and begun when all that these two have deferred before has ended, also what nobody waits for.
  void DeferBehindAll(ReplyBuilder* reply, Wait wait);
  // For waits behind work in `stream`, which end in the order in which they were given: one thread does them one after
  // the other, which is faster than many that look at the same stream. While it is busy with another stream, as
  // DeferAnswer.
  void DeferInStream(CUstream stream, ReplyBuilder* reply, Wait wait, std::function<bool()> ready);

  // Asks `ready` for a short while whether the GPU is done, as long as no other request is waiting. True once it is:
  // the handler answers at once, which is faster than handing the wait over.
  bool SpinUntil(const std::function<bool()>& ready);
  // The reply of this request must follow the device output that exists by now.
  void FlushBeforeReply() { flush_ = true; }

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
  std::map<uint64_t, HostRange>& host_ranges() { return host_ranges_; }
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
  std::unordered_map<uint64_t, ModuleFacts>& modules() { return modules_; }
  std::unordered_map<uint64_t, PhysicalFacts>& physical() { return physical_; }
  std::unordered_map<uint64_t, LinkFacts>& links() { return links_; }
  Ipc& ipc() { return ipc_; }

  // Contexts. `handle` is virtual; null if there is no such context.
  const ContextInfo* FindContext(uint64_t handle) const;
  ContextRef current_ref() const { return current_ref_; }
  // `parent`: virtual handle of the green context that it was made from, 0 for others.
  void BindContext(uint64_t handle, CUcontext real, int device, bool primary, uint64_t parent = 0);
  // A context of the device, preferring the current one; id 0 if there is none.
  ContextRef ContextOn(int device) const;
  // Any live context, preferring the current one; id 0 if there is none.
  ContextRef AnyContext() const;
  const std::map<uint64_t, ContextInfo>& contexts() const { return contexts_; }
  // Virtual handles of all contexts.
  std::vector<uint64_t> ContextsOldestFirst() const;
  // Forgets a context and what lived in it; returns what is to be freed once the context is idle.
  ContextRemains ForgetContext(uint64_t handle);
  // The GPU of what dies with a context; GpuReach::kAny if it is not known.
  int GpuOf(uint64_t handle) const;
  // Whether work of one GPU may use memory of another one.
  bool MayUseMemoryOf(int user, int owner) const { return reach_.MayUse(user, owner); }
  // The primary context that was retained ahead, once; null if it is another GPU's or taken.
  CUcontext TakeWarmContext(int device);
  // The primary context of a device for what comes before the replay; it stays until EndEarlyContexts.
  CUresult EarlyContext(int device, CUcontext* context);
  void EndEarlyContexts();

  // Whether [address, address + bytes) lies in one pinned range of the client.
  bool OwnsHostRange(uint64_t address, uint64_t bytes) const;
  // Registers pinned memory that is not (no context yet, or its context died), as far as possible.
  void RegisterHostRanges();
  // One of them, at this address, in the context that is current.
  CUresult RegisterWithDriver(uint64_t address, const HostRange& range);
  // Whether any of it lies in one: where the same addresses are host memory, the driver has another use for them.
  bool OverlapsHostRange(uint64_t address, uint64_t bytes) const;

  // Whether kernels that were loaded may print. The driver puts their text out in waits of its own, not where it is
  // only asked whether work is done.
  bool prints() const { return prints_; }

  // A module or library was loaded: remembers its variables, and lets the driver place them at once. Left to itself it
  // would place a library's when something of it is first used; so their order would not be that of the log, and a
  // replay would find them elsewhere. *placed is where they are, for a library in the oldest context first. False if
  // the session may not have as much memory: the caller unloads it.
  bool NoteModule(uint64_t handle, bool library, std::string_view image, VariablePlaces* placed);
  // In a replay: a module whose variables are at `*placed` and belong where `wanted` says (VariablePart::lowest alone;
  // 0: there was none), in contexts that exist. `load` loads it once more and gives the real handle, 0 on failure. Logs
  // what is not where it belongs, and fails then; `placed->loaded` says whether the module is still loaded, and the
  // caller unloads it.
  CUresult MoveVariables(uint64_t handle, VariablePlaces* placed, const std::vector<VariablePlace>& wanted,
                         const std::function<uint64_t()>& load);
  // In a replay, after MoveVariables: tries to bring the module's functions to where they were in each of `contexts`,
  // as `code`, equally many words for each, tells. Whether they lie there is for the tools to compare (Region::code),
  // so a failure is only that of loading the module again.
  CUresult MoveCode(uint64_t handle, VariablePlaces* placed, const std::vector<uint64_t>& contexts,
                    const std::vector<uint64_t>& code, const std::function<uint64_t()>& load);
  // In a replay: instantiates a graph that kernels may launch, so that the executable has the handle `wanted`
  // (ExecPads::MakeAt).
  void InstantiateAt(uint64_t wanted, const std::function<uint64_t()>& instantiate);
  // For messages: "the module with KERNEL".
  std::string NameOfModule(uint64_t handle);

  // A kernel of `module` is about to be launched in the current context. (0: some kernels of a graph.)
  void BeforeLaunch(uint64_t module) {
    if (allocating_modules_ != 0) BeginHeaps(module);
  }
  KernelHeaps& heaps() { return heaps_; }
  SideWork& side_work() { return side_work_; }

  // Unloads the driver's module or library behind a handle, which stays bound.
  void UnloadModule(uint64_t handle, bool library);
  // Where a variable of a module or library lies in the current context, and how long it is.
  CUresult FindVariable(uint64_t handle, bool library, const std::string& name, CUdeviceptr* address, size_t* bytes);

  // Work that the GPU may not have finished. Idle: everything that was asked for is known to be done.
  bool idle() const { return work_ == synced_.load(std::memory_order_acquire); }
  // For waits: what to pass to NoteSynchronized when the context has been synchronised. Any thread.
  uint64_t work_now() const { return contexts_.size() <= 1 ? work_ : 0; }
  // The same for waits for all contexts.
  uint64_t work_given() const { return work_; }
  void NoteSynchronized(uint64_t work);
  // What these contexts' streams, and the session's that were destroyed, are at: CUDA_ERROR_NOT_READY, or the first
  // error of those that are done. Nothing is captured. Executor only. Leaves another context current.
  CUresult QueryAll(const std::vector<ContextRef>& contexts);

  // A blocking stream is about to be captured: records events behind the work in the legacy streams, which cannot be
  // looked at any more when it is. Leaves another context current.
  void MarkLegacyWork();
  // The latest ones.
  const std::vector<WorkMark>& legacy_marks() const { return legacy_marks_; }
  // Behind the work of streams that were destroyed.
  const std::vector<WorkMark>& stream_marks() const { return stream_marks_; }
  bool BlockingStreamIsCaptured() const;

  // A function of the host's that is the last work of a stream, of which this is the virtual handle.
  struct LastFunction {
    ContextRef context;
    uint64_t stream;
    uint64_t id;
  };
  void NoteHostFunction(uint64_t stream, uint64_t id);
  // Those that are the last work of the whole session: none if other work was asked for since then.
  std::vector<LastFunction> LastFunctions() const;

  // Memory whose free waits for an event in a stream.
  struct PendingFree {
    CUevent event;
    uint64_t stream;  // as on the wire: the driver may give the handle of a stream that is gone to another one
    ContextRef context;
    uint64_t address;
  };
  std::list<PendingFree>& pending_frees() { return pending_frees_; }
  // Frees what the streams have passed; `wait`: waits for all of it. Leaves the current context as it was.
  void CollectPendingFrees(bool wait);

  // Sends output that has appeared. Any thread.
  void FlushOutput();
  // Remembers the first failure of a call that nobody waited for. Any thread.
  void SetPendingError(CUresult result);

  // A wait for all contexts is on its way that a question about work has begun (OpDrain with at_once). Any thread.
  std::atomic<bool>& draining() { return draining_; }

  uint64_t payload_bytes_out() const { return bytes_out_.load(std::memory_order_relaxed); }

 private:
  DriverHooks HooksOf();
  // `stream` is about to be destroyed: what waits for all work while a stream is captured could not find its work.
  void MarkStreamWork(CUstream stream);
  // Work begins, and some managed memory is host memory: has it go back if the host does not use it any more.
  void LeaveUnusedHostMemory();
  void AddMark(const ContextInfo& context, CUstream stream, std::vector<WorkMark>* marks);
  CUresult EnterContext(const FrameHeader& header);
  // For GpuReach, if the session uses several GPUs: what the request names.
  void NameGpu(int gpu) const;
  void NameGpuOf(CUdeviceptr address) const;
  std::function<void()> Deferrable(ContextRef context, ReplyBuilder* reply, Wait wait);
  void Gone(const HandleMap::Entry& entry);
  // Lets a device that the session now uses, and the others that it uses, reach each other's memory.
  void ShareArena(int device);
  // Makes the variables of a library (in `context`) or module (in its own) exist. Empty if it has none there.
  std::vector<VariablePart> PlaceVariables(uint64_t handle, const ModuleFacts& module, ContextRef context);
  // In all contexts, the oldest one first.
  VariablePlaces PlaceVariables(uint64_t handle);
  // Remembers ModuleFacts::code, in one context or in all in which the module is. They are made current.
  void ReadCode(uint64_t handle, uint64_t context);
  void ReadCode(uint64_t handle);
  void BeginHeaps(uint64_t module);
  void UnloadCodePads();
  void DestroyExec(uint64_t real);
  // For messages: what VariablePlace::parts[part] of a module is.
  std::string NameOfPart(uint64_t handle, size_t part);
  void LogMisplaced(uint64_t handle, const VariablePlaces& placed, const VariablePlace& wanted);
  void Answered(const FrameHeader& header, CUresult result, std::string_view message, std::string_view payload);

  const Parts parts_;
  DriverTable table_;
  HandleMap handles_;
  std::map<uint64_t, ContextInfo> contexts_;
  uint64_t next_context_id_ = 1;
  uint64_t current_ = 0;  // virtual handle of the request's context
  ContextRef current_ref_;
  bool warm_taken_ = false;
  std::map<int, CUcontext> early_contexts_;  // by device

  bool several_gpus_ = false;  // that is, or was, so
  mutable GpuReach reach_;

  std::unordered_map<uint64_t, uint64_t> substitutes_;
  std::shared_ptr<GoneObjects> gone_objects_ = std::make_shared<GoneObjects>();
  DeviceRanges ranges_;
  std::map<uint64_t, HostRange> host_ranges_;
  RegisteredPages registered_pages_;
  Mutex mirror_mutex_;
  std::map<uint64_t, Mirrored> mirrored_ CR_GUARDED_BY(mirror_mutex_);
  const std::unique_ptr<ManagedMemory> managed_memory_;
  ContextValues textures_, surfaces_;
  std::map<uint64_t, uint64_t> reservations_;  // address -> bytes
  std::optional<AddressSpace> reservation_space_;
  std::unordered_map<uint64_t, ModuleFacts> modules_;
  uint32_t next_module_ = 0;
  bool prints_ = false;
  int allocating_modules_ = 0;  // whose kernels use their context's heap
  // Pads in front of modules' code, until the replay is over.
  std::vector<std::pair<ContextRef, CUmodule>> code_pads_;
  // Executable graphs that take up handles, until the replay is over.
  ExecPads exec_pads_;
  KernelHeaps heaps_;
  SideWork side_work_;
  std::unordered_map<uint64_t, PhysicalFacts> physical_;
  std::list<PendingFree> pending_frees_;
  std::vector<WorkMark> legacy_marks_, stream_marks_;
  std::vector<LastFunction> last_functions_;
  uint64_t last_function_work_ = 0;  // work_ then
  std::unordered_map<uint64_t, LinkFacts> links_;
  Ipc ipc_;

  FrameHeader header_;  // of the request being executed
  bool flush_ = false;
  bool executes_kept_ = false;
  uint64_t work_ = 0;
  std::atomic<uint64_t> synced_{0};
  std::atomic<uint32_t> pending_error_{0};
  std::atomic<uint64_t> bytes_out_{0};
  std::atomic<bool> draining_{false};
  std::chrono::nanoseconds spin_limit_;
  HostFunctions host_functions_;
  Timeline timeline_;
  Uploads uploads_;
  std::unique_ptr<Waiters> waiters_;
  std::unique_ptr<Waiters> side_waiters_;
  // The thread of DeferInStream, the stream that it serves, and how many waits it has.
  std::unique_ptr<Waiters> stream_waiter_;
  CUstream waited_stream_ = nullptr;
  std::atomic<int> stream_waits_{0};
};

// The worker behind a handler's session.
inline WorkerSession& Worker(Session& session) { return static_cast<WorkerSession&>(session); }

}  // namespace cuda_remote::server

#endif  // CUDA_REMOTE_SERVER_WORKER_SESSION_WORKER_SESSION_H_
