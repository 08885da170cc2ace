// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/agent/agent_client.h"

#include <errno.h>
#include <sys/stat.h>
#include <unistd.h>

#include "checkpoint/job/job.h"
#include "proto/agent/message.h"
#include "proto/base/status_macros.h"
#include "proto/channel/handshake.h"
#include "proto/folder/this_job.h"
#include "proto/frame/frame.h"

namespace cuda_remote::agent {
namespace {

// The agent answers at once, except where it says otherwise.
constexpr int kAnswerMs = 30000;
// A socket is there a moment before the agent listens.
constexpr int kMostTries = 20, kTryAgainUs = 5000;

absl::Status Nonsense() { return absl::DataLossError("the job sent an answer that this tool cannot read"); }

}  // namespace

absl::StatusOr<std::unique_ptr<AgentClient>> AgentClient::Connect(const std::string& directory, uint32_t pid,
                                                                  const std::string& name) {
  const std::string folder = SocketFolder(directory);
  int failure = 0;
  StatusOr<UniqueFd> socket = ConnectUnix(folder + "/" + SocketName(pid), &failure, kMostConnectMs);
  for (int tries = 1; !socket.ok() && failure == ECONNREFUSED && tries < kMostTries; ++tries) {
    usleep(kTryAgainUs);
    socket = ConnectUnix(folder + "/" + SocketName(pid), &failure, kMostConnectMs);
  }
  if (!socket.ok()) return absl::UnavailableError(socket.status().message());
  uint32_t user = 0, seen = 0;
  struct stat facts;
  bool of_job = PeerUser(socket->get(), &user, &seen) && (user == geteuid() || geteuid() == 0);
  // What is in a user's folder may lead to sockets of others.
  if (folder != directory) of_job = of_job && stat(folder.c_str(), &facts) == 0 && facts.st_uid == user;
  if (!of_job) return absl::PermissionDeniedError("the job belongs to another user");
  // Root's tool in a user's own job (own_job.h) speaks to the processes that it saves, and to no others of his.
  if (getuid() == 0 && geteuid() != 0 && checkpoint::InnerPid(int(seen)) != int(pid)) {
    return absl::PermissionDeniedError("another process listens at its socket");
  }
  return std::unique_ptr<AgentClient>(new AgentClient(*std::move(socket), name));
}

absl::StatusOr<Message> AgentClient::Call(const Message& request, int timeout_ms) {
  Message reply;
  const bool sent = socket_.ok() && SendMessage(socket_.get(), request);
  // A refused tool finds the reason in its socket, though it can send no more.
  const ReceiveStatus status =
      socket_.ok() ? ReceiveMessage(socket_.get(), timeout_ms, &reply) : ReceiveStatus::kClosed;
  switch (status) {
    case ReceiveStatus::kOk:
      if (reply.type == Type::kOk && sent) return reply;
      for (int fd : reply.fds) close(fd);
      if (reply.type != Type::kError || reply.body.empty()) return Nonsense();
      return absl::FailedPreconditionError(reply.body);
    case ReceiveStatus::kTimeout:
      return absl::DeadlineExceededError("the job does not answer");
    case ReceiveStatus::kOtherVersion:
      return absl::FailedPreconditionError("the job's client library is of another version than this tool");
    case ReceiveStatus::kNoDescriptors:
      return absl::ResourceExhaustedError("this tool has no descriptor left (ulimit -n) for what the job gave it");
    case ReceiveStatus::kMalformed:
      return Nonsense();
    case ReceiveStatus::kClosed:
      break;
  }
  return absl::UnavailableError("the job has closed the connection: it has ended, or it ended in the middle of this");
}

absl::StatusOr<Info> AgentClient::GetInfo() {
  Message request;
  request.type = Type::kInfo;
  CR_ASSIGN_OR_RETURN(const Message reply, Call(request, kAnswerMs));
  Info info;
  if (!DecodeInfo(reply.body, &info)) return Nonsense();
  return info;
}

absl::Status AgentClient::Close() {
  Message request;
  request.type = Type::kClose;
  return Call(request, kAnswerMs).status();
}

absl::StatusOr<Activity> AgentClient::Look() {
  Message request;
  request.type = Type::kLook;
  CR_ASSIGN_OR_RETURN(const Message reply, Call(request, kAnswerMs));
  Activity activity;
  if (!DecodeActivity(reply.body, &activity)) return Nonsense();
  return activity;
}

absl::StatusOr<bool> AgentClient::AskYesNo(const Message& request, int timeout_ms) {
  CR_ASSIGN_OR_RETURN(const Message reply, Call(request, timeout_ms));
  Yes answer;
  if (!DecodeYes(reply.body, &answer)) return Nonsense();
  return answer.yes;
}

absl::StatusOr<bool> AgentClient::Admit(const Admission& which) {
  Message request;
  request.type = Type::kAdmit;
  EncodeAdmission(which, &request.body);
  return AskYesNo(request, kAnswerMs);
}

absl::StatusOr<bool> AgentClient::Settle(int timeout_ms) {
  Message request;
  request.type = Type::kSettle;
  EncodeTimeout({uint64_t(timeout_ms > 0 ? timeout_ms : 0)}, &request.body);
  return AskYesNo(request, timeout_ms + kAnswerMs);
}

// A process that does not answer goes on when the connection ends.
void AgentClient::Open() { Unlock().IgnoreError(); }

absl::Status AgentClient::Unlock() {
  Message request;
  request.type = Type::kUnlock;
  return Call(request, kAnswerMs).status();
}

absl::Status AgentClient::AskImages(uint64_t* number, UniqueFd* fd) {
  Message request;
  request.type = Type::kImages;
  CR_ASSIGN_OR_RETURN(const Message reply, Call(request, kAnswerMs));
  GivenImages given;
  if (!DecodeGivenImages(reply.body, &given) || reply.fds.size() != 1) {
    for (int one : reply.fds) close(one);
    return Nonsense();
  }
  *number = given.number;
  fd->Reset(reply.fds[0]);
  return absl::OkStatus();
}

absl::StatusOr<Taken> AgentClient::Take(uint64_t images) {
  Message request;
  request.type = Type::kTake;
  EncodeTakeRequest({images}, &request.body);
  CR_ASSIGN_OR_RETURN(const Message reply, Call(request, kAnswerMs));
  Taken taken;
  if (DecodeTaken(reply, &taken)) return taken;
  for (int fd : reply.fds) close(fd);
  return Nonsense();
}

absl::Status AgentClient::Release() {
  Message request;
  request.type = Type::kRelease;
  CR_ASSIGN_OR_RETURN(Message reply, Call(request, kAnswerMs));
  // The end of the connection says that the job has closed its end, which a snapshot needs.
  const bool closed = ReceiveMessage(socket_.get(), kAnswerMs, &reply) == ReceiveStatus::kClosed;
  socket_.Close();
  return closed ? absl::OkStatus() : absl::FailedPreconditionError("the job did not close its connection");
}

absl::Status AgentClient::Give(const Given& given) {
  Message request;
  request.type = Type::kGive;
  EncodeGiven(given, &request);
  // A new worker maps the job's pinned memory meanwhile.
  return Call(request, -1).status();
}

absl::Status AgentClient::Abandon() {
  Message request;
  request.type = Type::kAbandon;
  return Call(request, kAnswerMs).status();
}

absl::StatusOr<uint64_t> AgentClient::Ask(const SideRequest& request) {
  Message message;
  message.type = Type::kAsk;
  EncodeAskRequest({request.operation, request.tag, request.payload_bytes, request.message}, &message.body);
  if (request.tag != 0) message.fds = {request.fd};
  CR_ASSIGN_OR_RETURN(const Message reply, Call(message, kAnswerMs));
  AskReply answer;
  if (!DecodeAskReply(reply.body, &answer)) return Nonsense();
  return answer.number;
}

absl::StatusOr<std::optional<SideAnswer>> AgentClient::Answer(uint64_t sequence, int timeout_ms) {
  Message request;
  request.type = Type::kAnswer;
  EncodeAnswerRequest({sequence, uint64_t(timeout_ms > 0 ? timeout_ms : 0)}, &request.body);
  CR_ASSIGN_OR_RETURN(const Message reply, Call(request, kAnswerMs));
  AnswerReply body;
  bool ok = DecodeAnswerReply(reply.body, &body) && body.answered == body.has_result;
  if (ok && !body.answered) return std::optional<SideAnswer>();
  const uint64_t message_bytes = body.result.message_bytes, payload_bytes = body.result.payload_bytes;
  std::string all = std::move(body.result.both);
  ok = ok && message_bytes <= cuda_remote::kMaxMessageBytes && payload_bytes <= kMaxPayloadBytes;
  if (ok && reply.fds.size() == 1) {
    all.resize(message_bytes + payload_bytes);
    ok = pread(reply.fds[0], &all[0], all.size(), 0) == ssize_t(all.size());
  }
  for (int fd : reply.fds) close(fd);
  if (!ok || all.size() != message_bytes + payload_bytes) return Nonsense();
  SideAnswer answer;
  answer.result = body.result.result;
  answer.message = all.substr(0, message_bytes);
  answer.payload = all.substr(message_bytes);
  return std::optional<SideAnswer>(std::move(answer));
}

absl::Status AgentClient::BeginTrace(uint64_t events, uint64_t milliseconds) {
  Message request;
  request.type = Type::kBeginTrace;
  EncodeTraceLimits({events, milliseconds}, &request.body);
  return Call(request, kAnswerMs).status();
}

absl::Status AgentClient::EndTrace(int timeline_fd, int table_fd, bool json) {
  Message request;
  request.type = Type::kEndTrace;
  EncodeTable({json}, &request.body);
  request.fds = {timeline_fd, table_fd};
  // A long timeline takes its time to write.
  return Call(request, -1).status();
}

absl::Status AgentClient::TraceTotals(int table_fd, bool json) {
  Message request;
  request.type = Type::kTraceTotals;
  EncodeTable({json}, &request.body);
  request.fds = {table_fd};
  return Call(request, kAnswerMs).status();
}

}  // namespace cuda_remote::agent
