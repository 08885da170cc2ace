// SPDX-License-Identifier: Apache-2.0
#include "softgpu/core/texture_objects.h"

namespace cuda_remote::softgpu {
namespace {

// What a kernel finds stays where it is until it is destroyed, which waits for the context's work.
class Unit : public ptx::TextureUnit {
 public:
  const ptx::Texture* FindTexture(uint64_t handle) override {
    const auto object = TextureObjects().Find(handle);
    return object ? &object->texture : nullptr;
  }
  const ptx::Surface* FindSurface(uint64_t handle) override {
    const auto object = SurfaceObjects().Find(handle);
    return object ? &object->surface : nullptr;
  }
};

}  // namespace

NumberedObjects<TextureObject>& TextureObjects() {
  static auto* objects = new NumberedObjects<TextureObject>;
  return *objects;
}

NumberedObjects<SurfaceObject>& SurfaceObjects() {
  static auto* objects = new NumberedObjects<SurfaceObject>;
  return *objects;
}

ptx::TextureUnit& Textures() {
  static auto* unit = new Unit;
  return *unit;
}

}  // namespace cuda_remote::softgpu
