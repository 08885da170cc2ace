// SPDX-License-Identifier: Apache-2.0
#include "proto/agent/message.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>

namespace cuda_remote::agent {
namespace {

struct Head {
  uint32_t magic;
  uint32_t version;
  uint32_t type;
  uint32_t body_bytes;
};

void CloseAll(std::vector<int>* fds) {
  for (int fd : *fds) close(fd);
  fds->clear();
}

void EncodeWelcomeFields(const Welcome& welcome, FieldWriter* out) {
  out->Number(welcome.wire_version).Number(welcome.session).Number(welcome.shared_memory).Text(welcome.server);
}

void DecodeWelcomeFields(FieldReader* in, Welcome* welcome) {
  welcome->wire_version = uint32_t(in->Number());
  welcome->session = in->Number();
  welcome->shared_memory = in->Number() != 0;
  welcome->server = in->Text();
}

}  // namespace

bool SendMessage(int socket, const Message& message) {
  if (message.body.size() > kMaxMessageBytes || message.fds.size() > kMaxFds) return false;
  Head head{kMagic, kVersion, uint32_t(message.type), uint32_t(message.body.size())};
  iovec pieces[2] = {{&head, sizeof(head)}, {const_cast<char*>(message.body.data()), message.body.size()}};
  msghdr packet{};
  packet.msg_iov = pieces;
  packet.msg_iovlen = 2;
  alignas(cmsghdr) char control[CMSG_SPACE(kMaxFds * sizeof(int))] = {};
  if (!message.fds.empty()) {
    const size_t bytes = message.fds.size() * sizeof(int);
    packet.msg_control = control;
    packet.msg_controllen = CMSG_SPACE(bytes);
    cmsghdr* const rights = CMSG_FIRSTHDR(&packet);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(bytes);
    memcpy(CMSG_DATA(rights), message.fds.data(), bytes);
  }
  ssize_t sent;
  do {
    sent = sendmsg(socket, &packet, MSG_NOSIGNAL);
  } while (sent < 0 && errno == EINTR);
  return sent == ssize_t(sizeof(head) + message.body.size());
}

ReceiveStatus ReceiveMessage(int socket, int timeout_ms, Message* message) {
  pollfd waiting{socket, POLLIN, 0};
  int ready;
  do {
    ready = poll(&waiting, 1, timeout_ms);
  } while (ready < 0 && errno == EINTR);
  if (ready == 0) return ReceiveStatus::kTimeout;
  if (ready < 0) return ReceiveStatus::kClosed;
  Head head{};
  std::string body(kMaxMessageBytes, '\0');
  iovec pieces[2] = {{&head, sizeof(head)}, {&body[0], body.size()}};
  msghdr packet{};
  packet.msg_iov = pieces;
  packet.msg_iovlen = 2;
  alignas(cmsghdr) char control[CMSG_SPACE(kMaxFds * sizeof(int))] = {};
  packet.msg_control = control;
  packet.msg_controllen = sizeof(control);
  ssize_t got;
  // A peer that closed without reading what we sent is reported first, once; what it had to say comes after that.
  int resets = 0;
  do {
    got = recvmsg(socket, &packet, MSG_CMSG_CLOEXEC);
  } while (got < 0 && (errno == EINTR || (errno == ECONNRESET && ++resets == 1)));
  if (got <= 0) return ReceiveStatus::kClosed;
  message->fds.clear();
  for (cmsghdr* at = CMSG_FIRSTHDR(&packet); at; at = CMSG_NXTHDR(&packet, at)) {
    if (at->cmsg_level != SOL_SOCKET || at->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (at->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int fd;
      memcpy(&fd, CMSG_DATA(at) + i * sizeof(int), sizeof(fd));
      message->fds.push_back(fd);
    }
  }
  const bool whole = !(packet.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) && size_t(got) >= sizeof(head) &&
                     head.magic == kMagic && head.body_bytes == size_t(got) - sizeof(head);
  if (!whole || head.version != kVersion) {
    CloseAll(&message->fds);
    return whole ? ReceiveStatus::kOtherVersion : ReceiveStatus::kMalformed;
  }
  body.resize(head.body_bytes);
  message->type = Type(head.type);
  message->body = std::move(body);
  return ReceiveStatus::kOk;
}

FieldWriter& FieldWriter::Number(uint64_t value) {
  out_->append(reinterpret_cast<const char*>(&value), sizeof(value));
  return *this;
}

FieldWriter& FieldWriter::Text(std::string_view value) {
  Number(value.size());
  out_->append(value);
  return *this;
}

uint64_t FieldReader::Number() {
  uint64_t value = 0;
  if (in_.size() < sizeof(value)) {
    ok_ = false;
    return 0;
  }
  memcpy(&value, in_.data(), sizeof(value));
  in_.remove_prefix(sizeof(value));
  return value;
}

std::string FieldReader::Text() {
  const uint64_t size = Number();
  if (!ok_ || size > in_.size()) {
    ok_ = false;
    return {};
  }
  std::string text(in_.substr(0, size));
  in_.remove_prefix(size);
  return text;
}

void EncodeActivity(const Activity& activity, std::string* body) {
  FieldWriter out(body);
  out.Number(activity.quiet)
      .Number(activity.capturing)
      .Number(activity.answered)
      .Number(activity.inside)
      .Number(activity.asking)
      .Number(activity.has_work)
      .Number(activity.busy_streams)
      .Number(activity.host_function_ms)
      .Number(activity.held_bytes);
  const size_t count = std::min(activity.contexts.size(), kMaxContexts);
  out.Number(count);
  for (size_t i = 0; i < count; ++i) {
    const Activity::Context& one = activity.contexts[i];
    out.Number(one.context).Number(one.calls).Number(one.has_work).Number(one.adding);
  }
}

bool DecodeActivity(std::string_view body, Activity* activity) {
  FieldReader in(body);
  activity->quiet = in.Number() != 0;
  activity->capturing = in.Number() != 0;
  activity->answered = in.Number() != 0;
  activity->inside = in.Number();
  activity->asking = in.Number();
  activity->has_work = in.Number() != 0;
  activity->busy_streams = in.Number();
  activity->host_function_ms = in.Number();
  activity->held_bytes = in.Number();
  const uint64_t count = in.Number();
  activity->contexts.clear();
  for (uint64_t i = 0; i < count && i < kMaxContexts; ++i) {
    Activity::Context one;
    one.context = in.Number();
    one.calls = in.Number();
    one.has_work = in.Number() != 0;
    one.adding = in.Number() != 0;
    activity->contexts.push_back(one);
  }
  return in.done();
}

void EncodeInfo(const Info& info, std::string* body) {
  FieldWriter(body)
      .Number(info.pid)
      .Text(info.server)
      .Text(info.job)
      .Number(info.session)
      .Number(info.shared_memory)
      .Number(info.log_records)
      .Number(info.log_bytes)
      .Number(info.released)
      .Text(info.driver_settings);
}

bool DecodeInfo(std::string_view body, Info* info) {
  FieldReader in(body);
  info->pid = uint32_t(in.Number());
  info->server = in.Text();
  info->job = in.Text();
  info->session = in.Number();
  info->shared_memory = in.Number() != 0;
  info->log_records = in.Number();
  info->log_bytes = in.Number();
  info->released = in.Number() != 0;
  if (!in.done()) info->driver_settings = in.Text();  // none from a library that is older than the tool
  return in.done();
}

void EncodeTaken(const Taken& taken, Message* message) {
  FieldWriter out(&message->body);
  out.Number(taken.next_sequence);
  EncodeWelcomeFields(taken.welcome, &out);
  message->fds = {taken.log_fd, taken.fds.socket, taken.fds.ring};
}

bool DecodeTaken(const Message& message, Taken* taken) {
  FieldReader in(message.body);
  taken->next_sequence = in.Number();
  DecodeWelcomeFields(&in, &taken->welcome);
  if (!in.done() || message.fds.size() != 3) return false;
  taken->log_fd = message.fds[0];
  taken->fds = {message.fds[1], message.fds[2]};
  return true;
}

void EncodeGiven(const Given& given, Message* message) {
  FieldWriter out(&message->body);
  out.Number(given.next_sequence).Number(given.new_worker).Text(given.server);
  EncodeWelcomeFields(given.welcome, &out);
  message->fds = {given.fds.socket, given.fds.ring};
}

bool DecodeGiven(const Message& message, Given* given) {
  FieldReader in(message.body);
  given->next_sequence = in.Number();
  given->new_worker = in.Number() != 0;
  given->server = in.Text();
  DecodeWelcomeFields(&in, &given->welcome);
  if (!in.done() || message.fds.size() != 2) return false;
  given->fds = {message.fds[0], message.fds[1]};
  return true;
}

}  // namespace cuda_remote::agent
