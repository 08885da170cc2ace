// SPDX-License-Identifier: Apache-2.0
// Kernel launches: the hot path. A launch that looks right is sent without waiting; one that looks wrong is sent and
// waited for, so that the error is the driver's own and comes from the launch, as natively.

#include <cuda.h>

#include <atomic>

#include "client/calls/bodies.gen.h"
#include "client/calls/function_info.h"
#include "client/calls/kernel_params.h"
#include "client/calls/mapped_memory.h"
#include "client/core/call.h"
#include "client/core/session.h"
#include "proto/codec/codec.h"

namespace cuda_remote::client {
namespace {

struct Shape {
  unsigned grid[3];
  unsigned block[3];
  unsigned dynamic_shared_bytes;
};

// Local memory of each thread that a context has from the beginning (CU_LIMIT_STACK_SIZE, unless it was changed).
constexpr int64_t kLocalAtHand = 1024;

// Whether the driver can be expected to accept this. A "no" only costs the wait for the driver's own answer.
bool LooksValid(const Device& device, const FunctionInfo& info, const Shape& shape, const std::string& block) {
  if (block.size() != info.params_bytes) return false;
  static constexpr CUdevice_attribute kGrid[3] = {
      CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X, CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y, CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z};
  static constexpr CUdevice_attribute kBlock[3] = {
      CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X, CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y, CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z};
  uint64_t threads = 1;
  for (int i = 0; i < 3; ++i) {
    if (shape.grid[i] == 0 || shape.grid[i] > unsigned(device.Attribute(kGrid[i]))) return false;
    if (shape.block[i] == 0 || shape.block[i] > unsigned(device.Attribute(kBlock[i]))) return false;
    threads *= shape.block[i];
  }
  const auto attribute = [&info](CUfunction_attribute which) -> int64_t {
    return size_t(which) < info.attributes.size() ? info.attributes[which] : kRefused;
  };
  // Clusters whose size the code gives have to fill the grid. One that leaves it to the launch is asked about.
  static constexpr CUfunction_attribute kCluster[3] = {CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH,
                                                       CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_HEIGHT,
                                                       CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_DEPTH};
  for (int i = 0; i < 3; ++i) {
    const int64_t size = attribute(kCluster[i]);
    if (size > 0 && shape.grid[i] % size != 0) return false;
  }
  if (attribute(CU_FUNC_ATTRIBUTE_CLUSTER_SIZE_MUST_BE_SET) > 0 && attribute(kCluster[0]) <= 0) return false;
  if (int64_t(threads) > attribute(CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK)) return false;
  if (int64_t(shape.dynamic_shared_bytes) > attribute(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES)) return false;
  // For the first launch the driver has to find local memory of that size for all threads that the GPU can run at once.
  return attribute(CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES) <= kLocalAtHand || info.accepted.load(std::memory_order_relaxed);
}

// Whether the stream is known to be of another context than the function, which the driver refuses. Streams of green
// contexts are not looked at.
bool IsOfAnotherContext(Call& call, uint64_t function, uint64_t stream) {
  RecordedObjects& objects = call.session().objects();
  if (!objects.several_contexts() || KindOf(function) != Kind::kFunction) return false;
  ThreadState& thread = call.thread();
  if (KindOf(stream) != Kind::kStream) stream = thread.current_context();
  ThreadState::Fit& fit = thread.fits[(SlotOf(function) * 31 + SlotOf(stream)) % ThreadState::kFits];
  if (fit.function == function && fit.stream == stream) return false;
  const uint64_t of_function = objects.ContextOf(function), of_stream = objects.ContextOf(stream);
  const bool of_contexts = KindOf(of_function) == Kind::kContext && KindOf(of_stream) == Kind::kContext;
  if (of_contexts && of_function != of_stream) return true;
  fit = {function, stream};
  return false;
}

std::string& ParameterBlock(Call& call) {
  // The reply buffer is not in use while the request is being made.
  return call.scratch();
}

// Bytes of an attribute's value that mean something; 0 for those that a launch is always waited for: they name events
// or make nodes of graphs, or are not known here.
size_t MeaningfulBytes(const CUlaunchAttribute& attribute) {
  const CUlaunchAttributeValue& value = attribute.value;
  switch (attribute.id) {
    case CU_LAUNCH_ATTRIBUTE_COOPERATIVE:
    case CU_LAUNCH_ATTRIBUTE_SYNCHRONIZATION_POLICY:
    case CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE:
    case CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION:
    case CU_LAUNCH_ATTRIBUTE_PRIORITY:
    case CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN:
    case CU_LAUNCH_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT:
      return sizeof(int);
    case CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP:
      return sizeof(value.memSyncDomainMap);
    case CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION:
      return sizeof(value.clusterDim);
    case CU_LAUNCH_ATTRIBUTE_PREFERRED_CLUSTER_DIMENSION:
      return sizeof(value.preferredClusterDim);
    default:
      return 0;
  }
}

// What the driver's opinion of a launch with attributes depends on, apart from settings of the function. False if it
// may depend on more.
bool DescribeLaunch(uint64_t function, const Shape& shape, const CUlaunchConfig& config, std::string* description) {
  const auto add = [description](const void* bytes, size_t count) {
    description->append(static_cast<const char*>(bytes), count);
  };
  description->assign("launch ");
  add(&function, sizeof(function));
  add(&shape, sizeof(shape));
  for (unsigned i = 0; i < config.numAttrs; ++i) {
    const CUlaunchAttribute& attribute = config.attrs[i];
    if (attribute.id == CU_LAUNCH_ATTRIBUTE_IGNORE) continue;
    const size_t bytes = MeaningfulBytes(attribute);
    if (bytes == 0) return false;
    add(&attribute.id, sizeof(attribute.id));
    add(&attribute.value, bytes);
  }
  return true;
}

// Fills in the request of a launch, but for attributes. *looks_valid: whether the driver can be expected to accept it
// if there are none. On the hot path: always part of the two callers.
[[gnu::always_inline]] inline CUresult MakeLaunch(Call& call, CUstream stream, bool per_thread, CUfunction function,
                                                  const Shape& shape, void** parameters, void** extra,
                                                  wire::cuLaunchKernel_Request* request, const FunctionInfo** info,
                                                  bool* looks_valid) {
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  // First the stream: a kernel is launched in its context.
  if (const CUresult result = call.StreamToWire(stream, per_thread, &request->stream); result != CUDA_SUCCESS) {
    return result;
  }
  request->f = reinterpret_cast<uint64_t>(function);
  if (const CUresult result = FindFunctionInfo(call, request->f, info); result != CUDA_SUCCESS) return result;
  std::string& block = ParameterBlock(call);
  if (const CUresult result = PackParameters(**info, parameters, extra, &block); result != CUDA_SUCCESS) return result;
  if (const CUresult result = MapParameters(call, block, false); result != CUDA_SUCCESS) return result;
  request->grid_x = shape.grid[0];
  request->grid_y = shape.grid[1];
  request->grid_z = shape.grid[2];
  request->block_x = shape.block[0];
  request->block_y = shape.block[1];
  request->block_z = shape.block[2];
  request->shared_bytes = shape.dynamic_shared_bytes;
  request->params = block;
  *looks_valid =
      LooksValid(CurrentDevice(call), **info, shape, block) && !IsOfAnotherContext(call, request->f, request->stream);
  return CUDA_SUCCESS;
}

CUresult SendLaunch(Call& call, const FunctionInfo& info, bool looks_valid) {
  call.KernelsBegin();
  if (looks_valid) return call.Send();
  const CUresult result = call.Transact();
  if (result == CUDA_SUCCESS) info.accepted.store(true, std::memory_order_relaxed);
  return result;
}

}  // namespace

CUresult Custom_cuLaunchKernel(CUfunction f, unsigned int gridDimX, unsigned int gridDimY, unsigned int gridDimZ,
                               unsigned int blockDimX, unsigned int blockDimY, unsigned int blockDimZ,
                               unsigned int sharedMemBytes, CUstream hStream, void** kernelParams, void** extra,
                               bool per_thread) {
  Call call(info::k_cuLaunchKernel);
  const Shape shape{{gridDimX, gridDimY, gridDimZ}, {blockDimX, blockDimY, blockDimZ}, sharedMemBytes};
  wire::cuLaunchKernel_Request request;
  const FunctionInfo* info = nullptr;
  bool looks_valid = false;
  const CUresult result =
      MakeLaunch(call, hStream, per_thread, f, shape, kernelParams, extra, &request, &info, &looks_valid);
  if (result != CUDA_SUCCESS) return result;
  request.Encode(&call.message());
  return SendLaunch(call, *info, looks_valid);
}

CUresult Custom_cuLaunchCooperativeKernel(CUfunction f, unsigned int gridDimX, unsigned int gridDimY,
                                          unsigned int gridDimZ, unsigned int blockDimX, unsigned int blockDimY,
                                          unsigned int blockDimZ, unsigned int sharedMemBytes, CUstream hStream,
                                          void** kernelParams, bool per_thread) {
  CUlaunchAttribute cooperative{};
  cooperative.id = CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
  cooperative.value.cooperative = 1;
  CUlaunchConfig config{};
  config.gridDimX = gridDimX;
  config.gridDimY = gridDimY;
  config.gridDimZ = gridDimZ;
  config.blockDimX = blockDimX;
  config.blockDimY = blockDimY;
  config.blockDimZ = blockDimZ;
  config.sharedMemBytes = sharedMemBytes;
  config.hStream = hStream;
  config.attrs = &cooperative;
  config.numAttrs = 1;
  return Custom_cuLaunchKernelEx(&config, f, kernelParams, nullptr, per_thread);
}

// Launch attributes are plain values but for those that name events; these go as virtual handles and the server
// translates them.
CUresult Custom_cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction f, void** kernelParams, void** extra,
                                 bool per_thread) {
  if (!config || (config->numAttrs && !config->attrs)) return CUDA_ERROR_INVALID_VALUE;
  Call call(info::k_cuLaunchKernelEx);
  const Shape shape{{config->gridDimX, config->gridDimY, config->gridDimZ},
                    {config->blockDimX, config->blockDimY, config->blockDimZ},
                    config->sharedMemBytes};
  wire::cuLaunchKernel_Request request;
  const FunctionInfo* info = nullptr;
  bool expected = false;
  if (const CUresult result =
          MakeLaunch(call, config->hStream, per_thread, f, shape, kernelParams, extra, &request, &info, &expected);
      result != CUDA_SUCCESS) {
    return result;
  }
  request.attributes =
      std::string_view(reinterpret_cast<const char*>(config->attrs), config->numAttrs * sizeof(CUlaunchAttribute));
  request.Encode(&call.message());
  if (config->numAttrs == 0) return SendLaunch(call, *info, expected);
  // With attributes (clusters, cooperative launches) the limits are more than a few comparisons: the driver is asked
  // once for each launch that differs.
  Answers& answers = call.session().answers();
  std::string description;
  const bool plain = DescribeLaunch(request.f, shape, *config, &description);
  if (plain) call.session().objects().AppendSettings(request.f, &description);
  expected = expected && plain && answers.Find(description, nullptr);
  const uint64_t stamp = answers.stamp();
  const CUresult result = SendLaunch(call, *info, expected);
  if (plain) {
    if (result == CUDA_SUCCESS && !expected) answers.Keep(stamp, description, "");
  } else {
    call.session().completions().SomeEventsRecorded();
  }
  return result;
}

}  // namespace cuda_remote::client
