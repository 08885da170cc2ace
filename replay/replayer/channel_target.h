// SPDX-License-Identifier: Apache-2.0
// Replay over a session's channel.
#ifndef CUDA_REMOTE_REPLAY_REPLAYER_CHANNEL_TARGET_H_
#define CUDA_REMOTE_REPLAY_REPLAYER_CHANNEL_TARGET_H_

#include <string>
#include <string_view>
#include <utility>

#include "proto/channel/client_channel.h"
#include "replay/replayer/replayer.h"

namespace cuda_remote::replay {

// Borrows `channel`, which must outlive this. Nobody else may use it meanwhile.
class ChannelTarget final : public ReplayTarget {
 public:
  explicit ChannelTarget(ClientChannel& channel) : channel_(channel) {}

  uint64_t Begin(const FrameHeader& header, std::string_view message, std::string_view payload) override {
    return channel_.Begin(header, message, payload, nullptr, 0);
  }

  StatusOr<Answer> Finish(uint64_t ticket) override {
    Reply reply;
    const ChannelStatus status = channel_.Wait(ticket, &reply);
    if (status != ChannelStatus::kOk) {
      const std::string reason = channel_.end_reason();
      return Error(reason.empty() ? ChannelStatusName(status) : reason);
    }
    return Answer{reply.result, std::move(reply.message)};
  }

  size_t window() const override { return 64; }

 private:
  ClientChannel& channel_;
};

}  // namespace cuda_remote::replay

#endif  // CUDA_REMOTE_REPLAY_REPLAYER_CHANNEL_TARGET_H_
