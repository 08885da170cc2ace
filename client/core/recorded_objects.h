// SPDX-License-Identifier: Apache-2.0
// The application's objects: the handles that it has of them, what the client library remembers of each, and the
// replay log's records of them.
//
// These share one lock, because each call changes them together. An object's handle and record go in one step: else
// another thread could record something that needs an object which a replay does not make any more. And one object's
// end takes others with it through all three: the log says what depended on it, the handles what was made in it, and
// graph_records.h which records of graphs stay although their object is gone.
//
// Threads: any. Functions that end in Locked, and those that return a table, need mutex(). The others take it
// themselves, or need none, as they say.
//
// Lock order: first of the locks of the session's tables. A thread that holds mutex() may take those of known_memory.h,
// disguised_nodes.h, captures.h, and those that the README names after them. It holds mutex() for look-ups only, and
// never while it waits for the server. (The exception is ReplayRest of checkpoint.h, while no call is inside.)
//
// This header is part of the client library: no libprotobuf, no abseil, no logging.
#ifndef CUDA_REMOTE_CLIENT_CORE_RECORDED_OBJECTS_H_
#define CUDA_REMOTE_CLIENT_CORE_RECORDED_OBJECTS_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "client/core/names.h"
#include "client/core/objects.h"
#include "client/core/primary_contexts.h"
#include "client/core/resource_objects.h"
#include "client/graphs/graph_records.h"
#include "client/graphs/user_object_records.h"
#include "proto/frame/handle.h"
#include "proto/threads/mutex.h"
#include "replay/handles/handle_table.h"
#include "replay/handles/live_handles.h"
#include "replay/log/log.h"

namespace cuda_remote::client {

class RecordedObjects {
 public:
  // `gone` is called for each object that goes, before its handle does: the session's other parts forget it. It is
  // called with mutex() held, so it may lock only what comes after that.
  using Gone = std::function<void(const replay::ObjectKey&)>;
  explicit RecordedObjects(Gone gone) : gone_(std::move(gone)) {}

  // With locks of their own, which come after mutex().
  PrimaryContexts& primary_contexts() { return primary_contexts_; }
  ResourceObjects& resource_objects(Kind kind) { return kind == Kind::kTexture ? textures_ : surfaces_; }
  Names& names() { return names_; }

  SharedMutex& mutex() CR_RETURNS(mutex_) { return mutex_; }

  // Under mutex(), shared to look at them.
  ObjectTable& handles() CR_REQUIRES_SHARED(mutex_) { return handles_; }
  replay::Log& log() CR_REQUIRES_SHARED(mutex_) { return log_; }
  // Which records of graphs stay in the log.
  GraphRecords& graph_records() CR_REQUIRES_SHARED(mutex_) { return graph_records_; }
  // Which references to user objects the log says.
  UserObjectRecords& user_object_records() CR_REQUIRES_SHARED(mutex_) { return user_object_records_; }

  // Whether the application may use the handle (HandleTable::Usable). Without the lock, which every call of every
  // thread would have to write to.
  bool Usable(Kind kind, uint64_t handle) const CR_UNGUARDED { return handles_.Usable(kind, handle); }
  // Sets whether the application may use the handle of a live object (Object::active).
  void SetActiveLocked(uint64_t handle, Object* object, bool active) CR_REQUIRES(mutex_) {
    object->active = active;
    handles_.SetUsable(handle, active);
  }

  // The context's device ordinal; -1 for an unknown context.
  int DeviceOf(uint64_t context) CR_EXCLUDES(mutex_);
  // The context (or green context) that an object was made in, or that it is itself; 0 if it is of none.
  uint64_t ContextOf(uint64_t handle) CR_EXCLUDES(mutex_);
  // The same, but for a green context the primary context that it is a part of.
  uint64_t WholeContextOf(uint64_t handle) CR_EXCLUDES(mutex_);
  // Whether the application has ever made more than one context. Without the lock.
  bool several_contexts() const { return contexts_made_.load(std::memory_order_relaxed) > 1; }
  void NoteContext() { contexts_made_.fetch_add(1, std::memory_order_relaxed); }
  // A live context of the device, for questions that any of them can answer; 0: there is none.
  uint64_t SomeContextOn(int device) CR_EXCLUDES(mutex_);
  // The device's primary context, which has a handle from the first question on, retained or not. 0: no handle is left.
  uint64_t PrimaryContextLocked(int device) CR_REQUIRES(mutex_);
  // The same context if it is there: retained, and not reset since. Null: it is not; no handle is made for it.
  Object* LivePrimaryContextLocked(int device) CR_REQUIRES_SHARED(mutex_);
  // What cuCtxGetId answers for a new context.
  uint64_t NextContextIdLocked() CR_REQUIRES(mutex_) { return next_context_id_++; }

  // Changes with what is known of any function or kernel (Object::info), under mutex(). Without the lock.
  uint64_t function_epoch() const { return function_epoch_.load(std::memory_order_acquire); }
  void FunctionsChangedLocked() CR_REQUIRES(mutex_) { function_epoch_.fetch_add(1, std::memory_order_acq_rel); }
  // The child that `owner` has given under `name` (Object::children); 0: none, or there is no such owner.
  uint64_t ChildLocked(Kind kind, uint64_t owner, const std::string& name) const CR_REQUIRES_SHARED(mutex_);
  // Notes it there, if there is such an owner, which is returned.
  Object* NameChildLocked(Kind kind, uint64_t owner, const std::string& name, uint64_t child) CR_REQUIRES(mutex_);
  // The name of a child; empty if it is none.
  static std::string NameOf(const NamedChildren& children, uint64_t child);
  // The kernel whose attributes a function has where it has none of its own: the one that it came from, or, of a
  // library's module, the library's kernel of its name. 0 if there is none, or nobody has asked for it.
  uint64_t KernelOfLocked(uint64_t function) const CR_REQUIRES_SHARED(mutex_);
  // Appends what has been set of a kernel, or of the kernel that a function came from, as bytes.
  void AppendSettings(uint64_t function, std::string* out) CR_EXCLUDES(mutex_);

  // Whether records of an event may be sent quietly: it takes no time down and is of this process alone. Without the
  // lock.
  bool RecordsQuietly(uint64_t event) const { return quiet_events_.Contains(event); }
  // Notes of a new event whether its records may be sent quietly.
  void NoteEventLocked(uint64_t event, bool quiet) CR_REQUIRES(mutex_) {
    if (!quiet_events_.Reserve(SlotOf(event))) return;
    if (quiet) {
      quiet_events_.Set(event);
    } else {
      quiet_events_.Clear(event);
    }
  }

  // What the log has to keep for `user`, a graph's node, that has in it what `used` is now. Of a node of another graph
  // that graph, which the application may destroy. Of one of its own graph the node: a graph that it needs itself would
  // never go. Graphs and executables themselves.
  uint64_t RetainedForLocked(uint64_t user, uint64_t used) const CR_REQUIRES_SHARED(mutex_);

  // Whether a graph is a node's own, as that of a child graph's node or a body of a conditional one.
  bool IsEmbeddedLocked(uint64_t graph) const CR_REQUIRES_SHARED(mutex_);

  // The application destroyed `object`. True if something was made from it: it stays in the log, and its handle stays
  // taken.
  bool MarkDestroyedLocked(replay::ObjectKey object) CR_REQUIRES(mutex_);
  // Drops `key` from handles and log with all that depends on it. Of a graph that had something of it in it only the
  // record goes, and those of what was made from it: they cannot be made again, but the application has still to
  // destroy them.
  void DropLocked(replay::ObjectKey key) CR_REQUIRES(mutex_);
  // Drops all that depends on `key`, but not `key` itself.
  void DropDependentsLocked(replay::ObjectKey key) CR_REQUIRES(mutex_);
  // The last reference to a user object is gone.
  void UserObjectGone(uint64_t user_object) CR_EXCLUDES(mutex_);

 private:
  // Their locks come after this one's, and say so.
  friend class KnownMemory;
  friend class DisguisedNodes;
  friend class Captures;

  uint64_t ContextOfLocked(uint64_t handle) const CR_REQUIRES_SHARED(mutex_);
  // Takes the dead out of the tables; see DropLocked. `root` is what the application destroyed.
  void RemoveDeadLocked(replay::ObjectKey root, std::vector<replay::ObjectKey> dead) CR_REQUIRES(mutex_);
  // Whether `handle` is `ancestor` or dies with it.
  bool IsUnderLocked(uint64_t handle, uint64_t ancestor) const CR_REQUIRES_SHARED(mutex_);
  // Takes a dead object out of the tables.
  void ForgetLocked(const replay::ObjectKey& dead) CR_REQUIRES(mutex_);

  PrimaryContexts primary_contexts_;
  ResourceObjects textures_, surfaces_;
  Names names_;
  const Gone gone_;
  // The lock's line changes hands all the time. What the look-ups without it read lies on others.
  alignas(64) SharedMutex mutex_;
  alignas(64) ObjectTable handles_ CR_GUARDED_BY(mutex_);
  replay::LiveHandles quiet_events_;  // written to under mutex_
  std::atomic<uint64_t> function_epoch_{1};
  std::atomic<uint64_t> contexts_made_{0};
  replay::Log log_ CR_GUARDED_BY(mutex_);
  uint64_t next_context_id_ CR_GUARDED_BY(mutex_) = 1;
  GraphRecords graph_records_ CR_GUARDED_BY(mutex_){
      &log_, &handles_, [this](replay::ObjectKey object) CR_REQUIRES(mutex_) { DropLocked(object); }};
  UserObjectRecords user_object_records_ CR_GUARDED_BY(mutex_){
      &log_, [this](uint64_t graph, uint64_t after, uint64_t before)
                 CR_REQUIRES(mutex_) { return graph_records_.CopiedBetween(graph, after, before); }};
};

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_CORE_RECORDED_OBJECTS_H_
