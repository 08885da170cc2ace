// SPDX-License-Identifier: Apache-2.0
// What the library keeps for each thread of the program: its stack of contexts, its default streams.
//
// The state of a thread ends with the thread; that of the main thread stays until the process is gone, because the CUDA
// runtime calls the driver from exit handlers, when objects of thread-local storage are destroyed already.
#ifndef CUDA_REMOTE_SOFTGPU_CORE_THREAD_STATE_H_
#define CUDA_REMOTE_SOFTGPU_CORE_THREAD_STATE_H_

#include <cuda.h>

#include <map>
#include <vector>

#include "softgpu/core/context.h"

namespace cuda_remote::softgpu {

struct ThreadState {
  std::vector<ContextPtr> contexts;             // the last one is current
  std::map<const Context*, StreamPtr> streams;  // default streams of this thread
  CUstreamCaptureMode capture_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;

  ~ThreadState();
};

// The calling thread's.
ThreadState& GetThreadState();

}  // namespace cuda_remote::softgpu

#endif  // CUDA_REMOTE_SOFTGPU_CORE_THREAD_STATE_H_
