// SPDX-License-Identifier: Apache-2.0
// Nodes that a captured stream cannot be made to capture: they are added to the capture's graph.
#ifndef CUDA_REMOTE_CLIENT_CALLS_CAPTURED_NODE_H_
#define CUDA_REMOTE_CLIENT_CALLS_CAPTURED_NODE_H_

#include <cuda.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "client/calls/bodies.gen.h"

namespace cuda_remote::client {

// Adds a node to the capture of `stream`: after what is captured there so far, and before what comes.
template <typename Add>
CUresult AddToCapture(uint64_t stream, Add add) {
  const CUstream captured = reinterpret_cast<CUstream>(stream);
  CUstreamCaptureStatus status;
  CUgraph graph = nullptr;
  const CUgraphNode* dependencies = nullptr;
  const CUgraphEdgeData* edges = nullptr;
  size_t count = 0;
  CUresult result =
      Custom_cuStreamGetCaptureInfo_v3(captured, &status, nullptr, &graph, &dependencies, &edges, &count, false);
  if (result != CUDA_SUCCESS) return result;
  if (status != CU_STREAM_CAPTURE_STATUS_ACTIVE) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  // The lists are the thread's, for as long as nobody asks again.
  const std::vector<CUgraphNode> after(dependencies, dependencies + count);
  const std::vector<CUgraphEdgeData> data(edges, edges ? edges + count : edges);
  const bool plain = std::all_of(data.begin(), data.end(), [](const CUgraphEdgeData& one) {
    return one.from_port == 0 && one.to_port == 0 && one.type == 0;
  });
  CUgraphNode node = nullptr;
  result = add(&node, graph, after.data(), plain ? nullptr : data.data(), count);
  if (result != CUDA_SUCCESS) return result;
  return Call_cuStreamUpdateCaptureDependencies_v2(captured, &node, nullptr, 1, CU_STREAM_SET_CAPTURE_DEPENDENCIES,
                                                   false);
}

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_CALLS_CAPTURED_NODE_H_
