// SPDX-License-Identifier: Apache-2.0
// The table behind virtual handles: slots with generations, and who dies with whom.
//
// Part of the client library: no exceptions of its own, no abseil. Not thread-safe, except Usable; the owner locks. The
// table owns the values. A pointer from Find is valid until that handle is dropped. proto/frame/handle.h describes the
// numbers.
#ifndef CUDA_REMOTE_REPLAY_HANDLES_HANDLE_TABLE_H_
#define CUDA_REMOTE_REPLAY_HANDLES_HANDLE_TABLE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <optional>
#include <utility>
#include <vector>

#include "proto/frame/handle.h"
#include "replay/handles/live_handles.h"

namespace cuda_remote::replay {

// A `T` for each live handle.
template <typename T>
class HandleTable {
 public:
  HandleTable() = default;
  HandleTable(const HandleTable&) = delete;
  HandleTable& operator=(const HandleTable&) = delete;

  // Returns a new handle of `kind` with a default-constructed value; 0 if all slots are taken or there is no memory.
  // The handle is dropped with `parent`, if that is a live handle.
  uint64_t New(Kind kind, uint64_t parent) {
    if (kind == Kind::kNone) return 0;
    // Slots wait for some others before they are used again, which makes their generations last longer.
    uint32_t index = free_count_ > kIdleSlots ? first_free_ : 0;
    if (index == 0) index = Grow();
    if (index == 0) index = first_free_;
    if (index == 0) return 0;
    Slot& slot = At(index);
    if (slot.free) Unfree(index);
    slot.value.emplace();
    slot.kind = kind;
    ++live_;
    const uint64_t handle = MakeHandle(kind, index, slot.generation);
    usable_.Set(handle);
    const Slot* above = parent ? Lookup(KindOf(parent), parent) : nullptr;
    if (above) Link(index, SlotOf(parent));
    return handle;
  }

  // Whether `handle` is a live one of `kind` that has not been set aside. Any thread, without a lock.
  bool Usable(Kind kind, uint64_t handle) const { return KindOf(handle) == kind && usable_.Contains(handle); }

  // Says whether a live handle may be used; it stays allocated in either case. Ignores numbers that are not live
  // handles.
  void SetUsable(uint64_t handle, bool usable) {
    if (!Lookup(KindOf(handle), handle)) return;
    if (usable) {
      usable_.Set(handle);
    } else {
      usable_.Clear(handle);
    }
  }

  // The value of a live handle of `kind`; null for any other number, stale handles among them.
  T* Find(Kind kind, uint64_t handle) {
    Slot* slot = const_cast<Slot*>(Lookup(kind, handle));
    return slot ? &*slot->value : nullptr;
  }
  const T* Find(Kind kind, uint64_t handle) const {
    const Slot* slot = Lookup(kind, handle);
    return slot ? &*slot->value : nullptr;
  }

  // The parent's handle; 0 if there is none or `handle` is not live.
  uint64_t ParentOf(uint64_t handle) const {
    const Slot* slot = Lookup(KindOf(handle), handle);
    if (!slot || !slot->parent) return 0;
    const Slot& above = At(slot->parent);
    return MakeHandle(above.kind, slot->parent, above.generation);
  }

  // Drops a handle and all handles below it. Ignores numbers that are not live handles.
  void Drop(uint64_t handle) {
    if (!Lookup(KindOf(handle), handle)) return;
    const uint32_t root = SlotOf(handle);
    DropChildrenOf(root);
    Release(root);
  }

  // Drops all handles below `handle`, but not `handle` itself.
  void DropChildren(uint64_t handle) {
    if (Lookup(KindOf(handle), handle)) DropChildrenOf(SlotOf(handle));
  }

  // Calls `visit(handle)` for every handle below `handle`. `visit` may not change the table.
  template <typename Visit>
  void ForEachBelow(uint64_t handle, Visit visit) const {
    if (!Lookup(KindOf(handle), handle)) return;
    const uint32_t root = SlotOf(handle);
    for (uint32_t at = At(root).first_child; at != 0;) {
      const Slot& slot = At(at);
      visit(MakeHandle(slot.kind, at, slot.generation));
      if (slot.first_child) {
        at = slot.first_child;
        continue;
      }
      while (at != root && !At(at).next) at = At(at).parent;
      at = at == root ? 0 : At(at).next;
    }
  }

  // Calls `visit(handle, value)` for every live handle of `kind`. Reads every slot, so it is slow.
  template <typename Visit>
  void ForEach(Kind kind, Visit visit) const {
    for (uint32_t index = 1; index <= used_; ++index) {
      const Slot& slot = At(index);
      if (slot.value && slot.kind == kind) visit(MakeHandle(kind, index, slot.generation), *slot.value);
    }
  }

  // Number of live handles.
  size_t size() const { return live_; }
  // Slots that were ever used. The table's memory grows with them.
  size_t capacity() const { return used_; }

 private:
  static constexpr uint32_t kChunkSlots = 256;
  static constexpr uint32_t kIdleSlots = 1024;

  struct Slot {
    std::optional<T> value;  // set if live
    Kind kind = Kind::kNone;
    bool free = false;  // in the list of free slots
    uint16_t generation = 0;
    uint32_t parent = 0;
    uint32_t first_child = 0;
    uint32_t next = 0;      // sibling, or next free slot
    uint32_t previous = 0;  // sibling
  };

  Slot& At(uint32_t index) { return chunks_[index / kChunkSlots][index % kChunkSlots]; }
  const Slot& At(uint32_t index) const { return chunks_[index / kChunkSlots][index % kChunkSlots]; }

  const Slot* Lookup(Kind kind, uint64_t handle) const {
    const uint32_t index = SlotOf(handle);
    if (index == 0 || index > used_ || kind == Kind::kNone) return nullptr;
    const Slot& slot = At(index);
    // Comparing the whole number also refuses bits that no handle has.
    return slot.value && slot.kind == kind && MakeHandle(kind, index, slot.generation) == handle ? &slot : nullptr;
  }

  // A slot that was never used, 0 if there is none left.
  uint32_t Grow() {
    if (used_ >= kMaxSlot) return 0;
    const uint32_t index = used_ + 1;  // slot 0 is never used
    if (!usable_.Reserve(index)) return 0;
    if (index / kChunkSlots >= chunks_.size()) {
      std::unique_ptr<Slot[]> chunk(new (std::nothrow) Slot[kChunkSlots]);
      if (!chunk) return 0;
      chunks_.push_back(std::move(chunk));
    }
    used_ = index;
    return index;
  }

  void Unfree(uint32_t index) {
    Slot& slot = At(index);
    first_free_ = slot.next;
    if (first_free_ == 0) last_free_ = 0;
    --free_count_;
    slot.free = false;
    slot.next = 0;
  }

  void Link(uint32_t index, uint32_t parent) {
    Slot& slot = At(index);
    Slot& above = At(parent);
    slot.parent = parent;
    slot.next = above.first_child;
    if (slot.next) At(slot.next).previous = index;
    above.first_child = index;
  }

  void DropChildrenOf(uint32_t root) {
    // Leaves first, walking up again: no recursion, however deep the tree.
    for (uint32_t at = root;;) {
      if (const uint32_t child = At(at).first_child) {
        at = child;
        continue;
      }
      if (at == root) return;
      const uint32_t parent = At(at).parent;
      Release(at);
      at = parent;
    }
  }

  // Unlinks a slot that has no children and puts it at the end of the free list.
  void Release(uint32_t index) {
    Slot& slot = At(index);
    if (slot.parent) {
      if (slot.previous) {
        At(slot.previous).next = slot.next;
      } else {
        At(slot.parent).first_child = slot.next;
      }
      if (slot.next) At(slot.next).previous = slot.previous;
    }
    usable_.Clear(MakeHandle(slot.kind, index, slot.generation));
    slot.value.reset();
    slot.kind = Kind::kNone;
    ++slot.generation;
    slot.parent = slot.previous = slot.next = 0;
    slot.free = true;
    if (last_free_) {
      At(last_free_).next = index;
    } else {
      first_free_ = index;
    }
    last_free_ = index;
    ++free_count_;
    --live_;
  }

  LiveHandles usable_;
  std::vector<std::unique_ptr<Slot[]>> chunks_;
  uint32_t used_ = 0;
  uint32_t first_free_ = 0;
  uint32_t last_free_ = 0;
  uint32_t free_count_ = 0;
  size_t live_ = 0;
};

}  // namespace cuda_remote::replay

#endif  // CUDA_REMOTE_REPLAY_HANDLES_HANDLE_TABLE_H_
