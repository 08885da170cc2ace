// SPDX-License-Identifier: Apache-2.0
#include "server/worker/session/handle_map.h"

#include <algorithm>

namespace cuda_remote::server {

HandleMap::Entry* HandleMap::Slot(uint32_t slot) {
  const uint32_t chunk = slot / kChunk;
  if (slot == 0 || chunk >= chunks_.size() || !chunks_[chunk]) return nullptr;
  return &chunks_[chunk][slot % kChunk];
}

HandleMap::Entry* HandleMap::Find(Kind kind, uint64_t handle) {
  Entry* const entry = Slot(SlotOf(handle));
  // Comparing whole numbers also refuses stale generations and bits that no handle has.
  return entry && entry->handle == handle && handle != 0 && KindOf(handle) == kind ? entry : nullptr;
}

const HandleMap::Entry* HandleMap::At(uint32_t slot) const {
  const Entry* const entry = const_cast<HandleMap*>(this)->Slot(slot);
  return entry && entry->handle != 0 ? entry : nullptr;
}

uint64_t HandleMap::Virtual(Kind kind, uint64_t real) const {
  const auto& map = virtual_[uint8_t(kind)];
  const auto it = map.find(real);
  return it == map.end() ? 0 : it->second;
}

bool HandleMap::MayBind(Kind kind, uint64_t handle) const {
  const uint32_t slot = SlotOf(handle);
  if (kind == Kind::kNone || kind >= Kind::kDeviceMemory || slot == 0) return false;
  if (handle != MakeHandle(kind, slot, GenerationOf(handle))) return false;
  return At(slot) == nullptr;
}

void HandleMap::Bind(Kind kind, uint64_t handle, uint64_t real, uint64_t parent) {
  const uint32_t slot = SlotOf(handle);
  const uint32_t chunk = slot / kChunk;
  if (chunk >= chunks_.size()) chunks_.resize(chunk + 1);
  if (!chunks_[chunk]) chunks_[chunk].reset(new Entry[kChunk]);
  Entry* const entry = &chunks_[chunk][slot % kChunk];
  *entry = Entry();
  entry->handle = handle;
  entry->real = real;
  LinkTo(entry, parent);
  LinkToKind(entry);
  virtual_[uint8_t(kind)][real] = handle;
  ++live_;
}

void HandleMap::LinkTo(Entry* entry, uint64_t parent) {
  Entry* const above = parent != 0 ? Find(KindOf(parent), parent) : nullptr;
  if (above == nullptr || above == entry) return;
  const uint32_t slot = SlotOf(entry->handle);
  entry->parent = parent;
  entry->next_sibling = above->first_child;
  if (entry->next_sibling != 0) Slot(entry->next_sibling)->previous_sibling = slot;
  above->first_child = slot;
}

void HandleMap::LinkToKind(Entry* entry) {
  OfKind& all = of_kind_[uint8_t(KindOf(entry->handle))];
  const uint32_t slot = SlotOf(entry->handle);
  entry->next_of_kind = all.first;
  if (all.first != 0) Slot(all.first)->previous_of_kind = slot;
  all.first = slot;
  ++all.count;
}

void HandleMap::UnlinkFromKind(Entry* entry) {
  OfKind& all = of_kind_[uint8_t(KindOf(entry->handle))];
  if (entry->previous_of_kind != 0) {
    Slot(entry->previous_of_kind)->next_of_kind = entry->next_of_kind;
  } else {
    all.first = entry->next_of_kind;
  }
  if (entry->next_of_kind != 0) Slot(entry->next_of_kind)->previous_of_kind = entry->previous_of_kind;
  --all.count;
}

void HandleMap::Unlink(Entry* entry) {
  if (entry->parent == 0) return;
  if (entry->previous_sibling != 0) {
    Slot(entry->previous_sibling)->next_sibling = entry->next_sibling;
  } else if (Entry* const above = Slot(SlotOf(entry->parent))) {
    above->first_child = entry->next_sibling;
  }
  if (entry->next_sibling != 0) Slot(entry->next_sibling)->previous_sibling = entry->previous_sibling;
  entry->parent = 0;
  entry->next_sibling = entry->previous_sibling = 0;
}

bool HandleMap::IsUnder(uint64_t handle, uint64_t ancestor) const {
  while (handle != 0 && handle != ancestor) {
    const Entry* const entry = Find(KindOf(handle), handle);
    handle = entry != nullptr ? entry->parent : 0;
  }
  return handle != 0;
}

void HandleMap::SetParent(Kind kind, uint64_t handle, uint64_t parent) {
  Entry* const entry = Find(kind, handle);
  if (entry == nullptr || IsUnder(parent, handle)) return;
  Unlink(entry);
  LinkTo(entry, parent);
}

void HandleMap::Rebind(Kind kind, uint64_t handle, uint64_t real) {
  Entry* const entry = Find(kind, handle);
  if (entry == nullptr) return;
  auto& map = virtual_[uint8_t(kind)];
  map.erase(entry->real);
  entry->real = real;
  map[real] = handle;
}

void HandleMap::Drop(uint32_t slot, const std::function<void(const Entry&)>& gone) {
  Entry* const entry = Slot(slot);
  const Entry dead = *entry;
  Unlink(entry);
  UnlinkFromKind(entry);
  auto& map = virtual_[uint8_t(KindOf(entry->handle))];
  // Two handles may have named the same object; only the newer one is found from it.
  if (const auto it = map.find(entry->real); it != map.end() && it->second == entry->handle) map.erase(it);
  *entry = Entry();
  --live_;
  if (gone) gone(dead);
}

void HandleMap::DropChildren(uint32_t slot, const std::function<void(const Entry&)>& gone) {
  // Leaves first, walking up again: no recursion, however deep a hostile client makes the tree.
  for (uint32_t at = slot;;) {
    const Entry* const entry = Slot(at);
    if (entry->first_child != 0) {
      at = entry->first_child;
      continue;
    }
    if (at == slot) return;
    const uint32_t above = SlotOf(entry->parent);
    Drop(at, gone);
    at = above;
  }
}

void HandleMap::Unbind(uint64_t handle, const std::function<void(const Entry&)>& gone) {
  if (!Find(KindOf(handle), handle)) return;
  DropChildren(SlotOf(handle), gone);
  Drop(SlotOf(handle), gone);
}

void HandleMap::ForEach(Kind kind, const std::function<void(const Entry&)>& each) const {
  std::vector<uint32_t> slots;
  const OfKind& all = of_kind_[uint8_t(kind)];
  slots.reserve(all.count);
  for (uint32_t slot = all.first; slot != 0; slot = At(slot)->next_of_kind) slots.push_back(slot);
  std::sort(slots.begin(), slots.end());
  for (const uint32_t slot : slots) each(*At(slot));
}

}  // namespace cuda_remote::server
