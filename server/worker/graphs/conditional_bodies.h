// SPDX-License-Identifier: Apache-2.0
// The bodies of conditional nodes, which the driver names only when a node is made.
#ifndef CUDA_REMOTE_SERVER_WORKER_GRAPHS_CONDITIONAL_BODIES_H_
#define CUDA_REMOTE_SERVER_WORKER_GRAPHS_CONDITIONAL_BODIES_H_

#include <cuda.h>

#include <unordered_map>
#include <vector>

namespace cuda_remote::server {

// By the driver's node. An entry is right for as long as its node lives. Executor only; a worker serves one session.
inline std::unordered_map<CUgraphNode, std::vector<CUgraph>>& ConditionalBodies() {
  static auto* bodies = new std::unordered_map<CUgraphNode, std::vector<CUgraph>>;
  return *bodies;
}

}  // namespace cuda_remote::server

#endif  // CUDA_REMOTE_SERVER_WORKER_GRAPHS_CONDITIONAL_BODIES_H_
