// SPDX-License-Identifier: Apache-2.0
// For servers: closing what a stranger has filled.
//
// A client can attach descriptors to any packet. They lie in the socket until the server reads the packet or closes the
// socket. Whoever drops the last reference to a TCP socket waits in the kernel until its data has been sent, for as
// long as its owner has set with SO_LINGER: hours. So a client could stop the thread that serves all others.
//
// The kernel gives that wait up at a signal. While a ShortWaits exists, the thread that made it gets one every
// millisecond (SIGALRM, whose handler does nothing), so none of its system calls waits for longer. They may return
// EINTR; a descriptor is closed all the same.
//
// One thread makes, uses and destroys it. Where no timer can be had, it does nothing. Not part of the client library.
#ifndef CUDA_REMOTE_PROTO_BASE_SHORT_WAITS_H_
#define CUDA_REMOTE_PROTO_BASE_SHORT_WAITS_H_

namespace cuda_remote {

class ShortWaits {
 public:
  ShortWaits();
  ~ShortWaits();
  ShortWaits(const ShortWaits&) = delete;
  ShortWaits& operator=(const ShortWaits&) = delete;

 private:
  int timer_ = -1;
};

// Closes a stranger's socket, or a descriptor that came from there. Keeps errno.
void CloseWithoutWaiting(int fd);

}  // namespace cuda_remote

#endif  // CUDA_REMOTE_PROTO_BASE_SHORT_WAITS_H_
