// SPDX-License-Identifier: Apache-2.0
// Recorded requests that name nodes of a graph as the ends of edges: those that add a node, and those that add and
// remove edges.
//
// Pure functions; any thread.
//
// This header is part of the client library: no libprotobuf, no abseil, no logging.
#ifndef CUDA_REMOTE_CLIENT_GRAPHS_GRAPH_EDGES_H_
#define CUDA_REMOTE_CLIENT_GRAPHS_GRAPH_EDGES_H_

#include <cstdint>
#include <set>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

namespace cuda_remote::client {

// An edge by itself. `data`: its CUgraphEdgeData, or empty where that is all zeros.
struct Edge {
  uint64_t from = 0, to = 0;
  std::string data;
};
inline bool operator<(const Edge& a, const Edge& b) {
  return std::tie(a.from, a.to, a.data) < std::tie(b.from, b.to, b.data);
}

// Whether a call of this id adds one node to a graph, by parameters.
bool AddsNode(uint32_t call);

// The nodes that a request names as ends of edges, as often as it names them: those that a new node comes after, or
// both ends of edges that are added or removed. None for other requests.
std::vector<uint64_t> EndsOfEdges(uint32_t call, std::string_view message);

// Whether a call of this id adds edges by themselves, or removes them.
bool AddsEdges(uint32_t call);
bool RemovesEdges(uint32_t call);

// The edges that such a request adds or removes.
std::set<Edge> EdgesOf(uint32_t call, std::string_view message);

// The same request without some edges. Empty: it would have none left.
std::string WithoutEdges(const std::set<Edge>& edges, uint32_t call, std::string_view message);

// Whether a call of this id begins a capture into a graph, behind nodes that it names: the ends of edges, too.
bool CapturesInto(uint32_t call);

// The same request without the edges that begin or end at `node`. Empty: it would have no edge left, and adds no node
// and begins no capture.
std::string WithoutEdgesOf(uint64_t node, uint32_t call, std::string_view message);

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_GRAPHS_GRAPH_EDGES_H_
