// SPDX-License-Identifier: Apache-2.0
#include "client/core/host_functions.h"

#include <signal.h>

#include <chrono>
#include <string>
#include <thread>

#include "client/core/log.h"
#include "proto/base/clock.h"
#include "proto/channel/client_channel.h"
#include "proto/codec/operations.gen.h"
#include "proto/threads/start_thread.h"

namespace cuda_remote::client {
namespace {

// How long one read of the event ring may take: how long a checkpoint may have to wait for the thread to let go.
constexpr int kReadTimeoutMs = 100;

}  // namespace

bool HostFunctions::Start() {
  MutexLock lock(&mutex_);
  if (started_) return true;
  // The application's signals are for its own threads.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread thread = StartThread([this] { Loop(); });
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  started_ = thread.joinable();
  if (started_) {
    thread.detach();
  } else {
    LogLine("the system gives no thread to run host functions; see the limits of processes (ulimit -u, pids.max)");
  }
  return started_;
}

uint64_t HostFunctions::Register(std::function<void(CUresult)> function) {
  MutexLock lock(&mutex_);
  const uint64_t number = next_number_++;
  functions_[number] = std::move(function);
  outstanding_.fetch_add(1, std::memory_order_acq_rel);
  return number;
}

uint64_t HostFunctions::RegisterForGraph(CUhostFn function, void* data) {
  MutexLock lock(&mutex_);
  uint64_t& number = numbers_[{function, data}];
  if (number == 0) {
    number = next_number_++;
    of_graphs_[number] = {function, data};
  }
  return number;
}

bool HostFunctions::FindForGraph(uint64_t number, CUhostFn* function, void** data) const {
  MutexLock lock(&mutex_);
  const auto it = of_graphs_.find(number);
  if (it == of_graphs_.end()) return false;
  *function = it->second.function;
  *data = it->second.data;
  return true;
}

void HostFunctions::RegisterObject(uint64_t handle, CUhostFn destroy, void* data) {
  MutexLock lock(&mutex_);
  objects_[handle] = {destroy, data};
}

void HostFunctions::Forget(uint64_t number) {
  MutexLock lock(&mutex_);
  if (functions_.erase(number) != 0) outstanding_.fetch_sub(1, std::memory_order_acq_rel);
}

void HostFunctions::SetChannel(ClientChannel* channel) {
  MutexLock lock(&mutex_);
  channel_ = channel;
  changed_.NotifyAll();
  while (reading_ && reading_ != channel) changed_.Wait(&mutex_);
}

bool HostFunctions::Detach(int timeout_ms) {
  MutexLock lock(&mutex_);
  channel_ = nullptr;
  changed_.NotifyAll();
  if (reading_) reading_->InterruptEvents();
  const auto end = Now() + std::chrono::milliseconds(timeout_ms);
  while (reading_ && changed_.WaitUntil(&mutex_, end)) {
  }
  return !reading_;
}

uint64_t HostFunctions::RunningMs() const {
  const int64_t since = running_since_ns_.load(std::memory_order_acquire);
  return since == 0 ? 0 : uint64_t((NowNs() - since) / 1000000 + 1);
}

void HostFunctions::Loop() {
  while (true) {
    ClientChannel* channel;
    {
      MutexLock lock(&mutex_);
      while (!channel_) changed_.Wait(&mutex_);
      channel = channel_;
      reading_ = channel;
    }
    FrameHeader header;
    std::string message;
    const ChannelStatus status = channel->ReadEvent(&header, &message, kReadTimeoutMs);
    std::function<void(CUresult)> function;
    bool once = false;
    wire::OpHostFunc_Request event;
    wire::OpUserObjectGone_Request gone;
    const bool is_event = status == ChannelStatus::kOk && header.call == kOpHostFunc && event.Decode(message);
    const bool is_gone = status == ChannelStatus::kOk && header.call == kOpUserObjectGone && gone.Decode(message);
    Target destructor{nullptr, nullptr};
    if (is_event || is_gone) running_since_ns_.store(NowNs(), std::memory_order_release);
    {
      MutexLock lock(&mutex_);
      if (is_event) {
        if (auto it = functions_.find(event.id); it != functions_.end()) {
          function = std::move(it->second);
          once = true;
          functions_.erase(it);
        } else if (auto kept = of_graphs_.find(event.id); kept != of_graphs_.end()) {
          function = [target = kept->second](CUresult) { target.function(target.data); };
        }
      }
      if (is_gone) {
        if (auto it = objects_.find(gone.object); it != objects_.end()) {
          destructor = it->second;
          objects_.erase(it);
        }
      }
      if (status == ChannelStatus::kClosed || status == ChannelStatus::kProtocolError) {
        if (channel_ == channel) channel_ = nullptr;
      }
    }
    if (destructor.function) {
      destructor.function(destructor.data);
      recorded_->UserObjectGone(gone.object);
    }
    if (is_event) {
      const bool runs = bool(function);
      if (runs) {
        if (before_) before_(channel);
        function(CUresult(event.status));
        if (after_) after_(channel);
        if (once) outstanding_.fetch_sub(1, std::memory_order_acq_rel);
      } else {
        LogLine("the server asked for host function %llu, which this process has not registered",
                static_cast<unsigned long long>(event.id));
      }
      // The stream waits for this, also when the function was unknown.
      wire::OpHostFuncDone_Request done;
      done.id = event.id;
      done.turn = event.turn;
      std::string bytes;
      done.Encode(&bytes);
      FrameHeader request;
      request.call = kOpHostFuncDone;
      request.flags = kFlagNoReply;
      channel->Send(request, bytes, {});
      if (runs && told_) told_();
    }
    running_since_ns_.store(0, std::memory_order_release);
    MutexLock lock(&mutex_);
    reading_ = nullptr;
    changed_.NotifyAll();
  }
}

}  // namespace cuda_remote::client
