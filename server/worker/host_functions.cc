// SPDX-License-Identifier: Apache-2.0
#include "server/worker/host_functions.h"

namespace cuda_remote::server {

HostFunctions::Record* HostFunctions::CapturedLocked(uint64_t id) {
  std::unique_ptr<Record>& slot = records_[id];
  if (slot && !slot->captured) return nullptr;
  if (!slot) {
    slot = std::make_unique<Record>(Record{this, id, true});
    captured_.insert(slot.get());
  }
  return slot.get();
}

CUresult HostFunctions::Launch(const DriverTable& driver, CUstream stream, uint64_t id, bool callback, bool captured) {
  Record* record;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (captured) {
      record = CapturedLocked(id);
      if (record == nullptr) return CUDA_ERROR_INVALID_VALUE;
    } else {
      std::unique_ptr<Record>& slot = records_[id];
      if (slot) return CUDA_ERROR_INVALID_VALUE;  // ids are used once
      slot = std::make_unique<Record>(Record{this, id, false});
      record = slot.get();
    }
  }
  const CUresult result = callback ? driver.cuStreamAddCallback(
                                         stream,
                                         [](CUstream, CUresult status, void* data) {
                                           Record* const self = static_cast<Record*>(data);
                                           self->owner->Turn(self, status);
                                         },
                                         record, 0)
                                   : driver.cuLaunchHostFunc(stream, &HostFunctions::Call, record);
  if (result != CUDA_SUCCESS && !captured) {
    std::lock_guard<std::mutex> lock(mutex_);
    records_.erase(id);
  }
  return result;
}

CUhostFn HostFunctions::ForNode(uint64_t id, void** data) {
  std::lock_guard<std::mutex> lock(mutex_);
  Record* const record = CapturedLocked(id);
  if (record == nullptr) return nullptr;
  *data = record;
  return &HostFunctions::Call;
}

uint64_t HostFunctions::IdOf(CUhostFn function, void* data) const {
  if (function != &HostFunctions::Call) return 0;
  std::lock_guard<std::mutex> lock(mutex_);
  return captured_.count(data) != 0 ? static_cast<const Record*>(data)->id : 0;
}

void HostFunctions::Call(void* data) {
  Record* const self = static_cast<Record*>(data);
  self->owner->Turn(self, CUDA_SUCCESS);
}

void HostFunctions::Turn(Record* record, CUresult status) {
  uint64_t turn;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (stop_) return;
    turn = next_turn_++;
    turns_.insert(turn);
  }
  turn_.notify_all();
  announce_(record->id, turn, status);
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this, turn] { return stop_ || turns_.count(turn) == 0; });
  turns_.erase(turn);
  // A captured function's record is in the graph and stays.
  if (!record->captured) records_.erase(record->id);
}

void HostFunctions::Done(uint64_t turn) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (turns_.erase(turn) != 0) changed_.notify_all();
}

int HostFunctions::waiting() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return int(turns_.size());
}

bool HostFunctions::Any() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return !records_.empty() || !turns_.empty();
}

void HostFunctions::AwaitTurn(const std::atomic<bool>& stop) {
  std::unique_lock<std::mutex> lock(mutex_);
  turn_.wait(lock, [&] { return stop || !turns_.empty(); });
}

void HostFunctions::Interrupt() {
  std::lock_guard<std::mutex> lock(mutex_);
  turn_.notify_all();
}

void HostFunctions::Stop() {
  std::lock_guard<std::mutex> lock(mutex_);
  stop_ = true;
  changed_.notify_all();
}

}  // namespace cuda_remote::server
