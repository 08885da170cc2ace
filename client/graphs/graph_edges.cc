// SPDX-License-Identifier: Apache-2.0
#include "client/graphs/graph_edges.h"

#include <cuda.h>

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <utility>

#include "proto/codec/decode_as.h"
#include "proto/codec/graph.gen.h"
#include "proto/codec/stream.gen.h"

namespace cuda_remote::client {
namespace {

using Nodes = std::vector<uint64_t>;

Nodes NodesOf(std::string_view bytes) {
  Nodes nodes(bytes.size() / sizeof(uint64_t));
  if (!nodes.empty()) memcpy(nodes.data(), bytes.data(), nodes.size() * sizeof nodes[0]);
  return nodes;
}

std::string_view BytesOf(const Nodes& nodes) {
  return {reinterpret_cast<const char*>(nodes.data()), nodes.size() * sizeof(uint64_t)};
}

// The edges of a request. `from` is empty where the new node is their end.
struct Edges {
  Nodes from, to;
  std::string data;  // an array of CUgraphEdgeData, or empty
};

// The data of one edge; empty if it is all zeros.
std::string DataOf(const Edges& edges, size_t i) {
  if (edges.data.size() != edges.to.size() * sizeof(CUgraphEdgeData)) return {};
  std::string data = edges.data.substr(i * sizeof(CUgraphEdgeData), sizeof(CUgraphEdgeData));
  if (data.find_first_not_of('\0') == std::string::npos) data.clear();
  return data;
}

Edge EdgeAt(const Edges& edges, size_t i) { return {edges.from[i], edges.to[i], DataOf(edges, i)}; }

// Leaves out the edges of which `goes(i)` is true.
template <typename Goes>
void RemoveEdges(Edges* edges, Goes goes) {
  Edges kept;
  const bool has_data = edges->data.size() == edges->to.size() * sizeof(CUgraphEdgeData);
  for (size_t i = 0; i < edges->to.size(); ++i) {
    if (goes(i)) continue;
    kept.to.push_back(edges->to[i]);
    if (i < edges->from.size()) kept.from.push_back(edges->from[i]);
    if (has_data) kept.data.append(edges->data, i * sizeof(CUgraphEdgeData), sizeof(CUgraphEdgeData));
  }
  *edges = std::move(kept);
}

// Calls edit(edges, adds_node) with the edges of a request. If `out` is not null, encodes the request to it with what
// `edit` has left of them. Run is false for a request that names no edges.
template <typename Edit>
struct Editor {
  const uint32_t call;
  const std::string_view message;
  const Edit edit;
  std::string* const out;

  // A new node and what it comes after.
  template <typename Request>
  bool Adds() const {
    Request request;
    if (!wire::DecodeAs(call, message, &request)) return false;
    Edges edges;
    edges.to = NodesOf(request.dependencies);
    edit(&edges, true);
    request.dependencies = BytesOf(edges.to);
    request.numDependencies = edges.to.size();
    if (out) request.Encode(out);
    return true;
  }
  bool AddsAny() const {
    wire::cuGraphAddNode_v2_Request request;
    if (!wire::DecodeAs(call, message, &request)) return false;
    Edges edges;
    edges.to = request.dependencies;
    edges.data = request.edges;
    edit(&edges, true);
    request.dependencies = edges.to;
    request.edges = edges.data;
    if (out) request.Encode(out);
    return true;
  }
  // What a capture's first nodes come after.
  bool Begins() const {
    wire::cuStreamBeginCaptureToGraph_Request request;
    if (!wire::DecodeAs(call, message, &request)) return false;
    Edges edges;
    edges.to = NodesOf(request.dependencies);
    edges.data = request.dependencyData;
    edit(&edges, true);
    request.dependencies = BytesOf(edges.to);
    request.has_dependencies = request.has_dependencies && !edges.to.empty();
    request.dependencyData = edges.data;
    request.has_dependencyData = request.has_dependencyData && !edges.to.empty();
    request.numDependencies = edges.to.size();
    if (out) request.Encode(out);
    return true;
  }
  // Edges by themselves. The first versions of the calls have no data.
  template <typename Request>
  static constexpr bool kHasData = !std::is_same_v<Request, wire::cuGraphAddDependencies_Request> &&
                                   !std::is_same_v<Request, wire::cuGraphRemoveDependencies_Request>;
  template <typename Request>
  bool Connects() const {
    Request request;
    if (!wire::DecodeAs(call, message, &request)) return false;
    Edges edges;
    edges.from = NodesOf(request.from);
    edges.to = NodesOf(request.to);
    if constexpr (kHasData<Request>) edges.data = request.edgeData;
    edit(&edges, false);
    request.from = BytesOf(edges.from);
    request.to = BytesOf(edges.to);
    if constexpr (kHasData<Request>) request.edgeData = edges.data;
    request.numDependencies = edges.to.size();
    if (out) request.Encode(out);
    return true;
  }
  bool Run() const {
    return AddsAny() || Adds<wire::cuGraphAddEmptyNode_Request>() || Adds<wire::cuGraphAddMemsetNode_Request>() ||
           Adds<wire::cuGraphAddEventRecordNode_Request>() || Adds<wire::cuGraphAddEventWaitNode_Request>() ||
           Adds<wire::cuGraphAddChildGraphNode_Request>() || Connects<wire::cuGraphAddDependencies_Request>() ||
           Connects<wire::cuGraphAddDependencies_v2_Request>() || Connects<wire::cuGraphRemoveDependencies_Request>() ||
           Connects<wire::cuGraphRemoveDependencies_v2_Request>() || Begins();
  }
};

template <typename Edit>
bool EditEdges(uint32_t call, std::string_view message, Edit edit, std::string* out) {
  return Editor<Edit>{call, message, edit, out}.Run();
}

}  // namespace

bool CapturesInto(uint32_t call) { return call == wire::cuStreamBeginCaptureToGraph_Request::kCallId; }

bool AddsEdges(uint32_t call) {
  return call == wire::cuGraphAddDependencies_Request::kCallId ||
         call == wire::cuGraphAddDependencies_v2_Request::kCallId;
}

bool RemovesEdges(uint32_t call) {
  return call == wire::cuGraphRemoveDependencies_Request::kCallId ||
         call == wire::cuGraphRemoveDependencies_v2_Request::kCallId;
}

std::set<Edge> EdgesOf(uint32_t call, std::string_view message) {
  std::set<Edge> all;
  const auto note = [&all](Edges* edges, bool) {
    for (size_t i = 0; i < std::min(edges->from.size(), edges->to.size()); ++i) all.insert(EdgeAt(*edges, i));
  };
  EditEdges(call, message, note, nullptr);
  return all;
}

std::string WithoutEdges(const std::set<Edge>& edges, uint32_t call, std::string_view message) {
  std::string edited;
  bool needed = false;
  const auto remove = [&](Edges* its, bool) {
    RemoveEdges(its, [&](size_t i) { return i < its->from.size() && edges.count(EdgeAt(*its, i)) != 0; });
    needed = !its->to.empty();
  };
  EditEdges(call, message, remove, &edited);
  return needed ? edited : std::string();
}

bool AddsNode(uint32_t call) {
  return call == wire::cuGraphAddNode_v2_Request::kCallId || call == wire::cuGraphAddEmptyNode_Request::kCallId ||
         call == wire::cuGraphAddMemsetNode_Request::kCallId ||
         call == wire::cuGraphAddEventRecordNode_Request::kCallId ||
         call == wire::cuGraphAddEventWaitNode_Request::kCallId ||
         call == wire::cuGraphAddChildGraphNode_Request::kCallId;
}

std::vector<uint64_t> EndsOfEdges(uint32_t call, std::string_view message) {
  Nodes ends;
  const auto note = [&ends](Edges* edges, bool) {
    ends.insert(ends.end(), edges->from.begin(), edges->from.end());
    ends.insert(ends.end(), edges->to.begin(), edges->to.end());
  };
  EditEdges(call, message, note, nullptr);
  return ends;
}

std::string WithoutEdgesOf(uint64_t node, uint32_t call, std::string_view message) {
  std::string edited;
  bool needed = false;
  const auto remove = [&](Edges* edges, bool adds_node) {
    RemoveEdges(edges,
                [&](size_t i) { return edges->to[i] == node || (i < edges->from.size() && edges->from[i] == node); });
    needed = adds_node || !edges->to.empty();
  };
  EditEdges(call, message, remove, &edited);
  return needed ? edited : std::string();
}

}  // namespace cuda_remote::client
