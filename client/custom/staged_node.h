// SPDX-License-Identifier: Apache-2.0
// Copies of pageable memory as nodes of graphs.
//
// The server cannot read or write the application's memory. So such a node is a child graph there: the copy, which is
// one of pinned memory, and a host function that moves the bytes between that and the application's memory
// (client/session/staged_copies.h). To the application it is a copy node.
//
// The driver cannot disable a child graph's node. A disabled one has another child in its executable: of the same
// nodes, but the host function moves nothing, and the copy is one of memory that nobody else uses. The driver lets an
// executable exchange copies of one row between memory of the same kinds, so only such nodes can be disabled.
#ifndef CUDA_REMOTE_CLIENT_CUSTOM_STAGED_NODE_H_
#define CUDA_REMOTE_CLIENT_CUSTOM_STAGED_NODE_H_

#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <vector>

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

// Whether an executable can be updated, disabled nodes and all; and what is left to do when it was.
bool MayUpdateStaged(uint64_t exec);
CUresult StagedUpdated(uint64_t exec, uint64_t graph);

// Such a copy in a captured stream, which is its value on the wire.
CUresult CaptureStagedNode(uint64_t stream, const CUDA_MEMCPY3D& copy, const StagedSides* known = nullptr);

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_CUSTOM_STAGED_NODE_H_
