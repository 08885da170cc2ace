// SPDX-License-Identifier: Apache-2.0
// Buffers between the GPU and the channel: registered with the driver, so that a copy to one returns at once and runs
// at full speed. The memory is the worker's own: if the context that registered a buffer dies while the buffer is in
// use, the buffer stays valid, and copies to it are only slower. Thread-safe.
//
// The end of a registration may wait for all that the GPUs are doing (CUDA driver API, cuMemHostUnregister), and a
// stream may wait for what the client sends next. So the pool keeps a registered buffer that nobody uses any more for
// the next request of that size. GiveBack frees it while the GPUs have nothing to do.
#ifndef CUDA_REMOTE_SERVER_WORKER_MEMORY_STAGING_H_
#define CUDA_REMOTE_SERVER_WORKER_MEMORY_STAGING_H_

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
  // GiveBack is due when more than so many bytes of registered memory are unused.
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

  // A context is about to die, and registrations made in it die too: registered buffers that are free now are not taken
  // again.
  void ContextDies();

  // Whether GiveBack is due. Without a lock.
  bool has_much_unused() const { return unused_bytes_.load(std::memory_order_relaxed) > kMostUnused; }
  // Ends the registrations of unused memory and gives it back to the system. May wait for all work on the GPUs, so only
  // while there is none. With a context current.
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
  void KeepUnusedLocked(const Buffer& buffer) CR_REQUIRES(mutex_);

  const DriverTable& driver_;
  Mutex mutex_;
  std::vector<Buffer> small_ CR_GUARDED_BY(mutex_), large_ CR_GUARDED_BY(mutex_);
  // By size: registered ones for which those two have no place.
  std::multimap<size_t, Buffer> unused_ CR_GUARDED_BY(mutex_);
  std::atomic<size_t> unused_bytes_{0};
  uint64_t epoch_ CR_GUARDED_BY(mutex_) = 0;
};

}  // namespace cuda_remote::server

#endif  // CUDA_REMOTE_SERVER_WORKER_MEMORY_STAGING_H_
