// SPDX-License-Identifier: Apache-2.0
// The product's version, in this one place.
#ifndef CUDA_REMOTE_PROTO_FRAME_VERSION_H_
#define CUDA_REMOTE_PROTO_FRAME_VERSION_H_

#include <string>

#include "proto/frame/frame.h"

namespace cuda_remote {

// Semantic versioning. Images record it; nothing is decided by it. What client and server must share is kWireVersion.
inline constexpr char kVersion[] = "0.9.0";

// What `PROGRAM --version` prints.
inline std::string VersionLine(const std::string& program) {
  return program + " " + kVersion + " (wire version " + std::to_string(kWireVersion) + ")";
}

}  // namespace cuda_remote

#endif  // CUDA_REMOTE_PROTO_FRAME_VERSION_H_
