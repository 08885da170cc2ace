// SPDX-License-Identifier: Apache-2.0
// Memory that graphs allocate: memory nodes, and stream-ordered allocations in captured streams.
//
// The server's driver never hears of it: it would choose the addresses by itself. An allocation is ordinary device
// memory, which is there from when its node is made until nobody can use it any more, and is saved and restored like
// any other; its nodes are empty nodes there. Which allocation is alive, and what may be done with graphs that have
// such nodes, is settled here (proto/driverabi/graph_memory.h).
#ifndef CUDA_REMOTE_CLIENT_CALLS_GRAPH_MEMORY_H_
#define CUDA_REMOTE_CLIENT_CALLS_GRAPH_MEMORY_H_

#include <cuda.h>

#include <cstddef>
#include <cstdint>

#include "client/core/call.h"
#include "client/graphs/disguised_nodes.h"

namespace cuda_remote::client {

class Session;

// More dependencies of one node than these are refused: a message does not hold them.
constexpr size_t kMostDependencies = kMaxMessageBytes / 32;

// What the server knows as a node of another type. False if the node is what it seems.
bool FindDisguised(Session& session, CUgraphNode node, DisguisedNode* found);

// Device memory for a graph, with a record of its own; `info` is the application's call. In memory.cc.
CUresult AllocateForGraph(const CallInfo& info, uint64_t bytes, int device, CUdeviceptr* dptr);

// cuMemAllocAsync and cuMemFreeAsync in a captured stream (as on the wire). `call` has entered; `pool` is a virtual
// handle, 0 for the current one.
CUresult CaptureAllocation(Call& call, uint64_t stream, size_t bytes, uint64_t pool, CUdeviceptr* dptr);
CUresult CaptureFree(Call& call, uint64_t stream, CUdeviceptr dptr);

// Frees memory of a graph outside of graphs. False if it is none; else *result is the call's.
bool FreeOfGraph(Session& session, CUdeviceptr dptr, CUresult* result);

// cuGraphAddNode for an allocation or a free.
CUresult AddMemoryNode(CUgraphNode* node, CUgraph graph, const CUgraphNode* dependencies, const CUgraphEdgeData* edges,
                       size_t count, CUgraphNodeParams* params);

// CUDA_ERROR_NOT_SUPPORTED, as natively, for a graph (or the graph of a node) that allocates or frees memory: it cannot
// be cloned, put into another one, or lose nodes and edges.
CUresult CheckWithoutMemory(Session& session, uint64_t graph_or_node);

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_CALLS_GRAPH_MEMORY_H_
