// SPDX-License-Identifier: Apache-2.0
// Bounds the memory that the server needs for copies from pageable memory.
//
// Natively such a copy may wait for its stream. Here its bytes go to the server at once, which keeps them until the GPU
// has read them; behind a long kernel that could become any amount. So now and then a copy asks the server whether it
// has room, and waits for the answer.
//
// Thread-safe.
//
// This header is part of the client library: no libprotobuf, no abseil, no logging.
#ifndef CUDA_REMOTE_CLIENT_MEMORY_UPLOAD_LIMIT_H_
#define CUDA_REMOTE_CLIENT_MEMORY_UPLOAD_LIMIT_H_

#include <atomic>
#include <cstddef>

namespace cuda_remote::client {

class UploadLimit {
 public:
  // Bytes that are sent from one question to the next.
  static constexpr size_t kBetween = size_t{64} << 20;

  // Counts `bytes` that are about to be sent. True: they are to be sent with the question.
  bool ShouldAsk(size_t bytes) {
    const size_t before = sent_.fetch_add(bytes, std::memory_order_relaxed);
    return before / kBetween != (before + bytes) / kBetween;
  }

 private:
  std::atomic<size_t> sent_{0};
};

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_MEMORY_UPLOAD_LIMIT_H_
