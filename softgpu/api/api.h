// SPDX-License-Identifier: Apache-2.0
// What every file with exported driver functions begins with.
//
// Exported functions are strong definitions; exports.cc has a weak stub for every name of the driver, which answers
// CUDA_ERROR_NOT_SUPPORTED. Per-thread default stream variants (_ptsz, _ptds) are in per_thread.cc: they set a flag of
// the thread and call the plain function, which asks ResolveStream for the stream that is meant.
#ifndef CUDA_REMOTE_SOFTGPU_API_API_H_
#define CUDA_REMOTE_SOFTGPU_API_API_H_

#ifndef __CUDA_API_VERSION_INTERNAL
#error "cuda.h would make macros of the exported names: see BUILD.bazel"
#endif
#include <cuda.h>
#include <cudaProfiler.h>

#include "proto/threads/mutex.h"
#include "softgpu/core/context.h"
#include "softgpu/core/device.h"
#include "softgpu/core/settings.h"

// Exported functions are in no namespace.
using cuda_remote::Mutex;
using cuda_remote::MutexLock;
using cuda_remote::RecursiveMutexLock;

#define SOFTGPU_API extern "C" __attribute__((visibility("default"))) CUresult CUDAAPI

// First line of a function: injected failures (SOFTGPU_FAIL) and cuInit.
#define SOFTGPU_ENTER()                                                                                    \
  do {                                                                                                     \
    if (CUresult softgpu_result = ::cuda_remote::softgpu::Enter(__func__); softgpu_result != CUDA_SUCCESS) \
      return softgpu_result;                                                                               \
  } while (0)

// The same, and `context` is the calling thread's current context, which must be alive and without a sticky error.
#define SOFTGPU_ENTER_CONTEXT(context)                                                                             \
  SOFTGPU_ENTER();                                                                                                 \
  ::cuda_remote::softgpu::ContextPtr context;                                                                      \
  do {                                                                                                             \
    if (CUresult softgpu_result = ::cuda_remote::softgpu::UsableContext(&context); softgpu_result != CUDA_SUCCESS) \
      return softgpu_result;                                                                                       \
  } while (0)

// The same for a call that names `object`, whose own context it is without a current one.
#define SOFTGPU_ENTER_CONTEXT_OF(context, object)                                                  \
  SOFTGPU_ENTER();                                                                                 \
  ::cuda_remote::softgpu::ContextPtr context;                                                      \
  do {                                                                                             \
    if (CUresult softgpu_result =                                                                  \
            ::cuda_remote::softgpu::UsableContextOr([&] { return OwnContext(object); }, &context); \
        softgpu_result != CUDA_SUCCESS)                                                            \
      return softgpu_result;                                                                       \
  } while (0)

#endif  // CUDA_REMOTE_SOFTGPU_API_API_H_
