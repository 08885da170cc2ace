// SPDX-License-Identifier: Apache-2.0
// Every message's codec by name, for tests and fuzzers.
#ifndef CUDA_REMOTE_PROTO_CODEC_INTEROP_H_
#define CUDA_REMOTE_PROTO_CODEC_INTEROP_H_

#include <cstddef>
#include <string>
#include <string_view>

namespace cuda_remote::wire {

struct MessageCodec {
  const char* name;                                           // as in proto/calls
  bool (*round_trip)(std::string_view in, std::string* out);  // decodes, encodes again; false if malformed
};

extern const MessageCodec kMessages[];
extern const size_t kMessageCount;

}  // namespace cuda_remote::wire

#endif  // CUDA_REMOTE_PROTO_CODEC_INTEROP_H_
