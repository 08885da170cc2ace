#include "client/agent/agent_client.h"

#include <unistd.h>

#include "client/agent/message.h"
#include "proto/channel/handshake.h"

namespace cuda_remote::client::agent {
namespace {

// The agent answers at once, except where it waits for the GPU.
constexpr int kAnswerMs = 30000;

}  // namespace

std::unique_ptr<AgentClient> AgentClient::Connect(const std::string& directory, std::string* error) {
  const int socket = ConnectUnix(directory + "/" + kSocketName, error);
  if (socket < 0) return nullptr;
  uint32_t user = 0, pid = 0;
  if (!PeerUser(socket, &user, &pid) || (user != geteuid() && geteuid() != 0)) {
    *error = "the job belongs to another user";
    close(socket);
    return nullptr;
  }
  return std::unique_ptr<AgentClient>(new AgentClient(socket));
}

AgentClient::~AgentClient() {
  if (socket_ >= 0) close(socket_);
}

bool AgentClient::Call(const Message& request, int timeout_ms, Message* reply, std::string* error) {
  const bool sent = socket_ >= 0 && SendMessage(socket_, request);
  // A refused tool finds the reason in its socket, though it can send no more.
  const ReceiveStatus status = socket_ >= 0 ? ReceiveMessage(socket_, timeout_ms, reply) : ReceiveStatus::kClosed;
  switch (status) {
    case ReceiveStatus::kOk:
      if (reply->type == Type::kOk && sent) return true;
      for (int fd : reply->fds) close(fd);
      *error = reply->type == Type::kError && !reply->body.empty() ? reply->body
                                                                   : "the job gave an answer that makes no sense";
      return false;
    case ReceiveStatus::kTimeout:
      *error = "the job does not answer";
      return false;
    case ReceiveStatus::kOtherVersion:
      *error = "the job's client library is of another version than this tool";
      return false;
    case ReceiveStatus::kMalformed:
      *error = "the job gave an answer that makes no sense";
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
  *error = "the job gave an answer that makes no sense";
  return false;
}

bool AgentClient::Lock(int timeout_ms, std::string* error) {
  Message request, reply;
  request.type = Type::kLock;
  FieldWriter(&request.body).Number(uint64_t(timeout_ms > 0 ? timeout_ms : 0));
  // After the calls the agent waits for the GPU, which has no limit of its own.
  return Call(request, -1, &reply, error);
}

bool AgentClient::Unlock(std::string* error) {
  Message request, reply;
  request.type = Type::kUnlock;
  return Call(request, kAnswerMs, &reply, error);
}

bool AgentClient::Take(Taken* taken, std::string* error) {
  Message request, reply;
  request.type = Type::kTake;
  if (!Call(request, kAnswerMs, &reply, error)) return false;
  if (DecodeTaken(reply, taken)) return true;
  for (int fd : reply.fds) close(fd);
  *error = "the job gave an answer that makes no sense";
  return false;
}

bool AgentClient::Release(std::string* error) {
  Message request, reply;
  request.type = Type::kRelease;
  if (!Call(request, kAnswerMs, &reply, error)) return false;
  // The end of the connection says that the job has closed its end, which a snapshot needs.
  const bool closed = ReceiveMessage(socket_, kAnswerMs, &reply) == ReceiveStatus::kClosed;
  close(socket_);
  socket_ = -1;
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

bool AgentClient::BeginTrace(uint64_t events, uint64_t milliseconds, std::string* error) {
  Message request, reply;
  request.type = Type::kBeginTrace;
  FieldWriter(&request.body).Number(events).Number(milliseconds);
  return Call(request, kAnswerMs, &reply, error);
}

bool AgentClient::EndTrace(int timeline_fd, int table_fd, bool json, std::string* error) {
  Message request, reply;
  request.type = Type::kEndTrace;
  FieldWriter(&request.body).Number(json);
  request.fds = {timeline_fd, table_fd};
  // A long timeline takes its time to write.
  return Call(request, -1, &reply, error);
}

bool AgentClient::TraceTotals(int table_fd, bool json, std::string* error) {
  Message request, reply;
  request.type = Type::kTraceTotals;
  FieldWriter(&request.body).Number(json);
  request.fds = {table_fd};
  return Call(request, kAnswerMs, &reply, error);
}

}  // namespace cuda_remote::client::agent
