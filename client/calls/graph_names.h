// SPDX-License-Identifier: Apache-2.0
// Handles for a graph's nodes, so that calls can name them in their answers.
#ifndef CUDA_REMOTE_CLIENT_CALLS_GRAPH_NAMES_H_
#define CUDA_REMOTE_CLIENT_CALLS_GRAPH_NAMES_H_

#include <cuda.h>

#include <cstdint>

namespace cuda_remote::client {

class Session;

// The graph of a child graph's node (`body` 0), or a body of a conditional node (from 1 on).
CUresult GraphOfNode(CUgraphNode node, uint32_t body, CUgraph* graph);

// Sees to it that every node of the graph (or of the graph that a node belongs to) has a virtual handle. Makes calls of
// its own. Thread-safe.
CUresult NameNodes(Session& session, uint64_t graph_or_node);

// A capture is about to add to `graph`: gives its nodes handles, so that those that it adds can be told from them.
CUresult PrepareCaptureInto(Session& session, uint64_t graph);

// It has: `capture` has the record. `adds_only`: it has done nothing else to the graph.
void NoteCaptureInto(Session& session, uint64_t graph, uint64_t capture, bool adds_only);

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_CALLS_GRAPH_NAMES_H_
