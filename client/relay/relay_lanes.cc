// SPDX-License-Identifier: Apache-2.0
#include "client/relay/relay_lanes.h"

#include <stdlib.h>

#include <algorithm>
#include <utility>

#include "client/relay/relay_stream.h"
#include "proto/control/control.pb.h"
#include "proto/control/tunnel_message.h"
#include "proto/logging/log.h"
#include "proto/ring/spin.h"
#include "proto/threads/mutex.h"
#include "proto/threads/start_thread.h"

namespace cuda_remote::client {
uint32_t WantedLanes() {
  if (const char* const text = getenv("CUDA_REMOTE_TUNNEL_LANES")) {
    return uint32_t(std::clamp<long>(strtol(text, nullptr, 10), 0, control::TunnelEnd::kMostLanes));
  }
  // Each connection takes about three processors at either end when it is busy. With two, the client's own copy into
  // its ring is what bounds it.
  const int processors = ring::UsableProcessors();
  return processors >= ring::kManyProcessors ? 2 : processors >= 4 ? 1 : 0;
}

RelayLanes::RelayLanes(control::TunnelEnd* end, std::function<std::shared_ptr<grpc::Channel>()> channel,
                       std::string resume_token, uint64_t number, uint32_t count, bool checked)
    : end_(end),
      channel_(std::move(channel)),
      resume_token_(std::move(resume_token)),
      number_(number),
      checked_(checked) {
  contexts_.resize(count);
  // One that is missing costs speed only.
  for (size_t i = 0; i < count; ++i) threads_.push_back(StartThread([this, i] { Serve(i); }));
}

RelayLanes::~RelayLanes() {
  {
    MutexLock lock(&mutex_);
    stop_ = true;
    for (grpc::ClientContext* const context : contexts_) {
      if (context) context->TryCancel();
    }
  }
  end_->WakeWaiting();
  for (std::thread& thread : threads_) {
    if (thread.joinable()) thread.join();
  }
}

void RelayLanes::Serve(size_t index) {
  if (!end_->AwaitBulk(&stop_)) return;
  logging::Debug("opening lane {}", index);
  const std::shared_ptr<grpc::Channel> channel = channel_();
  RelayStream stream(channel.get());
  {
    MutexLock lock(&mutex_);
    if (stop_) stream.Cancel();
    contexts_[index] = stream.context();
  }
  control::TunnelOpen open;
  open.set_resume_token(resume_token_);
  open.set_lane_of(number_);
  open.set_lane(uint32_t(index));
  control::TunnelMessage first;
  first.open = open.SerializeAsString();
  grpc::ByteBuffer buffer;
  control::ReceivedFrames frames;
  if (stream.Write(control::EncodeTunnelMessage(first, nullptr, checked_)) && stream.Read(&buffer) &&
      (!checked_ || control::CheckTunnelMessage(buffer) == control::Integrity::kIntact) &&
      control::DecodeTunnelMessage(buffer, &first, &frames) && !first.open.empty() && frames.size() == 0) {
    logging::Debug("lane {} is open", index);
    end_->RunLane(&stream, number_, open.lane());
  }
  stream.Cancel();
  const grpc::Status status = stream.Finish();
  logging::Debug("lane {} ended: {}", index, status.error_message());
  MutexLock lock(&mutex_);
  contexts_[index] = nullptr;
}

}  // namespace cuda_remote::client
