// SPDX-License-Identifier: Apache-2.0
// What a context, its streams, functions and pools can be told: each is set to something that is not the default, and
// asked for after every step. Statics inside of kernels count the steps. Two contexts, set differently.
#include <cuda.h>
#include <cuda_runtime.h>

#include <string>
#include <vector>

#include "tests/apps/support/driver.h"

__global__ void Count(unsigned long long* out) {
  static __device__ unsigned long long calls = 5;
  __shared__ unsigned long long shared[16];
  shared[threadIdx.x % 16] = ++calls;
  __syncthreads();
  *out = shared[0];
}

// Everything that can be asked for, by name.
struct State {
  std::vector<std::pair<std::string, uint64_t>> values;
  void Add(const std::string& name, uint64_t value) { values.emplace_back(name, value); }
};

struct Side {
  CUcontext context;
  CUstream stream;
  CUmemoryPool pool;
  CUfunction function;
  CUmodule module;
  CUlibrary library;
  CUkernel kernel;  // of the library
  CUfunction of_kernel;
  CUdeviceptr memory, window;
  CUevent recorded, captured;  // the second one was last recorded in a capture
};

static const char kKernel[] = R"(
.version 7.0
.target sm_75
.address_size 64
.visible .entry plain(.param .u64 p)
{
  .reg .b64 %rd<3>;
  ld.param.u64 %rd1, [p];
  ld.global.u64 %rd2, [%rd1];
  add.u64 %rd2, %rd2, 1;
  st.global.u64 [%rd1], %rd2;
  ret;
}
)";

static void Set(Side* side, CUdevice device, int number) {
  CU_CHECK(cuCtxSetLimit(CU_LIMIT_STACK_SIZE, size_t(2048 * (number + 1))));
  CU_CHECK(cuCtxSetLimit(CU_LIMIT_PRINTF_FIFO_SIZE, size_t(3 + number) << 20));
  CU_CHECK(cuCtxSetLimit(CU_LIMIT_MALLOC_HEAP_SIZE, size_t(16 + 8 * number) << 20));
  CU_CHECK(cuCtxSetLimit(CU_LIMIT_MAX_L2_FETCH_GRANULARITY, number == 0 ? 32 : 128));
  int persisting = 0;
  CU_CHECK(cuDeviceGetAttribute(&persisting, CU_DEVICE_ATTRIBUTE_MAX_PERSISTING_L2_CACHE_SIZE, device));
  if (persisting > 0)
    CU_CHECK(cuCtxSetLimit(CU_LIMIT_PERSISTING_L2_CACHE_SIZE, size_t(persisting) / size_t(2 + number)));
  // Of the device runtime: not every GPU has both.
  const std::pair<CUlimit, size_t> of_device_runtime[] = {
      {CU_LIMIT_DEV_RUNTIME_SYNC_DEPTH, size_t(3 + number)},
      {CU_LIMIT_DEV_RUNTIME_PENDING_LAUNCH_COUNT, size_t(4096 * (number + 1))}};
  for (const auto& [limit, value] : of_device_runtime) {
    const CUresult result = cuCtxSetLimit(limit, value);
    if (result != CUDA_ERROR_UNSUPPORTED_LIMIT) CU_CHECK(result);
  }
  CU_CHECK(cuCtxSetCacheConfig(number == 0 ? CU_FUNC_CACHE_PREFER_L1 : CU_FUNC_CACHE_PREFER_SHARED));
  int least = 0, greatest = 0;
  CU_CHECK(cuCtxGetStreamPriorityRange(&least, &greatest));
  CU_CHECK(cuStreamCreateWithPriority(&side->stream, CU_STREAM_NON_BLOCKING, number == 0 ? greatest : least));
  CUgraph graph;
  CU_CHECK(cuEventCreate(&side->recorded, CU_EVENT_DEFAULT));
  CU_CHECK(cuEventCreate(&side->captured, CU_EVENT_DEFAULT));
  CU_CHECK(cuEventRecord(side->recorded, side->stream));
  CU_CHECK(cuEventRecord(side->captured, side->stream));
  CU_CHECK(cuStreamBeginCapture(side->stream, CU_STREAM_CAPTURE_MODE_RELAXED));
  CU_CHECK(cuEventRecord(side->captured, side->stream));
  CU_CHECK(cuStreamEndCapture(side->stream, &graph));
  CU_CHECK(cuGraphDestroy(graph));
  CU_CHECK(cuMemAlloc(&side->memory, 4096));
  CU_CHECK(cuMemsetD8(side->memory, 0, 4096));
  CU_CHECK(cuMemAlloc(&side->window, 1 << 20));
  // One stream has its attributes from another one, which is told something else then, and goes.
  CUstream told = side->stream;
  if (number == 1) CU_CHECK(cuStreamCreateWithPriority(&told, CU_STREAM_NON_BLOCKING, least));
  CUstreamAttrValue value = {};
  value.syncPolicy = number == 0 ? CU_SYNC_POLICY_YIELD : CU_SYNC_POLICY_BLOCKING_SYNC;
  CU_CHECK(cuStreamSetAttribute(told, CU_STREAM_ATTRIBUTE_SYNCHRONIZATION_POLICY, &value));
  if (persisting > 0) {
    value = {};
    value.accessPolicyWindow.base_ptr = reinterpret_cast<void*>(side->window);
    value.accessPolicyWindow.num_bytes = 64 << 10;
    value.accessPolicyWindow.hitRatio = 0.5f;
    value.accessPolicyWindow.hitProp = CU_ACCESS_PROPERTY_PERSISTING;
    value.accessPolicyWindow.missProp = CU_ACCESS_PROPERTY_STREAMING;
    CU_CHECK(cuStreamSetAttribute(told, CU_STREAM_ATTRIBUTE_ACCESS_POLICY_WINDOW, &value));
  }
  if (number == 1) {
    CU_CHECK(cuStreamCopyAttributes(side->stream, told));
    value = {};
    value.syncPolicy = CU_SYNC_POLICY_SPIN;
    CU_CHECK(cuStreamSetAttribute(told, CU_STREAM_ATTRIBUTE_SYNCHRONIZATION_POLICY, &value));
    CU_CHECK(cuStreamDestroy(told));
  }
  CU_CHECK(cuModuleLoadData(&side->module, kKernel));
  CU_CHECK(cuModuleGetFunction(&side->function, side->module, "plain"));
  CU_CHECK(cuFuncSetCacheConfig(side->function, CU_FUNC_CACHE_PREFER_EQUAL));
  CU_CHECK(cuFuncSetAttribute(side->function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 1024 * (number + 3)));
  CU_CHECK(cuFuncSetAttribute(side->function, CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 50 + number));
  // A kernel and its function have an attribute each.
  CU_CHECK(cuLibraryLoadData(&side->library, kKernel, nullptr, nullptr, 0, nullptr, nullptr, 0));
  CU_CHECK(cuLibraryGetKernel(&side->kernel, side->library, "plain"));
  CU_CHECK(cuKernelGetFunction(&side->of_kernel, side->kernel));
  const int of_kernel = 1024 * (number + 50), of_function = 1024 * (number + 60);
  CU_CHECK(cuFuncSetAttribute(side->of_kernel, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, of_function));
  CU_CHECK(cuKernelSetAttribute(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, of_kernel, side->kernel, device));
  CUmemPoolProps props = {};
  props.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
  props.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  props.location.id = device;
  CU_CHECK(cuMemPoolCreate(&side->pool, &props));
  cuuint64_t threshold = cuuint64_t(64 + number) << 20;
  int no = 0;
  CU_CHECK(cuMemPoolSetAttribute(side->pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &threshold));
  CU_CHECK(cuMemPoolSetAttribute(side->pool, CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC, &no));
  if (number == 0) CU_CHECK(cuDeviceSetMemPool(device, side->pool));
  CU_CHECK(cuCtxSynchronize());  // the stream does not wait for what the memory was set to
}

static State Ask(const Side& side, CUdevice device) {
  State state;
  for (const CUlimit limit : {CU_LIMIT_STACK_SIZE, CU_LIMIT_PRINTF_FIFO_SIZE, CU_LIMIT_MALLOC_HEAP_SIZE,
                              CU_LIMIT_MAX_L2_FETCH_GRANULARITY, CU_LIMIT_PERSISTING_L2_CACHE_SIZE}) {
    size_t bytes = 0;
    CU_CHECK(cuCtxGetLimit(&bytes, limit));
    state.Add("limit " + std::to_string(int(limit)), bytes);
  }
  for (const CUlimit limit : {CU_LIMIT_DEV_RUNTIME_SYNC_DEPTH, CU_LIMIT_DEV_RUNTIME_PENDING_LAUNCH_COUNT}) {
    size_t value = 0;
    const CUresult result = cuCtxGetLimit(&value, limit);
    if (result != CUDA_ERROR_UNSUPPORTED_LIMIT) CU_CHECK(result);
    state.Add("limit " + std::to_string(int(limit)), value);
  }
  CUfunc_cache cache;
  CU_CHECK(cuCtxGetCacheConfig(&cache));
  state.Add("cache configuration", uint64_t(cache));
  unsigned flags = 0;
  CU_CHECK(cuCtxGetFlags(&flags));
  state.Add("flags of the context", flags);
  CU_CHECK(cuStreamGetFlags(side.stream, &flags));
  state.Add("flags of the stream", flags);
  int number = 0;
  CU_CHECK(cuStreamGetPriority(side.stream, &number));
  state.Add("priority", uint64_t(int64_t(number)));
  CUstreamAttrValue value = {};
  CU_CHECK(cuStreamGetAttribute(side.stream, CU_STREAM_ATTRIBUTE_SYNCHRONIZATION_POLICY, &value));
  state.Add("synchronization policy", uint64_t(value.syncPolicy));
  value = {};
  CU_CHECK(cuStreamGetAttribute(side.stream, CU_STREAM_ATTRIBUTE_ACCESS_POLICY_WINDOW, &value));
  state.Add("window", reinterpret_cast<uint64_t>(value.accessPolicyWindow.base_ptr));
  state.Add("bytes of the window", value.accessPolicyWindow.num_bytes);
  state.Add("hits in the window", uint64_t(value.accessPolicyWindow.hitProp));
  state.Add("misses in the window", uint64_t(value.accessPolicyWindow.missProp));
  for (const CUfunction_attribute attribute :
       {CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT}) {
    CU_CHECK(cuFuncGetAttribute(&number, attribute, side.function));
    state.Add("attribute of the function " + std::to_string(int(attribute)), uint64_t(number));
  }
  CU_CHECK(cuFuncGetAttribute(&number, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, side.of_kernel));
  state.Add("attribute of the kernel's function", uint64_t(number));
  const int of_function = number;
  CU_CHECK(cuKernelGetAttribute(&number, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, side.kernel, device));
  state.Add("attribute of the kernel", uint64_t(number));
  APP_CHECK(of_function == number + 1024 * 10);
  CUmodule module;
  CUfunction of_module;
  CU_CHECK(cuLibraryGetModule(&module, side.library));
  CU_CHECK(cuModuleGetFunction(&of_module, module, "plain"));
  APP_CHECK(of_module == side.of_kernel);
  cuuint64_t threshold = 0;
  CU_CHECK(cuMemPoolGetAttribute(side.pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &threshold));
  state.Add("threshold of the pool", threshold);
  CU_CHECK(cuMemPoolGetAttribute(side.pool, CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC, &number));
  state.Add("reuse of the pool", uint64_t(number));
  // Results alone: what an event that was captured is good for is the driver's to say.
  float milliseconds = 0;
  state.Add("query of a captured event", uint64_t(cuEventQuery(side.captured)));
  state.Add("wait for a captured event", uint64_t(cuEventSynchronize(side.captured)));
  state.Add("time to a captured event", uint64_t(cuEventElapsedTime(&milliseconds, side.recorded, side.captured)));
  state.Add("time from a captured event", uint64_t(cuEventElapsedTime(&milliseconds, side.captured, side.recorded)));
  CUstream stream;
  CU_CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  state.Add("stream's wait for a captured event", uint64_t(cuStreamWaitEvent(stream, side.captured, 0)));
  CU_CHECK(cuStreamDestroy(stream));
  CU_CHECK(cuEventSynchronize(side.recorded));
  CUmemoryPool current;
  CU_CHECK(cuDeviceGetMemPool(&current, device));
  state.Add("current pool", reinterpret_cast<uint64_t>(current));
  return state;
}

int main(int argc, char** argv) {
  app::Options options = app::Parse(argc, argv, {10, 2});
  CU_CHECK(cuInit(0));
  CUdevice device;
  CU_CHECK(cuDeviceGet(&device, 0));
  CU_CHECK(cuDevicePrimaryCtxSetFlags(device, CU_CTX_SCHED_BLOCKING_SYNC));
  std::vector<Side> sides(2);
  CU_CHECK(cuDevicePrimaryCtxRetain(&sides[0].context, device));
  CU_CHECK(cuCtxCreate(&sides[1].context, nullptr, CU_CTX_SCHED_YIELD, device));
  std::vector<State> first;
  for (int i = 0; i < 2; ++i) {
    CU_CHECK(cuCtxSetCurrent(sides[size_t(i)].context));
    Set(&sides[size_t(i)], device, i);
  }
  for (const Side& side : sides) {
    CU_CHECK(cuCtxSetCurrent(side.context));
    first.push_back(Ask(side, device));
  }
  // A captured stream of one context records an event of the other one, for others than the capture's streams.
  CUevent external;
  CUgraph records;
  CU_CHECK(cuEventCreate(&external, CU_EVENT_DISABLE_TIMING));
  CU_CHECK(cuStreamBeginCapture(sides[0].stream, CU_STREAM_CAPTURE_MODE_RELAXED));
  CU_CHECK(cuEventRecordWithFlags(external, sides[0].stream, CU_EVENT_RECORD_EXTERNAL));
  CU_CHECK(cuStreamEndCapture(sides[0].stream, &records));
  app::Digest digest;
  for (int step = 1; step <= options.steps; ++step) {
    app::Step(step);  // a restart here must bring all of it back
    for (size_t i = 0; i < sides.size(); ++i) {
      const Side& side = sides[i];
      CU_CHECK(cuCtxSetCurrent(side.context));
      const State now = Ask(side, device);
      for (size_t k = 0; k < now.values.size(); ++k) {
        if (now.values[k] == first[i].values[k]) continue;
        fprintf(stderr, "context %zu: %s is %llu and was %llu\n", i, now.values[k].first.c_str(),
                static_cast<unsigned long long>(now.values[k].second),
                static_cast<unsigned long long>(first[i].values[k].second));
        return 1;
      }
      CUdeviceptr from_pool, memory = side.memory;
      CU_CHECK(cuMemAllocFromPoolAsync(&from_pool, 1000, side.pool, side.stream));
      void* parameters[] = {&memory};
      CU_CHECK(
          cuLaunchKernel(side.function, 1, 1, 1, 1, 1, 1, 1024 * unsigned(i + 3), side.stream, parameters, nullptr));
      CU_CHECK(
          cuLaunchKernel(side.of_kernel, 1, 1, 1, 1, 1, 1, 1024 * unsigned(i + 60), side.stream, parameters, nullptr));
      CU_CHECK(cuMemFreeAsync(from_pool, side.stream));
      uint64_t count = 0;
      CU_CHECK(cuStreamSynchronize(side.stream));
      CU_CHECK(cuMemcpyDtoH(&count, side.memory, sizeof(count)));
      APP_CHECK(count == uint64_t(2 * step));
      digest.Add(count);
    }
    CUgraphNode node;
    CUevent named;
    size_t count = 1;
    CU_CHECK(cuGraphGetNodes(records, &node, &count));
    CU_CHECK(cuGraphEventRecordNodeGetEvent(node, &named));
    APP_CHECK(count == 1 && named == external);
    for (const Side& side : sides) {  // each context has the static once
      CU_CHECK(cuCtxSetCurrent(side.context));
      unsigned long long* out;
      APP_CHECK(cudaMalloc(&out, sizeof(*out)) == cudaSuccess);
      Count<<<1, 1>>>(out);
      unsigned long long calls = 0;
      APP_CHECK(cudaMemcpy(&calls, out, sizeof(calls), cudaMemcpyDeviceToHost) == cudaSuccess);
      APP_CHECK(calls == 5 + static_cast<unsigned long long>(step));
      APP_CHECK(cudaFree(out) == cudaSuccess);
    }
  }
  printf("context_state steps=%d digest=%016" PRIx64 "\n", options.steps, digest.value());
  return 0;
}
