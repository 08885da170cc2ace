// SPDX-License-Identifier: Apache-2.0
// Sleeping on a word of memory, and waking who sleeps there.
//
// This header is part of the client library: no libprotobuf, no abseil, no logging.
#ifndef CUDA_REMOTE_PROTO_RING_FUTEX_H_
#define CUDA_REMOTE_PROTO_RING_FUTEX_H_

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>

namespace cuda_remote::ring {

// Sleeps while *word == value, at most timeout_ms (negative: no limit). May return early for no reason; look again.
// `shared`: the word lies in memory that other processes map.
inline void FutexWait(std::atomic<uint32_t>* word, uint32_t value, int timeout_ms, bool shared) {
  timespec limit;
  limit.tv_sec = timeout_ms / 1000;
  limit.tv_nsec = long(timeout_ms % 1000) * 1000000;
  syscall(SYS_futex, word, shared ? FUTEX_WAIT : FUTEX_WAIT_PRIVATE, value, timeout_ms < 0 ? nullptr : &limit, nullptr,
          0);
}

// Wakes everybody who sleeps on the word, or `most` of them.
inline void FutexWake(std::atomic<uint32_t>* word, bool shared, int most = INT_MAX) {
  syscall(SYS_futex, word, shared ? FUTEX_WAKE : FUTEX_WAKE_PRIVATE, most, nullptr, nullptr, 0);
}

}  // namespace cuda_remote::ring

#endif  // CUDA_REMOTE_PROTO_RING_FUTEX_H_
