// SPDX-License-Identifier: Apache-2.0
// A call of the Control service over a session socket of this machine: a server's, or a relay's, which takes it on.
// Needs no gRPC. Thread-safe: no state.
#ifndef CUDA_REMOTE_PROTO_CONTROL_SOCKET_CALL_H_
#define CUDA_REMOTE_PROTO_CONTROL_SOCKET_CALL_H_

#include <functional>
#include <string>

#include "absl/status/statusor.h"
#include "proto/control/control.pb.h"

namespace cuda_remote::control {

// What a server of another release gets wrong, and what it is told.
inline constexpr char kNotUnderstood[] =
    "its answer cannot be understood; both sides need the same release of cuda-remote";
inline constexpr char kUnknownCall[] =
    "it does not support this request; both sides need the same release of cuda-remote";

// Makes `call` at the socket `path` and waits `limit_ms` for the answer, which is of the same call. Fails if there is
// none. `goes_on`: is called about ten times a second meanwhile, with the time so far; false gives the call up.
absl::StatusOr<ControlAnswer> CallOnSocket(const std::string& path, const ControlCall& call, int limit_ms,
                                           const std::function<bool(int waited_ms)>& goes_on = nullptr);

}  // namespace cuda_remote::control

#endif  // CUDA_REMOTE_PROTO_CONTROL_SOCKET_CALL_H_
