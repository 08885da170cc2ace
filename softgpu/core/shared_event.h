// SPDX-License-Identifier: Apache-2.0
// The state of an event that several processes see: how often it was recorded, and up to which record the work is done.
// It lies in a page of a memory file.
//
// Thread-safe, and safe against another process that writes nonsense there: waits end with their context.
#ifndef CUDA_REMOTE_SOFTGPU_CORE_SHARED_EVENT_H_
#define CUDA_REMOTE_SOFTGPU_CORE_SHARED_EVENT_H_

#include <cuda.h>

#include <atomic>
#include <cstdint>
#include <memory>

#include "proto/base/unique_fd.h"

namespace cuda_remote::softgpu {

class SharedEvent {
 public:
  // A new one; null if the system has no memory file to give.
  static std::shared_ptr<SharedEvent> Create();
  // One of another process of the same user, from the handle that it gave; null if there is no such event any more.
  static std::shared_ptr<SharedEvent> Open(const CUipcEventHandle& handle);
  ~SharedEvent();

  CUipcEventHandle Handle() const;

  // A record begins: its number.
  uint64_t Submit();
  // The work before that record is done.
  void Complete(uint64_t record);
  // The latest record; 0: never recorded.
  uint64_t Latest() const;
  bool Done(uint64_t record) const;
  // Waits until the record is done, or `cancel` is set.
  void Wait(uint64_t record, const std::atomic<bool>* cancel) const;

 private:
  struct State {
    std::atomic<uint32_t> changes;
    std::atomic<uint64_t> submitted;
    std::atomic<uint64_t> completed;
  };
  SharedEvent(int fd, State* state) : fd_(fd), state_(state) {}
  static std::shared_ptr<SharedEvent> Map(int fd);
  const UniqueFd fd_;
  State* const state_;
};

}  // namespace cuda_remote::softgpu

#endif  // CUDA_REMOTE_SOFTGPU_CORE_SHARED_EVENT_H_
