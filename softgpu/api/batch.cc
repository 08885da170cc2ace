// SPDX-License-Identifier: Apache-2.0
// Calls on many things at once: batches of copies, events of whole contexts, pools by place, attributes of ranges.
#include <cstdint>
#include <cstring>

#include "proto/driverabi/copy_batch.h"
#include "softgpu/api/api.h"
#include "softgpu/core/event.h"
#include "softgpu/core/graph.h"
#include "softgpu/core/memory_map.h"
#include "softgpu/core/stream.h"
#include "softgpu/core/thread_state.h"

using namespace cuda_remote::softgpu;

namespace {
// Batches are not for the legacy default stream.
bool IsLegacy(CUstream value) {
  ContextPtr context;
  StreamPtr stream;
  return ResolveStream(value, &context, &stream) == CUDA_SUCCESS && context && stream == context->legacy();
}
}  // namespace

SOFTGPU_API cuMemcpyBatchAsync(CUdeviceptr* to, CUdeviceptr* from, size_t* sizes, size_t count,
                               CUmemcpyAttributes* attributes, size_t* firsts, size_t attribute_count, size_t* failed,
                               CUstream stream) {
  SOFTGPU_ENTER();
  if (IsLegacy(stream) ||
      !cuda_remote::driverabi::IsBatch(to, from, sizes, count, attributes, firsts, attribute_count)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  for (size_t i = 0; i < count; ++i) {
    if (CUresult result = cuMemcpyAsync(to[i], from[i], sizes[i], stream); result != CUDA_SUCCESS) {
      if (failed != nullptr) *failed = i;
      return result;
    }
  }
  // Sources that the caller may change when this returns.
  for (size_t i = 0; i < attribute_count; ++i) {
    if (attributes[i].srcAccessOrder != CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL) continue;
    if (CUresult result = cuStreamSynchronize(stream); result != CUDA_SUCCESS) return result;
    break;
  }
  if (failed != nullptr) *failed = SIZE_MAX;  // none of them
  return CUDA_SUCCESS;
}
SOFTGPU_API cuMemcpyBatchAsync_v2(CUdeviceptr* to, CUdeviceptr* from, size_t* sizes, size_t count,
                                  CUmemcpyAttributes* attributes, size_t* firsts, size_t attribute_count,
                                  CUstream stream) {
  return cuMemcpyBatchAsync(to, from, sizes, count, attributes, firsts, attribute_count, nullptr, stream);
}

SOFTGPU_API cuMemcpy3DBatchAsync_v2(size_t count, CUDA_MEMCPY3D_BATCH_OP* list, unsigned long long flags,
                                    CUstream stream) {
  SOFTGPU_ENTER();
  if (count == 0 || list == nullptr || flags != 0 || IsLegacy(stream)) return CUDA_ERROR_INVALID_VALUE;
  bool wait = false;
  for (size_t i = 0; i < count; ++i) {
    const CUDA_MEMCPY3D_BATCH_OP& op = list[i];
    if (op.src.type != CU_MEMCPY_OPERAND_TYPE_POINTER || op.dst.type != CU_MEMCPY_OPERAND_TYPE_POINTER) {
      return CUDA_ERROR_NOT_SUPPORTED;
    }
    wait = wait || op.srcAccessOrder == CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL;
    CUDA_MEMCPY3D copy = {};
    copy.srcMemoryType = copy.dstMemoryType = CU_MEMORYTYPE_UNIFIED;
    copy.srcDevice = op.src.op.ptr.ptr;
    copy.srcPitch = op.src.op.ptr.rowLength;  // of bytes: such copies have elements of one byte
    copy.srcHeight = op.src.op.ptr.layerHeight;
    copy.dstDevice = op.dst.op.ptr.ptr;
    copy.dstPitch = op.dst.op.ptr.rowLength;
    copy.dstHeight = op.dst.op.ptr.layerHeight;
    copy.WidthInBytes = op.extent.width;
    copy.Height = op.extent.height;
    copy.Depth = op.extent.depth;
    if (CUresult result = cuMemcpy3DAsync_v2(&copy, stream); result != CUDA_SUCCESS) return result;
  }
  // Sources that the caller may change when this returns.
  return wait ? cuStreamSynchronize(stream) : CUDA_SUCCESS;
}
SOFTGPU_API cuMemcpy3DBatchAsync(size_t count, CUDA_MEMCPY3D_BATCH_OP* list, size_t* failed, unsigned long long flags,
                                 CUstream stream) {
  const CUresult result = cuMemcpy3DBatchAsync_v2(count, list, flags, stream);
  if (result == CUDA_SUCCESS && failed != nullptr) *failed = SIZE_MAX;  // none of them
  return result;
}

SOFTGPU_API cuCtxRecordEvent(CUcontext handle, CUevent event_handle) {
  SOFTGPU_ENTER();
  ContextPtr context;
  if (CUresult result = ContextFor(handle, &context); result != CUDA_SUCCESS) return result;
  EventPtr event = Registry<Event>::Get().Find(event_handle);
  if (!event || event->context != context) return CUDA_ERROR_INVALID_HANDLE;
  if (CUresult result = CheckContextCapture(context); result != CUDA_SUCCESS) return result;
  // In a stream of its own, so that nothing else comes after it.
  auto stream = std::make_shared<Stream>(context, StreamKind::kUser, CU_STREAM_NON_BLOCKING, 0);
  context->Adopt(stream);
  RecordEvent(event, stream, context->Pending());
  context->Retire(stream);
  return CUDA_SUCCESS;
}

SOFTGPU_API cuCtxWaitEvent(CUcontext handle, CUevent event_handle) {
  SOFTGPU_ENTER();
  ContextPtr context;
  if (CUresult result = ContextFor(handle, &context); result != CUDA_SUCCESS) return result;
  EventPtr event = Registry<Event>::Get().Find(event_handle);
  if (!event) return CUDA_ERROR_INVALID_HANDLE;
  for (const StreamPtr& stream : context->AllStreams()) WaitEvent(event, stream);
  return CUDA_SUCCESS;
}

namespace {

CUresult DeviceOf(CUmemoryPool* out, const CUmemLocation* location, CUmemAllocationType type, CUdevice* device) {
  if (out == nullptr || location == nullptr || type != CU_MEM_ALLOCATION_TYPE_PINNED) return CUDA_ERROR_INVALID_VALUE;
  if (location->type != CU_MEM_LOCATION_TYPE_DEVICE) return CUDA_ERROR_NOT_SUPPORTED;
  *device = location->id;
  return CUDA_SUCCESS;
}

}  // namespace

SOFTGPU_API cuMemGetDefaultMemPool(CUmemoryPool* out, CUmemLocation* location, CUmemAllocationType type) {
  SOFTGPU_ENTER();
  CUdevice device;
  CUresult result = DeviceOf(out, location, type, &device);
  return result == CUDA_SUCCESS ? cuDeviceGetDefaultMemPool(out, device) : result;
}
SOFTGPU_API cuMemGetMemPool(CUmemoryPool* out, CUmemLocation* location, CUmemAllocationType type) {
  SOFTGPU_ENTER();
  CUdevice device;
  CUresult result = DeviceOf(out, location, type, &device);
  return result == CUDA_SUCCESS ? cuDeviceGetMemPool(out, device) : result;
}
SOFTGPU_API cuMemSetMemPool(CUmemLocation* location, CUmemAllocationType type, CUmemoryPool pool) {
  SOFTGPU_ENTER();
  CUdevice device;
  CUresult result = DeviceOf(&pool, location, type, &device);
  return result == CUDA_SUCCESS ? cuDeviceSetMemPool(device, pool) : result;
}

// The oldest calls of contexts, which count who uses the current one.
SOFTGPU_API cuCtxAttach(CUcontext* out, unsigned int flags) {
  SOFTGPU_ENTER_CONTEXT(context);
  if (out == nullptr || flags != 0) return CUDA_ERROR_INVALID_VALUE;
  ++context->attached;
  *out = context->handle();
  return CUDA_SUCCESS;
}
SOFTGPU_API cuCtxDetach(CUcontext handle) {
  SOFTGPU_ENTER();
  ContextPtr context = Registry<Context>::Get().Find(handle);
  if (!context || context != CurrentContext()) return CUDA_ERROR_INVALID_CONTEXT;
  return --context->attached == 0 ? cuCtxDestroy_v2(handle) : CUDA_SUCCESS;
}

SOFTGPU_API cuProfilerInitialize(const char*, const char*, CUoutput_mode) {
  SOFTGPU_ENTER();
  return CUDA_ERROR_NOT_SUPPORTED;  // as natively since CUDA 13
}
