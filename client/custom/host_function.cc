// Host functions in streams. See client/session/host_functions.h.

#include <cuda.h>

#include "client/custom/call_names.h"
#include "client/entry/custom.gen.h"
#include "client/session/call.h"
#include "client/session/session.h"
#include "proto/codec/codec.h"

namespace cuda_remote::client {
namespace {

CUresult Launch(const CallInfo& info, CUstream hStream, bool per_thread, bool callback,
                std::function<void(CUresult)> function) {
  Call call(info);
  if (const CUresult result = call.Enter(); result != CUDA_SUCCESS) return result;
  wire::OpLaunchHostFunc_Request request;
  if (const CUresult result = call.StreamToWire(hStream, per_thread, &request.stream); result != CUDA_SUCCESS) {
    return result;
  }
  HostFunctions& functions = call.session().host_functions();
  request.id = functions.Register(std::move(function), false);
  request.callback = callback;
  request.Encode(&call.message());
  const CUresult result = call.Transact();
  if (result != CUDA_SUCCESS) functions.Forget(request.id);
  return result;
}

}  // namespace

CUresult Custom_cuLaunchHostFunc(CUstream hStream, CUhostFn fn, void* userData, bool per_thread) {
  static constexpr CallInfo kInfo{kOpLaunchHostFunc, "cuLaunchHostFunc", false, true};
  if (!fn) return CUDA_ERROR_INVALID_VALUE;
  return Launch(kInfo, hStream, per_thread, false, [fn, userData](CUresult) { fn(userData); });
}

CUresult Custom_cuStreamAddCallback(CUstream hStream, CUstreamCallback callback, void* userData, unsigned int flags,
                                    bool per_thread) {
  static constexpr CallInfo kInfo{kOpLaunchHostFunc, "cuStreamAddCallback", false, true};
  if (!callback || flags != 0) return CUDA_ERROR_INVALID_VALUE;
  return Launch(kInfo, hStream, per_thread, true,
                [callback, hStream, userData](CUresult status) { callback(hStream, status, userData); });
}

}  // namespace cuda_remote::client
