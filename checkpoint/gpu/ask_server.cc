// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/gpu/ask_server.h"

#include <unistd.h>

#include <utility>

#include "proto/channel/handshake.h"

namespace cuda_remote::checkpoint {
namespace {

constexpr int kAnswerMs = 3000;

}  // namespace

bool AskServer(const std::string& address, nvml::Question question, nvml::Answer* answer) {
  const std::optional<std::string> path = SocketPathOf(address);
  if (!path) return false;
  std::string body;
  const StatusOr<UniqueFd> socket = ConnectServer(*path);
  if (!socket.ok()) return false;
  question.pid = uint32_t(getpid());
  EncodeQuestion(question, &body);
  Packet packet;
  const bool answered = SendPacket(socket->get(), PacketType::kQuery, body, -1) == ChannelStatus::kOk &&
                        ReceivePacket(socket->get(), &packet, kAnswerMs) == ChannelStatus::kOk;
  return answered && packet.type == PacketType::kAnswer && DecodeAnswer(packet.body, answer) &&
         answer->result == nvml::kSuccess;
}

}  // namespace cuda_remote::checkpoint
