// SPDX-License-Identifier: Apache-2.0
// Live objects by handle: mostly the object's address, valid only while it is registered here.
//
// Thread-safe. Find hands out shared ownership, so that an object that another thread destroys meanwhile stays usable.
#ifndef CUDA_REMOTE_SOFTGPU_CORE_REGISTRY_H_
#define CUDA_REMOTE_SOFTGPU_CORE_REGISTRY_H_

#include <memory>
#include <unordered_map>
#include <vector>

#include "proto/threads/mutex.h"

namespace cuda_remote::softgpu {

template <typename T>
class Registry {
 public:
  // The registry of this type. Never destroyed: threads of the library may outlive static objects.
  static Registry& Get() {
    static Registry* registry = new Registry;
    return *registry;
  }

  // Registers and returns the object, whose address is the handle.
  T* Add(std::shared_ptr<T> object) {
    const void* const handle = object.get();
    return Add(std::move(object), handle);
  }
  // The same with a handle of another kind, which no other object has.
  T* Add(std::shared_ptr<T> object, const void* handle) {
    T* const added = object.get();
    WriterLock lock(&mutex_);
    objects_[handle] = std::move(object);
    return added;
  }

  // Null if `handle` is no live object.
  std::shared_ptr<T> Find(const void* handle) const {
    ReaderLock lock(&mutex_);
    auto it = objects_.find(handle);
    return it == objects_.end() ? nullptr : it->second;
  }

  // Takes the object out; null if it is none.
  std::shared_ptr<T> Remove(const void* handle) {
    WriterLock lock(&mutex_);
    auto it = objects_.find(handle);
    if (it == objects_.end()) return nullptr;
    std::shared_ptr<T> object = std::move(it->second);
    objects_.erase(it);
    return object;
  }

  // Takes out all objects for which `predicate(const T&)` holds.
  template <typename Predicate>
  std::vector<std::shared_ptr<T>> RemoveIf(Predicate predicate) {
    std::vector<std::shared_ptr<T>> removed;
    WriterLock lock(&mutex_);
    for (auto it = objects_.begin(); it != objects_.end();) {
      if (predicate(*it->second)) {
        removed.push_back(std::move(it->second));
        it = objects_.erase(it);
      } else {
        ++it;
      }
    }
    return removed;
  }

  // Calls `visit(T&)` for every object that there is now.
  template <typename Visit>
  void ForEach(Visit visit) const {
    std::vector<std::shared_ptr<T>> all;
    {
      ReaderLock lock(&mutex_);
      for (const auto& [handle, object] : objects_) all.push_back(object);
    }
    for (const auto& object : all) visit(*object);
  }

 private:
  mutable SharedMutex mutex_;
  std::unordered_map<const void*, std::shared_ptr<T>> objects_ CR_GUARDED_BY(mutex_);
};

}  // namespace cuda_remote::softgpu

#endif  // CUDA_REMOTE_SOFTGPU_CORE_REGISTRY_H_
