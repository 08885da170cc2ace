// SPDX-License-Identifier: Apache-2.0
// Executable graphs that kernels may launch: the application has the driver's own handles of these, since kernels get
// them.
//
// Thread-safe.
#ifndef CUDA_REMOTE_CLIENT_GRAPHS_DRIVER_EXECS_H_
#define CUDA_REMOTE_CLIENT_GRAPHS_DRIVER_EXECS_H_

#include <atomic>
#include <cstdint>
#include <map>
#include <set>

#include "proto/threads/mutex.h"

namespace cuda_remote::client {

class DriverExecs {
 public:
  // `exec`: its virtual handle.
  void Name(uint64_t driver_handle, uint64_t exec) CR_EXCLUDES(mutex_) {
    MutexLock lock(&mutex_);
    execs_[driver_handle] = exec;
    names_.insert(exec);
    used_.store(true, std::memory_order_release);
  }
  // Whether `exec`, a virtual handle, is one of these.
  bool Has(uint64_t exec) const CR_EXCLUDES(mutex_) {
    if (!used_.load(std::memory_order_acquire)) return false;  // most programs have none
    MutexLock lock(&mutex_);
    return names_.count(exec) != 0;
  }
  // The virtual handle; `driver_handle` itself if it is none of these.
  uint64_t Find(uint64_t driver_handle) const CR_EXCLUDES(mutex_) {
    MutexLock lock(&mutex_);
    const auto found = execs_.find(driver_handle);
    return found != execs_.end() ? found->second : driver_handle;
  }
  // The executable is gone.
  void Forget(uint64_t exec) CR_EXCLUDES(mutex_) {
    MutexLock lock(&mutex_);
    if (names_.erase(exec) == 0) return;
    for (auto it = execs_.begin(); it != execs_.end();) it = it->second == exec ? execs_.erase(it) : std::next(it);
  }

 private:
  mutable Mutex mutex_;
  std::map<uint64_t, uint64_t> execs_ CR_GUARDED_BY(mutex_);  // by the driver's handle
  std::set<uint64_t> names_ CR_GUARDED_BY(mutex_);            // virtual handles
  std::atomic<bool> used_{false};                             // ever
};

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_GRAPHS_DRIVER_EXECS_H_
