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

#include "absl/status/status.h"
#include "proto/channel/handshake.h"
#include "proto/threads/mutex.h"

namespace cuda_remote::server {

absl::StatusOr<std::unique_ptr<WorkerLink>> WorkerLink::Open(int fd) {
  int type = 0;
  socklen_t length = sizeof(type);
  if (getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &length) != 0 || type != SOCK_SEQPACKET) {
    return absl::InvalidArgumentError("descriptor " + std::to_string(fd) +
                                      " is not a link to a supervisor; cr-worker is started by cr-server, not by hand");
  }
  fcntl(fd, F_SETFD, FD_CLOEXEC);
  return std::unique_ptr<WorkerLink>(new WorkerLink(fd));
}

WorkerLink::~WorkerLink() {
  if (watcher_.joinable()) {
    const uint64_t one = 1;
    if (write(wake_fd_.get(), &one, sizeof(one)) == sizeof(one)) watcher_.join();
  }
}

bool WorkerLink::Send(uint32_t type, const std::string& body) {
  MutexLock lock(&mutex_);
  return SendPacket(fd_.get(), PacketType(type), body, -1) == ChannelStatus::kOk;
}

bool WorkerLink::SendReady(const WorkerReady& ready) {
  std::string body;
  EncodeWorkerReady(ready, &body);
  return Send(uint32_t(PacketType::kReady), body);
}

bool WorkerLink::SendStats(const WorkerStats& stats) {
  std::string body;
  EncodeWorkerStats(stats, &body);
  return Send(uint32_t(PacketType::kStats), body);
}

bool WorkerLink::SendEnded(const std::string& reason) {
  std::string body;
  EncodeEnd(reason, &body);
  return Send(uint32_t(PacketType::kEnded), body);
}

bool WorkerLink::WaitAssign(WorkerAssign* assign) {
  Packet packet;
  ChannelStatus status = ReceivePacket(fd_.get(), &packet, -1);
  UniqueFd budget;
  if (status == ChannelStatus::kOk && packet.type == PacketType::kBudget && packet.fd.ok()) {
    budget = std::move(packet.fd);
    status = ReceivePacket(fd_.get(), &packet, -1);
  }
  if (status == ChannelStatus::kOk && packet.type == PacketType::kAssign && packet.fd.ok() &&
      DecodeWorkerAssignment(packet.body, assign) && (assign->budget_limit != 0) == budget.ok()) {
    assign->client_socket = packet.fd.Release();
    assign->budget_fd = budget.Release();
    return true;
  }
  return false;
}

void WorkerLink::Watch(std::function<void(const std::string& reason)> stop) {
  wake_fd_.Reset(eventfd(0, EFD_CLOEXEC));
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  watcher_ = std::thread([this, stop = std::move(stop)] {
    while (true) {
      pollfd waiting[2] = {{fd_.get(), POLLIN, 0}, {wake_fd_.get(), POLLIN, 0}};
      if (poll(waiting, 2, -1) < 0) continue;
      if (waiting[1].revents) return;
      Packet packet;
      const ChannelStatus status = ReceivePacket(fd_.get(), &packet, 0);
      if (status == ChannelStatus::kTimeout) continue;
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
