// SPDX-License-Identifier: Apache-2.0
#include "server/worker/testing/worker_process.h"

#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <thread>

#include "proto/base/clock.h"
#include "proto/channel/handshake.h"

namespace cuda_remote::server {
namespace {

constexpr int kReadyTimeoutMs = 60000;

}  // namespace

WorkerProcess::WorkerProcess(std::vector<std::string> arguments) {
  int sockets[2];
  if (!SocketPair(sockets)) return;
  pid_ = fork();
  if (pid_ == 0) {
    if (sockets[1] == kWorkerLinkFd) {
      fcntl(sockets[1], F_SETFD, 0);
    } else {
      dup2(sockets[1], kWorkerLinkFd);
    }
    std::vector<char*> argv;
    for (std::string& argument : arguments) argv.push_back(&argument[0]);
    argv.push_back(nullptr);
    execv(argv[0], argv.data());
    _exit(127);
  }
  close(sockets[1]);
  link_.Reset(sockets[0]);
  Packet packet;
  if (ReceivePacket(link_.get(), &packet, kReadyTimeoutMs) != ChannelStatus::kOk || packet.type != PacketType::kReady ||
      !DecodeWorkerReady(packet.body, &ready_)) {
    ready_.error = "no Ready from the worker";
  }
}

WorkerProcess::~WorkerProcess() {
  if (pid_ > 0) {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
}

std::unique_ptr<ClientChannel> WorkerProcess::Connect(ChannelFds* raw, const std::string& sharing_group,
                                                      uint64_t session) {
  int sockets[2];
  if (!SocketPair(sockets)) return nullptr;
  WorkerAssign assign;
  assign.session = session;
  assign.hello.pid = uint32_t(1000 + session);
  assign.hello.program = "/bin/program" + std::to_string(session);
  assign.shared_memory = true;
  assign.server = "test";
  assign.sharing_group = sharing_group;
  std::string body;
  EncodeWorkerAssignment(assign, &body);
  SendPacket(link_.get(), PacketType::kAssign, body, sockets[1]);
  close(sockets[1]);
  Packet packet;
  Welcome welcome;
  if (ReceivePacket(sockets[0], &packet, kReadyTimeoutMs) != ChannelStatus::kOk ||
      packet.type != PacketType::kWelcome || !DecodeWelcome(packet.body, &welcome)) {
    close(sockets[0]);
    return nullptr;
  }
  if (raw != nullptr) {
    raw->socket = dup(sockets[0]);
    raw->ring = dup(packet.fd.get());
  }
  StatusOr<std::unique_ptr<ClientChannel>> channel =
      ClientChannel::Adopt({sockets[0], packet.fd.Release()}, 1, welcome);
  return channel.ok() ? *std::move(channel) : nullptr;
}

int WorkerProcess::WaitForEnd(int timeout_ms) {
  const auto end = Now() + std::chrono::milliseconds(timeout_ms);
  while (Now() < end) {
    int status;
    if (waitpid(pid_, &status, WNOHANG) == pid_) {
      pid_ = -1;
      return status;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return -1;
}

std::string WorkerProcess::EndReason() {
  Packet packet;
  std::string reason;
  while (ReceivePacket(link_.get(), &packet, 100) == ChannelStatus::kOk) {
    if (packet.type == PacketType::kEnded) DecodeEnd(packet.body, &reason);
  }
  return reason;
}

std::string WorkerPath() {
  const char* const path = getenv("CR_WORKER");
  return path != nullptr ? path : "server/worker/cr-worker";
}

std::string DriverPath() {
  const char* const path = getenv("CR_WORKER_DRIVER");
  return path != nullptr ? path : "server/worker/libfake_driver.so";
}

}  // namespace cuda_remote::server
