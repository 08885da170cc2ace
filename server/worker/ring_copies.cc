#include "server/worker/ring_copies.h"

#include "spdlog/spdlog.h"

namespace cuda_remote::server {

RingCopies::~RingCopies() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

bool RingCopies::MayHold(ContextRef context, const char* data, size_t bytes) {
  if (bytes < kSmallest || refused_ || context.id == 0) return false;
  if (held_bytes_.load(std::memory_order_acquire) + bytes > kMostHeld) return false;
  const ServerChannel::Range ring = channel_->request_memory();
  const char* const start = static_cast<const char*>(ring.data);
  // A payload put together from several frames lies elsewhere.
  if (data < start || size_t(data - start) > ring.bytes || bytes > ring.bytes - size_t(data - start)) return false;
  if (registered_in_ != 0) return true;
  const CUresult result = driver_.cuMemHostRegister_v2(ring.data, ring.bytes, CU_MEMHOSTREGISTER_PORTABLE);
  if (result != CUDA_SUCCESS) {
    spdlog::debug("the driver does not register the channel's memory: CUDA error {}", int(result));
    refused_ = true;
    return false;
  }
  registered_in_ = context.id;
  return true;
}

CUresult RingCopies::ReleaseWhenDone(ContextRef context, CUstream stream, size_t bytes, uint64_t hold) {
  CUevent event = nullptr;
  CUresult result = driver_.cuEventCreate(&event, CU_EVENT_DISABLE_TIMING);
  if (result == CUDA_SUCCESS) result = driver_.cuEventRecord(event, stream);
  if (result != CUDA_SUCCESS) {
    // Without an event there is only one way to know.
    if (event != nullptr) driver_.cuEventDestroy_v2(event);
    result = driver_.cuStreamSynchronize(stream);
    channel_->Release(hold);
    return result;
  }
  held_bytes_.fetch_add(bytes, std::memory_order_acq_rel);
  std::lock_guard<std::mutex> lock(mutex_);
  held_.push_back({hold, event, context, bytes});
  if (!thread_.joinable()) thread_ = std::thread([this] { Loop(); });
  changed_.notify_one();
  return CUDA_SUCCESS;
}

void RingCopies::Loop() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return stop_ || !held_.empty(); });
    if (stop_) return;
    const Held next = held_.front();
    held_.pop_front();
    lock.unlock();
    // Whatever the wait says: afterwards the copy is over, or its context is.
    MakeCurrent(driver_, next.context);
    driver_.cuEventSynchronize(next.event);
    driver_.cuEventDestroy_v2(next.event);
    channel_->Release(next.hold);
    held_bytes_.fetch_sub(next.bytes, std::memory_order_acq_rel);
    lock.lock();
  }
}

void RingCopies::ContextDies(uint64_t context_id) {
  if (registered_in_ == context_id) registered_in_ = 0;
}

}  // namespace cuda_remote::server
