// SPDX-License-Identifier: Apache-2.0
// For test programs of several processes ("ranks"): arguments, starting and awaiting the ranks, memory that they share.
//
// Rank 0 alone calls app::Step (app.h), so that a pause stops the whole job: the other ranks wait for rank 0 in their
// next exchange. A rank that ends with an error ends the job: the process that started the ranks kills the others and
// ends with exit code 1.
#ifndef CUDA_REMOTE_TESTS_APPS_SUPPORT_RANKS_H_
#define CUDA_REMOTE_TESTS_APPS_SUPPORT_RANKS_H_

#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include <vector>

#include "tests/apps/support/app.h"

namespace app {

constexpr int kMaxRanks = 16;

// Takes "--ranks N" (default: `ranks`) out of the arguments, so that Parse can read the rest.
inline int TakeRanks(int* argc, char** argv, int ranks) {
  for (int i = 1; i + 1 < *argc; ++i) {
    if (strcmp(argv[i], "--ranks")) continue;
    ranks = atoi(argv[i + 1]);
    if (ranks < 2 || ranks > kMaxRanks) Fail(__FILE__, __LINE__, "--ranks", "from 2 to 16");
    for (int k = i + 2; k <= *argc; ++k) argv[k - 2] = argv[k];
    *argc -= 2;
    break;
  }
  return ranks;
}

// Waits for the children. One that fails ends the others and this process.
inline void AwaitRanks(const std::vector<pid_t>& children) {
  for (size_t left = children.size(); left > 0; --left) {
    int status = 0;
    const pid_t ended = waitpid(-1, &status, 0);
    if (ended > 0 && WIFEXITED(status) && WEXITSTATUS(status) == 0) continue;
    fprintf(stderr, "rank with PID %d ended with status %#x\n", int(ended), unsigned(status));
    for (pid_t child : children) kill(child, SIGKILL);
    exit(1);
  }
}

// Forks `count` processes, calls body(rank) in each and waits for all of them. Before the first CUDA call.
template <typename Body>
void RunRanks(int count, const Body& body) {
  std::vector<pid_t> children;
  fflush(nullptr);
  for (int rank = 0; rank < count; ++rank) {
    const pid_t child = fork();
    APP_CHECK(child >= 0);
    if (child == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      body(rank);
      fflush(nullptr);
      _exit(0);
    }
    children.push_back(child);
  }
  AwaitRanks(children);
}

// Memory that all ranks forked later share; zeroed.
template <typename T>
T* Share(size_t count = 1) {
  void* const memory = mmap(nullptr, count * sizeof(T), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  APP_CHECK(memory != MAP_FAILED);
  return static_cast<T*>(memory);
}

// Sends a descriptor to the process at the other end of a Unix socket. It stays open here, too.
inline void SendDescriptor(int socket, int fd) {
  char byte = 'd';
  iovec part = {&byte, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  cmsghdr* const head = CMSG_FIRSTHDR(&message);
  head->cmsg_level = SOL_SOCKET;
  head->cmsg_type = SCM_RIGHTS;
  head->cmsg_len = CMSG_LEN(sizeof(int));
  memcpy(CMSG_DATA(head), &fd, sizeof(fd));
  APP_CHECK(sendmsg(socket, &message, MSG_NOSIGNAL) == 1);
}

// Waits for one, which is closed on exec; the caller's.
inline int ReceiveDescriptor(int socket) {
  char byte = 0;
  iovec part = {&byte, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  APP_CHECK(recvmsg(socket, &message, MSG_CMSG_CLOEXEC) == 1);
  cmsghdr* const head = CMSG_FIRSTHDR(&message);
  APP_CHECK(head && head->cmsg_type == SCM_RIGHTS);
  int fd;
  memcpy(&fd, CMSG_DATA(head), sizeof(fd));
  return fd;
}

// A barrier in memory that processes share.
class Barrier {
 public:
  void Init(int ranks) {
    pthread_barrierattr_t attributes;
    pthread_barrierattr_init(&attributes);
    pthread_barrierattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    APP_CHECK(pthread_barrier_init(&barrier_, &attributes, unsigned(ranks)) == 0);
  }
  void Wait() {
    const int result = pthread_barrier_wait(&barrier_);
    APP_CHECK(result == 0 || result == PTHREAD_BARRIER_SERIAL_THREAD);
  }

 private:
  pthread_barrier_t barrier_;
};

// The reference of most programs here: one step of a linear congruential generator.
#ifdef __CUDACC__
__host__ __device__
#endif
    inline unsigned
    Advance(unsigned state, unsigned add) {
  return state * 1664525u + 1013904223u + add;
}

}  // namespace app

#endif  // CUDA_REMOTE_TESTS_APPS_SUPPORT_RANKS_H_
