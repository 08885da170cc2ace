// SPDX-License-Identifier: Apache-2.0
#include "client/memory/staging.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <thread>

#include "proto/ring/spin.h"

namespace cuda_remote::client {

void Staging::SetThreads(int threads) {
  if (threads <= 0) {
    // Memory bandwidth grows little beyond three, and the rest of the machine is the application's.
    const int processors = ring::UsableProcessors();
    threads = processors >= 8 ? 3 : processors >= 4 ? 2 : 1;
  }
  threads_ = std::min(threads, kMostThreads);
}

bool Staging::Acquire(size_t bytes) {
  if (!in_use_.try_lock()) return false;
  if (memory_) return true;
  missed_ += std::min(bytes, kWorth);
  if (missed_ >= kWorth && !refused_) {
    constexpr size_t kBytes = kPieces * kPieceBytes;
    void* const memory = arena_->Allocate(kBytes);
    if (memory && mappings_->Map(reinterpret_cast<uint64_t>(memory), kBytes, 0) == CUDA_SUCCESS) {
      memory_ = static_cast<char*>(memory);
      return true;
    }
    if (memory) arena_->Free(memory, kBytes);
    refused_ = true;
  }
  in_use_.unlock();
  return false;
}

void Staging::GiveBack() {
  MutexLock lock(&in_use_);
  refused_ = false;
  if (!memory_) return;
  mappings_->Unmap(reinterpret_cast<uint64_t>(memory_));
  arena_->Free(memory_, kPieces * kPieceBytes);
  memory_ = nullptr;
}

void Staging::Run(int count, const std::function<void(int)>& job) {
  if (count > 1) {
    MutexLock lock(&mutex_);
    StartHelpersLocked(count - 1);
    job_ = &job;
    count_ = count;
    ++generation_;
    changed_.NotifyAll();
  }
  job(0);
  if (count <= 1) return;
  // Helpers that have not woken up by now are not needed any more.
  MutexLock lock(&mutex_);
  job_ = nullptr;
  while (inside_ != 0) idle_.Wait(&mutex_);
}

void Staging::StartHelpersLocked(int count) {
  if (helpers_ >= count) return;
  // The application's signals are for its own threads.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    while (helpers_ < count) {
      std::thread([this, index = helpers_ + 1] { Help(index); }).detach();
      ++helpers_;
    }
  } catch (...) {
    // No more threads to be had: those that there are do it.
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void Staging::Help(int index) {
  mutex_.lock();
  uint64_t seen = 0;
  while (true) {
    while (!job_ || generation_ == seen) changed_.Wait(&mutex_);
    seen = generation_;
    if (index >= count_) continue;
    const std::function<void(int)>& job = *job_;
    ++inside_;
    mutex_.unlock();
    job(index);
    mutex_.lock();
    if (--inside_ == 0) idle_.NotifyAll();
  }
}

}  // namespace cuda_remote::client
