// SPDX-License-Identifier: Apache-2.0
// Executable graphs that kernels may launch: the application has the driver's own handles of these, since kernels get
// them.
//
// Thread-safe.
#ifndef CUDA_REMOTE_CLIENT_SESSION_DRIVER_EXECS_H_
#define CUDA_REMOTE_CLIENT_SESSION_DRIVER_EXECS_H_

#include <cstdint>
#include <map>

#include "client/session/guarded.h"

namespace cuda_remote::client {

class DriverExecs {
 public:
  // `exec`: its virtual handle.
  void Name(uint64_t driver_handle, uint64_t exec) CR_EXCLUDES(mutex_) {
    MutexLock lock(&mutex_);
    execs_[driver_handle] = exec;
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
    for (auto it = execs_.begin(); it != execs_.end();) it = it->second == exec ? execs_.erase(it) : std::next(it);
  }

 private:
  mutable Mutex mutex_;
  std::map<uint64_t, uint64_t> execs_ CR_GUARDED_BY(mutex_);  // by the driver's handle
};

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_SESSION_DRIVER_EXECS_H_
