// SPDX-License-Identifier: Apache-2.0
// Which records of graphs the log must keep, and for how long.
//
// An executable has in it what its graph was when it was made; so have a clone, a child node and an update. The
// application may destroy or change the original and go on with the copy; the log, and the original's handle, then stay
// for as long as it takes to make the copy again.
//
// Not thread-safe: part of RecordedObjects, under its lock, as the log and the handles are.
#ifndef CUDA_REMOTE_CLIENT_SESSION_GRAPH_RECORDS_H_
#define CUDA_REMOTE_CLIENT_SESSION_GRAPH_RECORDS_H_

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "client/session/objects.h"
#include "proto/frame/frame.h"
#include "proto/frame/handle.h"
#include "replay/handles/handle_table.h"
#include "replay/log/log.h"

namespace cuda_remote::client {

using ObjectTable = replay::HandleTable<Object>;

class GraphRecords {
 public:
  // `drop` takes an object that the application has destroyed, and that nothing needs any more, out of tables and log;
  // it calls Forget for what goes with it. `log` and `handles` outlive this.
  using Drop = std::function<void(replay::ObjectKey)>;
  GraphRecords(replay::Log* log, ObjectTable* handles, Drop drop)
      : log_(log), handles_(handles), drop_(std::move(drop)) {}

  // Whether objects of this kind are graphs, or parts or copies of them.
  static bool IsOf(Kind kind) {
    return kind == Kind::kGraph || kind == Kind::kGraphNode || kind == Kind::kGraphExec || kind == Kind::kCapture;
  }

  // Notes that `user` (an executable, a graph or a node) has in it what `used` (a graph or an executable) was at this
  // moment. Replaces what `user` had in `slot`.
  void Retain(uint64_t user, uint64_t slot, uint64_t used);
  // The slot of what a setting made with this call and key put into an object.
  static uint64_t SlotOfSetting(uint32_t call, uint64_t key) { return uint64_t(call) << 32 ^ key ^ uint64_t(1) << 63; }
  // Those that have `used` in them, one for each slot.
  std::vector<uint64_t> UsersOf(uint64_t used) const;

  // Records a setting of a graph's node. An earlier one with the same call and key goes, unless something was made from
  // the graph between the two that is still alive: that has the earlier one in it.
  void ModifyNode(replay::ObjectKey node, uint64_t key, const FrameHeader& header, const std::string& message,
                  const std::vector<replay::ObjectKey>& needs);

  // `exec` is an executable that kernels may launch. They launch what it was when it was last uploaded, so a replay
  // uploads it where that was, between the settings before and after it.
  void MakeLaunchable(uint64_t exec) { launchable_[exec]; }
  // Records a setting of an executable, and returns its key in the log. An earlier one with the same call and key goes,
  // unless the executable was uploaded between the two.
  uint64_t ModifyExec(replay::ObjectKey exec, uint64_t key, const FrameHeader& header, const std::string& message,
                      const std::vector<replay::ObjectKey>& needs);
  // The executable, if it is launchable, was uploaded: by a call, or by a launch from the host.
  void Uploaded(replay::ObjectKey exec);

  // The application destroyed `object`. True if something was made from it: it stays in the log, and its handle stays
  // taken.
  bool MarkDestroyed(replay::ObjectKey object);
  // A node has taken the graph over. The node retains its record; when it releases that, the graph is gone.
  void Moved(uint64_t graph) { uses_[graph].destroyed = true; }
  // The object is gone: drops what only it still needed.
  void Forget(uint64_t object);

  // A setting of a graph that names a user object. The graph's record can outlive the object, if something was made
  // from the graph and is another thing now; a replay leaves out what names an object that is gone.
  void NoteUserObject(uint64_t user_object, replay::ObjectKey graph, uint32_t call, uint64_t key) {
    user_object_settings_[user_object].push_back({graph, call, key});
  }
  void UserObjectGone(uint64_t user_object);

 private:
  // What graphs and executables others have in them, and the other way round.
  struct User {
    uint64_t handle;
    uint64_t order;  // in the log: when it took what the graph was then
  };
  struct Use {
    std::vector<User> users;  // one entry for each slot
    bool destroyed = false;   // by the application
  };
  struct Retained {
    uint64_t slot;
    uint64_t used;
  };
  struct NodeSetting {
    uint64_t key;  // in the log
    uint64_t order;
  };
  // A setting of a launchable executable: its keys in the log.
  struct ExecSetting {
    std::optional<uint64_t> uploaded;  // as it was at the last upload
    std::optional<uint64_t> later;     // made since then
  };
  struct Launchable {
    bool uploaded = false;                                          // at least once
    bool changed = false;                                           // since then
    std::map<std::pair<uint32_t, uint64_t>, ExecSetting> settings;  // by call and key, as they were made
  };
  struct GraphSetting {
    replay::ObjectKey graph;
    uint32_t call;
    uint64_t key;
  };

  static void RemoveUser(Use* use, uint64_t user);
  // Drops `used` if the application has destroyed it and nothing has it in it any more.
  void Release(uint64_t used);

  replay::Log* const log_;
  ObjectTable* const handles_;
  const Drop drop_;
  std::unordered_map<uint64_t, Use> uses_;
  std::unordered_map<uint64_t, std::vector<Retained>> retained_;
  // Settings of nodes that are in the log, by node, and by call and key as they were made; oldest first.
  std::unordered_map<uint64_t, std::map<std::pair<uint32_t, uint64_t>, std::vector<NodeSetting>>> node_settings_;
  uint64_t next_setting_key_ = uint64_t(1) << 62;
  std::unordered_map<uint64_t, Launchable> launchable_;  // by executable
  std::unordered_map<uint64_t, std::vector<GraphSetting>> user_object_settings_;
};

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_SESSION_GRAPH_RECORDS_H_
