// SPDX-License-Identifier: Apache-2.0
// The application's session with a GPU server: the one object behind all driver calls of the process.
//
// It owns the parts, each of which has a header of its own: connection (channel), objects and memory (handles, address
// maps and replay log), graphs, gate and checkpoint. It is made at the first driver call that needs a server and never
// destroyed: the CUDA runtime still calls the driver from its exit handlers.
//
// Locking: `mutex()` guards what one call changes together: handles, device and host ranges, freed memory, the pools'
// accounts, the graphs' records and the log. It is held for table look-ups only, never while a call waits for the
// server. Other parts have locks of their own. Those that guard data are of mutex.h, and the data say which lock they
// need, so that clang finds what is used without it (tests/style). The last ones in the order are those of added_work,
// driver_execs, event_times, managed_advice, names, primary_contexts, resource_objects and virtual_memory_map: a thread
// that holds mutex() may take one, and takes no other lock under it.
#ifndef CUDA_REMOTE_CLIENT_SESSION_SESSION_H_
#define CUDA_REMOTE_CLIENT_SESSION_SESSION_H_

#include <cuda.h>

#include <atomic>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "client/agent/agent.h"
#include "client/session/address_map.h"
#include "client/session/answers.h"
#include "client/session/captures.h"
#include "client/session/checkpoint.h"
#include "client/session/completion.h"
#include "client/session/connection.h"
#include "client/session/driver_execs.h"
#include "client/session/event_times.h"
#include "client/session/freed_memory.h"
#include "client/session/gate.h"
#include "client/session/graph_records.h"
#include "client/session/host_arena.h"
#include "client/session/host_functions.h"
#include "client/session/managed_advice.h"
#include "client/session/managed_home.h"
#include "client/session/managed_mirror.h"
#include "client/session/names.h"
#include "client/session/objects.h"
#include "client/session/pinned_heap.h"
#include "client/session/pool_accounts.h"
#include "client/session/primary_contexts.h"
#include "client/session/resource_objects.h"
#include "client/session/settings.h"
#include "client/session/staged_copies.h"
#include "client/session/staging.h"
#include "client/session/thread_state.h"
#include "client/session/upload_limit.h"
#include "client/session/virtual_memory_map.h"
#include "client/trace/control.h"
#include "proto/channel/client_channel.h"
#include "proto/driverabi/graph_memory.h"
#include "proto/threads/mutex.h"
#include "replay/handles/handle_table.h"
#include "replay/handles/live_handles.h"
#include "replay/log/log.h"

namespace cuda_remote::client {

// Device memory that the application knows of.
struct DeviceRange {
  enum Source : uint8_t { kAllocation, kStreamOrdered, kGlobal, kMapped, kManaged, kImported, kPoolImported, kGraph };
  Source source = kAllocation;
  int device = 0;
  uint64_t context = 0;       // virtual handle
  uint64_t buffer_id = 0;     // CU_POINTER_ATTRIBUTE_BUFFER_ID
  uint64_t pool = 0;          // stream-ordered, or imported from a pool: virtual handle, 0 for the device's default
  bool managed = false;       // kManaged, or a __managed__ variable: the host uses it too
  unsigned handle_types = 0;  // kMapped: CUmemAllocationHandleType that the memory can be exported as
};

// Pinned host memory.
struct HostRange {
  bool registered = false;  // cuMemHostRegister: the application's own pages
  bool shared = false;      // lies in the host arena: with shared memory the server has it at the same address
  bool on_device = false;   // the application uses it from kernels: the GPU reaches it at `device`
  // Registered pages that a server on this machine shares (client/session/shared_pages.h): moved into the host arena,
  // or a file's own. kNone: a server has a copy of them.
  enum Sharing : uint8_t { kNone, kMoved, kFile };
  Sharing sharing = kNone;
  uint64_t device = 0;
  uint64_t alias_of = 0;  // these are addresses of the GPU's for registered pages, which begin here
  unsigned flags = 0;
  uint64_t context = 0;
  uint64_t buffer_id = 0;
};

class Session final : public trace::Server {
 public:
  // The process's session. Null before the first Connect, and in a forked child.
  static Session* Get() { return g_session.load(std::memory_order_acquire); }

  // Connects if that has not happened yet. What cuInit and the calls that work before cuInit need.
  static CUresult Connect(Session** session);

  // A child made by fork from a process that had a session: every call returns what the native driver returns there.
  static bool InForkedChild();

  // A thread that used CUDA ends: its hidden streams are destroyed. Called by the thread's key destructor.
  static void ThreadEnds(ThreadState* thread);

  bool initialized() const { return initialized_.load(std::memory_order_acquire); }
  void set_initialized() { initialized_.store(true, std::memory_order_release); }

  // The channel to the server, and what became of it.
  Connection& connection() { return connection_; }
  CUresult lost() const { return connection_.lost(); }
  CUresult Lose(ChannelStatus status) { return connection_.Lose(status, settings_.server); }
  void SetPendingError(CUresult error) { connection_.SetPendingError(error); }
  CUresult TakePendingError() { return connection_.TakePendingError(); }

  const Settings& settings() const { return settings_; }
  const std::vector<Device>& devices() const { return devices_; }
  int driver_version() const { return driver_version_; }
  uint32_t address_layout() const { return address_layout_; }
  // How the process names its server from now on. The agent's thread, while the gate is closed.
  void set_server(const std::string& server) { settings_.server = server; }
  ClientChannel& channel() { return connection_.channel(); }
  // Whether the server shares memory with this process (ring), or only sees what is sent (relay).
  bool shared_memory() const { return connection_.channel().welcome().shared_memory; }

  Gate& gate() { return gate_; }
  // What the checkpoint agent talks to.
  Checkpoint& checkpoint() { return checkpoint_; }
  SharedMutex& mutex() CR_RETURNS(mutex_) { return mutex_; }

  // Whether the application may use the handle (HandleTable::Usable). Without the lock, which every call of every
  // thread would have to write to.
  bool Usable(Kind kind, uint64_t handle) const CR_UNGUARDED { return handles_.Usable(kind, handle); }

  // All of these: under mutex(), shared to look at them.
  ObjectTable& handles() CR_REQUIRES_SHARED(mutex_) { return handles_; }
  AddressMap<DeviceRange>& device_ranges() CR_REQUIRES_SHARED(mutex_) { return device_ranges_; }
  AddressMap<HostRange>& host_ranges() CR_REQUIRES_SHARED(mutex_) { return host_ranges_; }
  replay::Log& log() CR_REQUIRES_SHARED(mutex_) { return log_; }
  FreedMemory& freed_memory() CR_REQUIRES_SHARED(mutex_) { return freed_memory_; }
  PoolAccounts& pools() CR_REQUIRES_SHARED(mutex_) { return pools_; }
  // Memory that graphs allocate, and the nodes that the server knows as something else.
  driverabi::GraphMemory& graph_memory() CR_REQUIRES_SHARED(mutex_) { return graph_memory_; }
  std::unordered_map<uint64_t, DisguisedNode>& disguised_nodes() CR_REQUIRES_SHARED(mutex_) { return disguised_nodes_; }
  // Memory of a pool comes into the application's hands, and leaves them: device_ranges() and the pool's figures.
  void InsertPoolMemoryLocked(uint64_t address, uint64_t bytes, const DeviceRange& range) CR_REQUIRES(mutex_) {
    device_ranges_.Insert(address, bytes, range);
    pools_.Allocated({range.device, range.pool}, bytes);
  }
  void EraseDeviceRangeLocked(uint64_t address) CR_REQUIRES(mutex_);
  // Whether the application may use the object's handle (Object::active).
  void SetActiveLocked(uint64_t handle, Object* object, bool active) CR_REQUIRES(mutex_) {
    object->active = active;
    handles_.SetUsable(handle, active);
  }
  // The context (or green context) that an object was made in, or that it is itself; 0 if it is of none. Takes the
  // lock.
  uint64_t ContextOfObject(uint64_t handle);
  // A live context of the device, for questions that any of them can answer; 0: there is none. Takes the lock.
  uint64_t SomeContextOn(int device);
  // The device's primary context, which has a handle from the first question on, retained or not. 0: no handle is left.
  uint64_t PrimaryContextLocked(int device) CR_REQUIRES(mutex_);
  // The same context if it is there: retained, and not reset since. Null: it is not; no handle is made for it.
  Object* LivePrimaryContextLocked(int device) CR_REQUIRES_SHARED(mutex_);
  // Changes with what is known of any function or kernel (Object::info), under mutex().
  uint64_t function_epoch() const { return function_epoch_.load(std::memory_order_acquire); }
  void FunctionsChangedLocked() CR_REQUIRES(mutex_) { function_epoch_.fetch_add(1, std::memory_order_acq_rel); }
  // Which records of graphs stay in the log. Under mutex().
  GraphRecords& graph_records() CR_REQUIRES_SHARED(mutex_) { return graph_records_; }
  // The application destroyed `object`. True if something was made from it: it stays in the log, and its handle stays
  // taken.
  bool MarkDestroyedLocked(replay::ObjectKey object) CR_REQUIRES(mutex_);
  // Drops all that depends on `key`, but not `key` itself.
  void DropDependentsLocked(replay::ObjectKey key) CR_REQUIRES(mutex_);
  // Drops `key` from tables and log with all that depends on it. Of a graph that had something of it in it only the
  // record goes, and those of what was made from it: they cannot be made again, but the application has still to
  // destroy them.
  void DropLocked(replay::ObjectKey key) CR_REQUIRES(mutex_);
  uint64_t NextId() CR_REQUIRES(mutex_) { return next_id_++; }
  // Tells the server, in the order of their streams, of frees that it has not heard of: of these blocks, or of all that
  // are kept. Not under mutex().
  void GiveBack(const std::vector<FreedMemory::Block>& blocks);
  // Whether there were any.
  bool GiveBackFreed();
  // The host has waited for a stream, an event or a context: pools let go of what they keep. Takes the lock, if there
  // is anything to do.
  void NoteWaited() {
    if (!PoolsMaySynchronize()) return;
    WriterLock lock(&mutex_);
    pools_.Synchronized();
  }

  Names& names() { return names_; }

  // How many microseconds ago events of one context completed on this server; negative for those that did not.
  CUresult AskEventAges(uint64_t context, const std::vector<uint64_t>& events, std::vector<double>* microseconds);
  EventTimes& event_times() { return event_times_; }

  Staging& staging() { return staging_; }
  UploadLimit& upload_limit() { return upload_limit_; }
  Completions& completions() { return completions_; }
  Answers& answers() { return answers_; }
  // Appends what has been set of a kernel, or of the kernel that a function came from, as bytes.
  void AppendSettings(uint64_t function, std::string* out);
  Captures& captures() { return captures_; }
  // Whether records of an event may be sent quietly: it takes no time down and is of this process alone. Any thread.
  bool RecordsQuietly(uint64_t event) const { return quiet_events_.Contains(event); }
  // Says so of a new event, under mutex().
  void NoteEventLocked(uint64_t event, bool quiet) CR_REQUIRES(mutex_) {
    if (!quiet_events_.Reserve(SlotOf(event))) return;
    if (quiet) {
      quiet_events_.Set(event);
    } else {
      quiet_events_.Clear(event);
    }
  }
  // Which asynchronous calls wait until the server has executed them.
  enum class Waits : uint8_t {
    kNone,
    kEvents,  // those that record events or wait for them: another process has some of the events
    kAll,     // CUDA_REMOTE_SYNC
  };
  Waits waits() const { return waits_.load(std::memory_order_relaxed); }
  // From now on another process may record an event of this one, or wait for it. When a call returns here, a call that
  // the other process makes next must find it executed, as natively.
  void ShareEvents() {
    if (waits() == Waits::kNone) waits_.store(Waits::kEvents, std::memory_order_relaxed);
  }
  // Whether the application has ever made a stream, so that not everything is in the default stream's order.
  bool has_streams() const { return has_streams_.load(std::memory_order_relaxed); }
  void NoteStream() { has_streams_.store(true, std::memory_order_relaxed); }
  StagedCopies& staged_copies() { return staged_copies_; }
  DriverExecs& driver_execs() { return driver_execs_; }
  // The last reference to a user object is gone.
  void UserObjectGoneLocked(uint64_t user_object) CR_REQUIRES(mutex_);

  // Whether there has ever been memory of a graph: what every launch of one, and every free, asks first.
  bool uses_graph_memory() const { return uses_graph_memory_.load(std::memory_order_relaxed); }
  void set_uses_graph_memory() { uses_graph_memory_.store(true, std::memory_order_relaxed); }
  // Whether there has ever been a node that the server knows as something else.
  bool has_disguised_nodes() const { return has_disguised_nodes_.load(std::memory_order_relaxed); }
  void set_has_disguised_nodes() { has_disguised_nodes_.store(true, std::memory_order_relaxed); }
  // Gives memory of graphs back that nobody can use any more, once the GPU is idle; does not wait. Not under mutex().
  void FreeGraphMemory(const driverabi::GraphMemory::Addresses& gone);
  // The application destroyed a graph or an executable.
  void GraphDestroyed(replay::ObjectKey object);
  // A capture came to nothing: its own graph is gone, with its nodes and their memory. Not under mutex().
  void CaptureFailed(const CaptureRecord& failed);
  // `node` of `parent` has taken `graph` over: it keeps its handle, and dies with the node.
  void GraphMoved(uint64_t graph, uint64_t node, uint64_t parent);
  // Whether a graph is a node's own, as that of a child graph's node or a body of a conditional one.
  bool IsEmbeddedLocked(uint64_t graph) const CR_REQUIRES_SHARED(mutex_);
  HostArena& host_arena() { return host_arena_; }
  PinnedHeap& pinned_heap() { return pinned_heap_; }
  ManagedMirror& managed_mirror() { return managed_mirror_; }
  ManagedHome& managed_home() { return managed_home_; }
  // Whether there has ever been managed memory: what every copy asks first.
  bool uses_managed() const { return uses_managed_.load(std::memory_order_relaxed); }
  void set_uses_managed() { uses_managed_.store(true, std::memory_order_relaxed); }
  // Each of these has a lock of its own.
  ManagedAdvice& managed_advice() { return managed_advice_; }
  PrimaryContexts& primary_contexts() { return primary_contexts_; }
  VirtualMemoryMap& virtual_memory() { return virtual_memory_; }
  ResourceObjects& resource_objects(Kind kind) { return kind == Kind::kTexture ? textures_ : surfaces_; }
  HostFunctions& host_functions() { return host_functions_; }

  // Sends one of our own operations, which stands for no driver call of the application, and waits. Returns the
  // operation's result; `reply` may be null. `context` is the slot of the context to make current, 0 for none.
  CUresult Operate(uint32_t operation, const std::string& message, Reply* reply, uint32_t context = 0);

  // Makes a piece of the host arena known to the server (its address space and its GPU), and takes it back. Pinned
  // memory: only with shared memory. Managed memory: without shared memory the server has bytes of its own there, zero
  // at first, which ManagedMirror then mirrors.
  CUresult MapHostRange(uint64_t address, uint64_t bytes, unsigned flags) {
    return MapHostRange({address, bytes, host_arena_.fd(), HostArena::OffsetOf(address), flags, false, 0});
  }
  CUresult MapManagedRange(uint64_t address, uint64_t bytes, int device) {
    const int file = ManagedHome::Contains(address) ? managed_home_.file() : host_arena_.fd();
    const int fd = shared_memory() ? file : -1;
    return MapHostRange({address, bytes, fd, HostArena::OffsetOf(address), 0, true, device});
  }
  // Memory of the server's own at these addresses of the arena, whole pages; zero at first. Also with shared memory.
  CUresult MapOwnRange(uint64_t address, uint64_t bytes) {
    const uint64_t page = HostArena::PageOf(address);
    return MapHostRange({page, address - page + bytes, -1, 0, 0, false, 0});
  }
  CUresult UnmapHostRange(uint64_t address);
  // Waits until the GPUs have done all work that was sent.
  CUresult WaitForWork();
  // Has a server on this machine map registered pages that can be shared (range.sharing is not kNone) at range.device.
  // `start` and `bytes` are the registration's.
  CUresult MapRegisteredRange(uint64_t start, uint64_t bytes, const HostRange& range);
  // Passes a file to the server, for the next request that names the tag.
  CUresult SendFile(int fd, uint64_t* tag);
  // Whether the server has bytes of its own for this memory, which ManagedMirror mirrors; and whether it reaches
  // it at all, which is at range.device if it is on_device, and at the same address else.
  bool IsMirrored(const HostRange& range) const {
    const bool can_share = !range.registered || range.sharing != HostRange::kNone;
    return range.on_device && !(shared_memory() && can_share);
  }
  // For such memory of `bytes` at `start`: who writes to it here.
  ManagedMirror::Writers WritersOf(uint64_t start, uint64_t bytes, const HostRange& range) const;
  bool IsReachable(const HostRange& range) const { return (range.shared && shared_memory()) || range.on_device; }

  // The context's device ordinal; -1 for an unknown context.
  int DeviceOf(uint64_t context);

  // trace::Server. Any thread that is in no call.
  bool BeginTimeline(uint64_t capacity) override;
  void EndTimeline(trace::WorkerEvents* events) override;

 private:
  friend class Call;
  Session() = default;
  CUresult Open();
  // An atomic flag.
  bool PoolsMaySynchronize() const CR_UNGUARDED { return pools_.MaySynchronize(); }
  // Takes the dead out of the tables; see DropLocked. `root` is what the application destroyed.
  void BuryLocked(replay::ObjectKey root, std::vector<replay::ObjectKey> dead) CR_REQUIRES(mutex_);
  // Whether `handle` is `ancestor` or dies with it.
  bool IsUnderLocked(uint64_t handle, uint64_t ancestor) const CR_REQUIRES_SHARED(mutex_);
  // Takes a dead object out of the tables.
  void ForgetLocked(const replay::ObjectKey& dead) CR_REQUIRES(mutex_);
  CUresult FetchDevices();
  // Opens the session's channel. `visible_devices`: Hello's.
  CUresult OpenChannel(const std::string& path, const std::string& visible_devices);
  // What MapHostRange and its like ask the server for. `fd` is the file to map at `offset`, -1: bytes of the server's
  // own.
  struct Mapping {
    uint64_t address, bytes;  // whole pages
    int fd;
    uint64_t offset;
    unsigned flags;
    bool managed;
    int device;
  };
  CUresult MapHostRange(const Mapping& mapping);

  static std::atomic<Session*> g_session;

  Settings settings_;
  Connection connection_;
  Checkpoint checkpoint_{this};
  Gate gate_;
  std::atomic<bool> initialized_{false};
  std::vector<Device> devices_;
  int visible_devices_ = -1;  // how many the program sees by CUDA_VISIBLE_DEVICES, -1: all
  int driver_version_ = 0;
  uint32_t address_layout_ = 0;  // proto/channel/address_layout.h
  std::atomic<uint64_t> function_epoch_{1};

  // The lock's line changes hands all the time. What the look-ups without it read lies on others.
  alignas(64) SharedMutex mutex_;
  alignas(64) ObjectTable handles_ CR_GUARDED_BY(mutex_);
  replay::LiveHandles quiet_events_;
  AddressMap<DeviceRange> device_ranges_ CR_GUARDED_BY(mutex_);
  AddressMap<HostRange> host_ranges_ CR_GUARDED_BY(mutex_);
  replay::Log log_ CR_GUARDED_BY(mutex_);
  uint64_t next_id_ CR_GUARDED_BY(mutex_) = 1;
  GraphRecords graph_records_ CR_GUARDED_BY(mutex_){
      &log_, &handles_, [this](replay::ObjectKey object) CR_REQUIRES(mutex_) { DropLocked(object); }};
  driverabi::GraphMemory graph_memory_ CR_GUARDED_BY(mutex_);
  DriverExecs driver_execs_;
  std::unordered_map<uint64_t, DisguisedNode> disguised_nodes_ CR_GUARDED_BY(mutex_);
  std::atomic<bool> uses_graph_memory_{false};
  std::atomic<bool> has_disguised_nodes_{false};
  std::atomic<Waits> waits_{Waits::kNone};
  std::atomic<bool> has_streams_{false};
  Captures captures_;
  UploadLimit upload_limit_;
  StagedCopies staged_copies_;
  EventTimes event_times_;
  Names names_;
  FreedMemory freed_memory_ CR_GUARDED_BY(mutex_);
  PoolAccounts pools_ CR_GUARDED_BY(mutex_);
  Completions completions_;
  Answers answers_;
  Staging staging_;
  HostArena host_arena_;
  PinnedHeap pinned_heap_{&host_arena_};
  ManagedMirror managed_mirror_;
  ManagedHome managed_home_;
  std::atomic<bool> uses_managed_{false};
  ManagedAdvice managed_advice_;
  PrimaryContexts primary_contexts_;
  VirtualMemoryMap virtual_memory_;
  ResourceObjects textures_, surfaces_;
  HostFunctions host_functions_;
  std::unique_ptr<agent::Agent> agent_;
};

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_SESSION_SESSION_H_
