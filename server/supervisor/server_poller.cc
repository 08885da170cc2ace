// SPDX-License-Identifier: Apache-2.0
#include "server/supervisor/server_poller.h"

#include <grpcpp/alarm.h>

#include <chrono>

namespace cuda_remote::server {
namespace {

// How often to look all the same, should a substitute be held up by other work.
constexpr auto kLook = std::chrono::seconds(1);

}  // namespace

ServerPoller::ServerPoller(grpc::ServerBuilder* builder) : queue_(builder->AddCompletionQueue()) {}

ServerPoller::~ServerPoller() { Stop(); }

void ServerPoller::Start() {
  thread_ = std::thread([this] { Loop(); });
}

void ServerPoller::Stop() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (stopped_) return;
    stopped_ = true;
    queue_->Shutdown();
  }
  changed_.notify_all();
  if (thread_.joinable()) {
    thread_.join();
  } else {
    Loop();  // a queue has to be emptied
  }
}

ServerPoller::Substitute::Substitute(ServerPoller* poller) : poller_(poller) {
  std::lock_guard<std::mutex> lock(poller_->mutex_);
  if (++poller_->substitutes_ != 1 || poller_->stopped_) return;
  // Wakes the poller, which frees it.
  auto* const alarm = new grpc::Alarm;
  alarm->Set(poller_->queue_.get(), std::chrono::system_clock::now(), alarm);
}

ServerPoller::Substitute::~Substitute() {
  std::lock_guard<std::mutex> lock(poller_->mutex_);
  if (--poller_->substitutes_ == 0) poller_->changed_.notify_all();
}

void ServerPoller::Loop() {
  while (true) {
    auto deadline = std::chrono::system_clock::time_point::max();
    {
      std::unique_lock<std::mutex> lock(mutex_);
      if (substitutes_ > 0 && !stopped_) {
        changed_.wait_for(lock, kLook, [this] { return substitutes_ == 0 || stopped_; });
        if (substitutes_ > 0) deadline = std::chrono::system_clock::now();
      }
    }
    void* tag;
    bool ok;
    switch (queue_->AsyncNext(&tag, &ok, deadline)) {
      case grpc::CompletionQueue::SHUTDOWN:
        return;
      case grpc::CompletionQueue::GOT_EVENT: {
        std::lock_guard<std::mutex> lock(mutex_);  // it has been set altogether
        delete static_cast<grpc::Alarm*>(tag);
        break;
      }
      case grpc::CompletionQueue::TIMEOUT:
        break;
    }
  }
}

}  // namespace cuda_remote::server
