// SPDX-License-Identifier: Apache-2.0
// What the tables of proto/api say of a driver function, as far as a Call needs it. client/core/call_info.gen.h has
// one constant for each: info::k_cuX.
#ifndef CUDA_REMOTE_CLIENT_CORE_CALL_INFO_H_
#define CUDA_REMOTE_CLIENT_CORE_CALL_INFO_H_

#include <cstdint>

namespace cuda_remote::client {

// The context that a call is made in.
enum class ContextOf : uint8_t {
  kNone,    // works without one
  kThread,  // the thread's current one; natively CUDA_ERROR_INVALID_CONTEXT without
  kObject,  // the thread's current one, or without it that of the first object that the call names, as in the driver
};

struct CallInfo {
  uint32_t id;       // of the request that it sends; 0: none, it is answered here or by other Calls
  const char* name;  // the driver function's name, for messages and traces
  ContextOf context;
};

// The same under the name of another function, where several come to the same request.
constexpr CallInfo Under(const CallInfo& info, const char* name) { return {info.id, name, info.context}; }

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_CORE_CALL_INFO_H_
