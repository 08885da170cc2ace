// SPDX-License-Identifier: Apache-2.0
// Threads that wait for the GPU, so that the executor does not. As many as there are waits at the same time, up to a
// limit; idle ones stay. Tasks begin in the order in which they were given, and may end in any other one. Thread-safe.
//
// A wait may end only after a later one has: of two threads of the program, one waits for a stream that the other one
// goes on to fill. So a wait beyond the limit that can say when it is over is not queued behind the others: one more
// thread, the poller, asks all such waits in turn.
#ifndef CUDA_REMOTE_SERVER_WORKER_SESSION_WAITERS_H_
#define CUDA_REMOTE_SERVER_WORKER_SESSION_WAITERS_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <thread>
#include <vector>

#include "proto/threads/mutex.h"

namespace cuda_remote::server {

class Waiters {
 public:
  // `start` runs first in each thread.
  Waiters(size_t max_threads, std::function<void()> start) : max_threads_(max_threads), start_(std::move(start)) {}
  // Waits for all tasks that have begun.
  ~Waiters();
  Waiters(const Waiters&) = delete;
  Waiters& operator=(const Waiters&) = delete;

  // `ready`, if there is one: whether `task` would wait for nothing by now. Any thread calls it, never two at a time.
  // Throws std::system_error if the system gives no first thread; the task is dropped then.
  void Run(std::function<void()> task, std::function<bool()> ready = nullptr);
  // Begins when all tasks that were given before have ended.
  void RunBehind(std::function<void()> task);

 private:
  struct Task {
    uint64_t number;  // from 1 on
    bool behind;      // all with smaller numbers
    std::function<void()> run;
    std::function<bool()> ready;
  };
  void Add(Task task);
  // Starts one more thread, if there may be one and the system gives it.
  bool AddThreadLocked() CR_REQUIRES(mutex_);
  bool StartPollerLocked() CR_REQUIRES(mutex_);
  void Loop(size_t thread);
  void Poll();
  // Whether a task before `number` has begun and not ended.
  bool EarlierRunsLocked(uint64_t number) const CR_REQUIRES(mutex_);

  const size_t max_threads_;
  const std::function<void()> start_;
  Mutex mutex_;
  Condition changed_;
  Condition ended_;  // a task, while somebody wants to know
  std::deque<Task> tasks_ CR_GUARDED_BY(mutex_);
  Condition polled_changed_;
  std::list<Task> polled_ CR_GUARDED_BY(mutex_);  // the poller's, until they have ended
  std::thread poller_ CR_GUARDED_BY(mutex_);
  std::vector<std::thread> threads_ CR_GUARDED_BY(mutex_);
  std::vector<uint64_t> running_ CR_GUARDED_BY(mutex_);  // the number of each thread's task, 0: none
  uint64_t last_number_ CR_GUARDED_BY(mutex_) = 0;
  size_t behind_ CR_GUARDED_BY(mutex_) = 0;  // threads that wait for the ends of earlier tasks
  size_t idle_ CR_GUARDED_BY(mutex_) = 0;
  bool stop_ CR_GUARDED_BY(mutex_) = false;
};

}  // namespace cuda_remote::server

#endif  // CUDA_REMOTE_SERVER_WORKER_SESSION_WAITERS_H_
