// SPDX-License-Identifier: Apache-2.0
#include "softgpu/core/code_space.h"

#include <algorithm>
#include <set>

#include "proto/threads/mutex.h"
#include "softgpu/core/settings.h"

namespace cuda_remote::softgpu {
namespace {

// Above all that a kernel can read or write (ptx.h), and above the addresses that the interpreter gives by itself. Not
// a round number: memory is searched for these addresses at every byte, and has a 6 between zeros in many places.
constexpr uint64_t kCodeBase = 0x00065a7e91c00000, kSlotBytes = uint64_t{1} << 36;
constexpr uint64_t kBlock = 2 << 20;
// As the driver measures pieces: an instruction takes 16 bytes, and behind each piece some are left.
constexpr uint64_t kInstruction = 16, kBehind = 0x880, kUnit = 0x100;

// The part of the address space that the next context gets: the lowest one that nobody has.
Mutex g_mutex;
std::set<int>* const g_slots CR_PT_GUARDED_BY(g_mutex) = new std::set<int>;

int TakeSlot() {
  MutexLock lock(&g_mutex);
  int slot = 0;
  while (!g_slots->insert(slot).second) ++slot;
  return slot;
}

uint64_t RoundUp(uint64_t bytes, uint64_t unit) { return (bytes + unit - 1) / unit * unit; }

}  // namespace

CodeSpace::~CodeSpace() {
  MutexLock lock(&g_mutex);
  g_slots->erase(slot_);
}

void CodeSpace::AddBlocks(uint64_t bytes) {
  if (slot_ < 0) slot_ = TakeSlot();
  const uint64_t length = RoundUp(bytes, kBlock);
  // In a mode, somewhere else in each process.
  uint64_t begin =
      kCodeBase + uint64_t(slot_) * kSlotBytes + GetSettings().places_seed % (kSlotBytes / 4) / kBlock * kBlock;
  for (const auto& [other, its_length] : blocks_) {
    if (begin + length <= other) break;
    begin = other + its_length;
  }
  blocks_[begin] = length;
  holes_.push_back({begin, length});
}

uint64_t CodeSpace::Take(uint64_t instructions) {
  const uint64_t bytes = RoundUp(instructions * kInstruction + kBehind, kUnit);
  const auto best_hole = [&] {
    auto best = holes_.end();
    for (auto hole = holes_.begin(); hole != holes_.end(); ++hole) {
      if (hole->bytes >= bytes && (best == holes_.end() || hole->bytes < best->bytes)) best = hole;
    }
    return best;
  };
  auto hole = best_hole();
  if (hole == holes_.end()) {
    AddBlocks(bytes);
    hole = best_hole();
  }
  const uint64_t address = hole->begin;
  hole->begin += bytes;
  hole->bytes -= bytes;
  if (hole->bytes == 0) holes_.erase(hole);
  pieces_[address] = bytes;
  return address;
}

void CodeSpace::Give(uint64_t address) {
  const auto piece = pieces_.find(address);
  if (piece == pieces_.end()) return;
  Hole freed{address, piece->second};
  pieces_.erase(piece);
  const auto block = std::prev(blocks_.upper_bound(address));
  for (auto hole = holes_.begin(); hole != holes_.end();) {
    const bool same_block = hole->begin >= block->first && hole->begin < block->first + block->second;
    if (same_block && (hole->begin + hole->bytes == freed.begin || freed.begin + freed.bytes == hole->begin)) {
      freed = {std::min(hole->begin, freed.begin), hole->bytes + freed.bytes};
      hole = holes_.erase(hole);
    } else {
      ++hole;
    }
  }
  if (freed.begin == block->first && freed.bytes == block->second) {
    blocks_.erase(block);
  } else {
    holes_.push_back(freed);
  }
}

}  // namespace cuda_remote::softgpu
