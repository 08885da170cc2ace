// SPDX-License-Identifier: Apache-2.0
// The project's mutexes, which clang understands: -Wthread-safety finds accesses to what CR_GUARDED_BY names without
// its lock, and calls of what CR_REQUIRES names. tests/style checks all programs and libraries; tests/layers checks
// that they use no other mutexes for members. Compilers other than clang see the standard library's.
//
// This header is part of the client library: no abseil, whose annotations these are otherwise.
#ifndef CUDA_REMOTE_PROTO_THREADS_MUTEX_H_
#define CUDA_REMOTE_PROTO_THREADS_MUTEX_H_

#include <condition_variable>
#include <mutex>
#include <shared_mutex>

#include "proto/base/clock.h"

#ifdef __clang__
#define CR_ANNOTATION(x) __attribute__((x))
#else
#define CR_ANNOTATION(x)
#endif

// Of a member: only with this mutex held.
#define CR_GUARDED_BY(mutex) CR_ANNOTATION(guarded_by(mutex))
// Of a pointer: what it points to is only used with this mutex held.
#define CR_PT_GUARDED_BY(mutex) CR_ANNOTATION(pt_guarded_by(mutex))
// Of a function: its caller holds this mutex. In a class that also has functions which take the mutex themselves, its
// name ends in Locked.
#define CR_REQUIRES(mutex) CR_ANNOTATION(requires_capability(mutex))
// The same, but many may hold it at once: for looking only.
#define CR_REQUIRES_SHARED(mutex) CR_ANNOTATION(requires_shared_capability(mutex))
// Of a mutex: a thread that holds this one takes none of those (&Class::member, whose class names this one a friend).
#define CR_ACQUIRED_AFTER(...) CR_ANNOTATION(acquired_after(__VA_ARGS__))
// Of a function that returns this mutex.
#define CR_RETURNS(mutex) CR_ANNOTATION(lock_returned(mutex))
// Of a function that may look without the lock: it says why.
#define CR_UNGUARDED CR_ANNOTATION(no_thread_safety_analysis)
// Of a function: its caller must not hold this mutex.
#define CR_EXCLUDES(mutex) CR_ANNOTATION(locks_excluded(mutex))

namespace cuda_remote {

// The names of its functions are the standard library's, for std::unique_lock where a lock changes hands; clang does
// not follow those.
class CR_ANNOTATION(capability("mutex")) Mutex {
 public:
  void lock() CR_ANNOTATION(acquire_capability()) { mutex_.lock(); }
  bool try_lock() CR_ANNOTATION(try_acquire_capability(true)) { return mutex_.try_lock(); }
  void unlock() CR_ANNOTATION(release_capability()) { mutex_.unlock(); }
  // What a function that is called back says first, if its caller's caller holds the mutex.
  void AssertHeld() const CR_ANNOTATION(assert_capability(this)) {}

 private:
  friend class Condition;
  std::mutex mutex_;
};

// What holders of a mutex wait for.
class Condition {
 public:
  // Lets go of the mutex, waits until somebody notifies, or for no reason, and takes it again.
  void Wait(Mutex* mutex) CR_REQUIRES(*mutex) {
    std::unique_lock<std::mutex> lock(mutex->mutex_, std::adopt_lock);
    changed_.wait(lock);
    lock.release();
  }
  // False if it is too late.
  bool WaitUntil(Mutex* mutex, Moment end) CR_REQUIRES(*mutex) {
    std::unique_lock<std::mutex> lock(mutex->mutex_, std::adopt_lock);
    const bool in_time = changed_.wait_until(lock, end) == std::cv_status::no_timeout;
    lock.release();
    return in_time;
  }
  bool WaitFor(Mutex* mutex, std::chrono::nanoseconds time) CR_REQUIRES(*mutex) {
    return WaitUntil(mutex, Now() + time);
  }
  void NotifyOne() { changed_.notify_one(); }
  void NotifyAll() { changed_.notify_all(); }

 private:
  std::condition_variable changed_;
};

// Holds a mutex while it lives, but for the time between Unlock and Lock.
class CR_ANNOTATION(scoped_lockable) MutexLock {
 public:
  explicit MutexLock(Mutex* mutex) CR_ANNOTATION(acquire_capability(mutex)) : mutex_(mutex) { mutex_->lock(); }
  ~MutexLock() CR_ANNOTATION(release_capability()) {
    if (held_) mutex_->unlock();
  }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;
  void Unlock() CR_ANNOTATION(release_capability()) {
    mutex_->unlock();
    held_ = false;
  }
  void Lock() CR_ANNOTATION(acquire_capability()) {
    mutex_->lock();
    held_ = true;
  }

 private:
  Mutex* const mutex_;
  bool held_ = true;
};

// A mutex that a thread which holds it may take again.
class CR_ANNOTATION(capability("mutex")) RecursiveMutex {
 public:
  void Lock() CR_ANNOTATION(acquire_capability()) { mutex_.lock(); }
  void Unlock() CR_ANNOTATION(release_capability()) { mutex_.unlock(); }

 private:
  std::recursive_mutex mutex_;
};

// Holds it while it lives.
class CR_ANNOTATION(scoped_lockable) RecursiveMutexLock {
 public:
  explicit RecursiveMutexLock(RecursiveMutex* mutex) CR_ANNOTATION(acquire_capability(mutex)) : mutex_(mutex) {
    mutex_->Lock();
  }
  ~RecursiveMutexLock() CR_ANNOTATION(release_capability()) { mutex_->Unlock(); }
  RecursiveMutexLock(const RecursiveMutexLock&) = delete;
  RecursiveMutexLock& operator=(const RecursiveMutexLock&) = delete;

 private:
  RecursiveMutex* const mutex_;
};

// A mutex that one holds to change something, or many to look at it.
class CR_ANNOTATION(capability("mutex")) SharedMutex {
 public:
  void Lock() CR_ANNOTATION(acquire_capability()) { mutex_.lock(); }
  void Unlock() CR_ANNOTATION(release_capability()) { mutex_.unlock(); }
  void LockShared() CR_ANNOTATION(acquire_shared_capability()) { mutex_.lock_shared(); }
  void UnlockShared() CR_ANNOTATION(release_shared_capability()) { mutex_.unlock_shared(); }

 private:
  std::shared_mutex mutex_;
};

// Holds it alone, until Unlock or the end of its life.
class CR_ANNOTATION(scoped_lockable) WriterLock {
 public:
  explicit WriterLock(SharedMutex* mutex) CR_ANNOTATION(acquire_capability(mutex)) : mutex_(mutex) { mutex->Lock(); }
  ~WriterLock() CR_ANNOTATION(release_capability()) {
    if (mutex_) mutex_->Unlock();
  }
  WriterLock(const WriterLock&) = delete;
  WriterLock& operator=(const WriterLock&) = delete;
  void Unlock() CR_ANNOTATION(release_capability()) {
    mutex_->Unlock();
    mutex_ = nullptr;
  }

 private:
  SharedMutex* mutex_;
};

// Holds it with others that look.
class CR_ANNOTATION(scoped_lockable) ReaderLock {
 public:
  explicit ReaderLock(SharedMutex* mutex) CR_ANNOTATION(acquire_shared_capability(mutex)) : mutex_(mutex) {
    mutex->LockShared();
  }
  ~ReaderLock() CR_ANNOTATION(release_capability()) {
    if (mutex_) mutex_->UnlockShared();
  }
  ReaderLock(const ReaderLock&) = delete;
  ReaderLock& operator=(const ReaderLock&) = delete;
  void Unlock() CR_ANNOTATION(release_capability()) {
    mutex_->UnlockShared();
    mutex_ = nullptr;
  }

 private:
  SharedMutex* mutex_;
};

}  // namespace cuda_remote

#endif  // CUDA_REMOTE_PROTO_THREADS_MUTEX_H_
