// SPDX-License-Identifier: Apache-2.0
#include "proto/agent/message.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "proto/base/standard_descriptors.h"

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

Terms TermsOf(const Welcome& welcome) {
  return {welcome.wire_version, welcome.session, welcome.shared_memory, welcome.server};
}

Welcome WelcomeOf(const Terms& terms) {
  Welcome welcome;
  welcome.wire_version = terms.wire_version;
  welcome.session = terms.session;
  welcome.shared_memory = terms.shared_memory;
  welcome.server = terms.server;
  return welcome;
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
      message->fds.push_back(BesideStandard(fd));
    }
  }
  const bool whole = !(packet.msg_flags & MSG_TRUNC) && size_t(got) >= sizeof(head) && head.magic == kMagic &&
                     head.body_bytes == size_t(got) - sizeof(head);
  if (!whole || head.version != kVersion) {
    CloseAll(&message->fds);
    return whole ? ReceiveStatus::kOtherVersion : ReceiveStatus::kMalformed;
  }
  if (packet.msg_flags & MSG_CTRUNC) {
    CloseAll(&message->fds);
    return ReceiveStatus::kNoDescriptors;
  }
  body.resize(head.body_bytes);
  message->type = Type(head.type);
  message->body = std::move(body);
  return ReceiveStatus::kOk;
}

void EncodeTaken(const Taken& taken, Message* message) {
  EncodeTakenBody({taken.next_sequence, TermsOf(taken.welcome)}, &message->body);
  message->fds = {taken.log_fd, taken.fds.socket, taken.fds.ring};
}

bool DecodeTaken(const Message& message, Taken* taken) {
  TakenBody body;
  if (!DecodeTakenBody(message.body, &body) || message.fds.size() != 3) return false;
  taken->next_sequence = body.next_sequence;
  taken->welcome = WelcomeOf(body.terms);
  taken->log_fd = message.fds[0];
  taken->fds = {message.fds[1], message.fds[2]};
  return true;
}

void EncodeGiven(const Given& given, Message* message) {
  EncodeGivenBody({given.next_sequence, given.new_worker, given.server, TermsOf(given.welcome)}, &message->body);
  message->fds = {given.fds.socket, given.fds.ring};
}

bool DecodeGiven(const Message& message, Given* given) {
  GivenBody body;
  if (!DecodeGivenBody(message.body, &body) || message.fds.size() != 2) return false;
  given->next_sequence = body.next_sequence;
  given->new_worker = body.new_worker;
  given->server = body.server;
  given->welcome = WelcomeOf(body.terms);
  given->fds = {message.fds[0], message.fds[1]};
  return true;
}

}  // namespace cuda_remote::agent
