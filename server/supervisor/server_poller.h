// SPDX-License-Identifier: Apache-2.0
// The thread that lets cr-server's gRPC make progress while no session's thread does.
//
// In gRPC one thread of a process at a time waits for all its sockets; what it finds for others it hands to their
// threads. A thread that only ever waits, as the synchronous server has, takes that place whenever a session's thread
// turns to a message: then each message wakes two threads, one after the other. So the server's own queues do not poll
// (they do not where a queue is added that does), the added queue belongs to this thread, and it stands back while
// sessions are served: their threads, which wait for messages of their own, find everything else as well.
//
// Thread-safe.
#ifndef CUDA_REMOTE_SERVER_SUPERVISOR_SERVER_POLLER_H_
#define CUDA_REMOTE_SERVER_SUPERVISOR_SERVER_POLLER_H_

#include <grpcpp/grpcpp.h>

#include <memory>
#include <thread>

#include "proto/threads/mutex.h"

namespace cuda_remote::server {

class ServerPoller {
 public:
  // Before builder's BuildAndStart; nothing is polled until Start.
  explicit ServerPoller(grpc::ServerBuilder* builder);
  ~ServerPoller();

  // Once the server is there, at the latest before its Shutdown, which waits for what this thread polls.
  void Start();
  // After the server's Shutdown; once is enough. The destructor does it too. Not from several threads.
  void Stop();

  // While it lives, a thread waits for messages all the time but for short pieces of work, so that the poller need not.
  class Substitute {
   public:
    explicit Substitute(ServerPoller* poller);
    ~Substitute();
    Substitute(const Substitute&) = delete;
    Substitute& operator=(const Substitute&) = delete;

   private:
    ServerPoller* const poller_;
  };

 private:
  void Loop();

  const std::unique_ptr<grpc::ServerCompletionQueue> queue_;
  Mutex mutex_;
  Condition changed_;
  int substitutes_ CR_GUARDED_BY(mutex_) = 0;
  bool stopped_ CR_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace cuda_remote::server

#endif  // CUDA_REMOTE_SERVER_SUPERVISOR_SERVER_POLLER_H_
