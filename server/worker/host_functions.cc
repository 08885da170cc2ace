#include "server/worker/host_functions.h"

namespace cuda_remote::server {

CUresult HostFunctions::Launch(const DriverTable& driver, CUstream stream, uint64_t id, bool callback, bool captured) {
  Record* record;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    std::unique_ptr<Record>& slot = records_[id];
    if (slot) return CUDA_ERROR_INVALID_VALUE;  // ids are used once
    slot = std::make_unique<Record>(Record{this, id, captured});
    record = slot.get();
  }
  const CUresult result = callback ? driver.cuStreamAddCallback(
                                         stream,
                                         [](CUstream, CUresult status, void* data) {
                                           Record* const self = static_cast<Record*>(data);
                                           self->owner->Turn(self, status);
                                         },
                                         record, 0)
                                   : driver.cuLaunchHostFunc(
                                         stream,
                                         [](void* data) {
                                           Record* const self = static_cast<Record*>(data);
                                           self->owner->Turn(self, CUDA_SUCCESS);
                                         },
                                         record);
  if (result != CUDA_SUCCESS) {
    std::lock_guard<std::mutex> lock(mutex_);
    records_.erase(id);
  }
  return result;
}

void HostFunctions::Turn(Record* record, CUresult status) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (stop_) return;
    ++waiting_;
  }
  turn_.notify_all();
  announce_(record->id, status);
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this, record] { return stop_ || record->done > 0; });
  --waiting_;
  if (record->done > 0) --record->done;
  // A captured function's record is in the graph and stays.
  if (!record->captured) records_.erase(record->id);
}

void HostFunctions::Done(uint64_t id) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto it = records_.find(id);
  if (it == records_.end()) return;
  ++it->second->done;
  changed_.notify_all();
}

int HostFunctions::waiting() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return waiting_;
}

void HostFunctions::AwaitTurn(const std::atomic<bool>& stop) {
  std::unique_lock<std::mutex> lock(mutex_);
  turn_.wait(lock, [&] { return stop || waiting_ != 0; });
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
