// SPDX-License-Identifier: Apache-2.0
#include "client/memory/fault_device.h"

#include <sys/stat.h>
#include <unistd.h>

#include <optional>
#include <string>

#include "proto/base/status.h"
#include "proto/base/unique_fd.h"
#include "proto/channel/handshake.h"

namespace cuda_remote::client {
namespace {

constexpr int kAnswerTimeoutMs = 5000;

}  // namespace

int AskForFaultDevice(const std::string& server) {
  const std::optional<std::string> path = SocketPathOf(server);
  if (!path) return -1;
  StatusOr<UniqueFd> socket = ConnectServer(*path);
  if (!socket.ok()) return -1;
  Packet packet;
  ChannelStatus status = SendPacket(socket->get(), PacketType::kFaultDevice, {}, -1);
  if (status == ChannelStatus::kOk) status = ReceivePacket(socket->get(), &packet, kAnswerTimeoutMs);
  socket->Close();
  // A server of before answers in another way.
  struct stat facts;
  const bool is_device = status == ChannelStatus::kOk && packet.type == PacketType::kFaultDevice &&
                         fstat(packet.fd.get(), &facts) == 0 && S_ISCHR(facts.st_mode);
  return is_device ? packet.fd.Release() : -1;
}

}  // namespace cuda_remote::client
