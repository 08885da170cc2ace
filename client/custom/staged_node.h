// SPDX-License-Identifier: Apache-2.0
// Copies of pageable memory as nodes of graphs.
//
// The server cannot read or write the application's memory. So such a node is a child graph there: the copy, which is
// one of pinned memory, and a host function that moves the bytes between that and the application's memory
// (client/session/staged_copies.h). To the application it is a copy node.
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

// Which sides of a copy go through pinned memory.
struct StagedSides {
  bool from_host = false, to_host = false;
};

// Whether a side of the copy lies in memory that the server cannot reach. Makes a call of its own.
bool NeedsStaging(const CUDA_MEMCPY3D& copy);

// cuGraphAddMemcpyNode for such a copy; and changing its node, in the graph and in an executable. `known`: the sides,
// if that is not for the addresses to say.
CUresult AddStagedNode(CUgraphNode* node, CUgraph graph, const CUgraphNode* dependencies, const CUgraphEdgeData* edges,
                       size_t count, const CUDA_MEMCPY3D& copy, CUcontext context, const StagedSides* known = nullptr);
CUresult SetStagedNode(CUgraphNode node, const CUDA_MEMCPY3D& copy);
CUresult SetStagedNodeOfExec(CUgraphExec exec, CUgraphNode node, const CUDA_MEMCPY3D& copy, CUcontext context);

// Such a copy in a captured stream, which is its value on the wire.
CUresult CaptureStagedNode(uint64_t stream, const CUDA_MEMCPY3D& copy, const StagedSides* known = nullptr);

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_CUSTOM_STAGED_NODE_H_
