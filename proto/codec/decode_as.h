// SPDX-License-Identifier: Apache-2.0
// A request of one certain call, among others.
//
// This header is part of the client library: no libprotobuf, no abseil, no logging.
#ifndef CUDA_REMOTE_PROTO_CODEC_DECODE_AS_H_
#define CUDA_REMOTE_PROTO_CODEC_DECODE_AS_H_

#include <cstdint>
#include <string_view>

namespace cuda_remote::wire {

// Whether this is a well-formed request of the call that `Request` belongs to. If so, reads it.
template <typename Request>
bool DecodeAs(uint32_t call, std::string_view message, Request* request) {
  return call == Request::kCallId && request->Decode(message);
}

}  // namespace cuda_remote::wire

#endif  // CUDA_REMOTE_PROTO_CODEC_DECODE_AS_H_
