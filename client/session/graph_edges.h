// SPDX-License-Identifier: Apache-2.0
// Recorded requests that name nodes of a graph as the ends of edges: those that add a node, and those that add and
// remove edges.
//
// Pure functions; any thread.
//
// This header is part of the client library: no libprotobuf, no abseil, no logging.
#ifndef CUDA_REMOTE_CLIENT_SESSION_GRAPH_EDGES_H_
#define CUDA_REMOTE_CLIENT_SESSION_GRAPH_EDGES_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace cuda_remote::client {

// Whether a call of this id adds one node to a graph, by parameters.
bool AddsNode(uint32_t call);

// The nodes that a request names as ends of edges, as often as it names them: those that a new node comes after, or
// both ends of edges that are added or removed. None for other requests.
std::vector<uint64_t> EndsOfEdges(uint32_t call, std::string_view message);

// The same request without the edges that begin or end at `node`. Empty: it would have no edge left, and adds no node.
std::string WithoutEdgesOf(uint64_t node, uint32_t call, std::string_view message);

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_SESSION_GRAPH_EDGES_H_
