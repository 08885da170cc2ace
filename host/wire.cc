// SPDX-License-Identifier: Apache-2.0
#include "host/wire.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <protozero/exception.hpp>
#include <protozero/pbf_reader.hpp>

namespace cuda_remote::host {
namespace {

constexpr int64_t kMostWaitMs = 60000;  // at a time

// A command line and an environment of 2 MiB have fewer words. Each takes many times its bytes in memory.
constexpr size_t kMostFields = 1u << 18;

bool HasFewFields(const std::string& body) {
  try {
    protozero::pbf_reader fields(body);
    for (size_t count = 0; fields.next(); fields.skip()) {
      if (++count > kMostFields) return false;
    }
    return true;
  } catch (const protozero::exception&) {
    return false;
  }
}

// Whether something can be read at `until`, or before.
bool AwaitBytes(int socket, Moment until) {
  pollfd waiting = {socket, POLLIN, 0};
  while (true) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - Now()).count();
    const int ready = poll(&waiting, 1, int(std::clamp<int64_t>(left, 0, kMostWaitMs)));
    if (ready > 0) return true;
    if (ready < 0 ? errno != EINTR : left <= 0) return false;
  }
}

// Exactly `bytes`; descriptors that come are added to `descriptors`. False at the end, if too many come, or too late.
bool ReceiveBytes(int socket, char* to, size_t bytes, std::vector<int>* descriptors, Moment until) {
  bool allowed = true;
  while (bytes > 0) {
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * kMostDescriptors)];
    iovec part = {to, bytes};
    msghdr head = {};
    head.msg_iov = &part;
    head.msg_iovlen = 1;
    head.msg_control = control;
    head.msg_controllen = sizeof(control);
    if (!AwaitBytes(socket, until)) return false;
    const ssize_t got = recvmsg(socket, &head, MSG_CMSG_CLOEXEC);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return false;
    for (cmsghdr* one = CMSG_FIRSTHDR(&head); one; one = CMSG_NXTHDR(&head, one)) {
      if (one->cmsg_level != SOL_SOCKET || one->cmsg_type != SCM_RIGHTS) continue;
      for (size_t i = 0; i < (one->cmsg_len - CMSG_LEN(0)) / sizeof(int); ++i) {
        int fd = -1;
        memcpy(&fd, CMSG_DATA(one) + i * sizeof(int), sizeof(fd));
        if (descriptors) descriptors->push_back(fd);
        if (!descriptors) close(fd);
        allowed = allowed && descriptors && descriptors->size() <= kMostDescriptors;
      }
    }
    if (!allowed || (head.msg_flags & MSG_CTRUNC)) return false;
    to += got;
    bytes -= size_t(got);
  }
  return true;
}

}  // namespace

bool Send(int socket, const google::protobuf::MessageLite& message, const std::vector<int>& descriptors) {
  const std::string body = message.SerializeAsString();
  if (body.size() > kMostBytes || descriptors.size() > kMostDescriptors) return false;
  const auto length = uint32_t(body.size());
  std::string bytes(reinterpret_cast<const char*>(&length), sizeof(length));
  bytes += body;
  bool first = true;
  for (size_t done = 0; done < bytes.size();) {
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * kMostDescriptors)] = {};
    iovec part = {&bytes[done], bytes.size() - done};
    msghdr head = {};
    head.msg_iov = &part;
    head.msg_iovlen = 1;
    if (first && !descriptors.empty()) {
      head.msg_control = control;
      head.msg_controllen = CMSG_SPACE(sizeof(int) * descriptors.size());
      cmsghdr* const one = CMSG_FIRSTHDR(&head);
      one->cmsg_level = SOL_SOCKET;
      one->cmsg_type = SCM_RIGHTS;
      one->cmsg_len = CMSG_LEN(sizeof(int) * descriptors.size());
      memcpy(CMSG_DATA(one), descriptors.data(), sizeof(int) * descriptors.size());
    }
    const ssize_t sent = sendmsg(socket, &head, MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent <= 0) return false;
    done += size_t(sent);
    first = false;
  }
  return true;
}

bool Receive(int socket, google::protobuf::MessageLite* message, std::vector<int>* descriptors, Moment until) {
  uint32_t length = 0;
  if (!ReceiveBytes(socket, reinterpret_cast<char*>(&length), sizeof(length), descriptors, until)) return false;
  if (length > kMostBytes) return false;
  std::string body(length, '\0');
  return ReceiveBytes(socket, &body[0], length, descriptors, until) && HasFewFields(body) &&
         message->ParseFromString(body);
}

}  // namespace cuda_remote::host
