// SPDX-License-Identifier: Apache-2.0
// Starting a thread where the system may give no more (RLIMIT_NPROC, a container's limit): that must not end a process
// that serves others.
#ifndef CUDA_REMOTE_PROTO_THREADS_START_THREAD_H_
#define CUDA_REMOTE_PROTO_THREADS_START_THREAD_H_

#include <functional>
#include <system_error>
#include <thread>
#include <utility>

namespace cuda_remote {

// A thread that runs this; one that is not joinable if the system gives none. Any thread.
inline std::thread StartThread(std::function<void()> run) {
  try {
    return std::thread(std::move(run));
  } catch (const std::system_error&) {
    return {};
  }
}

}  // namespace cuda_remote

#endif  // CUDA_REMOTE_PROTO_THREADS_START_THREAD_H_
