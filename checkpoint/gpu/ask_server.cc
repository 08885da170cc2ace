// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/gpu/ask_server.h"

#include <sys/stat.h>
#include <unistd.h>

#include <utility>

#include "proto/channel/handshake.h"

namespace cuda_remote::checkpoint {
namespace {

constexpr int kAnswerMs = 3000;
constexpr char kUnix[] = "unix:";

}  // namespace

bool AskServer(const std::string& address, nvml::Question question, nvml::Answer* answer) {
  if (address.compare(0, sizeof(kUnix) - 1, kUnix) != 0) return false;
  std::string error, body, path = address.substr(sizeof(kUnix) - 1);
  struct stat facts;
  if (stat(path.c_str(), &facts) == 0 && S_ISDIR(facts.st_mode)) path += "/session.sock";
  const int socket = ConnectServer(path, &error);  // Until ConnectServer gives a status.
  if (socket < 0) return false;
  question.pid = uint32_t(getpid());
  EncodeQuestion(question, &body);
  Packet packet;
  const bool answered = SendPacket(socket, PacketType::kQuery, body, -1) == ChannelStatus::kOk &&
                        ReceivePacket(socket, &packet, kAnswerMs) == ChannelStatus::kOk;
  close(socket);
  return answered && packet.type == PacketType::kAnswer && DecodeAnswer(packet.body, answer) &&
         answer->result == nvml::kSuccess;
}

}  // namespace cuda_remote::checkpoint
