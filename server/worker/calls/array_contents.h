// SPDX-License-Identifier: Apache-2.0
// The contents of CUDA arrays and mipmapped arrays as packed bytes: for checkpoints.
#ifndef CUDA_REMOTE_SERVER_WORKER_CALLS_ARRAY_CONTENTS_H_
#define CUDA_REMOTE_SERVER_WORKER_CALLS_ARRAY_CONTENTS_H_

#include <cuda.h>

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "server/worker/session/worker_session.h"

namespace cuda_remote::server {

// How the elements of an array lie in its packed bytes: rows after rows, slices (or layers, or faces) after slices,
// levels after levels, without gaps.
struct ArrayLayout {
  struct Level {
    CUarray array = nullptr;
    uint64_t row_bytes = 0, rows = 0, slices = 0;
    uint64_t bytes() const { return row_bytes * rows * slices; }
  };
  std::vector<Level> levels;
  uint64_t bytes = 0;
  uint64_t context = 0;  // virtual handle of the array's context
  int device = 0;
};

// Whether `handle` is one of an array or mipmapped array, by its kind.
inline bool IsArrayHandle(uint64_t handle) {
  return KindOf(handle) == Kind::kArray || KindOf(handle) == Kind::kMipmappedArray;
}

// Describes a live array. Levels and planes of others have no contents of their own: `bytes` is 0. Fails if its
// contents cannot be saved. Changes the current context of the calling thread.
absl::StatusOr<ArrayLayout> DescribeArray(WorkerSession& session, uint64_t handle);

// Copies [offset, offset + bytes) of the packed contents from (`write`) or to `memory`, and waits. The array's context
// is current. CUDA_ERROR_INVALID_VALUE if the array does not have these bytes. Any thread.
CUresult CopyArrayBytes(const DriverTable& driver, const ArrayLayout& layout, uint64_t offset, char* memory,
                        uint64_t bytes, bool write);

}  // namespace cuda_remote::server

#endif  // CUDA_REMOTE_SERVER_WORKER_CALLS_ARRAY_CONTENTS_H_
