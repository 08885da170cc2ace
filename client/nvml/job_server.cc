// SPDX-License-Identifier: Apache-2.0
#include "client/nvml/job_server.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "client/core/relay_process.h"
#include "proto/base/environment.h"
#include "proto/base/status_macros.h"
#include "proto/base/unique_fd.h"
#include "proto/channel/handshake.h"
#include "proto/folder/connection_lock.h"
#include "proto/folder/this_job.h"

namespace cuda_remote::client {
namespace {

// cr-nvml may have to load the driver first.
constexpr int kAnswerTimeoutMs = 30000;

std::string Variable(const char* name) {
  const char* const value = TrustedVariable(name);
  return value ? value : "";
}

bool ReadFile(const std::string& path, std::string* text, std::string* identity) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return false;
  char buffer[4096];
  const ssize_t length = read(fd, buffer, sizeof(buffer));
  struct stat facts = {};
  fstat(fd, &facts);
  close(fd);
  if (length <= 0) return false;
  text->assign(buffer, size_t(length));
  // The same text may come again after a restart: the file does not.
  *identity = *text + std::to_string(facts.st_ino) + "." + std::to_string(facts.st_mtim.tv_sec) + "." +
              std::to_string(facts.st_mtim.tv_nsec);
  return true;
}

StatusOr<nvml::Answer> Exchange(const std::string& path, const std::string& body) {
  CR_ASSIGN_OR_RETURN(UniqueFd socket, ConnectServer(path));
  Packet packet;
  ChannelStatus status = SendPacket(socket.get(), PacketType::kQuery, body, -1);
  if (status == ChannelStatus::kOk) status = ReceivePacket(socket.get(), &packet, kAnswerTimeoutMs);
  socket.Close();
  if (status != ChannelStatus::kOk) {
    return Error(std::string("the server gave no answer (") + ChannelStatusName(status) + ")");
  }
  // A server of another release says Welcome and why not; it knows no questions.
  Welcome welcome;
  if (packet.type == PacketType::kWelcome && DecodeWelcome(packet.body, &welcome)) {
    return Error("the server refuses questions: " + welcome.error);
  }
  nvml::Answer answer;
  if (packet.type != PacketType::kAnswer || !nvml::DecodeAnswer(packet.body, &answer)) {
    return Error("the server's answer is malformed");
  }
  return answer;
}

}  // namespace

JobServer FindJobServer() {
  JobServer server;
  if (HasMoreRightsThanCaller()) return server;  // and so has its job from somebody else
  server.folder = Variable("CUDA_REMOTE_JOB_DIR");
  std::string text;
  // A process of a job whose environment was made anew.
  if (server.folder.empty() && Variable("CUDA_REMOTE_SERVER").empty()) FindThisJob(&server.folder, &text);
  if (!server.folder.empty() && ReadFile(server.folder + "/gpu-server", &text, &server.identity)) {
    const size_t end = text.find('\n');
    if (end != std::string::npos && end > 0) {
      server.address = text.substr(0, end);
      server.gpu = atoi(text.c_str() + end + 1);
      return server;
    }
  }
  server.address = Variable("CUDA_REMOTE_SERVER");
  const std::string gpu = Variable("CUDA_REMOTE_GPU");
  if (!gpu.empty()) server.gpu = atoi(gpu.c_str());
  server.identity = server.address + " " + gpu;
  return server;
}

StatusOr<nvml::Answer> AskServer(const JobServer& server, const nvml::Question& question, std::string* relay) {
  if (server.address.empty()) {
    return Error("no GPU server: run the program with cr-run, or set CUDA_REMOTE_SERVER");
  }
  std::string body;
  nvml::EncodeQuestion(question, &body);
  const ConnectionLock lock(server.folder);
  if (const std::optional<std::string> path = SocketPathOf(server.address)) return Exchange(*path, body);
  // A relay of our own ends when it had no questions for a while; then another one is started.
  if (!relay->empty()) {
    StatusOr<nvml::Answer> answer = Exchange(*relay, body);
    if (answer.ok()) return answer;
  }
  relay->clear();
  CR_ASSIGN_OR_RETURN(*relay, StartRelay(server.address));
  return Exchange(*relay, body);
}

}  // namespace cuda_remote::client
