// SPDX-License-Identifier: Apache-2.0
// Which records of graphs the log must keep, and for how long.
//
// An executable has in it what its graph was when it was made; so have a clone, a child node and an update. The
// application may destroy or change the original and go on with the copy; the log, and the original's handle, then stay
// for as long as it takes to make the copy again.
//
// Not thread-safe: part of RecordedObjects, under its lock, as the log and the handles are.
#ifndef CUDA_REMOTE_CLIENT_GRAPHS_GRAPH_RECORDS_H_
#define CUDA_REMOTE_CLIENT_GRAPHS_GRAPH_RECORDS_H_

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "client/core/objects.h"
#include "client/graphs/graph_edges.h"
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
  // The slot of what a setting made with this call and key, as in the log, put into an object.
  static uint64_t SlotOfSetting(uint32_t call, uint64_t key) { return uint64_t(call) << 32 ^ key ^ uint64_t(1) << 63; }
  // Those that have `used` in them, one for each slot.
  std::vector<uint64_t> UsersOf(uint64_t used) const;

  // Records a setting of a graph's node, and returns its key in the log. An earlier one with the same call and key
  // goes, unless something was made from the graph between the two that is still alive: that has the earlier one in it.
  uint64_t ModifyNode(replay::ObjectKey node, uint64_t key, const FrameHeader& header, const std::string& message,
                      const std::vector<replay::ObjectKey>& needs);

  // A record was made that names nodes as the ends of edges, by adding a node or edges (graph_edges.h). Other records
  // are ignored. If it removes an edge that a record added, both records lose the edge as soon as nothing alive was
  // made from the graph while the edge was in it.
  void NoteEdges(const replay::Record& record);
  // A capture is about to add to `graph`. `known`: all nodes of the graph have handles.
  void BeforeCapture(uint64_t graph, bool known);
  // It has, and `capture` has a record. `adds_only`: all that it has done is to add nodes, and they have handles too.
  void CapturedInto(uint64_t graph, uint64_t capture, bool adds_only);
  // The application removed `node` from `graph`, and the latest record says so. The node's records go, and so does that
  // one, as soon as nothing alive was made from the graph while the node was in it. Records that name the node as the
  // end of an edge lose the edge. The record of a capture into the graph goes with the last of the nodes that it added.
  // Nodes that other calls about a whole graph have made stay, since that call is replayed.
  void NodeRemoved(replay::ObjectKey graph, replay::ObjectKey node);

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

  // Whether something alive has in it what `graph`, or one that it is a part of, was between two records.
  bool CopiedBetween(uint64_t graph, uint64_t after, uint64_t before) { return UserAbove(graph, after, before, 0); }

 private:
  // A node that was in a graph between two records.
  struct RemovedNode {
    replay::ObjectKey graph;
    replay::ObjectKey node;
    uint64_t made;  // orders in the log
    uint64_t removed;
  };
  // A record that names a node as the end of an edge: a node's, or a setting of a graph.
  struct Naming {
    replay::ObjectKey object;
    bool modifies;
    uint32_t call;
    uint64_t key;
  };
  // Edges that were in a graph between two records.
  struct RemovedEdges {
    std::set<Edge> edges;
    Naming added;
    Naming removed;
  };
  // What would be out of the log but for something that has it in it. Each is listed in one such place of several.
  struct Held {
    std::vector<RemovedNode> nodes;
    std::vector<RemovedEdges> edges;
    std::vector<uint64_t> captures;  // into graphs
  };
  // What graphs and executables others have in them, and the other way round.
  struct User {
    uint64_t handle;
    uint64_t slot;
    uint64_t order;  // in the log: when it took what the graph was then
    Held held;
  };
  // A capture that added to a graph.
  struct CaptureInto {
    uint64_t handle;
    uint64_t order;               // in the log
    bool adds_only;               // and what it added is known
    std::vector<uint64_t> nodes;  // what it added
    size_t removed = 0;           // how many of them the application has removed
    Held held;                    // what its requests name
  };
  struct CapturesInto {
    bool known = false;                   // `before` counts
    std::unordered_set<uint64_t> before;  // the graph's nodes when a capture into it was about to begin
    std::vector<CaptureInto> captures;
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
  struct Named {
    std::vector<Naming> by;  // some of them may be gone
    size_t purge_at = 16;    // the size at which those are taken out
  };

  const replay::Record* RecordOf(const Naming& naming) const;
  bool IsUnder(uint64_t handle, uint64_t ancestor) const;
  // A user of `used` that took it between two records and is not a part of `outside`; null: there is none.
  User* UserBetween(uint64_t used, uint64_t after, uint64_t before, uint64_t outside);
  // The same of a graph or node, or of what it is a part of.
  User* UserAbove(uint64_t used, uint64_t after, uint64_t before, uint64_t outside);
  // Of a node's own, or of graphs in it, as what was between two records.
  User* UserOfNode(uint64_t node, uint64_t after, uint64_t before);
  // These take what was removed out of the log, or note it where something needs it.
  void DropOrHold(const RemovedNode& removed);
  void DropOrHold(const RemovedEdges& removed);
  void DropCaptureOrHold(uint64_t capture);
  void DropOrHold(const Held& held);
  // Takes settings that are gone out of edges_added_ now and then.
  void PurgeEdges();
  // Records that name the node as the end of an edge lose the edge, and captures into the graph do not begin behind it.
  void ForgetEdgesOf(uint64_t node, uint64_t graph);
  std::vector<uint64_t> NodesOf(uint64_t graph) const;
  CaptureInto* FindCapture(uint64_t graph, uint64_t capture);
  // A capture between two records into a graph, or one around it, whose requests may name the node, other than as one
  // behind which the capture begins; null: none.
  CaptureInto* CaptureNaming(uint64_t node, uint64_t graph, uint64_t after, uint64_t before);
  bool MayName(const CaptureInto& capture, uint64_t node) const;
  // `user` has nothing of `used` in this slot any more.
  void RemoveUser(uint64_t used, uint64_t user, uint64_t slot);
  void ReleaseSlot(uint64_t user, uint64_t slot);
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
  // Which records name a node, by node: of those nodes whose record may go before their graph's.
  std::unordered_map<uint64_t, Named> named_;
  // The settings that added an edge, oldest first. Some of them may be gone.
  std::map<Edge, std::vector<Naming>> edges_added_;
  size_t purge_edges_at_ = 64;                                // the size at which those are taken out
  std::unordered_map<uint64_t, CapturesInto> captured_into_;  // by graph
  std::unordered_map<uint64_t, uint64_t> captured_by_;        // the capture into a graph, by node that it added
  std::unordered_map<uint64_t, Launchable> launchable_;       // by executable
};

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_GRAPHS_GRAPH_RECORDS_H_
