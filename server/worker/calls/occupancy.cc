// SPDX-License-Identifier: Apache-2.0
// Occupancy questions that depend on the application's own function or on a launch configuration.

#include <cuda.h>

#include <cstring>
#include <vector>

#include "proto/codec/function.gen.h"
#include "server/dispatch/malformed.h"
#include "server/dispatch/runtime.h"
#include "server/worker/calls/handlers.gen.h"

namespace cuda_remote::server {
namespace {

// The application's table of dynamic shared memory by block size, for the driver's callback, which gets no argument of
// its own. Handlers run on one thread.
thread_local const std::vector<uint64_t>* t_table = nullptr;

size_t DynamicBytes(int block_size) {
  const size_t index = size_t(block_size) - 1;
  return t_table != nullptr && index < t_table->size() ? size_t((*t_table)[index]) : 0;
}

bool RealFunction(Session& session, uint64_t handle, CUfunction* function) {
  return session.Real(Kind::kFunction, handle, function) || session.Real(Kind::kKernel, handle, function);
}

// Both cluster questions take the same launch configuration.
template <typename In>
CUresult Configuration(Session& session, const In& in, CUfunction* function, std::vector<CUlaunchAttribute>* attributes,
                       CUlaunchConfig* config) {
  if (!RealFunction(session, in.func, function)) return CUDA_ERROR_INVALID_HANDLE;
  if (!CopyArray(in.attributes, in.attributes.size() / sizeof(CUlaunchAttribute), attributes)) return kMalformedRequest;
  for (CUlaunchAttribute& attribute : *attributes) {
    // Events inside attributes do not change an occupancy; they are left out rather than trusted.
    if (attribute.id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT ||
        attribute.id == CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT ||
        attribute.id == CU_LAUNCH_ATTRIBUTE_DEVICE_UPDATABLE_KERNEL_NODE) {
      attribute.id = CU_LAUNCH_ATTRIBUTE_IGNORE;
    }
  }
  *config = {};
  if (!session.RealStream(in.stream, &config->hStream)) return CUDA_ERROR_INVALID_HANDLE;
  config->gridDimX = in.grid_x;
  config->gridDimY = in.grid_y;
  config->gridDimZ = in.grid_z;
  config->blockDimX = in.block_x;
  config->blockDimY = in.block_y;
  config->blockDimZ = in.block_z;
  config->sharedMemBytes = in.shared_bytes;
  config->attrs = attributes->data();
  config->numAttrs = unsigned(attributes->size());
  return CUDA_SUCCESS;
}

}  // namespace

CUresult Custom_cuOccupancyMaxPotentialBlockSizeWithFlags(
    WorkerSession& session, const Request&, const wire::cuOccupancyMaxPotentialBlockSizeWithFlags_Request& in,
    wire::cuOccupancyMaxPotentialBlockSizeWithFlags_Reply* out, ReplyBuilder*) {
  CUfunction function;
  if (!RealFunction(session, in.func, &function)) return CUDA_ERROR_INVALID_HANDLE;
  int grid = 0;
  int block = 0;
  t_table = in.table.empty() ? nullptr : &in.table;
  const CUresult result = session.driver().cuOccupancyMaxPotentialBlockSizeWithFlags(
      &grid, &block, function, t_table != nullptr ? &DynamicBytes : nullptr, size_t(in.dynamic_bytes),
      in.block_size_limit, in.flags);
  t_table = nullptr;
  out->min_grid_size = grid;
  out->block_size = block;
  return result;
}

CUresult Custom_cuOccupancyMaxActiveClusters(WorkerSession& session, const Request&,
                                             const wire::cuOccupancyMaxActiveClusters_Request& in,
                                             wire::cuOccupancyMaxActiveClusters_Reply* out, ReplyBuilder*) {
  CUfunction function;
  CUlaunchConfig config;
  std::vector<CUlaunchAttribute> attributes;
  if (const CUresult result = Configuration(session, in, &function, &attributes, &config); result != CUDA_SUCCESS) {
    return result;
  }
  return session.driver().cuOccupancyMaxActiveClusters(&out->value, function, &config);
}

CUresult Custom_cuOccupancyMaxPotentialClusterSize(WorkerSession& session, const Request&,
                                                   const wire::cuOccupancyMaxPotentialClusterSize_Request& in,
                                                   wire::cuOccupancyMaxPotentialClusterSize_Reply* out, ReplyBuilder*) {
  CUfunction function;
  CUlaunchConfig config;
  std::vector<CUlaunchAttribute> attributes;
  if (const CUresult result = Configuration(session, in, &function, &attributes, &config); result != CUDA_SUCCESS) {
    return result;
  }
  return session.driver().cuOccupancyMaxPotentialClusterSize(&out->value, function, &config);
}

}  // namespace cuda_remote::server
