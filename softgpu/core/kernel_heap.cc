// SPDX-License-Identifier: Apache-2.0
#include "softgpu/core/kernel_heap.h"

#include <sys/mman.h>

#include <memory>
#include <set>

#include "proto/threads/mutex.h"
#include "softgpu/core/context.h"
#include "softgpu/core/device.h"
#include "softgpu/core/memory_map.h"
#include "softgpu/core/settings.h"

namespace cuda_remote::softgpu {
namespace {

// Away from the ranges of cr-worker and of module variables.
constexpr uint64_t kFirst = 0x480000000000, kSlotBytes = uint64_t{1} << 36, kSlots = 64;

Mutex g_mutex;
std::set<uint64_t>* const g_slots CR_PT_GUARDED_BY(g_mutex) = new std::set<uint64_t>;

// What the range begins with, and each piece: free or not. All in units of bytes; lengths are multiples of kUnit.
constexpr uint64_t kUnit = 16, kUsed = 1;
struct Head {
  uint64_t bytes;  // of the range
  uint64_t next;   // offset of the piece at which the next search begins
};
struct Piece {
  uint64_t length;  // this head included; and kUsed
  uint64_t before;  // length of the piece in front; 0: none
};
static_assert(sizeof(Head) == kUnit && sizeof(Piece) == kUnit);

Piece* PieceAt(uint64_t base, uint64_t offset) { return reinterpret_cast<Piece*>(base + offset); }
uint64_t LengthOf(const Piece* piece) { return piece->length & ~kUsed; }

// Kernels may write anything there: a heap that makes no sense gives nothing.
bool Sensible(uint64_t bytes, uint64_t offset, const Piece* piece) {
  const uint64_t length = LengthOf(piece);
  return length >= kUnit && length % kUnit == 0 && length <= bytes - offset;
}

}  // namespace

bool KernelHeap::Begin(Context& context) {
  Device* const device = GetDevice(context.device());
  const uint64_t bytes = context.limits[CU_LIMIT_MALLOC_HEAP_SIZE];
  if (bytes < 2 * kUnit || !device->TakeMemory(bytes)) return false;
  constexpr int kProt = PROT_READ | PROT_WRITE, kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* memory = MAP_FAILED;
  uint64_t slot = 0;
  {
    MutexLock lock(&g_mutex);
    while (g_slots->count(slot) != 0) ++slot;
    g_slots->insert(slot);
  }
#ifndef __SANITIZE_THREAD__
  if (slot < kSlots && bytes <= kSlotBytes / 2) {
    const uint64_t shift = GetSettings().places_seed % (kSlotBytes / 4) / (2 << 20) * (2 << 20);
    memory = mmap(reinterpret_cast<void*>(kFirst + slot * kSlotBytes + shift), bytes, kProt,
                  kFlags | MAP_FIXED_NOREPLACE, -1, 0);
  }
#endif
  if (memory == MAP_FAILED) memory = mmap(nullptr, bytes, kProt, kFlags, -1, 0);
  const auto give_slot = [slot] {
    MutexLock lock(&g_mutex);
    g_slots->erase(slot);
  };
  if (memory == MAP_FAILED) {
    device->GiveMemory(bytes);
    give_slot();
    return false;
  }
  auto allocation = std::make_shared<Allocation>();
  allocation->begin = reinterpret_cast<uint64_t>(memory);
  allocation->size = bytes;
  allocation->device = context.device();
  allocation->context = &context;
  allocation->flags = kDeviceHeapFlag;
  allocation->budget = bytes;
  allocation->release = [memory, bytes, give_slot] {
    munmap(memory, bytes);
    give_slot();
  };
  if (!MemoryMap::Get().Add(allocation)) {
    MemoryMap::Get().Release(std::move(allocation));
    return false;
  }
  base_ = reinterpret_cast<uint64_t>(memory);
  bytes_ = bytes;
  *reinterpret_cast<Head*>(base_) = {bytes, kUnit};
  *PieceAt(base_, kUnit) = {bytes - kUnit, 0};
  begun_ = true;
  return true;
}

uint64_t KernelHeap::Take(Context& context, uint64_t bytes) {
  MutexLock lock(&mutex_);
  if (!begun_ && !Begin(context)) return 0;
  if (bytes == 0 || bytes > bytes_) return 0;
  const uint64_t wanted = (bytes + kUnit - 1) / kUnit * kUnit + kUnit;
  Head& head = *reinterpret_cast<Head*>(base_);
  const uint64_t start = head.next >= kUnit && head.next < bytes_ && head.next % kUnit == 0 ? head.next : kUnit;
  uint64_t at = start;
  bool wrapped = false;
  while (!wrapped || at < start) {
    Piece* const piece = PieceAt(base_, at);
    if (!Sensible(bytes_, at, piece)) return 0;
    const uint64_t length = LengthOf(piece);
    if (!(piece->length & kUsed) && length >= wanted) {
      // From the upper end, as the driver does: the first allocation of a heap is near its end.
      const uint64_t rest = length - wanted;
      Piece* taken = piece;
      if (rest != 0) {
        piece->length = rest;
        taken = PieceAt(base_, at + rest);
        taken->before = rest;
        if (at + length < bytes_) PieceAt(base_, at + length)->before = wanted;
      }
      taken->length = wanted | kUsed;
      head.next = at;
      return base_ + at + rest + kUnit;
    }
    at += length;
    if (at >= bytes_) {
      if (wrapped) break;
      wrapped = true;
      at = kUnit;
    }
  }
  return 0;
}

void KernelHeap::Give(uint64_t address) {
  MutexLock lock(&mutex_);
  if (!begun_ || address < base_ + 2 * kUnit || address >= base_ + bytes_ || address % kUnit != 0) return;
  uint64_t at = address - base_ - kUnit;
  Piece* piece = PieceAt(base_, at);
  if (!(piece->length & kUsed) || !Sensible(bytes_, at, piece)) return;
  piece->length &= ~kUsed;
  // With its free neighbours it is one.
  const uint64_t behind = at + LengthOf(piece);
  if (behind < bytes_) {
    const Piece* const next = PieceAt(base_, behind);
    if (!(next->length & kUsed) && Sensible(bytes_, behind, next)) piece->length += LengthOf(next);
  }
  if (piece->before != 0 && piece->before < at) {
    Piece* const previous = PieceAt(base_, at - piece->before);
    if (!(previous->length & kUsed) && LengthOf(previous) == piece->before) {
      previous->length += LengthOf(piece);
      at -= piece->before;
      piece = previous;
    }
  }
  if (at + LengthOf(piece) < bytes_) PieceAt(base_, at + LengthOf(piece))->before = LengthOf(piece);
  reinterpret_cast<Head*>(base_)->next = at;
}

void KernelHeap::Reset() {
  MutexLock lock(&mutex_);
  begun_ = false;
  base_ = bytes_ = 0;
}

}  // namespace cuda_remote::softgpu
