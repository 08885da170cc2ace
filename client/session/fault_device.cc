// SPDX-License-Identifier: Apache-2.0
#include "client/session/fault_device.h"

#include <sys/stat.h>
#include <unistd.h>

#include <string>

#include "proto/channel/handshake.h"

namespace cuda_remote::client {
namespace {

constexpr int kAnswerTimeoutMs = 5000;

}  // namespace

int AskForFaultDevice(const std::string& server) {
  const std::string prefix = "unix:";
  if (server.compare(0, prefix.size(), prefix) != 0) return -1;
  std::string error;
  const int socket = ConnectServer(server.substr(prefix.size()), &error);
  if (socket < 0) return -1;
  Packet packet;
  ChannelStatus status = SendPacket(socket, PacketType::kFaultDevice, {}, -1);
  if (status == ChannelStatus::kOk) status = ReceivePacket(socket, &packet, kAnswerTimeoutMs);
  close(socket);
  // A server of before answers in another way.
  struct stat facts;
  if (packet.fd >= 0 && (status != ChannelStatus::kOk || packet.type != PacketType::kFaultDevice ||
                         fstat(packet.fd, &facts) != 0 || !S_ISCHR(facts.st_mode))) {
    close(packet.fd);
    packet.fd = -1;
  }
  return packet.fd;
}

}  // namespace cuda_remote::client
