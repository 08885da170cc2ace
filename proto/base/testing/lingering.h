// SPDX-License-Identifier: Apache-2.0
// For tests of servers: a TCP connection whose last close waits for an hour, as its data cannot be sent.
#ifndef CUDA_REMOTE_PROTO_BASE_TESTING_LINGERING_H_
#define CUDA_REMOTE_PROTO_BASE_TESTING_LINGERING_H_

#include <netinet/in.h>
#include <sys/socket.h>

#include <cstring>
#include <string>

#include "proto/base/short_waits.h"
#include "proto/base/unique_fd.h"

namespace cuda_remote {

class Lingering {
 public:
  Lingering()
      : listener_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)), fd_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof(address);
    made_ = bind(listener_.get(), reinterpret_cast<sockaddr*>(&address), length) == 0 &&
            listen(listener_.get(), 1) == 0 &&
            getsockname(listener_.get(), reinterpret_cast<sockaddr*>(&address), &length) == 0 &&
            connect(fd_.get(), reinterpret_cast<sockaddr*>(&address), length) == 0 && SetLinger({1, 3600});
    const std::string data(1 << 20, 'd');
    while (made_ && send(fd_.get(), data.data(), data.size(), MSG_DONTWAIT | MSG_NOSIGNAL) > 0) {
    }
  }
  // Does not wait if it still has the connection. What others have of it ends then.
  ~Lingering() {
    if (fd_.ok()) SetLinger({1, 0});
  }
  Lingering(const Lingering&) = delete;
  Lingering& operator=(const Lingering&) = delete;

  bool made() const { return made_; }
  int fd() const { return fd_.get(); }

  // Sends the connection along with some bytes, and keeps nothing of it. False: neither arrived.
  bool SendOver(int socket, std::string bytes) {
    iovec piece{&bytes[0], bytes.size()};
    msghdr message{};
    message.msg_iov = &piece;
    message.msg_iovlen = 1;
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    cmsghdr* const rights = CMSG_FIRSTHDR(&message);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(sizeof(int));
    const int fd = fd_.get();
    memcpy(CMSG_DATA(rights), &fd, sizeof(fd));
    if (!made_ || sendmsg(socket, &message, MSG_NOSIGNAL) != ssize_t(bytes.size())) return false;
    Drop();
    return true;
  }
  // Keeps nothing of it. Usually the receiver is slower, so that its close is the last one.
  void Drop() { CloseWithoutWaiting(fd_.Release()); }

 private:
  bool SetLinger(linger value) const {
    return setsockopt(fd_.get(), SOL_SOCKET, SO_LINGER, &value, sizeof(value)) == 0;
  }

  UniqueFd listener_, fd_;  // nobody accepts
  bool made_ = false;
};

}  // namespace cuda_remote

#endif  // CUDA_REMOTE_PROTO_BASE_TESTING_LINGERING_H_
