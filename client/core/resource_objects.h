// SPDX-License-Identifier: Apache-2.0
// Texture and surface objects, as the application described them.
//
// Thread-safe; a lock of its own, under which nothing else is locked.
//
// This header is part of the client library: no libprotobuf, no abseil, no logging.
#ifndef CUDA_REMOTE_CLIENT_CORE_RESOURCE_OBJECTS_H_
#define CUDA_REMOTE_CLIENT_CORE_RESOURCE_OBJECTS_H_

#include <cuda.h>

#include <cstdint>
#include <unordered_map>

#include "proto/threads/mutex.h"

namespace cuda_remote::client {

// A texture or surface object as the application described it: arrays inside are virtual handles.
struct ResourceObject {
  uint64_t context = 0;  // virtual handle
  CUDA_RESOURCE_DESC resource{};
  CUDA_TEXTURE_DESC texture{};
  CUDA_RESOURCE_VIEW_DESC view{};
  bool has_view = false;
};

// All of one kind, by the key that the log has for them.
class ResourceObjects {
 public:
  void Insert(uint64_t key, const ResourceObject& object) CR_EXCLUDES(mutex_) {
    MutexLock lock(&mutex_);
    objects_[key] = object;
  }
  void Erase(uint64_t key) CR_EXCLUDES(mutex_) {
    MutexLock lock(&mutex_);
    objects_.erase(key);
  }
  bool Contains(uint64_t key) const CR_EXCLUDES(mutex_) {
    MutexLock lock(&mutex_);
    return objects_.count(key) != 0;
  }
  // Copies the description to *object; false: there is no such object.
  bool Find(uint64_t key, ResourceObject* object) const CR_EXCLUDES(mutex_) {
    MutexLock lock(&mutex_);
    const auto found = objects_.find(key);
    if (found == objects_.end()) return false;
    *object = found->second;
    return true;
  }

 private:
  mutable Mutex mutex_;
  std::unordered_map<uint64_t, ResourceObject> objects_ CR_GUARDED_BY(mutex_);
};

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_CORE_RESOURCE_OBJECTS_H_
