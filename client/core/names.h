// SPDX-License-Identifier: Apache-2.0
// Texts that the application is given and never frees.
//
// Thread-safe.
#ifndef CUDA_REMOTE_CLIENT_CORE_NAMES_H_
#define CUDA_REMOTE_CLIENT_CORE_NAMES_H_

#include <set>
#include <string>

#include "proto/threads/mutex.h"

namespace cuda_remote::client {

class Names {
 public:
  // A copy of `text` that lives as long as this; the same one for the same text.
  const char* Intern(const std::string& text) CR_EXCLUDES(mutex_) {
    MutexLock lock(&mutex_);
    return names_.insert(text).first->c_str();
  }

 private:
  Mutex mutex_;
  std::set<std::string> names_ CR_GUARDED_BY(mutex_);
};

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_CORE_NAMES_H_
