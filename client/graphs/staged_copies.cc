// SPDX-License-Identifier: Apache-2.0
#include "client/graphs/staged_copies.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <new>
#include <utility>

namespace cuda_remote::client {
namespace {

// How long a launch waits for earlier ones that get no further.
constexpr std::chrono::seconds kPatience{2};

void Move(const StagedCopy& copy, const StagedCopy::Side& to) {
  for (size_t z = 0; z < copy.depth; ++z) {
    for (size_t y = 0; y < copy.height; ++y) {
      memmove(to.address + z * to.slice + y * to.pitch, copy.from.address + z * copy.from.slice + y * copy.from.pitch,
              copy.width);
    }
  }
}

}  // namespace

void StagedCopy::Run(void* data) {
  const StagedCopy& copy = *static_cast<const StagedCopy*>(data);
  if (!copy.home || !copy.home->UseBytes(copy)) Move(copy, copy.to);
}

StagedCopy* StagedCopies::Take(size_t bytes) {
  MutexLock lock(&mutex_);
  size_t best = free_.size();
  for (size_t i = 0; i < free_.size(); ++i) {
    if (free_[i]->capacity >= bytes && (best == free_.size() || free_[i]->capacity < free_[best]->capacity)) best = i;
  }
  if (best == free_.size()) return nullptr;
  StagedCopy* const found = free_[best];
  free_.erase(free_.begin() + long(best));
  return found;
}

void StagedCopies::Give(const std::vector<StagedCopy*>& pieces) {
  MutexLock lock(&mutex_);
  for (StagedCopy* const piece : pieces) {
    Forget(*piece);
    piece->owner = 0;
    piece->params = {};
    piece->user_object = 0;
    free_.push_back(piece);
  }
}

uint64_t StagedCopies::TakeBytes(const std::vector<StagedCopy*>& pieces) {
  size_t bytes = 0;
  for (const StagedCopy* const piece : pieces) bytes += piece->bytes();
  {
    MutexLock lock(&mutex_);
    for (size_t before = bytes_; bytes_ != 0 && bytes_ + bytes > most_bytes_; before = bytes_) {
      used_.WaitFor(&mutex_, kPatience);
      if (bytes_ >= before) break;
    }
    bytes_ += bytes;
  }
  std::vector<Taken> taken(pieces.size());
  bool has_memory = true;
  for (size_t i = 0; i < pieces.size() && has_memory; ++i) {
    const StagedCopy& piece = *pieces[i];
    taken[i].bytes.reset(new (std::nothrow) char[piece.bytes()]);
    has_memory = taken[i].bytes != nullptr;
    if (has_memory) Move(piece, {taken[i].bytes.get(), piece.width, piece.width * piece.height});
  }
  MutexLock lock(&mutex_);
  if (!has_memory) {
    bytes_ -= bytes;
    return 0;
  }
  const uint64_t launch = ++launches_;
  for (size_t i = 0; i < pieces.size(); ++i) {
    taken[i].launch = launch;
    taken_[pieces[i]].push_back(std::move(taken[i]));
  }
  return launch;
}

void StagedCopies::DropBytes(const std::vector<StagedCopy*>& pieces, uint64_t launch) {
  MutexLock lock(&mutex_);
  for (const StagedCopy* const piece : pieces) {
    const auto of_piece = taken_.find(piece);
    if (of_piece == taken_.end()) continue;
    std::deque<Taken>& all = of_piece->second;
    const auto is_its = [launch](const Taken& one) { return one.launch == launch; };
    const auto found = std::find_if(all.begin(), all.end(), is_its);
    if (found == all.end()) continue;
    all.erase(found);
    bytes_ -= piece->bytes();
    if (all.empty()) taken_.erase(of_piece);
  }
  used_.NotifyAll();
}

bool StagedCopies::UseBytes(const StagedCopy& piece) {
  Taken first;
  {
    MutexLock lock(&mutex_);
    const auto of_piece = taken_.find(&piece);
    if (of_piece == taken_.end()) return false;
    first = std::move(of_piece->second.front());
    of_piece->second.pop_front();
    if (of_piece->second.empty()) taken_.erase(of_piece);
    bytes_ -= piece.bytes();
    used_.NotifyAll();
  }
  memcpy(piece.pinned, first.bytes.get(), piece.bytes());
  return true;
}

size_t StagedCopies::waiting_bytes() {
  MutexLock lock(&mutex_);
  return bytes_;
}

void StagedCopies::Forget(const StagedCopy& piece) {
  const auto of_piece = taken_.find(&piece);
  if (of_piece == taken_.end()) return;
  bytes_ -= piece.bytes() * of_piece->second.size();
  taken_.erase(of_piece);
  used_.NotifyAll();
}

}  // namespace cuda_remote::client
