// SPDX-License-Identifier: Apache-2.0
// Reads the client's requests and executes them one after the other.
//
// The executor must not wait for the GPU, but a driver call may: a launch into a stream with a thousand launches before
// it blocks until one of them is done - and if that stream stands before a host function, only the client's answer,
// behind in the same channel, lets it go on. So while host functions wait, a second thread watches: when the executor
// is stuck in a call, it reads on, takes the answers out, and keeps all other requests for the executor in their order.
#ifndef CUDA_REMOTE_SERVER_WORKER_SESSION_EXECUTOR_H_
#define CUDA_REMOTE_SERVER_WORKER_SESSION_EXECUTOR_H_

#include <atomic>
#include <cstdint>
#include <deque>
#include <string>
#include <thread>

#include "proto/channel/server_channel.h"
#include "server/worker/session/reading_turn.h"
#include "server/worker/session/worker_session.h"

namespace cuda_remote::server {

class Executor {
 public:
  Executor(WorkerSession* session, ServerChannel* channel);
  ~Executor();

  // Executes requests until the session is over. Returns why it is.
  std::string Run();

  // Requests and payload bytes so far. Any thread.
  uint64_t calls() const { return calls_.load(std::memory_order_relaxed); }
  uint64_t bytes_in() const { return bytes_in_.load(std::memory_order_relaxed); }

 private:
  // A request that was read ahead.
  struct Kept {
    FrameHeader header;
    std::string message;
    std::string payload;
  };

  // Executes one request. False: the session must end, `reason_` says why.
  bool Execute(const FrameHeader& header, const std::string& message, std::string_view payload);
  void Watch();
  // What comes before the channel's next request: lets go of what the watcher held, and executes a request that it
  // kept. True if there was one; `*ok` is what became of it. Executor only, which has the turn and gives it up for a
  // request.
  bool ExecuteKept(bool* ok);
  // Does at once what cannot wait until the executor is free. False if this is nothing of the kind.
  bool AnswerAhead(const FrameHeader& header, const std::string& message, std::string_view payload);
  bool FetchAhead(const FrameHeader& header, const std::string& message);
  // Reads on in the executor's place, which is stuck in request number `stuck`.
  void ReadAhead(uint64_t stuck);
  // The same for one request, with the turn. False if there is none, or no room for it.
  bool ReadOneAhead();

  WorkerSession* const session_;
  ServerChannel* const channel_;
  std::string reason_;
  std::atomic<uint64_t> calls_{0};
  std::atomic<uint64_t> bytes_in_{0};

  // Who has the turn reads the channel, and has the members down to ended_.
  ReadingTurn turn_;
  std::deque<Kept> kept_;
  size_t kept_bytes_ = 0;
  uint64_t hold_ = 0;  // of the payload that the executor was working on when the watcher read on
  bool held_ = false;
  bool ended_ = false;           // the channel said so to the watcher
  bool has_read_ahead_ = false;  // there is something in the members above

  // Number of the request being executed, 0 between requests.
  std::atomic<uint64_t> executing_{0};
  std::atomic<bool> stop_{false};
  std::thread watcher_;
};

}  // namespace cuda_remote::server

#endif  // CUDA_REMOTE_SERVER_WORKER_SESSION_EXECUTOR_H_
