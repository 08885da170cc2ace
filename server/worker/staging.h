// SPDX-License-Identifier: Apache-2.0
// Buffers between the GPU and the channel: registered with the driver, so that a copy to one returns at once and runs
// at full speed. The memory is the worker's own: if the context that registered it dies, the buffer stays valid and is
// only slower. Thread-safe.
//
// The end of a registration may wait for all that the GPUs are doing (CUDA driver API, cuMemHostUnregister), and a
// stream may wait for what the client sends next. So a registered buffer that nobody uses any more is kept, for the
// next one who needs that much, until somebody who may wait gives it back: GiveBack.
#ifndef CUDA_REMOTE_SERVER_WORKER_STAGING_H_
#define CUDA_REMOTE_SERVER_WORKER_STAGING_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "proto/threads/mutex.h"
#include "server/driver/driver_table.h"

namespace cuda_remote::server {

class StagingPool {
 public:
  static constexpr size_t kLarge = 1 << 20;
  static constexpr size_t kSmall = 64 << 10;
  // Beyond so many bytes of registered memory that nobody uses, GiveBack is due.
  static constexpr size_t kMostUnused = size_t{256} << 20;

  explicit StagingPool(const DriverTable& driver) : driver_(driver) {}
  ~StagingPool();
  StagingPool(const StagingPool&) = delete;
  StagingPool& operator=(const StagingPool&) = delete;

  // A buffer of at least `bytes`; goes back to the pool with its last reference. Null if there is no memory. With a
  // context current: new buffers are registered in it.
  std::shared_ptr<char> Take(size_t bytes);

  // Makes sure that `count` large buffers are ready. With a context current.
  void Prepare(size_t count);

  // A context is about to die, and registrations made in it die too: buffers that are free then are not taken again.
  void ContextDies();

  // Whether GiveBack is due; true only once until it has been called. Cheap.
  bool BeginGiveBack() {
    return unused_bytes_.load(std::memory_order_relaxed) > kMostUnused && !giving_back_.exchange(true);
  }
  // Ends the registrations of unused memory and gives it back to the system. May wait for all work on the GPUs, so not
  // for the executor. With a context current.
  void GiveBack();

 private:
  struct Buffer {
    char* data = nullptr;
    size_t bytes = 0;
    bool registered = false;
    uint64_t epoch = 0;  // of the registration
  };
  bool Make(size_t bytes, Buffer* buffer);
  // A free buffer for `bytes`, registered as others are now; false if there is none.
  bool FindFree(size_t bytes, Buffer* buffer);
  void Register(Buffer* buffer);
  void Release(Buffer buffer);

  const DriverTable& driver_;
  Mutex mutex_;
  std::vector<Buffer> small_, large_;
  std::multimap<size_t, Buffer> unused_;  // by size: registered ones for which those two have no place
  std::atomic<size_t> unused_bytes_{0};
  std::atomic<bool> giving_back_{false};
  uint64_t epoch_ = 0;
};

}  // namespace cuda_remote::server

#endif  // CUDA_REMOTE_SERVER_WORKER_STAGING_H_
