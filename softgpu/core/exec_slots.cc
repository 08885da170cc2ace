// SPDX-License-Identifier: Apache-2.0
#include "softgpu/core/exec_slots.h"

#include <sys/mman.h>

#include <set>

#include "proto/threads/mutex.h"
#include "softgpu/core/settings.h"

namespace cuda_remote::softgpu {
namespace {

constexpr uint64_t kSlot = 0xc0, kBytes = 64 << 20;

struct Slots {
  Mutex mutex;
  uint64_t base CR_GUARDED_BY(mutex) = 0;         // of the reservation; 0: not made yet
  std::set<uint64_t> taken CR_GUARDED_BY(mutex);  // their addresses
};

Slots& Get() {
  static Slots* const slots = new Slots;
  return *slots;
}

// Nothing else may get these addresses: other handles are addresses of objects.
uint64_t Reserve() {
  constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
#ifndef __SANITIZE_THREAD__  // these addresses are the sanitizer's
  constexpr uint64_t kFirst = 0x540000000000, kRange = uint64_t{1} << 36;
  const uint64_t wanted = kFirst + GetSettings().places_seed % kRange / kBytes * kBytes;
  void* const there = mmap(reinterpret_cast<void*>(wanted), kBytes, PROT_NONE, kFlags | MAP_FIXED_NOREPLACE, -1, 0);
  if (there == reinterpret_cast<void*>(wanted)) return wanted;
  if (there != MAP_FAILED) munmap(there, kBytes);  // a kernel that does not know the flag
#endif
  void* const anywhere = mmap(nullptr, kBytes, PROT_NONE, kFlags, -1, 0);
  return anywhere == MAP_FAILED ? 0 : reinterpret_cast<uint64_t>(anywhere);
}

}  // namespace

uint64_t TakeExecSlot() {
  Slots& slots = Get();
  MutexLock lock(&slots.mutex);
  if (slots.base == 0) slots.base = Reserve();
  if (slots.base == 0) return 0;
  uint64_t slot = slots.base;
  for (auto it = slots.taken.begin(); it != slots.taken.end() && *it == slot; ++it) slot += kSlot;
  if (slot + kSlot > slots.base + kBytes) return 0;
  slots.taken.insert(slot);
  return slot;
}

void GiveExecSlot(uint64_t slot) {
  MutexLock lock(&Get().mutex);
  Get().taken.erase(slot);
}

}  // namespace cuda_remote::softgpu
