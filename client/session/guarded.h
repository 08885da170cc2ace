// SPDX-License-Identifier: Apache-2.0
// A mutex that clang understands: -Wthread-safety finds accesses to what CR_GUARDED_BY names without its lock, and
// calls of what CR_REQUIRES names. tests/style checks the classes that use it. Other compilers see a std::mutex.
//
// This header is part of the client library: no abseil, whose annotations these are otherwise.
#ifndef CUDA_REMOTE_CLIENT_SESSION_GUARDED_H_
#define CUDA_REMOTE_CLIENT_SESSION_GUARDED_H_

#include <mutex>

#ifdef __clang__
#define CR_ANNOTATION(x) __attribute__((x))
#else
#define CR_ANNOTATION(x)
#endif

// Of a member: only with this mutex held.
#define CR_GUARDED_BY(mutex) CR_ANNOTATION(guarded_by(mutex))
// Of a function: its caller holds this mutex. Its name ends in Locked.
#define CR_REQUIRES(mutex) CR_ANNOTATION(requires_capability(mutex))
// Of a function: its caller must not hold this mutex.
#define CR_EXCLUDES(mutex) CR_ANNOTATION(locks_excluded(mutex))

namespace cuda_remote::client {

class CR_ANNOTATION(capability("mutex")) Mutex {
 public:
  void Lock() CR_ANNOTATION(acquire_capability()) { mutex_.lock(); }
  void Unlock() CR_ANNOTATION(release_capability()) { mutex_.unlock(); }

 private:
  std::mutex mutex_;
};

// Holds a mutex while it lives.
class CR_ANNOTATION(scoped_lockable) MutexLock {
 public:
  explicit MutexLock(Mutex* mutex) CR_ANNOTATION(acquire_capability(mutex)) : mutex_(mutex) { mutex_->Lock(); }
  ~MutexLock() CR_ANNOTATION(release_capability()) { mutex_->Unlock(); }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

 private:
  Mutex* const mutex_;
};

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_SESSION_GUARDED_H_
