// SPDX-License-Identifier: Apache-2.0
// What texture and surface objects and the references of modules have in common.
#ifndef CUDA_REMOTE_SOFTGPU_API_TEXTURE_H_
#define CUDA_REMOTE_SOFTGPU_API_TEXTURE_H_

#include <cuda.h>

#include <memory>

#include "softgpu/core/texture_objects.h"

namespace cuda_remote::softgpu {

// Makes an object of `context` that shows a resource. Returns what the call that asks for it returns.
CUresult MakeTexture(const Context* context, const CUDA_RESOURCE_DESC& resource, const CUDA_TEXTURE_DESC& sampling,
                     std::shared_ptr<TextureObject>* object);
CUresult MakeSurface(const Context* context, CUarray array, std::shared_ptr<SurfaceObject>* object);

}  // namespace cuda_remote::softgpu

#endif  // CUDA_REMOTE_SOFTGPU_API_TEXTURE_H_
