// SPDX-License-Identifier: Apache-2.0
// Occupancy questions that name host functions or launch configurations.

#include <cuda.h>

#include <algorithm>

#include "client/calls/bodies.gen.h"
#include "client/calls/function_info.h"
#include "client/core/call.h"
#include "client/core/session.h"
#include "proto/codec/codec.h"

namespace cuda_remote::client {
namespace {

// Both cluster questions have the same fields.
template <typename Request, typename Reply>
CUresult Clusters(const CallInfo& info, int* value, CUfunction func, const CUlaunchConfig* config) {
  if (!value || !func || !config || (config->numAttrs && !config->attrs)) return CUDA_ERROR_INVALID_VALUE;
  Call call(info);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  Request request;
  request.func = reinterpret_cast<uint64_t>(func);
  if (!call.Valid(KindOf(request.func), request.func)) return CUDA_ERROR_INVALID_HANDLE;
  if (const CUresult result = call.StreamToWire(config->hStream, false, &request.stream); result != CUDA_SUCCESS) {
    return result;
  }
  request.grid_x = config->gridDimX;
  request.grid_y = config->gridDimY;
  request.grid_z = config->gridDimZ;
  request.block_x = config->blockDimX;
  request.block_y = config->blockDimY;
  request.block_z = config->blockDimZ;
  request.shared_bytes = config->sharedMemBytes;
  request.attributes =
      std::string_view(reinterpret_cast<const char*>(config->attrs), config->numAttrs * sizeof(CUlaunchAttribute));
  request.Encode(&call.message());
  if (const CUresult result = call.Recall(request.func); result != CUDA_SUCCESS) return result;
  Reply reply;
  if (!reply.Decode(call.reply())) return call.session().Lose(ChannelStatus::kProtocolError);
  *value = reply.value;
  return CUDA_SUCCESS;
}

}  // namespace

CUresult Custom_cuOccupancyMaxPotentialBlockSizeWithFlags(int* minGridSize, int* blockSize, CUfunction func,
                                                          CUoccupancyB2DSize blockSizeToDynamicSMemSize,
                                                          size_t dynamicSMemSize, int blockSizeLimit,
                                                          unsigned int flags) {
  if (!minGridSize || !blockSize) return CUDA_ERROR_INVALID_VALUE;
  Call call(info::k_cuOccupancyMaxPotentialBlockSizeWithFlags);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  wire::cuOccupancyMaxPotentialBlockSizeWithFlags_Request request;
  request.func = reinterpret_cast<uint64_t>(func);
  if (!call.Valid(KindOf(request.func), request.func)) return CUDA_ERROR_INVALID_HANDLE;
  request.dynamic_bytes = dynamicSMemSize;
  request.block_size_limit = blockSizeLimit;
  request.flags = flags;
  if (blockSizeToDynamicSMemSize) {
    // The function is the application's; the server gets its values for every block size there can be.
    const int most = CurrentDevice(call).Attribute(CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK);
    for (int size = 1; size <= most; ++size) request.table.push_back(blockSizeToDynamicSMemSize(size));
  }
  request.Encode(&call.message());
  if (const CUresult result = call.Transact(); result != CUDA_SUCCESS) return result;
  wire::cuOccupancyMaxPotentialBlockSizeWithFlags_Reply reply;
  if (!reply.Decode(call.reply())) return call.session().Lose(ChannelStatus::kProtocolError);
  *minGridSize = reply.min_grid_size;
  *blockSize = reply.block_size;
  return CUDA_SUCCESS;
}

CUresult Custom_cuOccupancyMaxPotentialBlockSize(int* minGridSize, int* blockSize, CUfunction func,
                                                 CUoccupancyB2DSize blockSizeToDynamicSMemSize, size_t dynamicSMemSize,
                                                 int blockSizeLimit) {
  return Custom_cuOccupancyMaxPotentialBlockSizeWithFlags(minGridSize, blockSize, func, blockSizeToDynamicSMemSize,
                                                          dynamicSMemSize, blockSizeLimit, 0);
}

CUresult Custom_cuOccupancyMaxActiveClusters(int* numClusters, CUfunction func, const CUlaunchConfig* config) {
  return Clusters<wire::cuOccupancyMaxActiveClusters_Request, wire::cuOccupancyMaxActiveClusters_Reply>(
      info::k_cuOccupancyMaxActiveClusters, numClusters, func, config);
}

CUresult Custom_cuOccupancyMaxPotentialClusterSize(int* clusterSize, CUfunction func, const CUlaunchConfig* config) {
  return Clusters<wire::cuOccupancyMaxPotentialClusterSize_Request, wire::cuOccupancyMaxPotentialClusterSize_Reply>(
      info::k_cuOccupancyMaxPotentialClusterSize, clusterSize, func, config);
}

}  // namespace cuda_remote::client
