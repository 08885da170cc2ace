// SPDX-License-Identifier: Apache-2.0
// Contexts: made, shared, reset and destroyed. Which one is current travels with each request.

#include <cuda.h>

#include <utility>
#include <vector>

#include "proto/codec/context.gen.h"
#include "proto/codec/device.gen.h"
#include "server/dispatch/malformed.h"
#include "server/worker/calls/handlers.gen.h"
#include "server/worker/session/worker_session.h"

namespace cuda_remote::server {
namespace {

bool IsDevice(const WorkerSession& session, int device) {
  return device >= 0 && size_t(device) < session.loaded().devices.size();
}

// Waits until the context is idle, lets `end` end it, then frees what it leaves. Runs on a waiter thread, since the
// wait may be long and host functions must be answered meanwhile.
void EndContext(WorkerSession& session, ReplyBuilder* reply, ContextRef context, ContextRemains remains,
                std::function<CUresult()> end) {
  const DriverTable* const driver = &session.driver();
  DeviceArena* const arena = &session.arena();
  Ipc* const ipc = &session.ipc();
  session.answers().DeferIn(context, reply, [=, remains = std::move(remains), end = std::move(end)](Answer*) {
    driver->cuCtxSynchronize();  // a context that is stuck with an error is destroyed all the same
    const CUresult result = end();
    ForgetCurrent();
    driver->cuCtxSetCurrent(nullptr);
    for (const uint64_t address : remains.memory) arena->Free(address);
    for (const IpcImport& import : remains.imports) ipc->LetGo(*driver, import);
    return result;
  });
}

// Gives up the one retain that this process has of a primary context, which ends it.
CUresult EndPrimary(WorkerSession& session, uint64_t handle, int device, ReplyBuilder* reply) {
  const ContextInfo* const found = session.contexts().Find(handle);
  if (found == nullptr || !found->primary || found->device != device) return CUDA_ERROR_INVALID_CONTEXT;
  const ContextRef context = found->ref;
  ContextRemains remains = session.ForgetContext(handle);
  session.host_ranges().RegisterAll(session.contexts().Any());
  MakeCurrent(session.driver(), {});
  const DriverTable* const driver = &session.driver();
  EndContext(session, reply, context, std::move(remains),
             [driver, device] { return driver->cuDevicePrimaryCtxRelease_v2(device); });
  return CUDA_SUCCESS;
}

}  // namespace

CUresult Custom_cuCtxCreate_v4(WorkerSession& session, const Request&, const wire::cuCtxCreate_v4_Request& in,
                               wire::cuCtxCreate_v4_Reply*, ReplyBuilder*) {
  if (!session.MayBind(Kind::kContext, in.context)) return kMalformedRequest;
  if (!IsDevice(session, in.device)) return CUDA_ERROR_INVALID_DEVICE;
  const DriverTable& driver = session.driver();
  CUcontext context = nullptr;
  CUresult result = driver.cuCtxCreate_v2(&context, in.flags, in.device);
  if (result != CUDA_SUCCESS) return result;
  // A new context becomes current here; whether it does for the client is the client's business.
  CUcontext popped = nullptr;
  driver.cuCtxPopCurrent_v2(&popped);
  ForgetCurrent();
  session.BindContext(in.context, context, in.device, false);
  return CUDA_SUCCESS;
}

CUresult Custom_cuCtxDestroy_v2(WorkerSession& session, const Request&, const wire::cuCtxDestroy_v2_Request& in,
                                wire::cuCtxDestroy_v2_Reply*, ReplyBuilder* reply) {
  const ContextInfo* const found = session.contexts().Find(in.context);
  if (found == nullptr || found->primary) return CUDA_ERROR_INVALID_CONTEXT;
  const ContextRef context = found->ref;
  ContextRemains remains = session.ForgetContext(in.context);
  session.host_ranges().RegisterAll(session.contexts().Any());
  MakeCurrent(session.driver(), {});
  const DriverTable* const driver = &session.driver();
  EndContext(session, reply, context, std::move(remains),
             [driver, context] { return driver->cuCtxDestroy_v2(context.real); });
  return CUDA_SUCCESS;
}

CUresult Custom_cuDevicePrimaryCtxRetain(WorkerSession& session, const Request&,
                                         const wire::cuDevicePrimaryCtxRetain_Request& in,
                                         wire::cuDevicePrimaryCtxRetain_Reply*, ReplyBuilder*) {
  if (!session.MayBind(Kind::kContext, in.context)) return kMalformedRequest;
  if (!IsDevice(session, in.device)) return CUDA_ERROR_INVALID_DEVICE;
  for (const auto& [handle, context] : session.contexts().all()) {
    // The client counts its retains itself and asks for the first one only.
    if (context.primary && context.device == in.device) return kMalformedRequest;
  }
  CUcontext context = session.contexts().TakeWarm(in.device);
  if (context == nullptr) {
    const CUresult result = session.driver().cuDevicePrimaryCtxRetain(&context, in.device);
    if (result != CUDA_SUCCESS) return result;
  }
  session.BindContext(in.context, context, in.device, true);
  return CUDA_SUCCESS;
}

CUresult Custom_cuDevicePrimaryCtxRelease_v2(WorkerSession& session, const Request&,
                                             const wire::cuDevicePrimaryCtxRelease_v2_Request& in,
                                             wire::cuDevicePrimaryCtxRelease_v2_Reply*, ReplyBuilder* reply) {
  return EndPrimary(session, in.context, in.device, reply);
}

// Whoever has retained it may release it after a reset, too; the client counts that.
CUresult Custom_cuDevicePrimaryCtxReset_v2(WorkerSession& session, const Request&,
                                           const wire::cuDevicePrimaryCtxReset_v2_Request& in,
                                           wire::cuDevicePrimaryCtxReset_v2_Reply*, ReplyBuilder* reply) {
  return EndPrimary(session, in.context, in.device, reply);
}

}  // namespace cuda_remote::server
