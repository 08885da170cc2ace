// SPDX-License-Identifier: Apache-2.0
// The two compressions of fat binary entries.
#ifndef CUDA_REMOTE_REPLAY_MODIMG_UNPACK_H_
#define CUDA_REMOTE_REPLAY_MODIMG_UNPACK_H_

#include <cstdint>
#include <string>
#include <string_view>

namespace cuda_remote::replay {

// Replaces `out` by exactly `bytes` unpacked bytes; false and `error` if `packed` does not hold just these. Memory is
// taken as the data come, not as `bytes` says.
bool UnpackLz4(std::string_view packed, uint64_t bytes, std::string* out, std::string* error);   // one raw block
bool UnpackZstd(std::string_view packed, uint64_t bytes, std::string* out, std::string* error);  // frames

}  // namespace cuda_remote::replay

#endif  // CUDA_REMOTE_REPLAY_MODIMG_UNPACK_H_
