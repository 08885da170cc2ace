// SPDX-License-Identifier: Apache-2.0
// What went wrong with a call of gRPC's, for a person: without the names of its parts and states.
//
// Thread-safe; nothing here keeps state. Not part of the client library.
#ifndef CUDA_REMOTE_PROTO_CONTROL_STATUS_TEXT_H_
#define CUDA_REMOTE_PROTO_CONTROL_STATUS_TEXT_H_

#include <string>

namespace grpc {
class Status;
}

namespace cuda_remote::control {

// As in "connection refused". What our own programs have answered comes out as it is. Empty for a call that went well.
std::string StatusText(const grpc::Status& status);

// What to look at when a cr-server could not be reached: goes behind `problem`, which StatusText has given. Begins with
// a semicolon; empty where the problem says it all.
std::string WhatToCheck(const std::string& problem);

}  // namespace cuda_remote::control

#endif  // CUDA_REMOTE_PROTO_CONTROL_STATUS_TEXT_H_
