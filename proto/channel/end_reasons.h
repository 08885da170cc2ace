// SPDX-License-Identifier: Apache-2.0
// Texts for the end of a session that programs also compare with.
#ifndef CUDA_REMOTE_PROTO_CHANNEL_END_REASONS_H_
#define CUDA_REMOTE_PROTO_CHANNEL_END_REASONS_H_

namespace cuda_remote {

// The client has closed its end: its process has ended, or has let the session go.
inline constexpr char kClientGone[] = "the client is gone";

}  // namespace cuda_remote

#endif  // CUDA_REMOTE_PROTO_CHANNEL_END_REASONS_H_
