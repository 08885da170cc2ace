// SPDX-License-Identifier: Apache-2.0
#include "client/core/connection.h"

#include <stdio.h>

#include <utility>

#include "client/core/log.h"
#include "proto/folder/this_job.h"

namespace cuda_remote::client {
namespace {

// What the application prints and what the GPU prints share stdio's buffer, as natively. Called by the channel before
// the reply of the call that flushed it.
void WriteDeviceOutput(const char* bytes, size_t count) { fwrite(bytes, 1, count, stdout); }
// The same for what the driver prints to standard error.
void WriteDeviceErrors(const char* bytes, size_t count) { fwrite(bytes, 1, count, stderr); }

}  // namespace

std::unique_ptr<ClientChannel> Connection::Replace(std::unique_ptr<ClientChannel> channel) {
  if (channel) {
    channel->SetStdoutSink(&WriteDeviceOutput);
    channel->SetStderrSink(&WriteDeviceErrors);
    channel->SetEager(!wait_asleep_);
  }
  channel_.swap(channel);
  return channel;
}

CUresult Connection::Lose(ChannelStatus status, const std::string& server) {
  CUresult expected = CUDA_SUCCESS;
  // What a program sees when its GPU falls off the bus is the closest native case.
  if (lost_.compare_exchange_strong(expected, CUDA_ERROR_DEVICE_UNAVAILABLE)) {
    const std::string reason = channel_ ? channel_->end_reason() : std::string();
    LogLine(
        "the session with the GPU server %s is lost (%s); every CUDA call fails from here on. Restart the job from its "
        "last checkpoint with cr-restart",
        NamedServer(server).c_str(), reason.empty() ? ChannelStatusName(status) : reason.c_str());
  }
  return CUDA_ERROR_DEVICE_UNAVAILABLE;
}

void Connection::WaitAsleep() {
  if (!wait_asleep_.exchange(true)) channel_->SetEager(false);
}

}  // namespace cuda_remote::client
