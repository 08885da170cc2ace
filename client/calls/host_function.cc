// SPDX-License-Identifier: Apache-2.0
// Host functions in streams. See client/core/host_functions.h.

#include <cuda.h>

#include "client/calls/bodies.gen.h"
#include "client/core/call.h"
#include "client/core/session.h"
#include "proto/codec/codec.h"

namespace cuda_remote::client {
namespace {

// `plain` is what cuLaunchHostFunc was given: in a captured stream it becomes part of the graph, and runs at every
// launch.
struct PlainFunction {
  CUhostFn function;
  void* data;
};

CUresult Launch(const CallInfo& info, CUstream hStream, bool per_thread, const PlainFunction* plain,
                std::function<void(CUresult)> function) {
  Call call(info);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  wire::OpLaunchHostFunc_Request request;
  if (const CUresult result = call.StreamToWire(hStream, per_thread, &request.stream); result != CUDA_SUCCESS) {
    return result;
  }
  HostFunctions& functions = call.session().host_functions();
  if (!functions.Start()) return CUDA_ERROR_OUT_OF_MEMORY;
  const bool captured = plain && call.session().graphs().captures().IsCaptured(request.stream);
  request.id =
      captured ? functions.RegisterForGraph(plain->function, plain->data) : functions.Register(std::move(function));
  request.callback = !plain;
  request.Encode(&call.message());
  const CUresult result = call.Transact();
  if (result != CUDA_SUCCESS && !captured) functions.Forget(request.id);
  return result;
}

}  // namespace

CUresult Custom_cuLaunchHostFunc(CUstream hStream, CUhostFn fn, void* userData, bool per_thread) {
  if (!fn) return CUDA_ERROR_INVALID_VALUE;
  const PlainFunction plain{fn, userData};
  return Launch(info::k_cuLaunchHostFunc, hStream, per_thread, &plain, [fn, userData](CUresult) { fn(userData); });
}

CUresult Custom_cuStreamAddCallback(CUstream hStream, CUstreamCallback callback, void* userData, unsigned int flags,
                                    bool per_thread) {
  if (!callback || flags != 0) return CUDA_ERROR_INVALID_VALUE;
  return Launch(info::k_cuStreamAddCallback, hStream, per_thread, nullptr,
                [callback, hStream, userData](CUresult status) { callback(hStream, status, userData); });
}

}  // namespace cuda_remote::client
