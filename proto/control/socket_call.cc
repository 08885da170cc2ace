// SPDX-License-Identifier: Apache-2.0
#include "proto/control/socket_call.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "proto/base/clock.h"
#include "proto/base/status_macros.h"
#include "proto/channel/handshake.h"
#include "proto/errors/absl_status.h"

namespace cuda_remote::control {

namespace {

constexpr int kLookMs = 100;

}  // namespace

absl::StatusOr<ControlAnswer> CallOnSocket(const std::string& path, const ControlCall& call, int limit_ms,
                                           const std::function<bool(int waited_ms)>& goes_on) {
  CR_ASSIGN_OR_RETURN(UniqueFd socket, ToAbsl(ConnectServer(path)));
  // A server that does not serve this user says so at once, and may have closed its end before the call came.
  SendPacket(socket.get(), PacketType::kControlCall, call.SerializeAsString(), -1);
  Packet packet;
  const auto asked = Now();
  ChannelStatus status = ChannelStatus::kTimeout;
  int waited_ms = 0;
  while (status == ChannelStatus::kTimeout && waited_ms < limit_ms && (!goes_on || goes_on(waited_ms))) {
    status = ReceivePacket(socket.get(), &packet, goes_on ? std::min(kLookMs, limit_ms - waited_ms) : limit_ms);
    waited_ms = int(SecondsSince(asked) * 1000);
  }
  socket.Close();
  Welcome refusal;
  ControlAnswer answer;
  if (status != ChannelStatus::kOk) {
    return absl::UnavailableError(absl::StrCat("it does not answer (", ChannelStatusName(status), ")"));
  }
  if (packet.type == PacketType::kWelcome && DecodeWelcome(packet.body, &refusal)) {
    return absl::PermissionDeniedError(refusal.error);
  }
  if (packet.type != PacketType::kControlAnswer || !answer.ParseFromString(packet.body)) {
    return absl::DataLossError(kNotUnderstood);
  }
  // The numbers of a call and of its reply are the same.
  if (int(answer.answer_case()) == int(call.call_case())) return answer;
  if (answer.answer_case() == ControlAnswer::kError) return absl::FailedPreconditionError(answer.error());
  return absl::DataLossError(kNotUnderstood);
}

}  // namespace cuda_remote::control
