// SPDX-License-Identifier: Apache-2.0
// What the exported entry points use besides the bodies of the calls.
//
// This header is part of the client library: no libprotobuf, no abseil, no logging.
#ifndef CUDA_REMOTE_CLIENT_ENTRY_EXPORT_H_
#define CUDA_REMOTE_CLIENT_ENTRY_EXPORT_H_

#include <cuda.h>

#include <cstdint>

#include "client/core/call.h"
#include "client/trace/trace.h"
#include "proto/frame/frame.h"
#include "proto/frame/handle.h"

// The exported symbols of the library; everything else is hidden by the version script.
#define CR_EXPORT __attribute__((visibility("default")))

namespace cuda_remote::client {

// The application's handle of an executable graph that kernels may launch is the driver's own.
inline CUgraphExec VirtualExec(CUgraphExec exec) {
  const uint64_t handle = reinterpret_cast<uint64_t>(exec);
  return KindOf(handle) == Kind::kGraphExec ? exec : reinterpret_cast<CUgraphExec>(Call::ExecOfDriver(handle));
}

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_ENTRY_EXPORT_H_
