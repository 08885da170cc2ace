// SPDX-License-Identifier: Apache-2.0
#include "server/worker/memory/uploads.h"

#include <algorithm>

#include "server/worker/session/driver_hooks.h"

namespace cuda_remote::server {
namespace {

constexpr size_t kBlockBytes = StagingPool::kLarge;
// Copy engines are fastest with sources that begin here.
constexpr size_t kAlignment = 256;

size_t Aligned(size_t bytes) { return (bytes + kAlignment - 1) & ~(kAlignment - 1); }

CUresult MakeEvent(const DriverTable& driver, CUstream stream, CUevent* event) {
  CUresult result = driver.cuEventCreate(event, CU_EVENT_DISABLE_TIMING);
  if (result != CUDA_SUCCESS) return result;
  result = driver.cuEventRecord(*event, stream);
  if (result != CUDA_SUCCESS) driver.cuEventDestroy_v2(*event);
  return result;
}

}  // namespace

CUevent EventBehind(const DriverTable& driver, CUstream stream, CUresult* result) {
  CUevent event = nullptr;
  *result = MakeEvent(driver, stream, &event);
  if (*result == CUDA_SUCCESS) return event;
  // An event belongs to a context, and the stream may be another one's.
  CUcontext context = nullptr, popped;
  if (driver.cuStreamGetCtx(stream, &context) == CUDA_SUCCESS && context != nullptr &&
      driver.cuCtxPushCurrent_v2(context) == CUDA_SUCCESS) {
    *result = MakeEvent(driver, stream, &event);
    driver.cuCtxPopCurrent_v2(&popped);
    if (*result == CUDA_SUCCESS) return event;
  }
  *result = driver.cuStreamSynchronize(stream);
  return nullptr;
}

CUevent EventBehindWork(const DriverTable& driver, CUstream stream, CUresult* result) {
  // During a capture the driver may refuse to answer, and invalidate it.
  if (CapturesInProgress() == 0 && driver.cuStreamQuery(stream) == CUDA_SUCCESS) {
    *result = CUDA_SUCCESS;
    return nullptr;
  }
  return EventBehind(driver, stream, result);
}

Uploads::~Uploads() {
  // One session for each process.
  static auto* const kept = new std::vector<std::shared_ptr<char>>;  // NOLINT(bugprone-unhandled-exception-at-new)
  kept->push_back(std::move(open_.memory));
  for (Block& block : lent_) kept->push_back(std::move(block.memory));
}

char* Uploads::Take(size_t bytes) {
  if (open_.memory == nullptr || bytes > open_.bytes - open_.used) {
    Settle();
    if (!lent_.empty()) Collect();
    while (lent_bytes_ + bytes > kMostLent && !lent_.empty()) AwaitOldest();
    open_ = Block();
    open_.bytes = std::max(bytes, kBlockBytes);
    open_.memory = staging_->Take(open_.bytes);
    if (open_.memory == nullptr) return nullptr;
  }
  char* const place = open_.memory.get() + open_.used;
  open_.used = std::min(open_.bytes, open_.used + Aligned(bytes));
  return place;
}

void Uploads::Used(ContextRef context, CUstream stream) {
  const bool known = std::any_of(open_.readers.begin(), open_.readers.end(), [&](const Reader& reader) {
    return reader.stream == stream && reader.context.id == context.id;
  });
  if (!known) open_.readers.push_back({context, stream, nullptr});
  // During a capture only this moment is sure to be one in which this stream may be touched.
  if (CapturesInProgress() != 0) Settle();
}

void Uploads::Settle() {
  if (open_.readers.empty()) return;
  auto& readers = open_.readers;
  for (Reader& reader : readers) {
    MakeCurrent(driver_, reader.context);
    CUresult result;
    reader.event = EventBehindWork(driver_, reader.stream, &result);
  }
  // Those that are done.
  readers.erase(std::remove_if(readers.begin(), readers.end(), [](const Reader& reader) { return !reader.event; }),
                readers.end());
  if (readers.empty()) return;
  lent_bytes_ += open_.bytes;
  lent_.push_back(std::move(open_));
  open_ = Block();
}

bool Uploads::IsRead(Block* block, std::vector<CUstream>* busy) {
  while (!block->readers.empty()) {
    const Reader& reader = block->readers.back();
    // What a stream has not done in an older block it has not done in this one.
    if (std::find(busy->begin(), busy->end(), reader.stream) != busy->end()) return false;
    if (MakeCurrent(driver_, reader.context) != CUDA_SUCCESS) return false;
    // After an error nothing of the context's runs any more.
    if (driver_.cuEventQuery(reader.event) == CUDA_ERROR_NOT_READY) {
      busy->push_back(reader.stream);
      return false;
    }
    driver_.cuEventDestroy_v2(reader.event);
    block->readers.pop_back();
  }
  return true;
}

void Uploads::Collect() {
  std::vector<CUstream> busy;
  for (auto it = lent_.begin(); it != lent_.end();) {
    if (!IsRead(&*it, &busy)) {
      ++it;
      continue;
    }
    lent_bytes_ -= it->bytes;
    it = lent_.erase(it);
  }
}

void Uploads::AwaitOldest() {
  Block& oldest = lent_.front();
  for (const Reader& reader : oldest.readers) {
    MakeCurrent(driver_, reader.context);
    driver_.cuEventSynchronize(reader.event);
    driver_.cuEventDestroy_v2(reader.event);
  }
  lent_bytes_ -= oldest.bytes;
  lent_.pop_front();
}

std::vector<std::shared_ptr<char>> Uploads::ContextDies(uint64_t context_id) {
  std::vector<std::shared_ptr<char>> kept;
  const auto forget = [&](Block* block) {
    auto& readers = block->readers;
    const auto end = std::remove_if(readers.begin(), readers.end(),
                                    [&](const Reader& reader) { return reader.context.id == context_id; });
    if (end == readers.end()) return;
    readers.erase(end, readers.end());
    kept.push_back(block->memory);
  };
  forget(&open_);
  // Its memory may have been registered in that context.
  Settle();
  open_ = Block();
  for (Block& block : lent_) forget(&block);
  return kept;
}

}  // namespace cuda_remote::server
