// SPDX-License-Identifier: Apache-2.0
// How long a module image is. The driver's calls take a bare pointer; to send the image, its end must be found.
//
// Part of the client library: libc only, no state, any thread.
#ifndef CUDA_REMOTE_REPLAY_MODIMG_IMAGE_SIZE_H_
#define CUDA_REMOTE_REPLAY_MODIMG_IMAGE_SIZE_H_

#include <cstddef>
#include <string_view>

#include "proto/base/status.h"

namespace cuda_remote::replay {

// No image is longer than this; one that says it is, is refused.
inline constexpr size_t kMaxImageBytes = size_t{2} << 30;

// Finds the bytes of the image that a module-loading call was given: a fat binary's wrapper (which is followed to the
// fat binary), a fat binary, a cubin (ELF), or PTX text. The size of a text includes its terminating zero, since the
// driver wants it there. As the driver itself, this believes the image's own headers: it reads nothing beyond what they
// span. Fails if it is none of these.
StatusOr<std::string_view> LocateImage(const void* image);

}  // namespace cuda_remote::replay

#endif  // CUDA_REMOTE_REPLAY_MODIMG_IMAGE_SIZE_H_
