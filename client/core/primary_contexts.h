// SPDX-License-Identifier: Apache-2.0
// The devices' primary contexts: the handle of each, how often it is retained, and the flags that the application has
// set.
//
// The object behind a handle, and with it whether the context is there, is in RecordedObjects.
//
// Thread-safe; a lock of its own, under which nothing else is locked. Retain, release and reset are each a check, a
// round trip and a change: client/calls/context.cc does them one at a time.
//
// This header is part of the client library: no libprotobuf, no abseil, no logging.
#ifndef CUDA_REMOTE_CLIENT_CORE_PRIMARY_CONTEXTS_H_
#define CUDA_REMOTE_CLIENT_CORE_PRIMARY_CONTEXTS_H_

#include <cstdint>
#include <map>

#include "proto/threads/mutex.h"

namespace cuda_remote::client {

class PrimaryContexts {
 public:
  // The handle of the device's primary context; 0: it has none yet.
  uint64_t Find(int device) const CR_EXCLUDES(mutex_) {
    MutexLock lock(&mutex_);
    const auto found = devices_.find(device);
    return found == devices_.end() ? 0 : found->second.handle;
  }
  // Gives it its handle, once. The caller sees to it that nobody else does at the same time.
  void Name(int device, uint64_t handle) CR_EXCLUDES(mutex_) {
    MutexLock lock(&mutex_);
    devices_[device].handle = handle;
  }

  // How often the application retains it; a reset does not change that.
  int retains(int device) const CR_EXCLUDES(mutex_) {
    MutexLock lock(&mutex_);
    const auto found = devices_.find(device);
    return found == devices_.end() ? 0 : found->second.retains;
  }
  void Retain(int device) CR_EXCLUDES(mutex_) {
    MutexLock lock(&mutex_);
    ++devices_[device].retains;
  }
  // One retain less. Only where there is one.
  void Release(int device) CR_EXCLUDES(mutex_) {
    MutexLock lock(&mutex_);
    --devices_[device].retains;
  }

  // What cuDevicePrimaryCtxSetFlags set last, also for a context that is made later.
  unsigned flags(int device) const CR_EXCLUDES(mutex_) {
    MutexLock lock(&mutex_);
    const auto found = devices_.find(device);
    return found == devices_.end() ? 0 : found->second.flags;
  }
  void SetFlags(int device, unsigned flags) CR_EXCLUDES(mutex_) {
    MutexLock lock(&mutex_);
    devices_[device].flags = flags;
  }

 private:
  struct Context {
    uint64_t handle = 0;
    int retains = 0;
    unsigned flags = 0;
  };
  mutable Mutex mutex_;
  std::map<int, Context> devices_ CR_GUARDED_BY(mutex_);
};

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_CORE_PRIMARY_CONTEXTS_H_
