// SPDX-License-Identifier: Apache-2.0
// Streams, events, host functions, stream memory operations.
#include "softgpu/core/stream.h"

#include "proto/threads/mutex.h"
#include "softgpu/api/api.h"
#include "softgpu/core/event.h"
#include "softgpu/core/graph.h"
#include "softgpu/core/memory_map.h"
#include "softgpu/core/pool.h"
#include "softgpu/core/work.h"

using namespace cuda_remote::softgpu;

namespace {

CUresult CreateStream(CUstream* out, unsigned flags, int priority) {
  ContextPtr context;
  if (CUresult result = UsableContext(&context); result != CUDA_SUCCESS) return result;
  if (out == nullptr || (flags & ~unsigned{CU_STREAM_NON_BLOCKING}) != 0) return CUDA_ERROR_INVALID_VALUE;
  if (priority > 0) priority = 0;
  if (priority < -5) priority = -5;
  auto stream = std::make_shared<Stream>(context, StreamKind::kUser, flags, priority);
  context->Adopt(stream);
  *out = Registry<Stream>::Get().Add(stream)->handle();
  return CUDA_SUCCESS;
}

// The stream of a query or a wait, and its errors.
CUresult StreamFor(CUstream handle, StreamPtr* stream) {
  ContextPtr context;
  auto number = reinterpret_cast<uintptr_t>(handle);
  if (number <= 2) {
    if (CUresult result = UsableContext(&context); result != CUDA_SUCCESS) return result;
  }
  return ResolveStream(context, handle, stream);
}

CUresult FindEvent(CUevent handle, EventPtr* event) {
  *event = Registry<Event>::Get().Find(handle);
  return *event ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

// An event and the stream that records it, which must be of one context.
CUresult ForRecord(CUevent handle, CUstream stream_handle, EventPtr* event, StreamPtr* stream) {
  if (CUresult result = StreamFor(stream_handle, stream); result != CUDA_SUCCESS) return result;
  if (CUresult result = FindEvent(handle, event); result != CUDA_SUCCESS) return result;
  return (*event)->context->Home() == (*stream)->context()->Home() ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult Record(CUevent handle, CUstream stream_handle) {
  StreamPtr stream;
  EventPtr event;
  if (CUresult result = ForRecord(handle, stream_handle, &event, &stream); result != CUDA_SUCCESS) return result;
  RecursiveMutexLock lock(&CaptureMutex());
  if (std::shared_ptr<Capture> capture = CaptureOf(stream)) {
    if (capture->invalid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    event->capture = capture;
    event->captured = true;
    event->capture_nodes = stream->capture_dependencies;
    return CUDA_SUCCESS;
  }
  if (CUresult result = CheckLegacyCapture(stream); result != CUDA_SUCCESS) return result;
  event->capture = nullptr;
  event->captured = false;
  event->capture_nodes.clear();
  RecordEvent(event, stream);
  return CUDA_SUCCESS;
}

CUresult Value(CUstream handle, CUdeviceptr address, uint64_t value, bool wide, bool wait, unsigned flags) {
  StreamPtr stream;
  if (CUresult result = StreamFor(handle, &stream); result != CUDA_SUCCESS) return result;
  uint64_t bytes = wide ? 8 : 4;
  if (address == 0 || address % bytes != 0 || !MemoryMap::Get().Covers(address, bytes)) return CUDA_ERROR_INVALID_VALUE;
  return Issue(stream, ValueWork{wait, address, value, wide, flags});
}

}  // namespace

SOFTGPU_API cuStreamCreate(CUstream* out, unsigned int flags) {
  SOFTGPU_ENTER();
  return CreateStream(out, flags, 0);
}
SOFTGPU_API cuStreamCreateWithPriority(CUstream* out, unsigned int flags, int priority) {
  SOFTGPU_ENTER();
  return CreateStream(out, flags, priority);
}

SOFTGPU_API cuStreamDestroy_v2(CUstream handle) {
  SOFTGPU_ENTER();
  StreamPtr stream = Registry<Stream>::Get().Remove(handle);
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  ForgetStreamCapture(stream);
  stream->context()->Retire(stream);
  return CUDA_SUCCESS;
}
SOFTGPU_API cuStreamDestroy(CUstream handle) { return cuStreamDestroy_v2(handle); }

SOFTGPU_API cuStreamSynchronize(CUstream handle) {
  SOFTGPU_ENTER();
  StreamPtr stream;
  if (CUresult result = StreamFor(handle, &stream); result != CUDA_SUCCESS) return result;
  if (CaptureOf(stream)) return ForbiddenInCapture(stream);
  if (CUresult result = CheckLegacyCapture(stream); result != CUDA_SUCCESS) return result;
  const CUresult result = stream->Synchronize();
  NotePoolsWaited();
  return result;
}

SOFTGPU_API cuStreamQuery(CUstream handle) {
  SOFTGPU_ENTER();
  StreamPtr stream;
  if (CUresult result = StreamFor(handle, &stream); result != CUDA_SUCCESS) return result;
  if (CaptureOf(stream)) return ForbiddenInCapture(stream);
  return stream->Query();
}

SOFTGPU_API cuStreamGetPriority(CUstream handle, int* priority) {
  SOFTGPU_ENTER();
  StreamPtr stream;
  if (CUresult result = StreamFor(handle, &stream); result != CUDA_SUCCESS) return result;
  if (priority == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *priority = stream->priority();
  return CUDA_SUCCESS;
}

SOFTGPU_API cuStreamGetFlags(CUstream handle, unsigned int* flags) {
  SOFTGPU_ENTER();
  StreamPtr stream;
  if (CUresult result = StreamFor(handle, &stream); result != CUDA_SUCCESS) return result;
  if (flags == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (CaptureOf(stream)) return ForbiddenInCapture(stream);
  *flags = stream->flags();
  return CUDA_SUCCESS;
}

SOFTGPU_API cuStreamGetId(CUstream handle, unsigned long long* id) {
  SOFTGPU_ENTER();
  StreamPtr stream;
  if (CUresult result = StreamFor(handle, &stream); result != CUDA_SUCCESS) return result;
  if (id == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *id = stream->id();
  return CUDA_SUCCESS;
}

SOFTGPU_API cuStreamGetCtx(CUstream handle, CUcontext* out) {
  SOFTGPU_ENTER();
  StreamPtr stream;
  if (CUresult result = StreamFor(handle, &stream); result != CUDA_SUCCESS) return result;
  if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *out = stream->context()->handle();
  return CUDA_SUCCESS;
}

SOFTGPU_API cuStreamGetCtx_v2(CUstream handle, CUcontext* out, CUgreenCtx* green) {
  CUgreenCtx its_green = nullptr;
  CUcontext its_context = nullptr;
  if (CUresult result = cuStreamGetGreenCtx(handle, &its_green); result != CUDA_SUCCESS) return result;
  if (CUresult result = cuStreamGetCtx(handle, &its_context); result != CUDA_SUCCESS) return result;
  if (green != nullptr) *green = its_green;
  if (out != nullptr) *out = its_context;
  return CUDA_SUCCESS;
}

SOFTGPU_API cuStreamGetDevice(CUstream handle, CUdevice* device) {
  SOFTGPU_ENTER();
  StreamPtr stream;
  if (CUresult result = StreamFor(handle, &stream); result != CUDA_SUCCESS) return result;
  if (device == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *device = stream->context()->device();
  return CUDA_SUCCESS;
}

SOFTGPU_API cuStreamWaitEvent(CUstream handle, CUevent event_handle, unsigned int flags) {
  SOFTGPU_ENTER();
  StreamPtr stream;
  if (CUresult result = StreamFor(handle, &stream); result != CUDA_SUCCESS) return result;
  if ((flags & ~unsigned{CU_EVENT_WAIT_EXTERNAL}) != 0) return CUDA_ERROR_INVALID_VALUE;
  EventPtr event;
  if (CUresult result = FindEvent(event_handle, &event); result != CUDA_SUCCESS) return result;
  RecursiveMutexLock lock(&CaptureMutex());
  std::shared_ptr<Capture> capture = CaptureOf(stream);
  if (capture && (flags & CU_EVENT_WAIT_EXTERNAL)) return CaptureWork(stream, capture, EventWaitWork{event});
  if (event->capture || capture) return WaitEventInCapture(stream, event);
  WaitEvent(event, stream);
  return CUDA_SUCCESS;
}

SOFTGPU_API cuLaunchHostFunc(CUstream handle, CUhostFn function, void* data) {
  SOFTGPU_ENTER();
  StreamPtr stream;
  if (CUresult result = StreamFor(handle, &stream); result != CUDA_SUCCESS) return result;
  if (function == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return Issue(stream, HostWork{function, data});
}

SOFTGPU_API cuStreamAddCallback(CUstream handle, CUstreamCallback callback, void* data, unsigned int flags) {
  SOFTGPU_ENTER();
  StreamPtr stream;
  if (CUresult result = StreamFor(handle, &stream); result != CUDA_SUCCESS) return result;
  if (callback == nullptr || flags != 0) return CUDA_ERROR_INVALID_VALUE;
  if (CaptureOf(stream)) return ForbiddenInCapture(stream);
  Context* context = stream->context().get();
  stream->Submit(
      [handle, callback, data, context] {
        context->FlushOutput();
        callback(handle, context->error(), data);
        return CUDA_SUCCESS;
      },
      {}, true);
  return CUDA_SUCCESS;
}

SOFTGPU_API cuStreamAttachMemAsync(CUstream handle, CUdeviceptr, size_t, unsigned int) {
  SOFTGPU_ENTER();
  StreamPtr stream;
  return StreamFor(handle, &stream);  // one memory for all: nothing to attach
}

SOFTGPU_API cuStreamGetAttribute(CUstream handle, CUstreamAttrID attribute, CUstreamAttrValue* value) {
  SOFTGPU_ENTER();
  StreamPtr stream;
  if (CUresult result = StreamFor(handle, &stream); result != CUDA_SUCCESS) return result;
  if (value == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *value = {};
  switch (attribute) {
    case CU_LAUNCH_ATTRIBUTE_PRIORITY:
      value->priority = stream->priority();
      return CUDA_SUCCESS;
    case CU_LAUNCH_ATTRIBUTE_SYNCHRONIZATION_POLICY:
      value->syncPolicy = CU_SYNC_POLICY_AUTO;
      break;
    case CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW:
    case CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN:
    case CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP:
      break;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
  const Stream::Attributes set = stream->attributes();
  if (const auto it = set.find(attribute); it != set.end()) *value = it->second;
  return CUDA_SUCCESS;
}

SOFTGPU_API cuStreamSetAttribute(CUstream handle, CUstreamAttrID attribute, const CUstreamAttrValue* value) {
  SOFTGPU_ENTER();
  StreamPtr stream;
  if (CUresult result = StreamFor(handle, &stream); result != CUDA_SUCCESS) return result;
  if (value == nullptr) return CUDA_ERROR_INVALID_VALUE;
  stream->SetAttribute(attribute, *value);
  return CUDA_SUCCESS;
}

SOFTGPU_API cuStreamCopyAttributes(CUstream to, CUstream from) {
  SOFTGPU_ENTER();
  StreamPtr target, source;
  if (CUresult result = StreamFor(to, &target); result != CUDA_SUCCESS) return result;
  if (CUresult result = StreamFor(from, &source); result != CUDA_SUCCESS) return result;
  target->SetAttributes(source->attributes());
  return CUDA_SUCCESS;
}

SOFTGPU_API cuStreamWaitValue32_v2(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned int flags) {
  SOFTGPU_ENTER();
  return Value(stream, address, value, false, true, flags);
}
SOFTGPU_API cuStreamWaitValue64_v2(CUstream stream, CUdeviceptr address, cuuint64_t value, unsigned int flags) {
  SOFTGPU_ENTER();
  return Value(stream, address, value, true, true, flags);
}
SOFTGPU_API cuStreamWriteValue32_v2(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned int flags) {
  SOFTGPU_ENTER();
  return Value(stream, address, value, false, false, flags);
}
SOFTGPU_API cuStreamWriteValue64_v2(CUstream stream, CUdeviceptr address, cuuint64_t value, unsigned int flags) {
  SOFTGPU_ENTER();
  return Value(stream, address, value, true, false, flags);
}
SOFTGPU_API cuStreamWaitValue32(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned int flags) {
  return cuStreamWaitValue32_v2(stream, address, value, flags);
}
SOFTGPU_API cuStreamWaitValue64(CUstream stream, CUdeviceptr address, cuuint64_t value, unsigned int flags) {
  return cuStreamWaitValue64_v2(stream, address, value, flags);
}
SOFTGPU_API cuStreamBatchMemOp(CUstream stream, unsigned int count, CUstreamBatchMemOpParams* list,
                               unsigned int flags) {
  return cuStreamBatchMemOp_v2(stream, count, list, flags);
}
SOFTGPU_API cuStreamWriteValue32(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned int flags) {
  return cuStreamWriteValue32_v2(stream, address, value, flags);
}
SOFTGPU_API cuStreamWriteValue64(CUstream stream, CUdeviceptr address, cuuint64_t value, unsigned int flags) {
  return cuStreamWriteValue64_v2(stream, address, value, flags);
}

SOFTGPU_API cuStreamBatchMemOp_v2(CUstream stream, unsigned int count, CUstreamBatchMemOpParams* list, unsigned int) {
  SOFTGPU_ENTER();
  if (list == nullptr && count != 0) return CUDA_ERROR_INVALID_VALUE;
  for (unsigned i = 0; i < count; ++i) {
    const CUstreamBatchMemOpParams& op = list[i];
    CUresult result;
    switch (op.operation) {
      case CU_STREAM_MEM_OP_WAIT_VALUE_32:
        result = Value(stream, op.waitValue.address, op.waitValue.value, false, true, op.waitValue.flags);
        break;
      case CU_STREAM_MEM_OP_WAIT_VALUE_64:
        result = Value(stream, op.waitValue.address, op.waitValue.value64, true, true, op.waitValue.flags);
        break;
      case CU_STREAM_MEM_OP_WRITE_VALUE_32:
        result = Value(stream, op.writeValue.address, op.writeValue.value, false, false, op.writeValue.flags);
        break;
      case CU_STREAM_MEM_OP_WRITE_VALUE_64:
        result = Value(stream, op.writeValue.address, op.writeValue.value64, true, false, op.writeValue.flags);
        break;
      case CU_STREAM_MEM_OP_FLUSH_REMOTE_WRITES:
      case CU_STREAM_MEM_OP_BARRIER:
        result = CUDA_SUCCESS;
        break;
      default:
        result = CUDA_ERROR_INVALID_VALUE;
        break;
    }
    if (result != CUDA_SUCCESS) return result;
  }
  return CUDA_SUCCESS;
}

SOFTGPU_API cuEventCreate(CUevent* out, unsigned int flags) {
  SOFTGPU_ENTER_CONTEXT(context);
  constexpr unsigned kKnown = CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS;
  if (out == nullptr || (flags & ~kKnown) != 0) return CUDA_ERROR_INVALID_VALUE;
  if ((flags & CU_EVENT_INTERPROCESS) && !(flags & CU_EVENT_DISABLE_TIMING)) return CUDA_ERROR_INVALID_VALUE;
  auto event = std::make_shared<Event>();
  event->context = context;
  event->flags = flags;
  if (flags & CU_EVENT_INTERPROCESS) {
    event->shared = SharedEvent::Create();
    if (!event->shared) return CUDA_ERROR_OUT_OF_MEMORY;
  }
  *out = Registry<Event>::Get().Add(event)->handle();
  return CUDA_SUCCESS;
}

SOFTGPU_API cuIpcGetEventHandle(CUipcEventHandle* out, CUevent handle) {
  SOFTGPU_ENTER();
  if (handle == nullptr) return CUDA_ERROR_INVALID_VALUE;
  EventPtr event;
  if (CUresult result = FindEvent(handle, &event); result != CUDA_SUCCESS) return result;
  if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (!event->shared) return CUDA_ERROR_INVALID_HANDLE;
  *out = event->shared->Handle();
  return CUDA_SUCCESS;
}

SOFTGPU_API cuIpcOpenEventHandle(CUevent* out, CUipcEventHandle handle) {
  SOFTGPU_ENTER_CONTEXT(context);
  if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  auto event = std::make_shared<Event>();
  event->context = context;
  event->flags = CU_EVENT_INTERPROCESS | CU_EVENT_DISABLE_TIMING;
  event->shared = SharedEvent::Open(handle);
  if (!event->shared) return CUDA_ERROR_INVALID_HANDLE;
  *out = Registry<Event>::Get().Add(event)->handle();
  return CUDA_SUCCESS;
}

SOFTGPU_API cuEventDestroy_v2(CUevent handle) {
  SOFTGPU_ENTER();
  return Registry<Event>::Get().Remove(handle) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}
SOFTGPU_API cuEventDestroy(CUevent handle) { return cuEventDestroy_v2(handle); }

SOFTGPU_API cuEventRecord(CUevent event, CUstream stream) {
  SOFTGPU_ENTER();
  return Record(event, stream);
}

SOFTGPU_API cuEventRecordWithFlags(CUevent handle, CUstream stream_handle, unsigned int flags) {
  SOFTGPU_ENTER();
  if ((flags & ~unsigned{CU_EVENT_RECORD_EXTERNAL}) != 0) return CUDA_ERROR_INVALID_VALUE;
  if (flags & CU_EVENT_RECORD_EXTERNAL) {
    StreamPtr stream;
    if (CUresult result = StreamFor(stream_handle, &stream); result != CUDA_SUCCESS) return result;
    if (std::shared_ptr<Capture> capture = CaptureOf(stream)) {
      // A node, which may name an event of any context.
      EventPtr event;
      if (CUresult result = FindEvent(handle, &event); result != CUDA_SUCCESS) return result;
      return CaptureWork(stream, capture, EventRecordWork{event});
    }
  }
  return Record(handle, stream_handle);
}

SOFTGPU_API cuEventQuery(CUevent handle) {
  SOFTGPU_ENTER();
  EventPtr event;
  if (CUresult result = FindEvent(handle, &event); result != CUDA_SUCCESS) return result;
  if (event->captured) return CUDA_ERROR_CAPTURED_EVENT;
  if (CUresult error = event->context->error(); error != CUDA_SUCCESS) return error;
  if (event->shared && !event->shared->Done(event->shared->Latest())) return CUDA_ERROR_NOT_READY;
  std::shared_ptr<EventRecord> record = event->latest();
  if (record && !record->done()) return CUDA_ERROR_NOT_READY;
  return event->context->error();
}

SOFTGPU_API cuEventSynchronize(CUevent handle) {
  SOFTGPU_ENTER();
  EventPtr event;
  if (CUresult result = FindEvent(handle, &event); result != CUDA_SUCCESS) return result;
  if (event->captured) return CUDA_ERROR_CAPTURED_EVENT;
  if (std::shared_ptr<EventRecord> record = event->latest(); record && record->task) record->task->Wait();
  if (event->shared) event->shared->Wait(event->shared->Latest(), event->context->cancel());
  event->context->FlushOutput();
  NotePoolsWaited();
  return event->context->error();
}

SOFTGPU_API cuEventElapsedTime(float* milliseconds, CUevent first, CUevent second) {
  SOFTGPU_ENTER();
  if (milliseconds == nullptr) return CUDA_ERROR_INVALID_VALUE;
  EventPtr begin, end;
  if (CUresult result = FindEvent(first, &begin); result != CUDA_SUCCESS) return result;
  if (CUresult result = FindEvent(second, &end); result != CUDA_SUCCESS) return result;
  if ((begin->flags | end->flags) & CU_EVENT_DISABLE_TIMING) return CUDA_ERROR_INVALID_HANDLE;
  if (begin->context != end->context) return CUDA_ERROR_INVALID_HANDLE;
  if (begin->captured || end->captured) return CUDA_ERROR_INVALID_VALUE;  // docs/driver-notes.md
  std::shared_ptr<EventRecord> from = begin->latest(), to = end->latest();
  if (!from || !to) return CUDA_ERROR_INVALID_HANDLE;
  if (!from->done() || !to->done()) return CUDA_ERROR_NOT_READY;
  if (CUresult error = begin->context->error(); error != CUDA_SUCCESS) return error;
  *milliseconds =
      static_cast<float>((static_cast<double>(to->nanoseconds) - static_cast<double>(from->nanoseconds)) / 1e6);
  return CUDA_SUCCESS;
}
SOFTGPU_API cuEventElapsedTime_v2(float* milliseconds, CUevent first, CUevent second) {
  return cuEventElapsedTime(milliseconds, first, second);
}
