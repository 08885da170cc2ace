// SPDX-License-Identifier: Apache-2.0
#include "server/worker/session/waiters.h"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <system_error>
#include <utility>

#include "proto/threads/mutex.h"
#include "proto/threads/start_thread.h"

namespace cuda_remote::server {
namespace {

// How long the poller rests after it has asked all its waits.
constexpr auto kPollPeriod = std::chrono::microseconds(200);

}  // namespace

Waiters::~Waiters() {
  {
    MutexLock lock(&mutex_);
    stop_ = true;
    tasks_.clear();
  }
  changed_.NotifyAll();
  polled_changed_.NotifyAll();
  for (std::thread& thread : threads_) thread.join();
  if (poller_.joinable()) poller_.join();
}

void Waiters::Run(std::function<void()> task, std::function<bool()> ready) {
  Add({0, false, std::move(task), std::move(ready)});
}

void Waiters::RunBehind(std::function<void()> task) { Add({0, true, std::move(task), nullptr}); }

bool Waiters::AddThreadLocked() {
  if (threads_.size() >= max_threads_) return false;
  running_.push_back(0);
  try {
    threads_.emplace_back([this, thread = threads_.size()] { Loop(thread); });
  } catch (const std::system_error&) {
    running_.pop_back();
    // No more threads to be had: the ones that exist do it when they are free. There must be a first one.
    if (threads_.empty()) throw;
    return false;
  }
  return true;
}

bool Waiters::StartPollerLocked() {
  if (!poller_.joinable()) poller_ = StartThread([this] { Poll(); });
  return poller_.joinable();
}

void Waiters::Add(Task task) {
  MutexLock lock(&mutex_);
  const bool has_thread = tasks_.size() < idle_ || AddThreadLocked();
  task.number = ++last_number_;
  if (!has_thread && task.ready && StartPollerLocked()) {
    polled_.push_back(std::move(task));
    polled_changed_.NotifyOne();
    return;
  }
  tasks_.push_back(std::move(task));
  changed_.NotifyOne();
}

bool Waiters::EarlierRunsLocked(uint64_t number) const {
  const auto earlier = [number](uint64_t other) { return other != 0 && other < number; };
  return std::any_of(running_.begin(), running_.end(), earlier) ||
         std::any_of(polled_.begin(), polled_.end(), [&](const Task& task) { return earlier(task.number); });
}

void Waiters::Poll() {
  if (start_) start_();
  MutexLock lock(&mutex_);
  while (!stop_) {
    for (auto task = polled_.begin(); task != polled_.end() && !stop_;) {
      lock.Unlock();  // nobody else takes a task out
      const bool ready = task->ready();
      if (ready) {
        task->run();
        task->run = nullptr;
      }
      lock.Lock();
      task = ready ? polled_.erase(task) : std::next(task);
      if (ready && behind_ != 0) ended_.NotifyAll();
    }
    if (polled_.empty()) {
      if (!stop_) polled_changed_.Wait(&mutex_);
    } else {
      polled_changed_.WaitFor(&mutex_, kPollPeriod);
    }
  }
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
      // Earlier ones have begun, as this one has; none of them waits for a later one in this queue.
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
