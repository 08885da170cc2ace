// SPDX-License-Identifier: Apache-2.0
#include "proto/control/socket_call.h"

#include <unistd.h>

#include "proto/channel/handshake.h"

namespace cuda_remote::control {

bool Answers(const ControlCall& call, const ControlAnswer& answer, std::string* error) {
  // The numbers of a call and of its reply are the same.
  if (int(answer.answer_case()) == int(call.call_case())) return true;
  *error = answer.answer_case() == ControlAnswer::kError ? answer.error() : kNotUnderstood;
  return false;
}

bool CallOnSocket(const std::string& path, const ControlCall& call, int limit_ms, ControlAnswer* answer,
                  std::string* error) {
  const int socket = ConnectServer(path, error);
  if (socket < 0) return false;
  // A server that does not serve this user says so at once, and may have closed its end before the call came.
  SendPacket(socket, PacketType::kControlCall, call.SerializeAsString(), -1);
  Packet packet;
  const ChannelStatus status = ReceivePacket(socket, &packet, limit_ms);
  close(socket);
  Welcome refusal;
  if (status != ChannelStatus::kOk) {
    *error = std::string("it does not answer (") + ChannelStatusName(status) + ")";
  } else if (packet.type == PacketType::kWelcome && DecodeWelcome(packet.body, &refusal)) {
    *error = refusal.error;
  } else if (packet.type != PacketType::kControlAnswer || !answer->ParseFromString(packet.body)) {
    *error = kNotUnderstood;
  } else {
    return Answers(call, *answer, error);
  }
  return false;
}

}  // namespace cuda_remote::control
