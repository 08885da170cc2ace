// SPDX-License-Identifier: Apache-2.0
#include "server/supervisor/server_poller.h"

#include <grpcpp/alarm.h>

#include <chrono>

#include "proto/base/clock.h"
#include "proto/threads/mutex.h"

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
    MutexLock lock(&mutex_);
    if (stopped_) return;
    stopped_ = true;
    queue_->Shutdown();
  }
  changed_.NotifyAll();
  if (thread_.joinable()) {
    thread_.join();
  } else {
    Loop();  // a queue has to be emptied
  }
}

ServerPoller::Substitute::Substitute(ServerPoller* poller) : poller_(poller) {
  MutexLock lock(&poller_->mutex_);
  if (++poller_->substitutes_ != 1 || poller_->stopped_) return;
  // Wakes the poller, which frees it.
  auto* const alarm = new grpc::Alarm;
  alarm->Set(poller_->queue_.get(), WallNow(), alarm);
}

ServerPoller::Substitute::~Substitute() {
  MutexLock lock(&poller_->mutex_);
  if (--poller_->substitutes_ == 0) poller_->changed_.NotifyAll();
}

void ServerPoller::Loop() {
  while (true) {
    auto deadline = std::chrono::system_clock::time_point::max();
    {
      MutexLock lock(&mutex_);
      if (substitutes_ > 0 && !stopped_) {
        const auto end = Now() + kLook;
        while (substitutes_ > 0 && !stopped_ && changed_.WaitUntil(&mutex_, end)) {
        }
        if (substitutes_ > 0) deadline = WallNow();
      }
    }
    void* tag;
    bool ok;
    switch (queue_->AsyncNext(&tag, &ok, deadline)) {
      case grpc::CompletionQueue::SHUTDOWN:
        return;
      case grpc::CompletionQueue::GOT_EVENT: {
        MutexLock lock(&mutex_);  // it has been set altogether
        delete static_cast<grpc::Alarm*>(tag);
        break;
      }
      case grpc::CompletionQueue::TIMEOUT:
        break;
    }
  }
}

}  // namespace cuda_remote::server
