// SPDX-License-Identifier: Apache-2.0
// Limits how many moves, checkpoints and restarts a cr-hostd does for other hosts at a time: in all, and for one user,
// whose jobs may keep it waiting.
#ifndef CUDA_REMOTE_HOST_PLACES_H_
#define CUDA_REMOTE_HOST_PLACES_H_

#include <sys/types.h>

#include <map>

#include "proto/threads/mutex.h"

namespace cuda_remote::host {

// Thread-safe.
class Places {
 public:
  static constexpr int kMost = 64, kMostOfUser = 8;

  // One of the user's places while it lives, if there was one.
  class Place {
   public:
    Place(Places* places, uid_t user) : places_(places), user_(user), taken_(places->Take(user)) {}
    ~Place() {
      if (taken_) places_->GiveBack(user_);
    }
    Place(const Place&) = delete;
    Place& operator=(const Place&) = delete;
    bool taken() const { return taken_; }

   private:
    Places* const places_;
    const uid_t user_;
    const bool taken_;
  };

 private:
  bool Take(uid_t user) {
    const MutexLock lock(&mutex_);
    const auto of_user = of_user_.find(user);
    if (all_ >= kMost || (of_user != of_user_.end() && of_user->second >= kMostOfUser)) return false;
    ++all_;
    ++of_user_[user];
    return true;
  }
  void GiveBack(uid_t user) {
    const MutexLock lock(&mutex_);
    --all_;
    if (--of_user_[user] == 0) of_user_.erase(user);
  }

  Mutex mutex_;
  int all_ CR_GUARDED_BY(mutex_) = 0;
  std::map<uid_t, int> of_user_ CR_GUARDED_BY(mutex_);
};

}  // namespace cuda_remote::host

#endif  // CUDA_REMOTE_HOST_PLACES_H_
