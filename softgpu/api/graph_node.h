// SPDX-License-Identifier: Apache-2.0
// What graph.cc and graph_node.cc share.
#ifndef CUDA_REMOTE_SOFTGPU_API_GRAPH_NODE_H_
#define CUDA_REMOTE_SOFTGPU_API_GRAPH_NODE_H_

#include <cuda.h>

#include <vector>

#include "softgpu/core/graph.h"

namespace cuda_remote::softgpu {

// How the getters hand out lists: `nodes` null asks for the count; room beyond it is filled with null.
CUresult ListNodes(const std::vector<GraphNode*>& list, CUgraphNode* nodes, size_t* count);

}  // namespace cuda_remote::softgpu

#endif  // CUDA_REMOTE_SOFTGPU_API_GRAPH_NODE_H_
