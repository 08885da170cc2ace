#include "client/session/host_functions.h"

#include <signal.h>

#include <string>
#include <thread>

#include "client/session/log.h"
#include "proto/channel/client_channel.h"
#include "proto/codec/operations.gen.h"

namespace cuda_remote::client {
namespace {

// How long one read of the event ring may take: how long a checkpoint may have to wait for the thread to let go.
constexpr int kReadTimeoutMs = 100;

}  // namespace

uint64_t HostFunctions::Register(std::function<void(CUresult)> function, bool keep) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!started_) StartThreadUnlocked();
  const uint64_t number = next_number_++;
  functions_[number] = Entry{std::move(function), keep};
  if (!keep) outstanding_.fetch_add(1, std::memory_order_acq_rel);
  return number;
}

void HostFunctions::Forget(uint64_t number) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto it = functions_.find(number);
  if (it == functions_.end()) return;
  if (!it->second.keep) outstanding_.fetch_sub(1, std::memory_order_acq_rel);
  functions_.erase(it);
}

void HostFunctions::SetChannel(ClientChannel* channel) {
  std::unique_lock<std::mutex> lock(mutex_);
  channel_ = channel;
  changed_.notify_all();
  changed_.wait(lock, [this, channel] { return !reading_ || reading_ == channel; });
}

void HostFunctions::StartThreadUnlocked() {
  started_ = true;
  // The application's signals are for its own threads.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread([this] { Loop(); }).detach();
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void HostFunctions::Loop() {
  while (true) {
    ClientChannel* channel;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [this] { return channel_ != nullptr; });
      channel = channel_;
      reading_ = channel;
    }
    FrameHeader header;
    std::string message;
    const ChannelStatus status = channel->ReadEvent(&header, &message, kReadTimeoutMs);
    Entry entry{nullptr, false};
    wire::OpHostFunc_Request event;
    const bool is_event = status == ChannelStatus::kOk && header.call == kOpHostFunc && event.Decode(message);
    {
      std::unique_lock<std::mutex> lock(mutex_);
      if (is_event) {
        auto it = functions_.find(event.id);
        if (it != functions_.end()) {
          entry = it->second;
          if (!entry.keep) functions_.erase(it);
        }
      }
      if (status == ChannelStatus::kClosed || status == ChannelStatus::kProtocolError) {
        if (channel_ == channel) channel_ = nullptr;
      }
    }
    if (is_event) {
      if (entry.function) {
        entry.function(CUresult(event.status));
        if (!entry.keep) outstanding_.fetch_sub(1, std::memory_order_acq_rel);
      } else {
        LogLine("the server asked for host function %llu, which is not registered",
                static_cast<unsigned long long>(event.id));
      }
      // The stream waits for this, also when the function was unknown.
      wire::OpHostFuncDone_Request done;
      done.id = event.id;
      std::string bytes;
      done.Encode(&bytes);
      FrameHeader request;
      request.call = kOpHostFuncDone;
      request.flags = kFlagNoReply;
      channel->Send(request, bytes, {});
    }
    std::lock_guard<std::mutex> lock(mutex_);
    reading_ = nullptr;
    changed_.notify_all();
  }
}

}  // namespace cuda_remote::client
