// SPDX-License-Identifier: Apache-2.0
// Messages between an ordinary user's tool and cr-hostd: a length, and a message of request.proto. Descriptors go with
// the first one (SCM_RIGHTS).
//
// What the other side sends is checked. Thread-safe; no state.
#ifndef CUDA_REMOTE_HOST_WIRE_H_
#define CUDA_REMOTE_HOST_WIRE_H_

#include <google/protobuf/message_lite.h>

#include <string>
#include <vector>

#include "proto/base/clock.h"

namespace cuda_remote::host {

inline constexpr uint32_t kVersion = 2;
// An environment and a command line are at most 2 MiB on Linux, unless somebody has raised the limit for stacks.
inline constexpr size_t kMostBytes = 8u << 20;
inline constexpr size_t kMostDescriptors = 4;

bool Send(int socket, const google::protobuf::MessageLite& message, const std::vector<int>& descriptors = {});

// Waits for a whole message. False if the peer has closed, sent something else, or more descriptors than
// kMostDescriptors; `descriptors` (close-on-exec; the caller's also on failure) may be null: then none may come. Also
// false if the message is not complete at `until`. A peer that is not trusted must not choose how long a process of
// root's waits. A short message comes as a whole, so a caller that has polled the socket can pass Now().
bool Receive(int socket, google::protobuf::MessageLite* message, std::vector<int>* descriptors = nullptr,
             Moment until = Moment::max());

}  // namespace cuda_remote::host

#endif  // CUDA_REMOTE_HOST_WIRE_H_
