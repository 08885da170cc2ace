// SPDX-License-Identifier: Apache-2.0
#include "server/worker/session/driver_hooks.h"

#include <algorithm>
#include <map>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "proto/driverabi/array_format.h"
#include "server/worker/graphs/graph_nodes.h"
#include "server/worker/memory/gpu_reach.h"
#include "server/worker/memory/snapshot_memory.h"
#include "server/worker/session/current_context.h"

namespace cuda_remote::server {
namespace {

// C function pointers carry no state, and a worker serves one session.
DriverTable g_real;
DeviceArena* g_arena = nullptr;
DriverHooks g_hooks;
std::thread::id g_executor;
// Streams in which one was begun, and the nodes that its graph had then.
std::map<CUstream, std::vector<CUgraphNode>> g_captures;
std::set<CUstream> g_non_blocking;  // live streams that were made so
std::map<CUmemGenericAllocationHandle, uint64_t> g_physical;
std::map<uint64_t, uint64_t> g_arrays;  // their bytes
std::map<CUmemoryPool, CUmemPoolProps> g_pools;

// Runs what leaves the request's context current. A handler may have made another one current, and keeps it.
template <typename Run>
void KeepingCurrent(Run run) {
  CUcontext before = nullptr, after = nullptr;
  g_real.cuCtxGetCurrent(&before);
  run();
  g_real.cuCtxGetCurrent(&after);
  if (after == before) return;
  g_real.cuCtxSetCurrent(before);
  ForgetCurrent();
}

bool OnExecutor() { return std::this_thread::get_id() == g_executor; }

void Settle() {
  if (OnExecutor()) KeepingCurrent(g_hooks.settle);
}

// `stream` is about to be captured. While a blocking stream is, no call may look at the legacy stream.
void BeforeCapture(CUstream stream) {
  if (OnExecutor() && IsBlocking(stream) && !IsCaptured(stream)) KeepingCurrent(g_hooks.mark_legacy);
}

// Memory that was freed in streams, as far as they have passed the free, or all of it.
void CollectFrees(bool wait) {
  if (!OnExecutor() || !g_captures.empty()) return;
  KeepingCurrent([wait] { g_hooks.collect_frees(wait); });
}

// A function of the driver's that takes device memory: if there is none, it is called again without the memory that is
// kept here for later allocations.
template <auto kFunction>
struct WithRoom;

template <typename... Args, CUresult (CUDAAPI* DriverTable::*kFunction)(Args...)>
struct WithRoom<kFunction> {
  static CUresult CUDAAPI Call(Args... args) {
    const CUresult result = (g_real.*kFunction)(args...);
    if (result != CUDA_ERROR_OUT_OF_MEMORY) return result;
    CollectFrees(true);
    g_arena->Trim();
    return (g_real.*kFunction)(args...);
  }
};

template <auto... kFunctions>
void HookAllocating(DriverTable* table) {
  ((table->*kFunctions = &WithRoom<kFunctions>::Call), ...);
}

CUresult CUDAAPI MemGetInfo(size_t* free, size_t* total) {
  CollectFrees(false);
  CUdevice device = 0;
  const CUresult result = GpuMemoryInfo(&device, free, total);
  if (result == CUDA_SUCCESS) g_arena->Adjust(device, free, total);
  return result;
}

// What an array's elements take, at least; false if that is no number. Formats whose elements do not lie one after the
// other have at least half a byte for each.
bool ArrayBytes(const CUDA_ARRAY3D_DESCRIPTOR& array, unsigned levels, uint64_t* bytes) {
  *bytes = 0;
  // These get their memory from cuMemCreate.
  if (array.Flags & (CUDA_ARRAY3D_SPARSE | CUDA_ARRAY3D_DEFERRED_MAPPING)) return true;
  constexpr unsigned kMostLevels = 32;
  const uint64_t element = ArrayElementBytes(array.Format, array.NumChannels);
  const bool layers = (array.Flags & (CUDA_ARRAY3D_LAYERED | CUDA_ARRAY3D_CUBEMAP)) != 0;
  for (unsigned level = 0; level < std::min(levels, kMostLevels); ++level) {
    uint64_t count = std::max<uint64_t>(array.Width >> level, 1);
    const uint64_t height = std::max<uint64_t>(array.Height >> level, 1);
    const uint64_t depth = std::max<uint64_t>(layers ? array.Depth : array.Depth >> level, 1);
    if (__builtin_mul_overflow(count, height, &count) || __builtin_mul_overflow(count, depth, &count) ||
        __builtin_mul_overflow(count, std::max<uint64_t>(element, 1), &count) ||
        __builtin_add_overflow(*bytes, element == 0 ? count / 2 : count, bytes)) {
      return false;
    }
  }
  return true;
}

// Makes an array by `create`, counted.
template <typename Array, typename Create>
CUresult CreateArray(Array* array, const CUDA_ARRAY3D_DESCRIPTOR& descriptor, unsigned levels, Create create) {
  uint64_t bytes = 0;
  // No driver makes one with more bytes than there are numbers.
  if (!ArrayBytes(descriptor, levels, &bytes)) return create();
  if (!ChargeWithRoom(bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
  const CUresult result = create();
  if (result == CUDA_SUCCESS) {
    g_arrays[reinterpret_cast<uint64_t>(*array)] = bytes;
  } else {
    g_arena->Discharge(bytes);
  }
  return result;
}

CUresult CUDAAPI ArrayCreate(CUarray* array, const CUDA_ARRAY_DESCRIPTOR* flat) {
  const CUDA_ARRAY3D_DESCRIPTOR descriptor = {flat->Width, flat->Height, 0, flat->Format, flat->NumChannels, 0};
  return CreateArray(array, descriptor, 1, [&] { return WithRoom<&DriverTable::cuArrayCreate_v2>::Call(array, flat); });
}

CUresult CUDAAPI Array3DCreate(CUarray* array, const CUDA_ARRAY3D_DESCRIPTOR* descriptor) {
  return CreateArray(array, *descriptor, 1,
                     [&] { return WithRoom<&DriverTable::cuArray3DCreate_v2>::Call(array, descriptor); });
}

CUresult CUDAAPI MipmappedArrayCreate(CUmipmappedArray* array, const CUDA_ARRAY3D_DESCRIPTOR* descriptor,
                                      unsigned levels) {
  return CreateArray(array, *descriptor, levels,
                     [&] { return WithRoom<&DriverTable::cuMipmappedArrayCreate>::Call(array, descriptor, levels); });
}

CUresult CUDAAPI MemCreate(CUmemGenericAllocationHandle* handle, size_t size, const CUmemAllocationProp* prop,
                           unsigned long long flags) {
  // The application could not reach host memory that this process has. Devices say that they do not offer it.
  if (prop != nullptr && prop->location.type != CU_MEM_LOCATION_TYPE_DEVICE &&
      prop->location.type != CU_MEM_LOCATION_TYPE_INVALID) {
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  if (!ChargeWithRoom(size)) return CUDA_ERROR_OUT_OF_MEMORY;
  const CUresult result = WithRoom<&DriverTable::cuMemCreate>::Call(handle, size, prop, flags);
  if (result == CUDA_SUCCESS) {
    g_physical[*handle] = size;
  } else {
    g_arena->Discharge(size);
  }
  return result;
}

CUresult CUDAAPI MemPoolCreate(CUmemoryPool* pool, const CUmemPoolProps* props) {
  const CUresult result = g_real.cuMemPoolCreate(pool, props);
  if (result != CUDA_SUCCESS) return result;
  // Limits are in the driver's chunks.
  constexpr size_t kChunk = size_t{32} << 20;
  CUmemPoolProps& kept = g_pools[*pool] = *props;
  kept.maxSize = kept.maxSize > SIZE_MAX - kChunk ? 0 : (kept.maxSize + kChunk - 1) / kChunk * kChunk;
  return CUDA_SUCCESS;
}

CUresult CUDAAPI MemPoolDestroy(CUmemoryPool pool) {
  const CUresult result = g_real.cuMemPoolDestroy(pool);
  if (result == CUDA_SUCCESS) g_pools.erase(pool);
  return result;
}

CUresult CUDAAPI MemPoolTrimTo(CUmemoryPool pool, size_t keep) {
  const CUresult result = g_real.cuMemPoolTrimTo(pool, keep);
  if (result != CUDA_SUCCESS) return result;
  // What is kept for pools is not kept for each.
  CollectFrees(false);
  g_arena->Trim(keep);
  return result;
}

CUresult CUDAAPI CtxEnablePeerAccess(CUcontext peer, unsigned flags) {
  const CUresult result = g_real.cuCtxEnablePeerAccess(peer, flags);
  if (result != CUDA_SUCCESS) return result;
  CUdevice here = 0, there = 0;
  CUcontext popped;
  if (g_real.cuCtxGetDevice(&here) != CUDA_SUCCESS || g_real.cuCtxPushCurrent_v2(peer) != CUDA_SUCCESS) {
    g_hooks.allow(GpuReach::kAny, GpuReach::kAny);
    return result;
  }
  const CUresult found = g_real.cuCtxGetDevice(&there);
  g_real.cuCtxPopCurrent_v2(&popped);
  g_hooks.allow(here, found == CUDA_SUCCESS ? there : GpuReach::kAny);
  // The driver's own peer access covers memory of its own allocator only.
  return found == CUDA_SUCCESS ? g_arena->EnablePeer(there, here) : result;
}

CUresult CUDAAPI MemPoolSetAccess(CUmemoryPool pool, const CUmemAccessDesc* map, size_t count) {
  const CUresult result = g_real.cuMemPoolSetAccess(pool, map, count);
  if (result != CUDA_SUCCESS) return result;
  CUmemPoolProps props;
  const bool known = PropsOfPool(pool, &props) && props.location.type == CU_MEM_LOCATION_TYPE_DEVICE;
  for (size_t i = 0; i < count; ++i) {
    if (map[i].location.type != CU_MEM_LOCATION_TYPE_DEVICE) continue;
    g_hooks.allow(map[i].location.id, known ? props.location.id : GpuReach::kAny);
  }
  return result;
}

// Makes a stream by `create`. Streams of other threads are the worker's own, which nobody captures.
template <typename Create>
CUresult CreateStream(CUstream* stream, unsigned flags, Create create) {
  const CUresult result = create();
  if (result != CUDA_SUCCESS || !OnExecutor()) return result;
  if (flags & CU_STREAM_NON_BLOCKING) {
    g_non_blocking.insert(*stream);
  } else {
    g_non_blocking.erase(*stream);
  }
  return result;
}

CUresult CUDAAPI StreamCreate(CUstream* stream, unsigned flags) {
  return CreateStream(stream, flags, [&] { return WithRoom<&DriverTable::cuStreamCreate>::Call(stream, flags); });
}

CUresult CUDAAPI StreamCreateWithPriority(CUstream* stream, unsigned flags, int priority) {
  return CreateStream(
      stream, flags, [&] { return WithRoom<&DriverTable::cuStreamCreateWithPriority>::Call(stream, flags, priority); });
}

CUresult CUDAAPI GreenCtxStreamCreate(CUstream* stream, CUgreenCtx context, unsigned flags, int priority) {
  return CreateStream(stream, flags, [&] { return g_real.cuGreenCtxStreamCreate(stream, context, flags, priority); });
}

CUresult CUDAAPI StreamBeginCapture(CUstream stream, CUstreamCaptureMode mode) {
  Settle();
  BeforeCapture(stream);
  const CUresult result = g_real.cuStreamBeginCapture_v2(stream, mode);
  if (result == CUDA_SUCCESS) g_captures[stream];
  return result;
}

CUresult CUDAAPI StreamBeginCaptureToGraph(CUstream stream, CUgraph graph, const CUgraphNode* dependencies,
                                           const CUgraphEdgeData* edges, size_t count, CUstreamCaptureMode mode) {
  Settle();
  BeforeCapture(stream);
  std::vector<CUgraphNode> nodes;
  if (const CUresult result = NodesOf(g_real, graph, &nodes); result != CUDA_SUCCESS) return result;
  const CUresult result = g_real.cuStreamBeginCaptureToGraph(stream, graph, dependencies, edges, count, mode);
  if (result == CUDA_SUCCESS) g_captures[stream] = std::move(nodes);
  return result;
}

// A stream that waits for an event of a capture joins it.
CUresult CUDAAPI StreamWaitEvent(CUstream stream, CUevent event, unsigned flags) {
  if (!g_captures.empty()) BeforeCapture(stream);
  return g_real.cuStreamWaitEvent(stream, event, flags);
}

CUresult CUDAAPI StreamEndCapture(CUstream stream, CUgraph* graph) {
  const CUresult result = g_real.cuStreamEndCapture(stream, graph);
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  // Also an invalid capture is over after this, unless the call itself was refused.
  if (g_real.cuStreamIsCapturing(stream, &status) != CUDA_SUCCESS || status == CU_STREAM_CAPTURE_STATUS_NONE) {
    g_captures.erase(stream);
  }
  return result;
}

CUresult CUDAAPI StreamDestroy(CUstream stream) {
  Settle();
  // What the stream still has to do goes on.
  if (OnExecutor() && !IsCaptured(stream)) KeepingCurrent([stream] { g_hooks.mark_stream(stream); });
  const CUresult result = g_real.cuStreamDestroy_v2(stream);
  if (result == CUDA_SUCCESS && OnExecutor()) ForgetStream(stream);
  return result;
}

// Destroys the streams that were made from it.
CUresult CUDAAPI GreenCtxDestroy(CUgreenCtx context) {
  Settle();
  return g_real.cuGreenCtxDestroy(context);
}

}  // namespace

DriverTable HookDriver(const DriverTable& real, DeviceArena* arena, DriverHooks hooks) {
  g_real = real;
  g_arena = arena;
  g_hooks = std::move(hooks);
  g_executor = std::this_thread::get_id();
  DriverTable table = real;
  using T = DriverTable;
  HookAllocating<&T::cuModuleLoadData, &T::cuModuleLoadDataEx, &T::cuModuleLoadFatBinary, &T::cuModuleGetGlobal_v2,
                 &T::cuModuleGetFunction, &T::cuLibraryLoadData, &T::cuLibraryGetModule, &T::cuLibraryGetGlobal,
                 &T::cuKernelGetFunction, &T::cuFuncLoad, &T::cuLaunchKernel, &T::cuLaunchKernelEx,
                 &T::cuLaunchCooperativeKernel, &T::cuGraphInstantiateWithParams, &T::cuGraphUpload, &T::cuGraphLaunch,
                 &T::cuEventCreate, &T::cuCtxCreate_v4, &T::cuDevicePrimaryCtxRetain, &T::cuCtxSetLimit,
                 &T::cuMemHostRegister_v2, &T::cuMemHostAlloc>(&table);
  table.cuMemGetInfo_v2 = &MemGetInfo;
  table.cuArrayCreate_v2 = &ArrayCreate;
  table.cuArray3DCreate_v2 = &Array3DCreate;
  table.cuMipmappedArrayCreate = &MipmappedArrayCreate;
  table.cuMemCreate = &MemCreate;
  table.cuMemPoolCreate = &MemPoolCreate;
  table.cuMemPoolDestroy = &MemPoolDestroy;
  table.cuMemPoolTrimTo = &MemPoolTrimTo;
  table.cuCtxEnablePeerAccess = &CtxEnablePeerAccess;
  table.cuMemPoolSetAccess = &MemPoolSetAccess;
  table.cuStreamCreate = &StreamCreate;
  table.cuStreamCreateWithPriority = &StreamCreateWithPriority;
  table.cuGreenCtxStreamCreate = &GreenCtxStreamCreate;
  table.cuStreamBeginCapture_v2 = &StreamBeginCapture;
  table.cuStreamBeginCaptureToGraph = &StreamBeginCaptureToGraph;
  table.cuStreamEndCapture = &StreamEndCapture;
  table.cuStreamWaitEvent = &StreamWaitEvent;
  table.cuStreamDestroy_v2 = &StreamDestroy;
  table.cuGreenCtxDestroy = &GreenCtxDestroy;
  return table;
}

int CapturesInProgress() { return int(g_captures.size()); }

std::vector<CUgraphNode> NodesBeforeCapture(CUstream stream) {
  const auto capture = g_captures.find(stream);
  return capture != g_captures.end() ? capture->second : std::vector<CUgraphNode>();
}

bool IsCaptured(CUstream stream) {
  // Without a capture somewhere no stream can have joined one.
  if (g_captures.empty()) return false;
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  return g_real.cuStreamIsCapturing(stream, &status) == CUDA_SUCCESS && status == CU_STREAM_CAPTURE_STATUS_ACTIVE;
}

bool IsBlocking(CUstream stream) { return g_non_blocking.count(stream) == 0; }

void ForgetStream(CUstream stream) {
  g_captures.erase(stream);
  g_non_blocking.erase(stream);
}

bool PropsOfPool(CUmemoryPool pool, CUmemPoolProps* props) {
  const auto it = g_pools.find(pool);
  if (it == g_pools.end()) return false;
  *props = it->second;
  return true;
}

uint64_t PhysicalBytes(CUmemGenericAllocationHandle handle) {
  const auto it = g_physical.find(handle);
  return it == g_physical.end() ? 0 : it->second;
}

void PhysicalMemoryReleased(CUmemGenericAllocationHandle handle) {
  const auto it = g_physical.find(handle);
  if (it == g_physical.end()) return;
  g_arena->Discharge(it->second);
  g_physical.erase(it);
}

void ArrayGone(uint64_t array) {
  const auto it = g_arrays.find(array);
  if (it == g_arrays.end()) return;
  g_arena->Discharge(it->second);
  g_arrays.erase(it);
}

CUresult GpuMemoryInfo(CUdevice* device, size_t* free, size_t* total) {
  CUresult result = g_real.cuCtxGetDevice(device);
  if (result == CUDA_SUCCESS) result = g_real.cuMemGetInfo_v2(free, total);
  // What a checkpoint has borrowed goes where the job needs it.
  if (result == CUDA_SUCCESS) *free += SnapshotMemory::Get().bytes_on(*device);
  return result;
}

bool ChargeWithRoom(uint64_t bytes) {
  if (g_arena->Charge(bytes)) return true;
  CollectFrees(true);
  g_arena->Trim();
  return g_arena->Charge(bytes);
}

}  // namespace cuda_remote::server
