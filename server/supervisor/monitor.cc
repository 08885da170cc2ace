// SPDX-License-Identifier: Apache-2.0
#include "server/supervisor/monitor.h"

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include "proto/base/clock.h"
#include "proto/base/short_waits.h"
#include "proto/channel/handshake.h"
#include "proto/logging/log.h"
#include "proto/nvml/query.h"
#include "server/supervisor/spawn.h"
#include "server/worker_link/worker_link.h"

namespace cuda_remote::server {
namespace {

// A call into NVML that takes longer hangs; the first one may have to wait for the driver.
constexpr auto kHangs = std::chrono::seconds(60);
// Unanswered questions at a time; more are refused at once.
constexpr size_t kMaxOpen = 256;

void Refuse(int socket, const std::string& why) {
  nvml::Answer answer;
  answer.result = nvml::kDriverNotLoaded;
  answer.error = why;
  std::string body;
  EncodeAnswer(answer, &body);
  SendPacket(socket, PacketType::kAnswer, body, -1);
  CloseWithoutWaiting(socket);
}

}  // namespace

Monitor::~Monitor() {
  Stop();
  CloseLink();
}

void Monitor::CloseLink() {
  if (link_ >= 0) close(link_);
  link_ = -1;
}

absl::Status Monitor::Start() {
  if (options_.monitor.empty()) {
    return absl::FailedPreconditionError("cr-nvml is not beside cr-server: the server's installation is incomplete");
  }
  int sockets[2];
  if (!SocketPair(sockets)) return absl::ResourceExhaustedError("the server has no descriptors left");
  std::vector<std::string> command = {options_.monitor, "--link-fd", std::to_string(kWorkerLinkFd), "--log-level",
                                      options_.policy.log_level};
  if (!options_.driver.empty()) command.insert(command.end(), {"--driver", options_.driver});
  if (options_.gpu >= 0) command.insert(command.end(), {"--gpu", std::to_string(options_.gpu)});
  const absl::StatusOr<pid_t> pid = SpawnWorker(command, sockets[1], *restrictions_);
  close(sockets[1]);
  if (!pid.ok()) {
    close(sockets[0]);
    logging::Error("{}", std::string(pid.status().message()));
    return pid.status();
  }
  // The event loop must not wait for it.
  fcntl(sockets[0], F_SETFL, O_NONBLOCK);
  pid_ = *pid;
  link_ = sockets[0];
  logging::Debug("cr-nvml starts, pid {}", pid_);
  return absl::OkStatus();
}

void Monitor::Submit(int socket, const Ask& ask, bool stopping) {
  if (stopping) return Refuse(socket, "the server is shutting down");
  if (open_.size() >= kMaxOpen) return Refuse(socket, "the server has too many open questions");
  // One that has just died is started again when it was reaped; until then there is no link.
  if (link_ < 0) {
    if (pid_ > 0) return Refuse(socket, "cr-nvml is ending");
    if (const absl::Status started = Start(); !started.ok()) return Refuse(socket, std::string(started.message()));
  }
  std::string body;
  EncodeAsk(ask, &body);
  if (SendPacket(link_, PacketType::kAsk, body, socket) != ChannelStatus::kOk)
    return Refuse(socket, "the server's cr-nvml does not keep up");
  CloseWithoutWaiting(socket);
  open_.push_back(Now());
}

void Monitor::ReadLink() {
  while (link_ >= 0) {
    Packet packet;
    const ChannelStatus status = ReceivePacket(link_, &packet, 0);
    if (status == ChannelStatus::kTimeout) return;
    if (status == ChannelStatus::kOk && packet.type == PacketType::kAsked) {
      if (!open_.empty()) open_.pop_front();
      continue;
    }
    // It is ending, or it is not what it should be.
    kill(pid_, SIGKILL);
    CloseLink();
  }
}

void Monitor::KillOverdue() {
  if (open_.empty() || pid_ <= 0 || Now() - open_.front() < kHangs) return;
  logging::Error("cr-nvml (pid {}) hangs; it is killed", pid_);
  kill(-pid_, SIGKILL);
  kill(pid_, SIGKILL);
  open_.clear();
}

void Monitor::Stop() {
  stopping_ = true;
  if (pid_ <= 0) return;
  kill(-pid_, SIGKILL);
  kill(pid_, SIGKILL);
}

bool Monitor::Gone(pid_t pid, const std::string& how) {
  if (pid <= 0 || pid != pid_) return false;
  if (!stopping_) logging::Warn("cr-nvml (pid {}) {}; the next question starts it again", pid, how);
  kill(-pid, SIGKILL);
  pid_ = 0;
  CloseLink();
  // Their sockets were closed with it.
  open_.clear();
  return true;
}

}  // namespace cuda_remote::server
