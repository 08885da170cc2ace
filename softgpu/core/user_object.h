// SPDX-License-Identifier: Apache-2.0
// User objects: things of the program that graphs keep alive. Thread-safe.
#ifndef CUDA_REMOTE_SOFTGPU_CORE_USER_OBJECT_H_
#define CUDA_REMOTE_SOFTGPU_CORE_USER_OBJECT_H_

#include <cuda.h>

#include <atomic>
#include <memory>
#include <utility>

#include "softgpu/core/registry.h"

namespace cuda_remote::softgpu {

struct UserObject {
  void* data = nullptr;
  CUhostFn destroy = nullptr;
  std::atomic<int> references{0};

  CUuserObject handle() { return reinterpret_cast<CUuserObject>(this); }
  // The last one calls the program's destructor.
  void Release(int count) {
    if ((references -= count) > 0) return;
    if (Registry<UserObject>::Get().Remove(this)) destroy(data);
  }
};

// One reference that a graph holds; a copy (a clone of the graph) is a reference more.
class UserReference {
 public:
  // Takes over a reference that is counted already.
  explicit UserReference(std::shared_ptr<UserObject> object) : object_(std::move(object)) {}
  UserReference(const UserReference& other) : object_(other.object_) {
    if (object_) ++object_->references;
  }
  UserReference(UserReference&& other) noexcept : object_(std::move(other.object_)) {}
  UserReference& operator=(UserReference other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~UserReference() {
    if (object_) object_->Release(1);
  }
  const std::shared_ptr<UserObject>& object() const { return object_; }

 private:
  std::shared_ptr<UserObject> object_;
};

}  // namespace cuda_remote::softgpu

#endif  // CUDA_REMOTE_SOFTGPU_CORE_USER_OBJECT_H_
