// SPDX-License-Identifier: Apache-2.0
#include "server/worker/waiters.h"

#include <algorithm>
#include <system_error>
#include <utility>

namespace cuda_remote::server {

Waiters::~Waiters() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
    tasks_.clear();
  }
  changed_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void Waiters::Run(std::function<void()> task) { Add(false, std::move(task)); }

void Waiters::RunBehind(std::function<void()> task) { Add(true, std::move(task)); }

void Waiters::Add(bool behind, std::function<void()> run) {
  std::lock_guard<std::mutex> lock(mutex_);
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
  changed_.notify_one();
}

bool Waiters::EarlierRuns(uint64_t number) const {
  return std::any_of(running_.begin(), running_.end(),
                     [number](uint64_t other) { return other != 0 && other < number; });
}

void Waiters::Loop(size_t thread) {
  if (start_) start_();
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    ++idle_;
    changed_.wait(lock, [this] { return stop_ || !tasks_.empty(); });
    --idle_;
    if (stop_) return;
    Task task = std::move(tasks_.front());
    tasks_.pop_front();
    running_[thread] = task.number;
    if (task.behind) {
      // Earlier ones have begun, as this one has; none of them waits for a later one.
      ++behind_;
      ended_.wait(lock, [&] { return !EarlierRuns(task.number); });
      --behind_;
    }
    lock.unlock();
    task.run();
    task.run = nullptr;
    lock.lock();
    running_[thread] = 0;
    if (behind_ != 0) ended_.notify_all();
  }
}

}  // namespace cuda_remote::server
