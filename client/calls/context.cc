// SPDX-License-Identifier: Apache-2.0
// Contexts. The stack of each thread lives here in the client; the server is asked only to make and destroy contexts.
//
// The current context goes along with every request (FrameHeader), so none of the stack calls needs a round trip.

#include <cuda.h>

#include <mutex>

#include "client/calls/bodies.gen.h"
#include "client/core/call.h"
#include "client/core/session.h"
#include "proto/codec/codec.h"
#include "proto/driverabi/export_tables.h"

namespace cuda_remote::client {
namespace {

// Retain, release and reset of primary contexts: one at a time, since each is a check, a round trip and a change.
std::mutex g_primary_mutex;

CUcontext AsContext(uint64_t handle) { return reinterpret_cast<CUcontext>(handle); }
uint64_t AsHandle(CUcontext context) { return reinterpret_cast<uint64_t>(context); }

// What every call that only looks at this thread's stack needs.
CUresult LocalState(Session** session, ThreadState** thread) {
  *session = Session::Get();
  if (!*session || !(*session)->initialized()) return CUDA_ERROR_NOT_INITIALIZED;
  *thread = ThreadState::Get();
  return *thread ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

// Also true for a primary context that nobody retains: it can be made current, and the calls that need it then fail
// with CUDA_ERROR_CONTEXT_IS_DESTROYED until somebody does. The runtime relies on it.
bool IsContext(Session* session, uint64_t handle) {
  ReaderLock lock(&session->objects().mutex());
  return session->objects().handles().Find(Kind::kContext, handle) != nullptr;
}

CUresult CheckDevice(Session* session, CUdevice dev) {
  return dev >= 0 && size_t(dev) < session->devices().size() ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

void Describe(Session* session, uint64_t handle, CUdevice dev, unsigned flags) {
  WriterLock lock(&session->objects().mutex());
  Object* object = session->objects().handles().Find(Kind::kContext, handle);
  object->device = dev;
  object->flags = flags;
  if ((flags & CU_CTX_SCHED_MASK) == CU_CTX_SCHED_BLOCKING_SYNC) session->connection().WaitAsleep();
  object->id = session->objects().NextContextIdLocked();
}

// Has the server end a context. Memory of pools outlives it; what was freed in its streams goes back while these are
// there.
CUresult End(Call& call) {
  call.session().memory().GiveBack(call.session().memory().TakeFreed());
  return call.Transact();
}

// Removes a context and all that lives in it, here and in context-local storage.
void Forget(Call& call, uint64_t handle) {
  driverabi::ContextDestroyed(AsContext(handle));
  call.Destroyed({Kind::kContext, handle});
}

}  // namespace

CUresult CreateContext(CUcontext* pctx, unsigned flags, CUdevice dev) {
  if (!pctx) return CUDA_ERROR_INVALID_VALUE;
  Call call(info::k_cuCtxCreate_v4);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  if (const CUresult result = CheckDevice(&call.session(), dev); result != CUDA_SUCCESS) return result;
  const uint64_t handle = call.NewHandle(Kind::kContext, kNoParent);
  if (!handle) return CUDA_ERROR_OUT_OF_MEMORY;
  wire::cuCtxCreate_v4_Request request;
  request.context = handle;
  request.flags = flags;
  request.device = dev;
  request.Encode(&call.message());
  if (const CUresult result = call.Transact(); result != CUDA_SUCCESS) return result;
  Describe(&call.session(), handle, dev, flags);
  call.Created({Kind::kContext, handle});
  call.thread().context_stack.push_back(handle);  // a new context becomes current
  *pctx = AsContext(handle);
  return CUDA_SUCCESS;
}

CUresult Custom_cuCtxCreate_v2(CUcontext* pctx, unsigned int flags, CUdevice dev) {
  return CreateContext(pctx, flags, dev);
}

CUresult Custom_cuCtxCreate_v3(CUcontext* pctx, CUexecAffinityParam* paramsArray, int numParams, unsigned int flags,
                               CUdevice dev) {
  if (numParams != 0) return Call::Unsupported("cuCtxCreate_v3", "execution affinity needs MPS");
  return CreateContext(pctx, flags, dev);
}

CUresult Custom_cuCtxCreate_v4(CUcontext* pctx, CUctxCreateParams* ctxCreateParams, unsigned int flags, CUdevice dev) {
  if (ctxCreateParams && (ctxCreateParams->numExecAffinityParams != 0 || ctxCreateParams->cigParams)) {
    return Call::Unsupported("cuCtxCreate_v4", "execution affinity and graphics contexts are not remoted");
  }
  return CreateContext(pctx, flags, dev);
}

CUresult Custom_cuCtxDestroy_v2(CUcontext ctx) {
  Call call(info::k_cuCtxDestroy_v2);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  const uint64_t handle = AsHandle(ctx);
  if (!handle) return CUDA_ERROR_INVALID_VALUE;
  if (!call.Valid(Kind::kContext, handle)) return CUDA_ERROR_INVALID_CONTEXT;
  {
    ReaderLock lock(&call.session().objects().mutex());
    // Primary contexts are released, not destroyed; a green context's goes with that.
    const Object* const object = call.session().objects().handles().Find(Kind::kContext, handle);
    if (object->primary || object->green) return CUDA_ERROR_INVALID_CONTEXT;
  }
  wire::cuCtxDestroy_v2_Request request;
  request.context = handle;
  request.Encode(&call.message());
  const CUresult result = End(call);
  if (result != CUDA_SUCCESS) return result;
  Forget(call, handle);
  auto& stack = call.thread().context_stack;
  if (!stack.empty() && stack.back() == handle) stack.pop_back();
  return CUDA_SUCCESS;
}

CUresult Custom_cuDevicePrimaryCtxRetain(CUcontext* pctx, CUdevice dev) {
  if (!pctx) return CUDA_ERROR_INVALID_VALUE;
  Call call(info::k_cuDevicePrimaryCtxRetain);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  Session& session = call.session();
  if (const CUresult result = CheckDevice(&session, dev); result != CUDA_SUCCESS) return result;
  std::lock_guard<std::mutex> one_at_a_time(g_primary_mutex);
  uint64_t handle;
  {
    WriterLock lock(&session.objects().mutex());
    handle = session.objects().PrimaryContextLocked(dev);
    if (!handle) return CUDA_ERROR_OUT_OF_MEMORY;
    if (session.objects().LivePrimaryContextLocked(dev)) {
      session.objects().primary_contexts().Retain(dev);
      *pctx = AsContext(handle);
      return CUDA_SUCCESS;
    }
  }
  wire::cuDevicePrimaryCtxRetain_Request request;
  request.context = handle;
  request.device = dev;
  request.Encode(&call.message());
  if (const CUresult result = call.Transact(); result != CUDA_SUCCESS) return result;
  {
    WriterLock lock(&session.objects().mutex());
    // More than 1 after a reset.
    session.objects().primary_contexts().Retain(dev);
    Object* const object = session.objects().handles().Find(Kind::kContext, handle);
    object->flags = session.objects().primary_contexts().flags(dev);
    object->id = session.objects().NextContextIdLocked();
    session.objects().SetActiveLocked(handle, object, true);
  }
  call.Created({Kind::kContext, handle});
  *pctx = AsContext(handle);
  return CUDA_SUCCESS;
}

CUresult Custom_cuDevicePrimaryCtxRelease_v2(CUdevice dev) {
  Call call(info::k_cuDevicePrimaryCtxRelease_v2);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  Session& session = call.session();
  if (const CUresult result = CheckDevice(&session, dev); result != CUDA_SUCCESS) return result;
  std::lock_guard<std::mutex> one_at_a_time(g_primary_mutex);
  uint64_t handle;
  {
    WriterLock lock(&session.objects().mutex());
    const int retains = session.objects().primary_contexts().retains(dev);
    if (retains == 0) return CUDA_ERROR_INVALID_CONTEXT;
    handle = session.objects().PrimaryContextLocked(dev);
    if (retains > 1 || !session.objects().LivePrimaryContextLocked(dev)) {
      session.objects().primary_contexts().Release(dev);
      return CUDA_SUCCESS;
    }
  }
  wire::cuDevicePrimaryCtxRelease_v2_Request request;
  request.context = handle;
  request.device = dev;
  request.Encode(&call.message());
  if (const CUresult result = End(call); result != CUDA_SUCCESS) return result;
  Forget(call, handle);
  session.objects().primary_contexts().Release(dev);
  return CUDA_SUCCESS;
}

// A reset destroys the primary context, and leaves the count of its retains. Calls in it fail until it is retained once
// more: then it is there again, empty, under the same handle. (So the driver does, 580.)
CUresult Custom_cuDevicePrimaryCtxReset_v2(CUdevice dev) {
  Call call(info::k_cuDevicePrimaryCtxReset_v2);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  Session& session = call.session();
  if (const CUresult result = CheckDevice(&session, dev); result != CUDA_SUCCESS) return result;
  std::lock_guard<std::mutex> one_at_a_time(g_primary_mutex);
  uint64_t handle;
  {
    WriterLock lock(&session.objects().mutex());
    if (!session.objects().LivePrimaryContextLocked(dev)) return CUDA_SUCCESS;  // nothing there to reset
    handle = session.objects().PrimaryContextLocked(dev);
  }
  wire::cuDevicePrimaryCtxReset_v2_Request request;
  request.context = handle;
  request.device = dev;
  request.Encode(&call.message());
  if (const CUresult result = End(call); result != CUDA_SUCCESS) return result;
  Forget(call, handle);
  return CUDA_SUCCESS;
}

CUresult Custom_cuDevicePrimaryCtxSetFlags_v2(CUdevice dev, unsigned int flags) {
  Call call(info::k_cuDevicePrimaryCtxSetFlags_v2);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  Session& session = call.session();
  if (const CUresult result = CheckDevice(&session, dev); result != CUDA_SUCCESS) return result;
  std::lock_guard<std::mutex> one_at_a_time(g_primary_mutex);
  wire::cuDevicePrimaryCtxSetFlags_v2_Request request;
  request.dev = dev;
  request.flags = flags;
  request.Encode(&call.message());
  if (const CUresult result = call.Transact(); result != CUDA_SUCCESS) return result;
  WriterLock lock(&session.objects().mutex());
  session.objects().primary_contexts().SetFlags(dev, flags);
  if ((flags & CU_CTX_SCHED_MASK) == CU_CTX_SCHED_BLOCKING_SYNC) session.connection().WaitAsleep();
  Object* const context = session.objects().LivePrimaryContextLocked(dev);
  if (!context) return CUDA_SUCCESS;
  context->flags = flags;
  const uint64_t handle = session.objects().PrimaryContextLocked(dev);
  lock.Unlock();
  call.Modified({Kind::kContext, handle}, 0);
  return CUDA_SUCCESS;
}

// The first version takes flags for a context to come only.
CUresult Custom_cuDevicePrimaryCtxSetFlags(CUdevice dev, unsigned int flags) {
  unsigned before;
  int active = 0;
  if (const CUresult result = Custom_cuDevicePrimaryCtxGetState(dev, &before, &active); result != CUDA_SUCCESS)
    return result;
  if (flags & ~unsigned(CU_CTX_FLAGS_MASK)) return CUDA_ERROR_INVALID_VALUE;
  return active ? CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE : Custom_cuDevicePrimaryCtxSetFlags_v2(dev, flags);
}

CUresult Custom_cuDevicePrimaryCtxGetState(CUdevice dev, unsigned int* flags, int* active) {
  Session* session;
  ThreadState* thread;
  if (const CUresult result = LocalState(&session, &thread); result != CUDA_SUCCESS) return result;
  if (!flags || !active) return CUDA_ERROR_INVALID_VALUE;
  if (const CUresult result = CheckDevice(session, dev); result != CUDA_SUCCESS) return result;
  WriterLock lock(&session->objects().mutex());
  *flags = session->objects().primary_contexts().flags(dev);
  *active = session->objects().LivePrimaryContextLocked(dev) != nullptr;
  return CUDA_SUCCESS;
}

CUresult Custom_cuCtxGetCurrent(CUcontext* pctx) {
  Session* session;
  ThreadState* thread;
  if (const CUresult result = LocalState(&session, &thread); result != CUDA_SUCCESS) return result;
  if (!pctx) return CUDA_ERROR_INVALID_VALUE;
  *pctx = AsContext(thread->current_context());
  return CUDA_SUCCESS;
}

CUresult Custom_cuCtxSetCurrent(CUcontext ctx) {
  Session* session;
  ThreadState* thread;
  if (const CUresult result = LocalState(&session, &thread); result != CUDA_SUCCESS) return result;
  const uint64_t handle = AsHandle(ctx);
  auto& stack = thread->context_stack;
  if (!handle) {
    if (!stack.empty()) stack.pop_back();
    return CUDA_SUCCESS;
  }
  if (!IsContext(session, handle)) return CUDA_ERROR_INVALID_CONTEXT;
  if (stack.empty()) {
    stack.push_back(handle);
  } else {
    stack.back() = handle;
  }
  return CUDA_SUCCESS;
}

CUresult Custom_cuCtxPushCurrent_v2(CUcontext ctx) {
  Session* session;
  ThreadState* thread;
  if (const CUresult result = LocalState(&session, &thread); result != CUDA_SUCCESS) return result;
  if (!ctx) return CUDA_ERROR_INVALID_VALUE;
  if (!IsContext(session, AsHandle(ctx))) return CUDA_ERROR_INVALID_CONTEXT;
  thread->context_stack.push_back(AsHandle(ctx));
  return CUDA_SUCCESS;
}

CUresult Custom_cuCtxPopCurrent_v2(CUcontext* pctx) {
  Session* session;
  ThreadState* thread;
  if (const CUresult result = LocalState(&session, &thread); result != CUDA_SUCCESS) return result;
  if (thread->context_stack.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  if (pctx) *pctx = AsContext(thread->context_stack.back());
  thread->context_stack.pop_back();
  return CUDA_SUCCESS;
}

CUresult Custom_cuCtxGetDevice(CUdevice* device) {
  Session* session;
  ThreadState* thread;
  if (const CUresult result = LocalState(&session, &thread); result != CUDA_SUCCESS) return result;
  if (!device) return CUDA_ERROR_INVALID_VALUE;
  const uint64_t context = thread->current_context();
  if (!context) return CUDA_ERROR_INVALID_CONTEXT;
  const int ordinal = session->objects().DeviceOf(context);
  if (ordinal < 0) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
  *device = ordinal;
  return CUDA_SUCCESS;
}

CUresult Custom_cuCtxGetDevice_v2(CUdevice* device, CUcontext ctx) {
  if (!ctx) return Custom_cuCtxGetDevice(device);
  Session* session;
  ThreadState* thread;
  if (const CUresult result = LocalState(&session, &thread); result != CUDA_SUCCESS) return result;
  if (!device) return CUDA_ERROR_INVALID_VALUE;
  const int ordinal = session->objects().DeviceOf(AsHandle(ctx));
  if (ordinal < 0) return CUDA_ERROR_INVALID_CONTEXT;
  *device = ordinal;
  return CUDA_SUCCESS;
}

CUresult Custom_cuCtxGetFlags(unsigned int* flags) {
  Session* session;
  ThreadState* thread;
  if (const CUresult result = LocalState(&session, &thread); result != CUDA_SUCCESS) return result;
  if (!flags) return CUDA_ERROR_INVALID_VALUE;
  ReaderLock lock(&session->objects().mutex());
  const Object* object = session->objects().handles().Find(Kind::kContext, thread->current_context());
  if (!object) return CUDA_ERROR_INVALID_CONTEXT;
  *flags = object->flags;
  return CUDA_SUCCESS;
}

CUresult Custom_cuCtxGetId(CUcontext ctx, unsigned long long* ctxId) {
  Session* session;
  ThreadState* thread;
  if (const CUresult result = LocalState(&session, &thread); result != CUDA_SUCCESS) return result;
  if (!ctxId) return CUDA_ERROR_INVALID_VALUE;
  const uint64_t handle = ctx ? AsHandle(ctx) : thread->current_context();
  ReaderLock lock(&session->objects().mutex());
  const Object* object = session->objects().handles().Find(Kind::kContext, handle);
  if (!object) return CUDA_ERROR_INVALID_CONTEXT;
  if (!object->active) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
  *ctxId = object->id;
  return CUDA_SUCCESS;
}

CUresult Custom_cuCtxSetFlags(unsigned int flags) {
  Call call(info::k_cuCtxSetFlags);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  wire::cuCtxSetFlags_Request request;
  request.flags = flags;
  request.Encode(&call.message());
  if (const CUresult result = call.Transact(); result != CUDA_SUCCESS) return result;
  const uint64_t handle = call.thread().current_context();
  {
    WriterLock lock(&call.session().objects().mutex());
    if (Object* object = call.session().objects().handles().Find(Kind::kContext, handle)) object->flags = flags;
  }
  call.Modified({Kind::kContext, handle}, 0);
  return CUDA_SUCCESS;
}

// The version of the interface that the context was made with. The driver answers 3020 for every context that today's
// entry points can make.
CUresult Custom_cuCtxGetApiVersion(CUcontext ctx, unsigned int* version) {
  Session* session;
  ThreadState* thread;
  if (const CUresult result = LocalState(&session, &thread); result != CUDA_SUCCESS) return result;
  if (!version) return CUDA_ERROR_INVALID_VALUE;
  ReaderLock lock(&session->objects().mutex());
  const Object* const object =
      session->objects().handles().Find(Kind::kContext, ctx ? AsHandle(ctx) : thread->current_context());
  if (!object || !object->active) return CUDA_ERROR_INVALID_CONTEXT;
  *version = 3020;
  return CUDA_SUCCESS;
}

// Usage counts of before CUDA 4: a context made by cuCtxCreate counts once, so one detach destroys it.
CUresult Custom_cuCtxAttach(CUcontext* pctx, unsigned int flags) {
  Session* session;
  ThreadState* thread;
  if (const CUresult result = LocalState(&session, &thread); result != CUDA_SUCCESS) return result;
  if (!pctx || flags != 0) return CUDA_ERROR_INVALID_VALUE;
  WriterLock lock(&session->objects().mutex());
  Object* object = session->objects().handles().Find(Kind::kContext, thread->current_context());
  if (!object || !object->active) return CUDA_ERROR_INVALID_CONTEXT;
  ++object->attached;
  *pctx = AsContext(thread->current_context());
  return CUDA_SUCCESS;
}

// Takes back what cuCtxAttach or cuCtxCreate counted; the last one destroys the context.
CUresult Custom_cuCtxDetach(CUcontext ctx) {
  Session* session;
  ThreadState* thread;
  if (const CUresult result = LocalState(&session, &thread); result != CUDA_SUCCESS) return result;
  {
    WriterLock lock(&session->objects().mutex());
    Object* object = session->objects().handles().Find(Kind::kContext, AsHandle(ctx));
    if (!object || !object->active) return CUDA_ERROR_INVALID_CONTEXT;
    if (object->attached > 0) {
      --object->attached;
      return CUDA_SUCCESS;
    }
  }
  return Custom_cuCtxDestroy_v2(ctx);
}

}  // namespace cuda_remote::client
