// SPDX-License-Identifier: Apache-2.0
#include "server/worker/waiters.h"

#include <algorithm>
#include <system_error>
#include <utility>

#include "proto/threads/mutex.h"

namespace cuda_remote::server {

Waiters::~Waiters() {
  {
    MutexLock lock(&mutex_);
    stop_ = true;
    tasks_.clear();
  }
  changed_.NotifyAll();
  for (std::thread& thread : threads_) thread.join();
}

void Waiters::Run(std::function<void()> task) { Add(false, std::move(task)); }

void Waiters::RunBehind(std::function<void()> task) { Add(true, std::move(task)); }

void Waiters::Add(bool behind, std::function<void()> run) {
  MutexLock lock(&mutex_);
  tasks_.push_back({++last_number_, behind, std::move(run)});
  if (tasks_.size() > idle_ && threads_.size() < max_threads_) {
    running_.push_back(0);
    try {
      threads_.emplace_back([this, thread = threads_.size()] { Loop(thread); });
    } catch (const std::system_error&) {
      running_.pop_back();
      // No more threads to be had: the ones that exist do it when they are free. The first must exist.
      if (threads_.empty()) throw;
    }
  }
  changed_.NotifyOne();
}

bool Waiters::EarlierRunsLocked(uint64_t number) const {
  return std::any_of(running_.begin(), running_.end(),
                     [number](uint64_t other) { return other != 0 && other < number; });
}

void Waiters::Loop(size_t thread) {
  if (start_) start_();
  MutexLock lock(&mutex_);
  while (true) {
    ++idle_;
    while (!stop_ && tasks_.empty()) changed_.Wait(&mutex_);
    --idle_;
    if (stop_) return;
    Task task = std::move(tasks_.front());
    tasks_.pop_front();
    running_[thread] = task.number;
    if (task.behind) {
      // Earlier ones have begun, as this one has; none of them waits for a later one.
      ++behind_;
      while (EarlierRunsLocked(task.number)) ended_.Wait(&mutex_);
      --behind_;
    }
    lock.Unlock();
    task.run();
    task.run = nullptr;
    lock.Lock();
    running_[thread] = 0;
    if (behind_ != 0) ended_.NotifyAll();
  }
}

}  // namespace cuda_remote::server
