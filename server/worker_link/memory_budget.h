// SPDX-License-Identifier: Apache-2.0
// How much device memory the sessions of one owner hold together, and may: a page that cr-server and the workers of
// that owner have mapped.
//
// Each worker writes what its session holds into a slot of its own, and adds up all slots before it takes more. A
// worker that dies takes nothing with it: cr-server clears its slot. Two workers that take the last piece at the same
// moment may both be refused, but never both be served.
//
// Thread-safe. Nothing throws but std::bad_alloc.
#ifndef CUDA_REMOTE_SERVER_WORKER_LINK_MEMORY_BUDGET_H_
#define CUDA_REMOTE_SERVER_WORKER_LINK_MEMORY_BUDGET_H_

#include <atomic>
#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "proto/base/unique_fd.h"

namespace cuda_remote::server {

class MemoryBudget {
 public:
  static constexpr uint32_t kSlots = 512;

  // A new page, all slots empty. Fails if there is no memory.
  static absl::StatusOr<std::unique_ptr<MemoryBudget>> Create();
  // The page behind `fd` (taken over), as the worker that has `slot` sees it; `limit`: bytes of all slots together.
  // Fails if that is no such page.
  static absl::StatusOr<std::unique_ptr<MemoryBudget>> Open(int fd, uint32_t slot, uint64_t limit);
  ~MemoryBudget();
  MemoryBudget(const MemoryBudget&) = delete;
  MemoryBudget& operator=(const MemoryBudget&) = delete;

  int fd() const { return fd_.get(); }
  uint64_t limit() const { return limit_; }

  // For the worker's own slot. False: it does not fit, and nothing was taken. `twice`: bytes that two slots have though
  // they are one memory, and that count once here.
  bool Take(uint64_t bytes, uint64_t twice = 0);
  // Takes what is held already, whether it fits or not.
  void TakeAnyway(uint64_t bytes);
  void Give(uint64_t bytes);
  // What is left for everybody.
  uint64_t Left() const;

  // cr-server: the slot's worker is gone, or has not come yet.
  void Clear(uint32_t slot) { slots_[slot].store(0); }

 private:
  MemoryBudget(int fd, std::atomic<uint64_t>* slots, uint32_t slot, uint64_t limit)
      : fd_(fd), slots_(slots), slot_(slot), limit_(limit) {}
  uint64_t Sum() const;

  const UniqueFd fd_;
  std::atomic<uint64_t>* const slots_;
  const uint32_t slot_;
  const uint64_t limit_;
};

}  // namespace cuda_remote::server

#endif  // CUDA_REMOTE_SERVER_WORKER_LINK_MEMORY_BUDGET_H_
