// SPDX-License-Identifier: Apache-2.0
// The application's session with a GPU server: the one object behind all driver calls of the process.
//
// It owns the channel, the handle table, the address maps, the replay log and the admission gate, and it is what the
// checkpoint agent talks to. It is made at the first driver call that needs a server and never destroyed: the CUDA
// runtime still calls the driver from its exit handlers.
//
// Locking: `mutex()` guards handles, ranges and log. It is held for table look-ups only, never while a call waits for
// the server. The channel has its own locks; it is replaced only while the gate is closed.
#ifndef CUDA_REMOTE_CLIENT_SESSION_SESSION_H_
#define CUDA_REMOTE_CLIENT_SESSION_SESSION_H_

#include <cuda.h>

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <shared_mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "client/agent/agent.h"
#include "client/session/address_map.h"
#include "client/session/answers.h"
#include "client/session/captures.h"
#include "client/session/completion.h"
#include "client/session/freed_memory.h"
#include "client/session/gate.h"
#include "client/session/host_arena.h"
#include "client/session/host_functions.h"
#include "client/session/managed_advice.h"
#include "client/session/managed_home.h"
#include "client/session/managed_mirror.h"
#include "client/session/objects.h"
#include "client/session/pinned_heap.h"
#include "client/session/pool_accounts.h"
#include "client/session/settings.h"
#include "client/session/staged_copies.h"
#include "client/session/staging.h"
#include "client/session/thread_state.h"
#include "client/session/upload_limit.h"
#include "client/trace/control.h"
#include "proto/channel/client_channel.h"
#include "proto/driverabi/graph_memory.h"
#include "replay/handles/handle_table.h"
#include "replay/handles/live_handles.h"
#include "replay/log/log.h"

namespace cuda_remote::wire {
struct OpCodeWords_Reply;
}  // namespace cuda_remote::wire

namespace cuda_remote::client {

// Device memory that the application knows of.
struct DeviceRange {
  enum Source : uint8_t { kAllocation, kStreamOrdered, kGlobal, kMapped, kManaged, kImported, kPoolImported, kGraph };
  Source source = kAllocation;
  int device = 0;
  uint64_t context = 0;    // virtual handle
  uint64_t buffer_id = 0;  // CU_POINTER_ATTRIBUTE_BUFFER_ID
  uint64_t pool = 0;       // stream-ordered, or imported from a pool: virtual handle, 0 for the device's default
  bool managed = false;    // kManaged, or a __managed__ variable: the host uses it too
};

// Pinned host memory.
struct HostRange {
  bool registered = false;  // cuMemHostRegister: the application's own pages
  bool shared = false;      // lies in the host arena: with shared memory the server has it at the same address
  bool on_device = false;   // the application uses it from kernels: the GPU reaches it at `device`
  // Registered pages that a server on this machine shares (client/session/shared_pages.h): moved into the host arena, or
  // a file's own. kNone: a server has a copy of them.
  enum Sharing : uint8_t { kNone, kMoved, kFile };
  Sharing sharing = kNone;
  uint64_t device = 0;
  uint64_t alias_of = 0;  // these are addresses of the GPU's for registered pages, which begin here
  unsigned flags = 0;
  uint64_t context = 0;
  uint64_t buffer_id = 0;
};

using ObjectTable = replay::HandleTable<Object>;

class Session final : public agent::AgentHost, public trace::Server {
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

  // Set once the server is gone; every later call fails with this. CUDA_SUCCESS while all is well.
  CUresult lost() const { return lost_.load(std::memory_order_acquire); }
  // Notes that the channel failed, and says so once on stderr. Returns what the calls return from now on.
  CUresult Lose(ChannelStatus status);

  // The first error of a fire-and-forget call that no synchronising call has reported yet.
  void SetPendingError(CUresult error) {
    CUresult none = CUDA_SUCCESS;
    pending_error_.compare_exchange_strong(none, error);
  }
  CUresult TakePendingError() {
    if (pending_error_.load(std::memory_order_relaxed) == CUDA_SUCCESS) return CUDA_SUCCESS;
    return pending_error_.exchange(CUDA_SUCCESS);
  }

  const Settings& settings() const { return settings_; }
  const std::vector<Device>& devices() const { return devices_; }
  int driver_version() const { return driver_version_; }
  ClientChannel& channel() { return *channel_; }
  // Whether the server shares memory with this process (ring), or only sees what is sent (relay).
  bool shared_memory() const { return channel_->welcome().shared_memory; }

  Gate& gate() { return gate_; }
  // A call leaves the closed gate that may have put work into `stream` (as on the wire), in `context`. Any thread.
  void NoteLeft(uint64_t stream, uint64_t context);
  std::shared_mutex& mutex() { return mutex_; }

  // All of these: under mutex().
  ObjectTable& handles() { return handles_; }
  AddressMap<DeviceRange>& device_ranges() { return device_ranges_; }
  AddressMap<HostRange>& host_ranges() { return host_ranges_; }
  // The application's own virtual memory: reservations, and mappings with their physical memory's handle.
  AddressMap<int>& reservations() { return reservations_; }
  AddressMap<uint64_t>& mappings() { return mappings_; }
  replay::Log& log() { return log_; }
  FreedMemory& freed_memory() { return freed_memory_; }
  PoolAccounts& pools() { return pools_; }
  // Memory that graphs allocate, and the nodes that the server knows as something else.
  driverabi::GraphMemory& graph_memory() { return graph_memory_; }
  std::unordered_map<uint64_t, DisguisedNode>& disguised_nodes() { return disguised_nodes_; }
  // Memory of a pool comes into the application's hands, and leaves them: device_ranges() and the pool's figures.
  void InsertPoolMemoryLocked(uint64_t address, uint64_t bytes, const DeviceRange& range) {
    device_ranges_.Insert(address, bytes, range);
    pools_.Allocated({range.device, range.pool}, bytes);
  }
  void EraseDeviceRangeLocked(uint64_t address);
  // Whether the application may use the object's handle (Object::active).
  void SetActiveLocked(uint64_t handle, Object* object, bool active) {
    object->active = active;
    handles_.SetUsable(handle, active);
  }
  // The context (or green context) that an object was made in, or that it is itself; 0 if it is of none. Takes the
  // lock.
  uint64_t ContextOfObject(uint64_t handle);
  // A live context of the device, for questions that any of them can answer; 0: there is none. Takes the lock.
  uint64_t SomeContextOn(int device);
  // The device's primary context, which has a handle from the first question on, retained or not. 0: no handle is left.
  uint64_t PrimaryContextLocked(int device);
  // The same context if it is there: retained, and not reset since. Null: it is not; no handle is made for it.
  Object* LivePrimaryContextLocked(int device);
  // Changes with what is known of any function or kernel (Object::info), under mutex().
  uint64_t function_epoch() const { return function_epoch_.load(std::memory_order_acquire); }
  void FunctionsChangedLocked() { function_epoch_.fetch_add(1, std::memory_order_acq_rel); }
  int& primary_retains(int device) { return primary_retains_[device]; }
  unsigned& primary_flags(int device) { return primary_flags_[device]; }
  // Notes that `user` (an executable, a graph or a node) has in it what `used` (a graph or an executable) was at this
  // moment. The application may destroy `used` and go on with `user`; the log, and the handle of `used`, then stay for
  // as long as it takes to make `user` again. Replaces what `user` had in `slot`.
  void RetainLocked(uint64_t user, uint64_t slot, uint64_t used);
  // Records a setting of a graph's node. An earlier one with the same call and key goes, unless something was made from
  // the graph between the two that is still alive: that has the earlier one in it.
  void ModifyNodeLocked(replay::ObjectKey node, uint64_t key, const FrameHeader& header, const std::string& message,
                          const std::vector<replay::ObjectKey>& needs);
  // The slot of what a setting made with this call and key put into an object.
  static uint64_t SlotOfSetting(uint32_t call, uint64_t key) { return uint64_t(call) << 32 ^ key ^ uint64_t(1) << 63; }
  // The application destroyed `object`. True if something was made from it: it stays in the log, and its handle stays
  // taken.
  bool MarkDestroyedLocked(replay::ObjectKey object);
  // Drops all that depends on `key`, but not `key` itself.
  void DropDependentsLocked(replay::ObjectKey key);
  // Drops `key` from tables and log with all that depends on it. Of a graph that had something of it in it only the
  // record goes, and those of what was made from it: they cannot be made again, but the application has still to
  // destroy them.
  void DropLocked(replay::ObjectKey key);
  uint64_t NextId() { return next_id_++; }
  // Tells the server, in the order of their streams, of frees that it has not heard of: of these blocks, or of all that
  // are kept. Not under mutex().
  void GiveBack(const std::vector<FreedMemory::Block>& blocks);
  // Whether there were any.
  bool GiveBackFreed();
  // The host has waited for a stream, an event or a context: pools let go of what they keep. Takes the lock, if there
  // is anything to do.
  void NoteWaited() {
    if (!pools_.MaySynchronize()) return;
    std::unique_lock<std::shared_mutex> lock(mutex_);
    pools_.Synchronized();
  }

  // A copy of `text` that lives as long as the process. Takes its own lock.
  const char* Intern(const std::string& text) {
    std::lock_guard<std::mutex> lock(names_mutex_);
    return names_.insert(text).first->c_str();
  }

  // How many microseconds ago events of one context completed on this server; negative for those that did not.
  CUresult AskEventAges(uint64_t context, const std::vector<uint64_t>& events, std::vector<double>* microseconds);
  // Where an event that completed on an earlier server lies on the session's time line, in microseconds from the moment
  // the session went on (so it is negative). False if the event is not known from there.
  bool EventBeforeMove(uint64_t event, double* microseconds);
  // The moment "now" on that time line.
  double MicrosecondsSinceMove() const;

  // The application asked for threads that sleep while they wait for the GPU.
  void WaitAsleep();
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
  void NoteEventLocked(uint64_t event, bool quiet) {
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
  // Whether there has ever been memory of a graph: what every launch of one, and every free, asks first.
  // An executable graph that kernels may launch: the application has the driver's own handle of it, since kernels get it.
  void NameExec(uint64_t driver_handle, uint64_t exec);
  // Its virtual handle; `driver_handle` itself if it is none of these.
  uint64_t ExecOfDriver(uint64_t driver_handle);
  // A setting of a graph that names a user object. The graph's record can outlive the object, if something was made from
  // the graph and is another thing now; a replay leaves out what names an object that is gone.
  void NoteUserObjectLocked(uint64_t user_object, replay::ObjectKey graph, uint32_t call, uint64_t key) {
    user_object_settings_[user_object].push_back({graph, call, key});
  }
  void UserObjectGoneLocked(uint64_t user_object);

  bool uses_graph_memory() const { return uses_graph_memory_.load(std::memory_order_relaxed); }
  void set_uses_graph_memory() { uses_graph_memory_.store(true, std::memory_order_relaxed); }
  // Whether there has ever been a node that the server knows as something else.
  bool has_disguised_nodes() const { return has_disguised_nodes_.load(std::memory_order_relaxed); }
  void set_has_disguised_nodes() { has_disguised_nodes_.store(true, std::memory_order_relaxed); }
  // Gives memory of graphs back that nobody can use any more, once the GPU is idle; does not wait. Not under mutex().
  void FreeGraphMemory(const driverabi::GraphMemory::Addresses& gone);
  // The application destroyed a graph or an executable.
  void GraphDestroyed(replay::ObjectKey object);
  // `node` of `parent` has taken `graph` over: it keeps its handle, and dies with the node.
  void GraphMoved(uint64_t graph, uint64_t node, uint64_t parent);
  // Whether a graph is a node's own, as that of a child graph's node or a body of a conditional one.
  bool IsEmbeddedLocked(uint64_t graph) const;
  HostArena& host_arena() { return host_arena_; }
  PinnedHeap& pinned_heap() { return pinned_heap_; }
  ManagedMirror& managed_mirror() { return managed_mirror_; }
  ManagedHome& managed_home() { return managed_home_; }
  // Whether there has ever been managed memory: what every copy asks first.
  bool uses_managed() const { return uses_managed_.load(std::memory_order_relaxed); }
  void set_uses_managed() { uses_managed_.store(true, std::memory_order_relaxed); }
  // Under mutex().
  ManagedAdvice& managed_advice() { return managed_advice_; }
  std::unordered_map<uint64_t, ResourceObject>& textures() { return textures_; }
  std::unordered_map<uint64_t, ResourceObject>& surfaces() { return surfaces_; }
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
  bool IsReachable(const HostRange& range) const { return (range.shared && shared_memory()) || range.on_device; }

  // The context's device ordinal; -1 for an unknown context.
  int DeviceOf(uint64_t context);

  // agent::AgentHost, called on the agent's thread.
  agent::Info GetInfo() override;
  bool Close(std::string* error) override;
  bool Look(agent::Activity* activity, std::string* error) override;
  bool Admit(const agent::Admission& which) override;
  bool Settle(int timeout_ms, const std::function<bool()>& gone, bool* settled, std::string* error) override;
  void SettleMove() override;
  void Unlock() override;
  bool Take(agent::Taken* taken, std::string* error) override;
  void Release() override;
  void Abandon() override;
  bool Give(agent::Given given, std::string* error) override;
  bool Ask(const agent::SideRequest& request, char* out, uint64_t* sequence, std::string* error) override;
  bool Answer(uint64_t sequence, int timeout_ms, bool* answered, agent::SideAnswer* answer, size_t* bytes,
              std::string* error) override;
  void EndAsking(const std::vector<uint64_t>& open) override;
  bool BeginTrace(uint64_t events, double max_seconds, std::string* error) override;
  bool EndTrace(int timeline_fd, int table_fd, bool json, std::string* error) override;
  bool TraceTotals(int table_fd, bool json, std::string* error) override;

  // trace::Server. Any thread that is in no call.
  bool BeginTimeline(uint64_t capacity) override;
  void EndTimeline(trace::WorkerEvents* events) override;

 private:
  friend class Call;
  Session() = default;
  CUresult Open();
  // Releases what `user` retained; drops what only it still needed.
  void ReleaseRetainedLocked(uint64_t user);
  void ReleaseLocked(uint64_t used);
  // Takes the dead out of the tables; see DropLocked. `root` is what the application destroyed.
  void BuryLocked(replay::ObjectKey root, std::vector<replay::ObjectKey> dead);
  // Whether `handle` is `ancestor` or dies with it.
  bool IsUnderLocked(uint64_t handle, uint64_t ancestor) const;
  // Takes a dead object out of the tables.
  void ForgetLocked(const replay::ObjectKey& dead);
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
  // Tells another server of the host arena and of managed memory, after a move.
  bool ShareHostArena(std::string* error);
  // Makes again what the tool's replay left out because it needs this process's pinned memory.
  bool ReplayRest(std::string* error);
  void GoBack();
  // Where the server's functions lie whose addresses variables hold; `use` gets all of it, in pieces of whole modules.
  CUresult AskCode(const std::function<void(const wire::OpCodeWords_Reply&)>& use);
  // Puts that into the log, for a replay.
  bool NoteCode(std::string* error);
  // After a replay: false if this process's memory holds the address of a function that lies elsewhere now.
  bool FindOldCode(std::string* error);
  // The same for managed memory: that it is there, and then what is in it.
  bool MapManaged(std::string* error);
  bool MoveManaged(std::string* error);
  // Notes when the events of the log completed, for after a move to another server. Failure is not an error: elapsed
  // times that begin before the move are then refused, not wrong.
  void NoteEventTimes();
  // Waits until the GPU is idle and all device output has arrived.
  bool DrainUntil(int64_t deadline_ns, const std::function<bool()>& gone, std::string* error);
  // Whether a context's GPU had work when the server answered last.
  bool HasWork(uint64_t context) const;
  bool IsAdding(uint64_t context);
  void ForgetIdleStreams();
  void ForgetQuestion();
  // Both set *error and return false.
  bool ServerWentAway(ChannelStatus status, std::string* error);
  static bool WorkFailed(CUresult result, std::string* error);

  static std::atomic<Session*> g_session;

  Settings settings_;
  std::unique_ptr<ClientChannel> channel_;
  // The agent's thread only: whether a tool uses the channel; the question about work that the server has not answered
  // (0: none), whether the job was quiet when it was asked, and how many calls had been admitted; how many have been since
  // the gate closed; and the streams and their contexts that had work at the
  // last answer.
  bool taken_ = false;
  // Since a Give of another server's channel, until calls go on: there is a way back to the server before.
  bool given_new_ = false;
  std::unique_ptr<ClientChannel> former_channel_;  // null after a restart
  std::string former_scope_;                       // the job's sharing scope at that Give
  std::string former_server_;
  int64_t former_moved_at_ns_ = 0;
  // Memory that a tool has the server map: what is mapped, and by sequence number what is asked for and not answered.
  std::set<uint64_t> side_maps_;
  std::map<uint64_t, uint64_t> side_mapping_;
  uint64_t question_ = 0;
  bool question_quiet_ = false;
  uint64_t question_admissions_ = 0;
  uint64_t admissions_ = 0;
  std::vector<uint64_t> busy_streams_, busy_contexts_;
  // Streams (a context for its default stream), with their contexts, into which calls have put work since the gate
  // closed, as far as that is not known to be done.
  std::mutex added_mutex_;
  std::map<uint64_t, uint64_t> added_;
  Gate gate_;
  std::atomic<bool> initialized_{false};
  std::atomic<CUresult> lost_{CUDA_SUCCESS};
  std::atomic<CUresult> pending_error_{CUDA_SUCCESS};
  std::vector<Device> devices_;
  int visible_devices_ = -1;  // how many the program sees by CUDA_VISIBLE_DEVICES, -1: all
  int driver_version_ = 0;
  std::atomic<uint64_t> function_epoch_{1};

  // The lock's line changes hands all the time. What the look-ups without it read lies on others.
  alignas(64) std::shared_mutex mutex_;
  alignas(64) ObjectTable handles_;
  replay::LiveHandles quiet_events_;
  AddressMap<DeviceRange> device_ranges_;
  AddressMap<HostRange> host_ranges_;
  AddressMap<int> reservations_;
  AddressMap<uint64_t> mappings_;
  replay::Log log_;
  std::unordered_map<int, uint64_t> primary_contexts_;
  std::unordered_map<int, int> primary_retains_;
  std::unordered_map<int, unsigned> primary_flags_;
  uint64_t next_id_ = 1;
  // What graphs and executables others have in them, and the other way round.
  struct User {
    uint64_t handle;
    uint64_t order;  // in the log: when it took what the graph was then
  };
  struct Use {
    std::vector<User> users;  // one entry for each slot
    bool destroyed = false;   // by the application
  };
  std::unordered_map<uint64_t, Use> uses_;
  struct Retained {
    uint64_t slot;
    uint64_t used;
  };
  std::unordered_map<uint64_t, std::vector<Retained>> retained_;
  static void RemoveUser(Use* use, uint64_t user);
  // Settings of nodes that are in the log, by node, and by call and key as they were made; oldest first.
  struct NodeSetting {
    uint64_t key;  // in the log
    uint64_t order;
  };
  std::unordered_map<uint64_t, std::map<std::pair<uint32_t, uint64_t>, std::vector<NodeSetting>>> node_settings_;
  uint64_t next_setting_key_ = uint64_t(1) << 62;
  driverabi::GraphMemory graph_memory_;
  struct GraphSetting {
    replay::ObjectKey graph;
    uint32_t call;
    uint64_t key;
  };
  std::unordered_map<uint64_t, std::vector<GraphSetting>> user_object_settings_;
  std::map<uint64_t, uint64_t> launchable_execs_;  // by the driver's handle
  std::unordered_map<uint64_t, DisguisedNode> disguised_nodes_;
  std::atomic<bool> uses_graph_memory_{false};
  std::atomic<bool> has_disguised_nodes_{false};
  std::atomic<Waits> waits_{Waits::kNone};
  std::atomic<bool> has_streams_{false};
  Captures captures_;
  UploadLimit upload_limit_;
  StagedCopies staged_copies_;
  // Microseconds before the last move to another server at which events completed; and the same for a move that has not
  // happened yet.
  std::unordered_map<uint64_t, double> event_ages_;
  std::unordered_map<uint64_t, double> noted_event_ages_;
  int64_t moved_at_ns_ = 0;  // CLOCK_MONOTONIC
  std::atomic<uint64_t> next_tag_{1};

  std::mutex names_mutex_;
  std::set<std::string> names_;

  FreedMemory freed_memory_;
  PoolAccounts pools_;
  std::atomic<bool> wait_asleep_{false};
  Completions completions_;
  Answers answers_;
  Staging staging_;
  HostArena host_arena_;
  PinnedHeap pinned_heap_{&host_arena_};
  ManagedMirror managed_mirror_;
  ManagedHome managed_home_;
  std::atomic<bool> uses_managed_{false};
  ManagedAdvice managed_advice_;
  std::unordered_map<uint64_t, ResourceObject> textures_;
  std::unordered_map<uint64_t, ResourceObject> surfaces_;
  HostFunctions host_functions_;
  std::unique_ptr<agent::Agent> agent_;
};

// Prints what a kernel printed. Called by the channel before the reply of the call that flushed it.
void WriteDeviceOutput(const char* bytes, size_t count);
// The same for what the driver prints to standard error.
void WriteDeviceErrors(const char* bytes, size_t count);

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_SESSION_SESSION_H_
