// SPDX-License-Identifier: Apache-2.0
// Copies of pageable memory as nodes of graphs.
//
// The server cannot read or write the application's memory. So such a node is a child graph there: the copy, which is
// one of pinned memory, and a host function that moves the bytes between that and the application's memory
// (client/session/staged_copies.h). To the application it is a copy node.
//
// The driver cannot disable a child graph's node or a host function. So where the application disables a node in an
// executable, the copy inside is disabled there, and the host function is one that moves nothing.
#ifndef CUDA_REMOTE_CLIENT_CUSTOM_STAGED_NODE_H_
#define CUDA_REMOTE_CLIENT_CUSTOM_STAGED_NODE_H_

#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <functional>

#include "client/session/call.h"
#include "client/session/staged_copies.h"

namespace cuda_remote::client {

class Session;

// Whether a side of the copy lies in memory that the server cannot reach. Makes a call of its own.
bool NeedsStaging(const CUDA_MEMCPY3D& copy);

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

// Around `update`, which updates an executable from a graph: what is disabled in the executable stays that. The driver
// leaves copies disabled. The graph's own nodes have host functions that move nothing meanwhile, since the node that
// names the executable's may be gone.
CUresult UpdateStaged(CUgraphExec exec, CUgraph graph, const std::function<CUresult()>& update);

// Such a copy in a captured stream, which is its value on the wire.
CUresult CaptureStagedNode(uint64_t stream, const CUDA_MEMCPY3D& copy, const StagedSides* known = nullptr);

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_CUSTOM_STAGED_NODE_H_
