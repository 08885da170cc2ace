// SPDX-License-Identifier: Apache-2.0
// A ControlCall over gRPC, as the call of the Control service that it stands for.
#ifndef CUDA_REMOTE_PROTO_CONTROL_GRPC_CALL_H_
#define CUDA_REMOTE_PROTO_CONTROL_GRPC_CALL_H_

#include <grpcpp/grpcpp.h>

#include "proto/control/control.grpc.pb.h"

namespace cuda_remote::control {

// Waits for the answer. `checked`: nothing else notices what is damaged on the way, so the messages carry checksums
// (message_check.h). Thread-safe: no state.
grpc::Status CallOverGrpc(Control::Stub* stub, grpc::ClientContext* context, ControlCall call, bool checked,
                          ControlAnswer* answer);

}  // namespace cuda_remote::control

#endif  // CUDA_REMOTE_PROTO_CONTROL_GRPC_CALL_H_
