#include "server/worker/driver_hooks.h"

#include <map>
#include <set>

namespace cuda_remote::server {
namespace {

// C function pointers carry no state, and a worker serves one session.
DriverTable g_real;
DeviceArena* g_arena = nullptr;
std::set<CUstream> g_captures;
std::map<CUmemGenericAllocationHandle, uint64_t> g_physical;
std::map<CUmemoryPool, CUmemPoolProps> g_pools;

CUresult CUDAAPI MemGetInfo(size_t* free, size_t* total) {
  CUdevice device = 0;
  if (const CUresult result = g_real.cuCtxGetDevice(&device); result != CUDA_SUCCESS) return result;
  const CUresult result = g_real.cuMemGetInfo_v2(free, total);
  if (result == CUDA_SUCCESS) g_arena->Adjust(device, free, total);
  return result;
}

CUresult CUDAAPI MemCreate(CUmemGenericAllocationHandle* handle, size_t size, const CUmemAllocationProp* prop,
                           unsigned long long flags) {
  if (!g_arena->Charge(size)) return CUDA_ERROR_OUT_OF_MEMORY;
  CUresult result = g_real.cuMemCreate(handle, size, prop, flags);
  if (result == CUDA_ERROR_OUT_OF_MEMORY) {
    g_arena->Trim();
    result = g_real.cuMemCreate(handle, size, prop, flags);
  }
  if (result == CUDA_SUCCESS) {
    g_physical[*handle] = size;
  } else {
    g_arena->Discharge(size);
  }
  return result;
}

CUresult CUDAAPI MemPoolCreate(CUmemoryPool* pool, const CUmemPoolProps* props) {
  const CUresult result = g_real.cuMemPoolCreate(pool, props);
  if (result == CUDA_SUCCESS) g_pools[*pool] = *props;
  return result;
}

CUresult CUDAAPI MemPoolDestroy(CUmemoryPool pool) {
  const CUresult result = g_real.cuMemPoolDestroy(pool);
  if (result == CUDA_SUCCESS) g_pools.erase(pool);
  return result;
}

CUresult CUDAAPI CtxEnablePeerAccess(CUcontext peer, unsigned flags) {
  const CUresult result = g_real.cuCtxEnablePeerAccess(peer, flags);
  if (result != CUDA_SUCCESS) return result;
  CUdevice here = 0, there = 0;
  CUcontext popped;
  if (g_real.cuCtxGetDevice(&here) != CUDA_SUCCESS || g_real.cuCtxPushCurrent_v2(peer) != CUDA_SUCCESS) return result;
  const CUresult found = g_real.cuCtxGetDevice(&there);
  g_real.cuCtxPopCurrent_v2(&popped);
  // The driver's own peer access covers memory of its own allocator only.
  return found == CUDA_SUCCESS ? g_arena->EnablePeer(there, here) : result;
}

CUresult CUDAAPI StreamBeginCapture(CUstream stream, CUstreamCaptureMode mode) {
  const CUresult result = g_real.cuStreamBeginCapture_v2(stream, mode);
  if (result == CUDA_SUCCESS) g_captures.insert(stream);
  return result;
}

CUresult CUDAAPI StreamBeginCaptureToGraph(CUstream stream, CUgraph graph, const CUgraphNode* dependencies,
                                           const CUgraphEdgeData* edges, size_t count, CUstreamCaptureMode mode) {
  const CUresult result = g_real.cuStreamBeginCaptureToGraph(stream, graph, dependencies, edges, count, mode);
  if (result == CUDA_SUCCESS) g_captures.insert(stream);
  return result;
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
  const CUresult result = g_real.cuStreamDestroy_v2(stream);
  if (result == CUDA_SUCCESS) g_captures.erase(stream);
  return result;
}

}  // namespace

DriverTable HookDriver(const DriverTable& real, DeviceArena* arena) {
  g_real = real;
  g_arena = arena;
  DriverTable table = real;
  table.cuMemGetInfo_v2 = &MemGetInfo;
  table.cuMemCreate = &MemCreate;
  table.cuMemPoolCreate = &MemPoolCreate;
  table.cuMemPoolDestroy = &MemPoolDestroy;
  table.cuCtxEnablePeerAccess = &CtxEnablePeerAccess;
  table.cuStreamBeginCapture_v2 = &StreamBeginCapture;
  table.cuStreamBeginCaptureToGraph = &StreamBeginCaptureToGraph;
  table.cuStreamEndCapture = &StreamEndCapture;
  table.cuStreamDestroy_v2 = &StreamDestroy;
  return table;
}

int CapturesInProgress() { return int(g_captures.size()); }

bool IsCaptured(CUstream stream) {
  // Without a capture somewhere no stream can have joined one.
  if (g_captures.empty()) return false;
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  return g_real.cuStreamIsCapturing(stream, &status) == CUDA_SUCCESS && status == CU_STREAM_CAPTURE_STATUS_ACTIVE;
}

void ForgetCapture(CUstream stream) { g_captures.erase(stream); }

bool PropsOfPool(CUmemoryPool pool, CUmemPoolProps* props) {
  const auto it = g_pools.find(pool);
  if (it == g_pools.end()) return false;
  *props = it->second;
  return true;
}

void PhysicalMemoryReleased(CUmemGenericAllocationHandle handle) {
  const auto it = g_physical.find(handle);
  if (it == g_physical.end()) return;
  g_arena->Discharge(it->second);
  g_physical.erase(it);
}

}  // namespace cuda_remote::server
