// SPDX-License-Identifier: Apache-2.0
#include "server/worker_link/memory_budget.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "absl/status/status.h"
#include "proto/base/unique_fd.h"
#include "proto/errors/absl_status.h"

namespace cuda_remote::server {
namespace {

constexpr size_t kBytes = MemoryBudget::kSlots * sizeof(std::atomic<uint64_t>);
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
static_assert(std::atomic<uint64_t>::is_always_lock_free);

std::atomic<uint64_t>* Map(int fd) {
  void* const at = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  return at == MAP_FAILED ? nullptr : static_cast<std::atomic<uint64_t>*>(at);
}

}  // namespace

absl::StatusOr<std::unique_ptr<MemoryBudget>> MemoryBudget::Create() {
  UniqueFd fd(memfd_create("cuda-remote-budget", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  std::atomic<uint64_t>* slots = nullptr;
  if (fd.ok() && ftruncate(fd.get(), kBytes) == 0 && fcntl(fd.get(), F_ADD_SEALS, kSeals) == 0) slots = Map(fd.get());
  if (!slots) return ErrnoStatus("no memory for a budget");
  return std::unique_ptr<MemoryBudget>(new MemoryBudget(fd.Release(), slots, 0, 0));
}

absl::StatusOr<std::unique_ptr<MemoryBudget>> MemoryBudget::Open(int fd, uint32_t slot, uint64_t limit) {
  struct stat facts;
  std::atomic<uint64_t>* slots = nullptr;
  if (slot < kSlots && fstat(fd, &facts) == 0 && facts.st_size == off_t(kBytes)) slots = Map(fd);
  if (slots) return std::unique_ptr<MemoryBudget>(new MemoryBudget(fd, slots, slot, limit));
  close(fd);
  return absl::InvalidArgumentError("what cr-server sent is not a memory budget");
}

MemoryBudget::~MemoryBudget() { munmap(slots_, kBytes); }

uint64_t MemoryBudget::Sum() const {
  uint64_t sum = 0;
  for (uint32_t slot = 0; slot < kSlots; ++slot) sum += slots_[slot].load();
  return sum;
}

bool MemoryBudget::Take(uint64_t bytes, uint64_t twice) {
  if (bytes > limit_) return false;
  // First taken, then counted: of two that do so at the same moment, one sees the other.
  slots_[slot_].fetch_add(bytes);
  if (const uint64_t sum = Sum(); sum <= limit_ || sum - limit_ <= twice) return true;
  slots_[slot_].fetch_sub(bytes);
  return false;
}

void MemoryBudget::TakeAnyway(uint64_t bytes) { slots_[slot_].fetch_add(bytes); }
void MemoryBudget::Give(uint64_t bytes) { slots_[slot_].fetch_sub(bytes); }

uint64_t MemoryBudget::Left() const {
  const uint64_t sum = Sum();
  return sum < limit_ ? limit_ - sum : 0;
}

}  // namespace cuda_remote::server
