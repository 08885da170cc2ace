// SPDX-License-Identifier: Apache-2.0
// Occupancy.
#include "softgpu/core/occupancy.h"

#include <algorithm>

#include "softgpu/api/api.h"
#include "softgpu/core/launch.h"
#include "softgpu/core/module.h"

namespace cuda_remote::softgpu {

uint32_t RegistersOf(const Function& function) {
  uint32_t threads = std::max(1u, function.info->max_threads);
  uint32_t room = kRegistersPerMultiprocessor / ((threads + 31) / 32 * 32) / 8 * 8;
  return std::max(16u, std::min({function.info->register_estimate, room, 255u}));
}

int BlocksPerMultiprocessor(const Function& function, uint32_t block_threads, uint64_t dynamic_shared) {
  if (block_threads == 0 || block_threads > function.info->max_threads) return 0;
  if (dynamic_shared + function.info->static_shared_bytes > kSharedPerBlockOptin) return 0;
  uint32_t warps = (block_threads + 31) / 32;
  uint32_t registers_per_warp = (RegistersOf(function) * 32 + 255) / 256 * 256;
  uint64_t shared = dynamic_shared + function.info->static_shared_bytes + kReservedSharedPerBlock;
  shared = (shared + 127) / 128 * 128;
  uint64_t blocks = kBlocksPerMultiprocessor;
  blocks = std::min<uint64_t>(blocks, kThreadsPerMultiprocessor / 32 / warps);
  blocks = std::min<uint64_t>(blocks, kRegistersPerMultiprocessor / registers_per_warp / warps);
  blocks = std::min<uint64_t>(blocks, kSharedPerMultiprocessor / shared);
  return static_cast<int>(blocks);
}

}  // namespace cuda_remote::softgpu

using namespace cuda_remote::softgpu;

SOFTGPU_API cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, CUfunction handle, int block_size,
                                                                 size_t dynamic_shared, unsigned int flags) {
  SOFTGPU_ENTER_CONTEXT(context);
  if (blocks == nullptr || block_size <= 0 || flags > CU_OCCUPANCY_DISABLE_CACHING_OVERRIDE) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  FunctionPtr function;
  if (CUresult result = ResolveFunction(context, handle, &function); result != CUDA_SUCCESS) return result;
  *blocks = BlocksPerMultiprocessor(*function, block_size, dynamic_shared);
  return CUDA_SUCCESS;
}

SOFTGPU_API cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction handle, int block_size,
                                                        size_t dynamic_shared) {
  return cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, handle, block_size, dynamic_shared, 0);
}

SOFTGPU_API cuOccupancyMaxPotentialBlockSizeWithFlags(int* min_grid, int* block_size, CUfunction handle,
                                                      CUoccupancyB2DSize shared_of, size_t dynamic_shared, int limit,
                                                      unsigned int flags) {
  SOFTGPU_ENTER_CONTEXT(context);
  if (min_grid == nullptr || block_size == nullptr) return CUDA_ERROR_INVALID_VALUE;
  FunctionPtr function;
  if (CUresult result = ResolveFunction(context, handle, &function); result != CUDA_SUCCESS) return result;
  int max = static_cast<int>(function->info->max_threads);
  if (limit > 0) max = std::min(max, limit);
  int best_threads = 0, best_size = 0, best_blocks = 0;
  // From large to small, in warps (the first may be a part of one), as long as more threads are resident.
  for (int size = max; size > 0; size = (size - 1) / 32 * 32) {
    size_t shared = shared_of != nullptr ? shared_of(size) : dynamic_shared;
    int blocks = BlocksPerMultiprocessor(*function, size, shared);
    if (blocks * size > best_threads) {
      best_threads = blocks * size;
      best_size = size;
      best_blocks = blocks;
    }
  }
  *block_size = best_size;
  *min_grid = best_blocks * kMultiprocessors;
  return CUDA_SUCCESS;
}

SOFTGPU_API cuOccupancyMaxPotentialBlockSize(int* min_grid, int* block_size, CUfunction handle,
                                             CUoccupancyB2DSize shared_of, size_t dynamic_shared, int limit) {
  return cuOccupancyMaxPotentialBlockSizeWithFlags(min_grid, block_size, handle, shared_of, dynamic_shared, limit, 0);
}

SOFTGPU_API cuOccupancyAvailableDynamicSMemPerBlock(size_t* bytes, CUfunction handle, int blocks, int block_size) {
  SOFTGPU_ENTER_CONTEXT(context);
  if (bytes == nullptr || blocks <= 0 || block_size <= 0) return CUDA_ERROR_INVALID_VALUE;
  FunctionPtr function;
  if (CUresult result = ResolveFunction(context, handle, &function); result != CUDA_SUCCESS) return result;
  int64_t each = kSharedPerMultiprocessor / blocks / 128 * 128 - kReservedSharedPerBlock;
  each = std::min<int64_t>(each, kSharedPerBlockOptin) - function->info->static_shared_bytes;
  *bytes = static_cast<size_t>(std::max<int64_t>(each, 0));
  return CUDA_SUCCESS;
}

namespace {

// How many clusters of so many blocks fit on the GPU, any of whose multiprocessors may be in one.
int Clusters(const Function& function, const CUlaunchConfig& config, uint64_t blocks) {
  const uint64_t threads = uint64_t{config.blockDimX} * config.blockDimY * config.blockDimZ;
  if (threads > 1024) return 0;
  const int each = BlocksPerMultiprocessor(function, static_cast<uint32_t>(threads), config.sharedMemBytes);
  return static_cast<int>(uint64_t(kMultiprocessors) * each / blocks);
}

}  // namespace

SOFTGPU_API cuOccupancyMaxPotentialClusterSize(int* size, CUfunction handle, const CUlaunchConfig* config) {
  SOFTGPU_ENTER_CONTEXT(context);
  if (size == nullptr || handle == nullptr || config == nullptr) return CUDA_ERROR_INVALID_VALUE;
  FunctionPtr function;
  if (CUresult result = ResolveFunction(context, handle, &function); result != CUDA_SUCCESS) return result;
  uint32_t most = function->settings->non_portable_cluster() ? ptx::kMaxCluster : ptx::kPortableCluster;
  if (function->info->max_cluster != 0) most = std::min(most, function->info->max_cluster);
  if (ComputeMajor() < 9) most = 1;
  while (most > 1 && Clusters(*function, *config, most) == 0) most /= 2;
  *size = static_cast<int>(most);
  return CUDA_SUCCESS;
}

SOFTGPU_API cuOccupancyMaxActiveClusters(int* clusters, CUfunction handle, const CUlaunchConfig* config) {
  SOFTGPU_ENTER_CONTEXT(context);
  if (clusters == nullptr || handle == nullptr || config == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (config->numAttrs != 0 && config->attrs == nullptr) return CUDA_ERROR_INVALID_VALUE;
  FunctionPtr function;
  if (CUresult result = ResolveFunction(context, handle, &function); result != CUDA_SUCCESS) return result;
  LaunchAttributes attributes;
  for (unsigned i = 0; i < config->numAttrs; ++i) attributes[config->attrs[i].id] = config->attrs[i].value;
  const ptx::Dim3 grid{config->gridDimX, config->gridDimY, config->gridDimZ};
  ptx::Dim3 size;
  bool explicit_size = false;
  if (CUresult result = ClusterSize(*function, grid, attributes, &size, &explicit_size); result != CUDA_SUCCESS) {
    return result;
  }
  *clusters = Clusters(*function, *config, uint64_t{size.x} * size.y * size.z);
  return CUDA_SUCCESS;
}
