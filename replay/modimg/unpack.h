// SPDX-License-Identifier: Apache-2.0
// The two compressions of fat binary entries.
#ifndef CUDA_REMOTE_REPLAY_MODIMG_UNPACK_H_
#define CUDA_REMOTE_REPLAY_MODIMG_UNPACK_H_

#include <cstdint>
#include <string>
#include <string_view>

#include "proto/base/status.h"

namespace cuda_remote::replay {

// Replaces `out` by exactly `bytes` unpacked bytes; fails if `packed` does not hold just these. Memory is taken as the
// data come, not as `bytes` says.
Status UnpackLz4(std::string_view packed, uint64_t bytes, std::string* out);   // one raw block
Status UnpackZstd(std::string_view packed, uint64_t bytes, std::string* out);  // frames

}  // namespace cuda_remote::replay

#endif  // CUDA_REMOTE_REPLAY_MODIMG_UNPACK_H_
