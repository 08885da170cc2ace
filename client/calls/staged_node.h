// SPDX-License-Identifier: Apache-2.0
// Copies of pageable memory as nodes of graphs.
//
// The server cannot read or write the application's memory. So such a node is a child graph there: the copy, which is
// one of pinned memory, and a host function that moves the bytes between that and the application's memory
// (client/graphs/staged_copies.h). To the application it is a copy node.
//
// The driver cannot disable a child graph's node or a host function. So where the application disables a node in an
// executable, the copy inside is disabled there, and the host function is one that moves nothing.
//
// A launch takes the bytes that go to the GPU at the call, as driver 580 does; the host function has them when the
// copy's turn comes.
//
// A node that was made with other memory stays a copy node there, since executables have it in them. Calls that give it
// pageable memory return CUDA_ERROR_NOT_SUPPORTED (FillSide in graph_nodes.cc).
#ifndef CUDA_REMOTE_CLIENT_CALLS_STAGED_NODE_H_
#define CUDA_REMOTE_CLIENT_CALLS_STAGED_NODE_H_

#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <functional>

#include "client/core/call.h"
#include "client/graphs/staged_copies.h"

namespace cuda_remote::client {

class Session;

// Whether a side of the copy lies in memory that the server cannot reach. Makes a call of its own.
bool NeedsStaging(const CUDA_MEMCPY3D& copy);

// CUDA_ERROR_INVALID_VALUE for what the driver refuses of such a copy. It never hears of the copy: it is given one of
// packed rows of pinned memory. Sides that it does hear of may be wrong still.
CUresult CheckStaged(const CUDA_MEMCPY3D& copy);

// cuGraphAddMemcpyNode for such a copy; and changing its node, in the graph and in an executable. A side that is
// pageable memory can become pinned memory, and that still goes through the node's own piece. `known`: the sides, if
// that is not for the addresses to say.
CUresult AddStagedNode(CUgraphNode* node, CUgraph graph, const CUgraphNode* dependencies, const CUgraphEdgeData* edges,
                       size_t count, const CUDA_MEMCPY3D& copy, CUcontext context, const StagedSides* known = nullptr);
CUresult SetStagedNode(CUgraphNode node, const CUDA_MEMCPY3D& copy);
CUresult SetStagedNodeOfExec(CUgraphExec exec, CUgraphNode node, const CUDA_MEMCPY3D& copy, CUcontext context);

// Whether the node is such a copy in the executable; and enabling or disabling one that is.
bool IsStagedInExec(CUgraphExec exec, CUgraphNode node, bool* enabled);
CUresult EnableStagedNode(CUgraphExec exec, CUgraphNode node, bool enabled);

// Before a graph is copied into another one, or cloned; and before an executable is made from it. See to it that no two
// executables copy by way of the same pieces. `graph`: virtual handle.
CUresult PrepareCopies(Session& session, uint64_t graph);
CUresult PrepareInstantiation(CUgraph graph);
// A launch of an executable with nodes that copy pageable memory to the GPU: takes the bytes of that memory. `launch`
// waits for the server's answer. False: it has no such node that is enabled, and nothing was done.
bool LaunchStaged(CUgraphExec exec, CUstream stream, bool per_thread, const std::function<CUresult()>& launch,
                  CUresult* result);

// What the driver refuses of a copy node: an empty copy, a wrong pitch or height, and a side that leaves its allocation
// or its pinned memory. The server's driver does not see where those end, because they are parts of larger mappings. In
// graph_nodes.cc.
CUresult CheckCopyNode(Session& session, CUDA_MEMCPY3D copy);

// Around `update`, which updates an executable from a graph: what is disabled in the executable stays that. The driver
// leaves copies disabled. The graph's own nodes have host functions that move nothing meanwhile, since the node that
// names the executable's may be gone.
CUresult UpdateStaged(CUgraphExec exec, CUgraph graph, const std::function<CUresult()>& update);
// The same around `set`, which puts the nodes of a child graph in the place of those in an executable's node.
CUresult SetChildOfExec(CUgraphExec exec, CUgraphNode node, CUgraph child, const std::function<CUresult()>& set);

// Such a copy in a captured stream, which is its value on the wire.
CUresult CaptureStagedNode(uint64_t stream, const CUDA_MEMCPY3D& copy, const StagedSides* known = nullptr);

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_CALLS_STAGED_NODE_H_
