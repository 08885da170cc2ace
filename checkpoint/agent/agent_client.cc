// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/agent/agent_client.h"

#include <errno.h>
#include <sys/stat.h>
#include <unistd.h>

#include "checkpoint/job/job.h"
#include "proto/agent/message.h"
#include "proto/channel/handshake.h"
#include "proto/folder/this_job.h"
#include "proto/frame/frame.h"

namespace cuda_remote::agent {
namespace {

// The agent answers at once, except where it says otherwise.
constexpr int kAnswerMs = 30000;
// A socket is there a moment before the agent listens.
constexpr int kMostTries = 20, kTryAgainUs = 5000;
constexpr char kNonsense[] = "the job sent an answer that this tool cannot read";

}  // namespace

std::unique_ptr<AgentClient> AgentClient::Connect(const std::string& directory, uint32_t pid, const std::string& name,
                                                  std::string* error) {
  const std::string folder = SocketFolder(directory);
  int socket = ConnectUnix(folder + "/" + SocketName(pid), error);
  for (int tries = 1; socket < 0 && errno == ECONNREFUSED && tries < kMostTries; ++tries) {
    usleep(kTryAgainUs);
    socket = ConnectUnix(folder + "/" + SocketName(pid), error);
  }
  if (socket < 0) {
    std::string ignored;
    socket = ConnectUnix(folder + "/" + kOnlySocketName, &ignored);
  }
  if (socket < 0) return nullptr;
  uint32_t user = 0, seen = 0;
  struct stat facts;
  bool of_job = PeerUser(socket, &user, &seen) && (user == geteuid() || geteuid() == 0);
  // What is in a user's folder may lead to sockets of others.
  if (folder != directory) of_job = of_job && stat(folder.c_str(), &facts) == 0 && facts.st_uid == user;
  // Root's tool in a user's own job (own_job.h) speaks to the processes that it saves, and to no others of his.
  const bool other = of_job && getuid() == 0 && geteuid() != 0 && checkpoint::InnerPid(int(seen)) != int(pid);
  if (!of_job || other) {
    *error = other ? "another process listens at its socket" : "the job belongs to another user";
    close(socket);
    return nullptr;
  }
  return std::unique_ptr<AgentClient>(new AgentClient(socket, name));
}

bool AgentClient::Call(const Message& request, int timeout_ms, Message* reply, std::string* error) {
  const bool sent = socket_.ok() && SendMessage(socket_.get(), request);
  // A refused tool finds the reason in its socket, though it can send no more.
  const ReceiveStatus status = socket_.ok() ? ReceiveMessage(socket_.get(), timeout_ms, reply) : ReceiveStatus::kClosed;
  switch (status) {
    case ReceiveStatus::kOk:
      if (reply->type == Type::kOk && sent) return true;
      for (int fd : reply->fds) close(fd);
      *error = reply->type == Type::kError && !reply->body.empty() ? reply->body : kNonsense;
      return false;
    case ReceiveStatus::kTimeout:
      *error = "the job does not answer";
      return false;
    case ReceiveStatus::kOtherVersion:
      *error = "the job's client library is of another version than this tool";
      return false;
    case ReceiveStatus::kMalformed:
      *error = kNonsense;
      return false;
    case ReceiveStatus::kClosed:
      *error = "the job has closed the connection: it has ended, or it ended in the middle of this";
      return false;
  }
  return false;
}

bool AgentClient::GetInfo(Info* info, std::string* error) {
  Message request, reply;
  request.type = Type::kInfo;
  if (!Call(request, kAnswerMs, &reply, error)) return false;
  if (DecodeInfo(reply.body, info)) return true;
  *error = kNonsense;
  return false;
}

CloseResult AgentClient::Close(std::string* error) {
  Message request, reply;
  request.type = Type::kClose;
  if (Call(request, kAnswerMs, &reply, error)) return CloseResult::kClosed;
  return *error == kUnknownRequest ? CloseResult::kOld : CloseResult::kFailed;
}

bool AgentClient::Look(Activity* activity, std::string* error) {
  Message request, reply;
  request.type = Type::kLook;
  if (!Call(request, kAnswerMs, &reply, error)) return false;
  if (DecodeActivity(reply.body, activity)) return true;
  *error = kNonsense;
  return false;
}

bool AgentClient::AskYesNo(const Message& request, int timeout_ms, bool* yes, std::string* error) {
  Message reply;
  if (!Call(request, timeout_ms, &reply, error)) return false;
  Yes answer;
  if (DecodeYes(reply.body, &answer)) {
    *yes = answer.yes;
    return true;
  }
  *error = kNonsense;
  return false;
}

bool AgentClient::Admit(const Admission& which, bool* admitted, std::string* error) {
  Message request;
  request.type = Type::kAdmit;
  EncodeAdmission(which, &request.body);
  return AskYesNo(request, kAnswerMs, admitted, error);
}

bool AgentClient::Settle(int timeout_ms, bool* settled, std::string* error) {
  Message request;
  request.type = Type::kSettle;
  EncodeTimeout({uint64_t(timeout_ms > 0 ? timeout_ms : 0)}, &request.body);
  return AskYesNo(request, timeout_ms + kAnswerMs, settled, error);
}

bool AgentClient::LockOld(int timeout_ms, std::string* error) {
  Message request, reply;
  request.type = Type::kLock;
  EncodeTimeout({uint64_t(timeout_ms > 0 ? timeout_ms : 0)}, &request.body);
  // After the calls that agent waits for the GPU, without a limit.
  return Call(request, timeout_ms + kAnswerMs, &reply, error);
}

void AgentClient::Open() {
  std::string ignored;
  Unlock(&ignored);
}

bool AgentClient::Unlock(std::string* error) {
  Message request, reply;
  request.type = Type::kUnlock;
  return Call(request, kAnswerMs, &reply, error);
}

bool AgentClient::AskImages(uint64_t* number, int* fd, std::string* error) {
  Message request, reply;
  request.type = Type::kImages;
  if (!Call(request, kAnswerMs, &reply, error)) return false;
  GivenImages given;
  if (DecodeGivenImages(reply.body, &given) && reply.fds.size() == 1) {
    *number = given.number;
    *fd = reply.fds[0];
    return true;
  }
  for (int one : reply.fds) close(one);
  *error = kNonsense;
  return false;
}

bool AgentClient::Take(uint64_t images, Taken* taken, std::string* error) {
  Message request, reply;
  request.type = Type::kTake;
  if (images != 0) EncodeTakeRequest({images}, &request.body);
  if (!Call(request, kAnswerMs, &reply, error)) return false;
  if (DecodeTaken(reply, taken)) return true;
  for (int fd : reply.fds) close(fd);
  *error = kNonsense;
  return false;
}

bool AgentClient::Release(std::string* error) {
  Message request, reply;
  request.type = Type::kRelease;
  if (!Call(request, kAnswerMs, &reply, error)) return false;
  // The end of the connection says that the job has closed its end, which a snapshot needs.
  const bool closed = ReceiveMessage(socket_.get(), kAnswerMs, &reply) == ReceiveStatus::kClosed;
  socket_.Close();
  if (!closed) *error = "the job did not close its connection";
  return closed;
}

bool AgentClient::Give(const Given& given, std::string* error) {
  Message request, reply;
  request.type = Type::kGive;
  EncodeGiven(given, &request);
  // A new worker maps the job's pinned memory meanwhile.
  return Call(request, -1, &reply, error);
}

bool AgentClient::Abandon(std::string* error) {
  Message request, reply;
  request.type = Type::kAbandon;
  return Call(request, kAnswerMs, &reply, error);
}

bool AgentClient::Ask(const SideRequest& request, uint64_t* sequence, std::string* error, bool* old) {
  Message message, reply;
  message.type = Type::kAsk;
  EncodeAskRequest({request.operation, request.tag, request.payload_bytes, request.message}, &message.body);
  if (request.tag != 0) message.fds = {request.fd};
  if (!Call(message, kAnswerMs, &reply, error)) {
    if (old != nullptr) *old = *error == kUnknownRequest;
    return false;
  }
  AskReply answer;
  if (DecodeAskReply(reply.body, &answer)) {
    *sequence = answer.number;
    return true;
  }
  *error = kNonsense;
  return false;
}

bool AgentClient::Answer(uint64_t sequence, int timeout_ms, bool* answered, SideAnswer* answer, std::string* error) {
  Message request, reply;
  request.type = Type::kAnswer;
  EncodeAnswerRequest({sequence, uint64_t(timeout_ms > 0 ? timeout_ms : 0)}, &request.body);
  if (!Call(request, kAnswerMs, &reply, error)) return false;
  AnswerReply body;
  bool ok = DecodeAnswerReply(reply.body, &body) && body.answered == body.has_result;
  *answered = body.answered;
  if (ok && !body.answered) return true;
  const uint64_t message_bytes = body.result.message_bytes, payload_bytes = body.result.payload_bytes;
  answer->result = body.result.result;
  std::string all = std::move(body.result.both);
  ok = ok && message_bytes <= cuda_remote::kMaxMessageBytes && payload_bytes <= kMaxPayloadBytes;
  if (ok && reply.fds.size() == 1) {
    all.resize(message_bytes + payload_bytes);
    ok = pread(reply.fds[0], &all[0], all.size(), 0) == ssize_t(all.size());
  }
  for (int fd : reply.fds) close(fd);
  if (!ok || all.size() != message_bytes + payload_bytes) {
    *error = kNonsense;
    return false;
  }
  answer->message = all.substr(0, message_bytes);
  answer->payload = all.substr(message_bytes);
  return true;
}

bool AgentClient::BeginTrace(uint64_t events, uint64_t milliseconds, std::string* error) {
  Message request, reply;
  request.type = Type::kBeginTrace;
  EncodeTraceLimits({events, milliseconds}, &request.body);
  return Call(request, kAnswerMs, &reply, error);
}

bool AgentClient::EndTrace(int timeline_fd, int table_fd, bool json, std::string* error) {
  Message request, reply;
  request.type = Type::kEndTrace;
  EncodeTable({json}, &request.body);
  request.fds = {timeline_fd, table_fd};
  // A long timeline takes its time to write.
  return Call(request, -1, &reply, error);
}

bool AgentClient::TraceTotals(int table_fd, bool json, std::string* error) {
  Message request, reply;
  request.type = Type::kTraceTotals;
  EncodeTable({json}, &request.body);
  request.fds = {table_fd};
  return Call(request, kAnswerMs, &reply, error);
}

}  // namespace cuda_remote::agent
