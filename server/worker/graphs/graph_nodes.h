// SPDX-License-Identifier: Apache-2.0
// The nodes of a real graph.
#ifndef CUDA_REMOTE_SERVER_WORKER_GRAPHS_GRAPH_NODES_H_
#define CUDA_REMOTE_SERVER_WORKER_GRAPHS_GRAPH_NODES_H_

#include <cuda.h>

#include <cstddef>
#include <vector>

#include "server/driver/driver_table.h"

namespace cuda_remote::server {

// In the driver's order. Executor only; returns what the driver answers.
inline CUresult NodesOf(const DriverTable& driver, CUgraph graph, std::vector<CUgraphNode>* nodes) {
  size_t count = 0;
  nodes->clear();
  CUresult result = driver.cuGraphGetNodes(graph, nullptr, &count);
  // The driver refuses a list without places.
  if (result != CUDA_SUCCESS || count == 0) return result;
  nodes->resize(count);
  result = driver.cuGraphGetNodes(graph, nodes->data(), &count);
  if (count < nodes->size()) nodes->resize(count);
  return result;
}

}  // namespace cuda_remote::server

#endif  // CUDA_REMOTE_SERVER_WORKER_GRAPHS_GRAPH_NODES_H_
