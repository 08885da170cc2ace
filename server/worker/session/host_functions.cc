// SPDX-License-Identifier: Apache-2.0
#include "server/worker/session/host_functions.h"

#include "proto/threads/mutex.h"

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
    MutexLock lock(&mutex_);
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
    MutexLock lock(&mutex_);
    records_.erase(id);
  }
  return result;
}

CUhostFn HostFunctions::ForNode(uint64_t id, void** data) {
  MutexLock lock(&mutex_);
  Record* const record = CapturedLocked(id);
  if (record == nullptr) return nullptr;
  *data = record;
  return &HostFunctions::Call;
}

uint64_t HostFunctions::IdOf(CUhostFn function, void* data) const {
  if (function != &HostFunctions::Call) return 0;
  MutexLock lock(&mutex_);
  return captured_.count(data) != 0 ? static_cast<const Record*>(data)->id : 0;
}

void HostFunctions::Call(void* data) {
  Record* const self = static_cast<Record*>(data);
  self->owner->Turn(self, CUDA_SUCCESS);
}

void HostFunctions::Turn(Record* record, CUresult status) {
  uint64_t turn;
  {
    MutexLock lock(&mutex_);
    if (stop_) return;
    turn = record->turn = next_turn_++;
    turns_.insert(turn);
  }
  turn_.NotifyAll();
  announce_(record->id, turn, status);
  MutexLock lock(&mutex_);
  while (!stop_ && turns_.count(turn) != 0) changed_.Wait(&mutex_);
  turns_.erase(turn);
  // A captured function's record is in the graph and stays.
  if (!record->captured) records_.erase(record->id);
}

void HostFunctions::Done(uint64_t turn) {
  MutexLock lock(&mutex_);
  if (turns_.erase(turn) != 0) changed_.NotifyAll();
}

bool HostFunctions::IsDone(uint64_t id) const {
  MutexLock lock(&mutex_);
  const auto it = records_.find(id);
  if (it == records_.end()) return true;
  return it->second->turn != 0 && turns_.count(it->second->turn) == 0;
}

int HostFunctions::waiting() const {
  MutexLock lock(&mutex_);
  return int(turns_.size());
}

bool HostFunctions::Any() const {
  MutexLock lock(&mutex_);
  return !records_.empty() || !turns_.empty();
}

void HostFunctions::AwaitTurn(const std::atomic<bool>& stop) {
  MutexLock lock(&mutex_);
  while (!stop && turns_.empty()) turn_.Wait(&mutex_);
}

void HostFunctions::Interrupt() {
  MutexLock lock(&mutex_);
  turn_.NotifyAll();
}

void HostFunctions::Stop() {
  MutexLock lock(&mutex_);
  stop_ = true;
  changed_.NotifyAll();
}

}  // namespace cuda_remote::server
