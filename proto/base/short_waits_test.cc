// SPDX-License-Identifier: Apache-2.0
// A close that would wait for an hour does not.

#include "proto/base/short_waits.h"

#include <errno.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "proto/base/testing/lingering.h"

namespace cuda_remote {
namespace {

// Runs `drop` in a process of its own, which has a socket with a lingering connection in it. False if it hangs.
template <typename Drop>
bool Returns(Drop drop) {
  int sockets[2], closed[2];
  EXPECT_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sockets), 0);
  EXPECT_EQ(pipe(closed), 0);
  Lingering lingering;
  EXPECT_TRUE(lingering.SendOver(sockets[0], "packet"));
  const pid_t child = fork();
  if (child == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    close(sockets[0]);
    close(closed[1]);
    char byte;
    // Until the parent has closed it, this is not the last one.
    while (read(closed[0], &byte, 1) > 0) {
    }
    drop(sockets[1]);
    _exit(0);
  }
  close(sockets[1]);
  close(sockets[0]);
  close(closed[1]);
  close(closed[0]);
  int status = -1;
  for (int i = 0; i < 4000 && waitpid(child, &status, WNOHANG) != child; ++i) usleep(5000);
  if (status == -1) {
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
  }
  return status == 0;
}

TEST(ShortWaits, AStrangersSocketIsClosedAtOnce) {
  EXPECT_TRUE(Returns([](int socket) { CloseWithoutWaiting(socket); }));
}

TEST(ShortWaits, AStrangersPacketIsReadAtOnce) {
  EXPECT_TRUE(Returns([](int socket) {
    const ShortWaits waits;
    char byte;
    recv(socket, &byte, 1, 0);
  }));
}

TEST(ShortWaits, KeepsErrno) {
  errno = EMFILE;
  CloseWithoutWaiting(-1);
  EXPECT_EQ(errno, EMFILE);
}

}  // namespace
}  // namespace cuda_remote
