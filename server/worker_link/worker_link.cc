// SPDX-License-Identifier: Apache-2.0
#include "server/worker_link/worker_link.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <utility>

#include "proto/channel/handshake.h"
#include "proto/codec/wire.h"

namespace cuda_remote::server {

void EncodeReady(const WorkerReady& ready, std::string* out) {
  wire::PutInt(out, 1, ready.gpu);
  wire::PutBytes(out, 2, std::string_view(ready.driver).substr(0, kMaxHandshakeString));
  wire::PutUint(out, 3, ready.devices);
  wire::PutUint(out, 4, ready.software);
  wire::PutBytes(out, 5, std::string_view(ready.error).substr(0, kMaxHandshakeString));
}

bool DecodeReady(std::string_view bytes, WorkerReady* ready) {
  *ready = WorkerReady();
  return wire::ReadMessage(bytes, [&](wire::Reader& reader) {
    switch (reader.field()) {
      case 1:
        return reader.Get(&ready->gpu);
      case 2:
        return reader.Get(&ready->driver);
      case 3:
        return reader.Get(&ready->devices);
      case 4:
        return reader.Get(&ready->software);
      case 5:
        return reader.Get(&ready->error);
      default:
        return reader.Skip();
    }
  });
}

void EncodeAssign(const WorkerAssign& assign, std::string* out) {
  std::string hello;
  EncodeHello(assign.hello, &hello);
  wire::PutUint(out, 1, assign.session);
  wire::PutUint(out, 2, assign.shared_memory);
  wire::PutBytes(out, 3, assign.server);
  wire::PutBytes(out, 4, hello);
  wire::PutBytes(out, 5, assign.sharing_group);
  wire::PutUint(out, 6, assign.budget_slot);
  wire::PutUint(out, 7, assign.budget_limit);
}

bool DecodeAssign(std::string_view bytes, WorkerAssign* assign) {
  *assign = WorkerAssign();
  return wire::ReadMessage(bytes, [&](wire::Reader& reader) {
    std::string_view text;
    switch (reader.field()) {
      case 1:
        return reader.Get(&assign->session);
      case 2:
        return reader.Get(&assign->shared_memory);
      case 3:
        return reader.Get(&assign->server);
      case 4:
        return reader.Get(&text) && DecodeHello(text, &assign->hello);
      case 5:
        return reader.Get(&assign->sharing_group);
      case 6:
        return reader.Get(&assign->budget_slot);
      case 7:
        return reader.Get(&assign->budget_limit);
      default:
        return reader.Skip();
    }
  });
}

void EncodeStats(const WorkerStats& stats, std::string* out) {
  wire::PutUint(out, 1, stats.device_bytes);
  wire::PutUint(out, 2, stats.calls);
  wire::PutUint(out, 3, stats.bytes_in);
  wire::PutUint(out, 4, stats.bytes_out);
  wire::PutPackedUnsigned(out, 5, stats.gpu_bytes);
}

bool DecodeStats(std::string_view bytes, WorkerStats* stats) {
  *stats = WorkerStats();
  return wire::ReadMessage(bytes, [&](wire::Reader& reader) {
    switch (reader.field()) {
      case 1:
        return reader.Get(&stats->device_bytes);
      case 2:
        return reader.Get(&stats->calls);
      case 3:
        return reader.Get(&stats->bytes_in);
      case 4:
        return reader.Get(&stats->bytes_out);
      case 5:
        return reader.Add(&stats->gpu_bytes);
      default:
        return reader.Skip();
    }
  });
}

std::unique_ptr<WorkerLink> WorkerLink::Open(int fd, std::string* error) {
  int type = 0;
  socklen_t length = sizeof(type);
  if (getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &length) != 0 || type != SOCK_SEQPACKET) {
    *error = "descriptor " + std::to_string(fd) + " is no link to a supervisor; cr-worker is started by cr-server";
    return nullptr;
  }
  fcntl(fd, F_SETFD, FD_CLOEXEC);
  return std::unique_ptr<WorkerLink>(new WorkerLink(fd));
}

WorkerLink::~WorkerLink() {
  if (watcher_.joinable()) {
    const uint64_t one = 1;
    if (write(wake_fd_, &one, sizeof(one)) == sizeof(one)) watcher_.join();
  }
  if (wake_fd_ >= 0) close(wake_fd_);
  close(fd_);
}

bool WorkerLink::Send(uint32_t type, const std::string& body) {
  std::lock_guard<std::mutex> lock(mutex_);
  return SendPacket(fd_, PacketType(type), body, -1) == ChannelStatus::kOk;
}

bool WorkerLink::SendReady(const WorkerReady& ready) {
  std::string body;
  EncodeReady(ready, &body);
  return Send(uint32_t(PacketType::kReady), body);
}

bool WorkerLink::SendStats(const WorkerStats& stats) {
  std::string body;
  EncodeStats(stats, &body);
  return Send(uint32_t(PacketType::kStats), body);
}

bool WorkerLink::SendEnded(const std::string& reason) {
  std::string body;
  EncodeEnd(reason, &body);
  return Send(uint32_t(PacketType::kEnded), body);
}

bool WorkerLink::WaitAssign(WorkerAssign* assign) {
  Packet packet;
  ChannelStatus status = ReceivePacket(fd_, &packet, -1);
  int budget = -1;
  if (status == ChannelStatus::kOk && packet.type == PacketType::kBudget && packet.fd >= 0) {
    budget = packet.fd;
    status = ReceivePacket(fd_, &packet, -1);
  }
  if (status == ChannelStatus::kOk && packet.type == PacketType::kAssign && packet.fd >= 0 &&
      DecodeAssign(packet.body, assign) && (assign->budget_limit != 0) == (budget >= 0)) {
    assign->client_socket = packet.fd;
    assign->budget_fd = budget;
    return true;
  }
  if (packet.fd >= 0) close(packet.fd);
  if (budget >= 0) close(budget);
  return false;
}

void WorkerLink::Watch(std::function<void(const std::string& reason)> stop) {
  wake_fd_ = eventfd(0, EFD_CLOEXEC);
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  watcher_ = std::thread([this, stop = std::move(stop)] {
    while (true) {
      pollfd waiting[2] = {{fd_, POLLIN, 0}, {wake_fd_, POLLIN, 0}};
      if (poll(waiting, 2, -1) < 0) continue;
      if (waiting[1].revents) return;
      Packet packet;
      const ChannelStatus status = ReceivePacket(fd_, &packet, 0);
      if (status == ChannelStatus::kTimeout) continue;
      if (packet.fd >= 0) close(packet.fd);
      std::string reason;
      if (status == ChannelStatus::kOk && packet.type == PacketType::kStop) DecodeEnd(packet.body, &reason);
      stop(reason);
      return;
    }
  });
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

Welcome WorkerLink::MakeWelcome(const WorkerAssign& assign) {
  Welcome welcome;
  welcome.session = assign.session;
  welcome.shared_memory = assign.shared_memory;
  welcome.server = assign.server;
  return welcome;
}

}  // namespace cuda_remote::server
