// SPDX-License-Identifier: Apache-2.0
// The end of a context: everything of it in the other files' registries.
#ifndef CUDA_REMOTE_SOFTGPU_CORE_CLEANUP_H_
#define CUDA_REMOTE_SOFTGPU_CORE_CLEANUP_H_

#include "softgpu/core/context.h"

namespace cuda_remote::softgpu {

// Called when the context has no work left: its modules, events, graphs and memory go, and what the CUDA runtime stored
// with the context is destroyed.
void DestroyObjectsOf(const ContextPtr& context);

}  // namespace cuda_remote::softgpu

#endif  // CUDA_REMOTE_SOFTGPU_CORE_CLEANUP_H_
