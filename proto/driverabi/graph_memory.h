// SPDX-License-Identifier: Apache-2.0
// Memory that graphs allocate and free: which allocation is alive, who may free it, and when nobody can use it any
// more.
//
// The rules are those of the driver's documentation of memory nodes. An allocation has its address from when its node
// is made, and keeps it over all launches. It is alive from a launch of its graph on until it is freed: by the
// application, or by a launch of a graph with a free node for it. As in the driver that counts from the calls, not from
// when the GPU gets there. It is *gone* once it is not alive, its graph is destroyed, and no executable names it.
//
// A graph may allocate again, at the same address, what a node before has freed. That is one allocation here, which is
// freed in its own graph if all nodes that allocate it have a node that frees it behind them.
//
// Graphs, nodes and executables are numbers of the caller's. Bytes come from and go to the caller: this is the
// bookkeeping alone.
//
// Not thread-safe. Used by the client library and by the software GPU: libc, libstdc++ and cuda.h only.
#ifndef CUDA_REMOTE_PROTO_DRIVERABI_GRAPH_MEMORY_H_
#define CUDA_REMOTE_PROTO_DRIVERABI_GRAPH_MEMORY_H_

#include <cuda.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

namespace cuda_remote::driverabi {

class GraphMemory {
 public:
  using Addresses = std::vector<uint64_t>;

  // What cuDeviceGetGraphMemAttribute counts reserved memory in.
  static constexpr uint64_t kChunk = uint64_t{32} << 20;

  // There is nothing to keep track of.
  bool empty() const { return blocks_.empty() && graphs_.empty() && execs_.empty(); }
  // Whether `address` is where an allocation of a graph begins.
  bool Contains(uint64_t address) const { return blocks_.count(address) != 0; }
  bool IsAlive(uint64_t address) const {
    const auto found = blocks_.find(address);
    return found != blocks_.end() && found->second.alive;
  }
  // Whether the graph allocates or frees memory: its nodes and edges cannot be taken away, and it cannot be cloned.
  bool HasNodes(uint64_t graph) const { return graphs_.count(graph) != 0 || inside_.count(graph) != 0; }
  bool ExecHasNodes(uint64_t exec) const { return execs_.count(exec) != 0; }

  // A node of `graph` allocates these bytes.
  void Allocates(uint64_t graph, uint64_t address, uint64_t bytes, int device) {
    Block& block = blocks_[address];
    block.graph = block.maker = graph;
    block.bytes = bytes;
    block.device = device;
    graphs_[graph].allocations.Add(address);
  }

  // An allocation that its own graph frees, and does not allocate again so far: by `node`.
  struct Freed {
    uint64_t address, node;
  };
  // Those of `graph` that have room for `bytes`, and are not twice as large.
  std::vector<Freed> FreedFor(uint64_t graph, uint64_t bytes, int device) const {
    std::vector<Freed> freed;
    const auto found = graphs_.find(graph);
    if (found == graphs_.end()) return freed;
    for (const auto& [address, count] : found->second.frees) {
      const auto block = blocks_.find(address);
      if (block == blocks_.end() || block->second.graph != graph || block->second.freed_by == 0) continue;
      const bool fits =
          block->second.device == device && block->second.bytes >= bytes && block->second.bytes / 2 < bytes;
      if (fits && count == found->second.allocations.CountOf(address))
        freed.push_back({address, block->second.freed_by});
    }
    return freed;
  }
  // Another node of the graph allocates one of these, behind the node that frees it. False if one does so already.
  bool AllocatesAgain(uint64_t graph, uint64_t address) {
    const auto found = graphs_.find(graph);
    if (found == graphs_.end()) return false;
    Counts& allocations = found->second.allocations;
    if (found->second.frees.CountOf(address) != allocations.CountOf(address)) return false;
    allocations.Add(address);
    return true;
  }
  // That node could not be made.
  void DoesNotAllocateAgain(uint64_t graph, uint64_t address) { graphs_[graph].allocations.Remove(address); }

  // Whether a node of `graph` may free the allocation, and that it does: `node`, or 0 if nobody asks for that. An
  // allocation is freed once in one graph, and either in its own graph or elsewhere.
  CUresult MayFree(uint64_t graph, uint64_t address) const {
    const auto found = blocks_.find(address);
    if (found == blocks_.end()) return CUDA_ERROR_INVALID_VALUE;
    const std::set<uint64_t>& freeing = found->second.freeing;
    if (freeing.empty()) return CUDA_SUCCESS;
    const uint64_t own = found->second.graph;
    const bool own_frees = freeing.count(own) != 0;
    if (graph != own) return own_frees || freeing.count(graph) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
    const Nodes& nodes = graphs_.at(own);
    return own_frees && nodes.frees.CountOf(address) < nodes.allocations.CountOf(address) ? CUDA_SUCCESS
                                                                                          : CUDA_ERROR_INVALID_VALUE;
  }
  void Frees(uint64_t graph, uint64_t address, uint64_t node = 0) {
    Block& block = blocks_[address];
    block.freeing.insert(graph);
    if (graph == block.graph) block.freed_by = node;
    graphs_[graph].frees.Add(address);
  }

  // All nodes of `from` are `to`'s from now on. `from` goes on to exist as a part of `to` if it is `inside`, until
  // ForgetInside.
  void Move(uint64_t from, uint64_t to, bool inside = false) {
    const auto found = graphs_.find(from);
    if (found == graphs_.end()) return;
    const Nodes moved = std::move(found->second);
    graphs_.erase(found);
    if (inside) inside_.insert(from);
    Nodes& nodes = graphs_[to];
    if (nodes.exec == 0 && moved.exec != 0) {
      nodes.exec = moved.exec;
      execs_[moved.exec].graph = to;
    }
    for (const auto& [address, count] : moved.allocations) {
      blocks_[address].graph = to;
      blocks_[address].freed_by = 0;
      nodes.allocations.Add(address, count);
    }
    for (const auto& [address, count] : moved.frees) {
      blocks_[address].freeing.erase(from);
      blocks_[address].freeing.insert(to);
      nodes.frees.Add(address, count);
    }
  }

  // A graph that was moved into another one is gone.
  void ForgetInside(uint64_t graph) { inside_.erase(graph); }

  // There may be one executable of such a graph at a time.
  CUresult MayInstantiate(uint64_t graph) const {
    const auto found = graphs_.find(graph);
    return found == graphs_.end() || found->second.exec == 0 ? CUDA_SUCCESS : CUDA_ERROR_NOT_SUPPORTED;
  }
  void Instantiated(uint64_t graph, uint64_t exec, bool frees_at_launch) {
    const auto found = graphs_.find(graph);
    if (found == graphs_.end()) return;
    found->second.exec = exec;
    Exec& made = execs_[exec];
    made.graph = graph;
    made.frees_at_launch = frees_at_launch;
    made.nodes = made.first = found->second;
    Use(made.nodes);
    Use(made.first);
  }
  // An executable can be updated from a graph that allocates and frees as often. It has the graph's memory from then
  // on, beside that of the graph that it was made from, without which a replay could not make it.
  bool MayUpdate(uint64_t exec, uint64_t graph) const {
    static const Nodes kNone;
    const auto found = execs_.find(exec);
    const auto other = graphs_.find(graph);
    const Nodes& mine = found == execs_.end() ? kNone : found->second.nodes;
    const Nodes& its = other == graphs_.end() ? kNone : other->second;
    return mine.allocations.total() == its.allocations.total() && mine.frees.total() == its.frees.total();
  }
  void Updated(uint64_t exec, uint64_t graph, Addresses* gone) {
    const auto found = execs_.find(exec);
    const auto other = graphs_.find(graph);
    if (found == execs_.end() || other == graphs_.end()) return;
    const Nodes before = std::move(found->second.nodes);
    found->second.nodes = other->second;
    Use(found->second.nodes);
    Unuse(before, gone);
  }

  // A launch: what it allocates must not be alive (unless the executable frees by itself), and what it frees must be.
  CUresult MayLaunch(uint64_t exec) const {
    const auto found = execs_.find(exec);
    if (found == execs_.end()) return CUDA_SUCCESS;
    const Exec& one = found->second;
    if (one.nodes.broken) return CUDA_ERROR_INVALID_VALUE;
    for (const auto& [address, count] : one.nodes.allocations) {
      if (!one.frees_at_launch && blocks_.at(address).alive) return CUDA_ERROR_INVALID_VALUE;
    }
    for (const auto& [address, count] : one.nodes.frees) {
      if (!one.nodes.allocations.CountOf(address) && !blocks_.at(address).alive) return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
  }
  // Appends to *gone what is gone once the launch is over.
  void Launched(uint64_t exec, Addresses* gone) {
    const auto found = execs_.find(exec);
    if (found == execs_.end()) return;
    Uploaded(exec);
    const Counts& allocations = found->second.nodes.allocations;
    for (const auto& [address, count] : allocations) blocks_[address].alive = true;
    for (const auto& [address, count] : Counts(found->second.nodes.frees)) {
      if (count < allocations.CountOf(address)) continue;
      blocks_[address].alive = false;
      DropIfGone(address, gone);
    }
  }

  // The application frees an allocation that Contains has found.
  CUresult Free(uint64_t address, Addresses* gone) {
    Block& block = blocks_[address];
    if (!block.alive) return CUDA_ERROR_INVALID_VALUE;
    block.alive = false;
    DropIfGone(address, gone);
    return CUDA_SUCCESS;
  }

  // The application destroyed a graph, or an executable.
  void GraphDestroyed(uint64_t graph, Addresses* gone) {
    const auto found = graphs_.find(graph);
    if (found == graphs_.end()) return;
    const Nodes nodes = std::move(found->second);
    graphs_.erase(found);
    for (const auto& [address, count] : nodes.frees) {
      if (const auto freed = blocks_.find(address); freed != blocks_.end()) freed->second.freeing.erase(graph);
    }
    for (const auto& [address, count] : nodes.allocations) {
      blocks_[address].graph = 0;
      DropIfGone(address, gone);
    }
  }
  void ExecDestroyed(uint64_t exec, Addresses* gone) {
    const auto found = execs_.find(exec);
    if (found == execs_.end()) return;
    const Exec one = std::move(found->second);
    execs_.erase(found);
    if (const auto graph = graphs_.find(one.graph); graph != graphs_.end() && graph->second.exec == exec) {
      graph->second.exec = 0;
    }
    Unuse(one.nodes, gone);
    Unuse(one.first, gone);
  }

  // The memory is gone for another reason: its context is. Graphs and executables that name it cannot be launched.
  void Forget(uint64_t address) {
    const auto found = blocks_.find(address);
    if (found == blocks_.end()) return;
    for (auto& [graph, nodes] : graphs_) nodes.Forget(address);
    for (auto& [exec, one] : execs_) {
      one.nodes.Forget(address);
      one.first.Forget(address);
    }
    blocks_.erase(found);
  }

  // The executable's memory is made ready: by an upload, or a launch.
  void Uploaded(uint64_t exec) {
    const auto found = execs_.find(exec);
    if (found == execs_.end()) return;
    for (auto& [device, figures] : FootprintsWith(&found->second.nodes)) {
      Figures& now = figures_[device];
      now.current = std::max(now.current, figures);
      now.used_high = std::max(now.used_high, now.current);
      now.reserved_high = std::max(now.reserved_high, now.current);
    }
  }

  // CU_GRAPH_MEM_ATTR_*. What has been made ready for graphs stays so until it is trimmed, and driver 580 calls all of
  // it used.
  uint64_t Figure(int device, CUgraphMem_attribute attribute) const {
    const auto found = figures_.find(device);
    if (found == figures_.end()) return 0;
    switch (attribute) {
      case CU_GRAPH_MEM_ATTR_USED_MEM_HIGH:
        return found->second.used_high;
      case CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH:
        return found->second.reserved_high;
      default:
        return found->second.current;
    }
  }
  void ResetHigh(int device, CUgraphMem_attribute attribute) {
    Figures& figures = figures_[device];
    if (attribute == CU_GRAPH_MEM_ATTR_USED_MEM_HIGH) figures.used_high = figures.current;
    if (attribute == CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH) figures.reserved_high = figures.current;
  }
  void Trim(int device) {
    const std::map<int, uint64_t> needed = FootprintsWith(nullptr);
    const auto found = needed.find(device);
    Figures& figures = figures_[device];
    figures.current = std::min(figures.current, found == needed.end() ? 0 : found->second);
  }

 private:
  struct Block {
    uint64_t graph = 0;  // 0: destroyed
    uint64_t maker = 0;  // the graph, destroyed or not
    uint64_t bytes = 0;
    int device = 0;
    int execs = 0;  // whose nodes allocate or free it
    bool alive = false;
    std::set<uint64_t> freeing;  // graphs with a free node for it
    uint64_t freed_by = 0;       // the last free node in its own graph, if that is known
  };
  // How many nodes there are for each address.
  class Counts {
   public:
    unsigned CountOf(uint64_t address) const {
      const auto found = counts_.find(address);
      return found == counts_.end() ? 0 : found->second;
    }
    size_t total() const { return total_; }
    void Add(uint64_t address, unsigned count = 1) {
      counts_[address] += count;
      total_ += count;
    }
    void Remove(uint64_t address) {
      --counts_[address];
      --total_;
    }
    // False if there were none.
    bool Forget(uint64_t address) {
      total_ -= CountOf(address);
      return counts_.erase(address) != 0;
    }
    std::map<uint64_t, unsigned>::const_iterator begin() const { return counts_.begin(); }
    std::map<uint64_t, unsigned>::const_iterator end() const { return counts_.end(); }

   private:
    std::map<uint64_t, unsigned> counts_;
    size_t total_ = 0;
  };
  struct Nodes {
    Counts allocations, frees;
    uint64_t exec = 0;    // made from it
    bool broken = false;  // some of the memory is gone

    void Forget(uint64_t address) {
      for (Counts* list : {&allocations, &frees}) broken = list->Forget(address) || broken;
    }
  };
  struct Exec {
    uint64_t graph = 0;
    bool frees_at_launch = false;
    Nodes nodes;
    Nodes first;  // when it was made
  };
  struct Figures {
    uint64_t current = 0, used_high = 0, reserved_high = 0;
  };

  static uint64_t InChunks(uint64_t bytes) { return (bytes + kChunk - 1) / kChunk * kChunk; }

  // What each device's graphs take, in chunks of each graph's: of allocations that are alive, and of `nodes`.
  std::map<int, uint64_t> FootprintsWith(const Nodes* nodes) const {
    std::map<std::pair<int, uint64_t>, uint64_t> bytes;  // by device and graph
    for (const auto& [address, block] : blocks_) {
      const bool counts = block.alive || (nodes != nullptr && nodes->allocations.CountOf(address) != 0);
      if (counts) bytes[{block.device, block.maker}] += block.bytes;
    }
    std::map<int, uint64_t> sums;
    for (const auto& [place, sum] : bytes) sums[place.first] += InChunks(sum);
    return sums;
  }

  void Use(const Nodes& nodes) {
    for (const Counts* list : {&nodes.allocations, &nodes.frees}) {
      for (const auto& [address, count] : *list) ++blocks_[address].execs;
    }
  }
  void Unuse(const Nodes& nodes, Addresses* gone) {
    for (const Counts* list : {&nodes.allocations, &nodes.frees}) {
      for (const auto& [address, count] : *list) {
        const auto used = blocks_.find(address);
        if (used == blocks_.end()) continue;
        --used->second.execs;
        DropIfGone(address, gone);
      }
    }
  }

  void DropIfGone(uint64_t address, Addresses* gone) {
    const auto found = blocks_.find(address);
    if (found == blocks_.end()) return;
    const Block& block = found->second;
    if (block.alive || block.graph != 0 || block.execs != 0) return;
    // Graphs that would have freed it have nothing to free any more: the address may be another allocation's soon.
    for (const uint64_t graph : block.freeing) {
      if (const auto nodes = graphs_.find(graph); nodes != graphs_.end()) nodes->second.Forget(address);
    }
    blocks_.erase(found);
    gone->push_back(address);
  }

  std::map<uint64_t, Block> blocks_;  // by address
  std::unordered_map<uint64_t, Nodes> graphs_;
  std::set<uint64_t> inside_;  // parts of others, which have their memory nodes
  std::unordered_map<uint64_t, Exec> execs_;
  std::map<int, Figures> figures_;
};

}  // namespace cuda_remote::driverabi

#endif  // CUDA_REMOTE_PROTO_DRIVERABI_GRAPH_MEMORY_H_
