// SPDX-License-Identifier: Apache-2.0
// Kernel launches.
#include "softgpu/core/launch.h"

#include <algorithm>
#include <cstring>

#include "proto/threads/mutex.h"
#include "softgpu/api/api.h"
#include "softgpu/core/event.h"
#include "softgpu/core/graph.h"
#include "softgpu/core/occupancy.h"
#include "softgpu/core/stream.h"

namespace cuda_remote::softgpu {
namespace {

CUresult CopyParams(const ptx::KernelInfo& info, void** params, void** extra, std::string* out) {
  if (params != nullptr && extra != nullptr) return CUDA_ERROR_INVALID_VALUE;
  out->assign(info.param_bytes, 0);
  if (extra != nullptr) {
    const char* buffer = nullptr;
    size_t bytes = 0;
    for (int i = 0; extra[i] != CU_LAUNCH_PARAM_END; i += 2) {
      if (extra[i] == CU_LAUNCH_PARAM_BUFFER_POINTER) {
        buffer = static_cast<const char*>(extra[i + 1]);
      } else if (extra[i] == CU_LAUNCH_PARAM_BUFFER_SIZE) {
        bytes = *static_cast<const size_t*>(extra[i + 1]);
      } else {
        return CUDA_ERROR_INVALID_VALUE;
      }
    }
    // A shorter buffer leaves the rest zero; none at all, and a longer one, are refused.
    if ((bytes == 0 || buffer == nullptr) && info.param_bytes != 0) return CUDA_ERROR_INVALID_VALUE;
    if (bytes > info.param_bytes) return CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES;
    if (bytes != 0) std::memcpy(out->data(), buffer, bytes);
    return CUDA_SUCCESS;
  }
  if (info.params.empty()) return CUDA_SUCCESS;
  if (params == nullptr) return CUDA_ERROR_INVALID_VALUE;
  for (size_t i = 0; i < info.params.size(); ++i) {
    if (params[i] == nullptr) return CUDA_ERROR_INVALID_VALUE;
    std::memcpy(out->data() + info.params[i].offset, params[i], info.params[i].size);
  }
  return CUDA_SUCCESS;
}

// Prepares the kernel when it is launched for the first time, and names what the interpreter cannot run. (No call_once:
// its variables of the C++ library would be exported.)
CUresult CheckSupported(Function* function, const Module& module) {
  int state = function->supported.load(std::memory_order_acquire);
  if (state == 0) {
    MutexLock lock(&function->mutex);
    state = function->supported.load(std::memory_order_relaxed);
    if (state == 0) {
      const Status runs = module.code().Check(function->name);
      state = runs.ok() ? 1 : -1;
      if (!runs.ok()) Log("kernel cannot be run: " + runs.message());
      function->supported.store(state, std::memory_order_release);
    }
  }
  return state > 0 ? CUDA_SUCCESS : CUDA_ERROR_NOT_SUPPORTED;
}

}  // namespace

CUresult MakeLaunch(const ContextPtr& context, const LaunchRequest& request, KernelWork* work) {
  FunctionPtr function;
  if (CUresult result = ResolveFunction(context, request.function, &function); result != CUDA_SUCCESS) return result;
  ModulePtr module = function->module.lock();
  if (!module) return CUDA_ERROR_INVALID_HANDLE;
  const ptx::Dim3 &grid = request.grid, &block = request.block;
  if (grid.x == 0 || grid.y == 0 || grid.z == 0 || block.x == 0 || block.y == 0 || block.z == 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (grid.x > 2147483647u || grid.y > 65535 || grid.z > 65535) return CUDA_ERROR_INVALID_VALUE;
  if (block.x > 1024 || block.y > 1024 || block.z > 64) return CUDA_ERROR_INVALID_VALUE;
  uint64_t threads = uint64_t{block.x} * block.y * block.z;
  if (threads > 1024 || threads > function->info->max_threads) return CUDA_ERROR_INVALID_VALUE;
  if (request.shared_bytes > static_cast<uint32_t>(function->MaxDynamicShared())) return CUDA_ERROR_INVALID_VALUE;
  if (CUresult result = CopyParams(*function->info, request.params, request.extra, &work->params);
      result != CUDA_SUCCESS) {
    return result;
  }
  if (CUresult result = CheckSupported(function.get(), *module); result != CUDA_SUCCESS) return result;
  const KernelPtr kernel = Registry<Kernel>::Get().Find(reinterpret_cast<CUkernel>(request.function));
  work->kernel = kernel ? kernel->handle() : nullptr;
  work->function = std::move(function);
  work->module = std::move(module);
  work->grid = grid;
  work->block = block;
  work->shared_bytes = request.shared_bytes;
  return SetAttributes(request.attributes, work);
}

bool Asked(const LaunchAttributes& attributes, CUlaunchAttributeID id) {
  const auto found = attributes.find(id);
  return found != attributes.end() && found->second.cooperative != 0;  // all yes or no attributes are an int
}

CUresult ClusterSize(const Function& function, const ptx::Dim3& grid, const LaunchAttributes& attributes,
                     ptx::Dim3* size, bool* explicit_size) {
  const ptx::KernelInfo& info = *function.info;
  const FunctionSettings& settings = *function.settings;
  ptx::Dim3 required{info.required_cluster[0], info.required_cluster[1], info.required_cluster[2]};
  if (required.x == 0) {
    const auto set = [&](CUfunction_attribute axis) { return uint32_t(settings.Get(axis, 0)); };
    required = {set(CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH), set(CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_HEIGHT),
                set(CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_DEPTH)};
  }
  const auto found = attributes.find(CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION);
  const bool says = found != attributes.end();
  ptx::Dim3 given;
  if (says) given = {found->second.clusterDim.x, found->second.clusterDim.y, found->second.clusterDim.z};
  if (says && (given.x == 0 || given.y == 0 || given.z == 0)) return CUDA_ERROR_INVALID_CLUSTER_SIZE;
  if (says && required.x != 0 && (given.x != required.x || given.y != required.y || given.z != required.z)) {
    return CUDA_ERROR_INVALID_CLUSTER_SIZE;
  }
  *explicit_size = says || required.x != 0;
  *size = says ? given : required.x != 0 ? required : ptx::Dim3{1, 1, 1};
  if (!*explicit_size && info.needs_cluster) return CUDA_ERROR_INVALID_CLUSTER_SIZE;
  const uint64_t blocks = uint64_t{size->x} * size->y * size->z;
  uint32_t most = settings.non_portable_cluster() ? ptx::kMaxCluster : ptx::kPortableCluster;
  if (info.max_cluster != 0) most = std::min(most, info.max_cluster);
  if (blocks > 1 && ComputeMajor() < 9) return CUDA_ERROR_INVALID_CLUSTER_SIZE;
  if (blocks > most) return CUDA_ERROR_INVALID_CLUSTER_SIZE;
  if (grid.x % size->x != 0 || grid.y % size->y != 0 || grid.z % size->z != 0) return CUDA_ERROR_INVALID_CLUSTER_SIZE;
  return CUDA_SUCCESS;
}

CUresult SetAttributes(LaunchAttributes attributes, KernelWork* work) {
  ptx::Dim3 cluster;
  bool explicit_cluster = false;
  if (CUresult result = ClusterSize(*work->function, work->grid, attributes, &cluster, &explicit_cluster);
      result != CUDA_SUCCESS) {
    return result;
  }
  const ptx::Dim3 &grid = work->grid, &block = work->block;
  const bool cooperative = Asked(attributes, CU_LAUNCH_ATTRIBUTE_COOPERATIVE);
  const uint64_t in_cluster = uint64_t{cluster.x} * cluster.y * cluster.z;
  const uint64_t room = uint64_t{kMultiprocessors} *
                        BlocksPerMultiprocessor(*work->function, block.x * block.y * block.z, work->shared_bytes);
  if (cooperative && uint64_t{grid.x} * grid.y * grid.z > room) return CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE;
  if (in_cluster > 1 && in_cluster > room) return CUDA_ERROR_INVALID_CLUSTER_SIZE;
  work->cluster = cluster;
  work->explicit_cluster = explicit_cluster;
  work->cooperative = cooperative;
  work->attributes = std::move(attributes);
  return CUDA_SUCCESS;
}

}  // namespace cuda_remote::softgpu

using namespace cuda_remote::softgpu;

namespace {

CUresult Launch(const LaunchRequest& request, CUstream handle) {
  ContextPtr context;
  StreamPtr stream;
  if (CUresult result = ResolveStream(handle, &context, &stream); result != CUDA_SUCCESS) return result;
  KernelWork work;
  if (CUresult result = MakeLaunch(stream->context(), request, &work); result != CUDA_SUCCESS) return result;
  if (work.module->context() != stream->context()->Home().get()) return CUDA_ERROR_INVALID_HANDLE;
  return Issue(stream, std::move(work));
}

}  // namespace

SOFTGPU_API cuLaunchKernel(CUfunction function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z,
                           unsigned int block_x, unsigned int block_y, unsigned int block_z, unsigned int shared,
                           CUstream stream, void** params, void** extra) {
  SOFTGPU_ENTER();
  return Launch({function, {grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, shared, params, extra, {}}, stream);
}

SOFTGPU_API cuLaunchCooperativeKernel(CUfunction function, unsigned int grid_x, unsigned int grid_y,
                                      unsigned int grid_z, unsigned int block_x, unsigned int block_y,
                                      unsigned int block_z, unsigned int shared, CUstream stream, void** params) {
  SOFTGPU_ENTER();
  CUlaunchAttributeValue yes = {};
  yes.cooperative = 1;
  return Launch({function,
                 {grid_x, grid_y, grid_z},
                 {block_x, block_y, block_z},
                 shared,
                 params,
                 nullptr,
                 {{CU_LAUNCH_ATTRIBUTE_COOPERATIVE, yes}}},
                stream);
}

SOFTGPU_API cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** params, void** extra) {
  SOFTGPU_ENTER();
  if (config == nullptr || (config->numAttrs != 0 && config->attrs == nullptr)) return CUDA_ERROR_INVALID_VALUE;
  LaunchRequest request = {function,
                           {config->gridDimX, config->gridDimY, config->gridDimZ},
                           {config->blockDimX, config->blockDimY, config->blockDimZ},
                           config->sharedMemBytes,
                           params,
                           extra,
                           {}};
  std::vector<CUevent> events;
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    const CUlaunchAttribute& attribute = config->attrs[i];
    switch (attribute.id) {
      case CU_LAUNCH_ATTRIBUTE_IGNORE:
        break;
      case CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT:
        events.push_back(attribute.value.programmaticEvent.event);
        break;
      case CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT:
        events.push_back(attribute.value.launchCompletionEvent.event);
        break;
      default:  // those that are hints are kept too, for graphs
        request.attributes[attribute.id] = attribute.value;
        break;
    }
  }
  if (CUresult result = Launch(request, config->hStream); result != CUDA_SUCCESS) return result;
  for (CUevent event : events) {
    if (CUresult result = cuEventRecord(event, config->hStream); result != CUDA_SUCCESS) return result;
  }
  return CUDA_SUCCESS;
}
