// SPDX-License-Identifier: Apache-2.0
// Buffers that the server shares, and threads, for large copies of pageable memory.
//
// The application's own pages cannot be shared with the server, so their bytes are copied once more than natively -
// unless the GPU itself reads and writes memory that both sides have mapped. These buffers are a piece of the host
// arena, registered with the server's driver like pinned memory: the GPU copies a piece while the client empties the
// one before, and large copies are emptied by several threads, which one thread's memory bandwidth does not limit.
//
// Nothing is made before a large copy or many small ones, and nothing runs between copies. One copy at a time uses the
// buffers; another thread's goes through the channel meanwhile.
//
// Thread-safe. Only for sessions with shared memory.
//
// This header is part of the client library: no libprotobuf, no abseil, no logging.
#ifndef CUDA_REMOTE_CLIENT_MEMORY_STAGING_H_
#define CUDA_REMOTE_CLIENT_MEMORY_STAGING_H_

#include <cstddef>
#include <cstdint>
#include <functional>

#include "client/memory/host_arena.h"
#include "client/memory/host_mappings.h"
#include "proto/threads/mutex.h"

namespace cuda_remote::client {

class Staging {
 public:
  // Both outlive this.
  Staging(HostArena* arena, HostMappings* mappings) : arena_(arena), mappings_(mappings) {}

  static constexpr size_t kPieces = 12;
  static constexpr size_t kPieceBytes = 1 << 20;
  // Divides kPieces, so that each thread has as many pieces as the others.
  static constexpr int kMostThreads = 4;

  // How many threads a large copy uses, the caller's among them; 0: as many as this machine has processors for.
  void SetThreads(int threads);
  int threads() const { return threads_; }

  // So many bytes of copies that could have used the buffers are reason enough to make them.
  static constexpr size_t kWorth = 2 << 20;

  // Takes the buffers for a copy of `bytes`, making them first once they would have been used for kWorth bytes. False
  // if there are none or another copy has them.
  bool Acquire(size_t bytes) CR_ANNOTATION(try_acquire_capability(true, in_use_));
  void Release() CR_ANNOTATION(release_capability(in_use_)) { in_use_.unlock(); }
  // With the buffers: one of them. Also for the threads of Run, of which clang does not know whose lock they work
  // under.
  char* piece(size_t index) const CR_UNGUARDED { return memory_ + index * kPieceBytes; }

  // With the buffers: runs job(0) on the caller's thread and job(1) to job(count - 1) on others, as far as they can be
  // had: a job must not rely on another one's running. Returns when all that began have ended. Jobs must not throw.
  void Run(int count, const std::function<void(int)>& job);

  // Gives the buffers back: to the server, which is about to be left, and to the system. With no copy in progress.
  void GiveBack();

 private:
  void StartHelpersLocked(int count) CR_REQUIRES(mutex_);
  void Help(int index);

  HostArena* const arena_;
  HostMappings* const mappings_;
  int threads_ = 1;
  Mutex in_use_;
  char* memory_ CR_GUARDED_BY(in_use_) = nullptr;
  size_t missed_ CR_GUARDED_BY(in_use_) = 0;     // bytes of copies that there were no buffers for
  bool refused_ CR_GUARDED_BY(in_use_) = false;  // the server could not map them; it is not asked again

  Mutex mutex_;
  Condition changed_;
  Condition idle_;
  const std::function<void(int)>* job_ CR_GUARDED_BY(mutex_) = nullptr;  // while a job may be begun
  int count_ CR_GUARDED_BY(mutex_) = 0;
  uint64_t generation_ CR_GUARDED_BY(mutex_) = 0;
  int inside_ CR_GUARDED_BY(mutex_) = 0;
  int helpers_ CR_GUARDED_BY(mutex_) = 0;
};

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_MEMORY_STAGING_H_
