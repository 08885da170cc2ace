// SPDX-License-Identifier: Apache-2.0
// Texture and surface objects by their numbers, and what the references of modules refer to, by the references'
// addresses.
#ifndef CUDA_REMOTE_SOFTGPU_CORE_TEXTURE_OBJECTS_H_
#define CUDA_REMOTE_SOFTGPU_CORE_TEXTURE_OBJECTS_H_

#include <cuda.h>

#include <cstdint>
#include <iterator>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "proto/threads/mutex.h"
#include "softgpu/core/context.h"
#include "softgpu/ptx/texture.h"

namespace cuda_remote::softgpu {

struct TextureObject {
  ptx::Texture texture;
  CUDA_RESOURCE_DESC resource = {};
  CUDA_TEXTURE_DESC sampling = {};
  CUDA_RESOURCE_VIEW_DESC view = {};
  bool has_view = false;
  const Context* context = nullptr;
  std::vector<std::shared_ptr<char>> memory;  // keeps the elements alive
};

struct SurfaceObject {
  ptx::Surface surface;
  CUDA_RESOURCE_DESC resource = {};
  const Context* context = nullptr;
  std::shared_ptr<char> memory;
};

// Objects under small numbers: the lowest free one for each new object, as kernels and cuda-remote's replay
// expect of a driver. Thread-safe.
template <typename T>
class NumberedObjects {
 public:
  // Takes an object in. Returns its number, from 1 on.
  uint64_t Enter(std::shared_ptr<T> object) {
    WriterLock lock(&mutex_);
    uint64_t number = 1;
    for (const auto& [taken, other] : objects_) {
      if (taken != number) break;
      ++number;
    }
    objects_[number] = std::move(object);
    return number;
  }

  // Takes an object in under the address of a reference, in the place of another one. Addresses are far above numbers.
  void Refer(uint64_t address, std::shared_ptr<T> object) {
    WriterLock lock(&mutex_);
    objects_[address] = std::move(object);
  }

  // Null if there is none of this number.
  std::shared_ptr<T> Find(uint64_t number) const {
    ReaderLock lock(&mutex_);
    auto it = objects_.find(number);
    return it == objects_.end() ? nullptr : it->second;
  }

  void Erase(uint64_t number) {
    WriterLock lock(&mutex_);
    objects_.erase(number);
  }

  // Erases all that were made in a context.
  void EraseOf(const Context* context) {
    WriterLock lock(&mutex_);
    for (auto it = objects_.begin(); it != objects_.end();) {
      it = it->second->context == context ? objects_.erase(it) : std::next(it);
    }
  }

 private:
  mutable SharedMutex mutex_;
  std::map<uint64_t, std::shared_ptr<T>> objects_ CR_GUARDED_BY(mutex_);
};

NumberedObjects<TextureObject>& TextureObjects();
NumberedObjects<SurfaceObject>& SurfaceObjects();

// What kernels ask for textures and surfaces.
ptx::TextureUnit& Textures();

}  // namespace cuda_remote::softgpu

#endif  // CUDA_REMOTE_SOFTGPU_CORE_TEXTURE_OBJECTS_H_
