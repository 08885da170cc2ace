// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/engine/criu/socket_copier.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "proto/threads/mutex.h"
#include "proto/threads/start_thread.h"

namespace cuda_remote::checkpoint {
namespace {

// More do not help: moving references is the slower part then.
constexpr size_t kLanes = 4;
// Threads for Fetch: all processors but those that CRIU and the caller need. Each takes 3 to 4 GB/s.
constexpr unsigned kSparedProcessors = 2, kMostFetchers = 16;
constexpr int kPipeBytes = 1 << 20;
// Less is copied sooner than handed to another thread.
constexpr size_t kWorthALane = 64 << 10;

// All `bytes`, by calls of `some`, which returns how many it has done. False: the end, or an error.
template <typename Some>
bool All(size_t bytes, const Some& some) {
  for (size_t done = 0; done < bytes;) {
    const ssize_t got = some(done, bytes - done);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return false;
    done += size_t(got);
  }
  return true;
}

}  // namespace

SocketCopier::SocketCopier(int socket, bool fetches) : socket_(socket) {
  for (size_t i = 0; i < kLanes; ++i) {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) break;
    fcntl(ends[1], F_SETPIPE_SZ, kPipeBytes);
    lanes_.push_back(std::make_unique<Lane>());
    lanes_.back()->out.Reset(ends[0]);
    lanes_.back()->in.Reset(ends[1]);
  }
  for (const auto& lane : lanes_) lane->thread = StartThread([this, one = lane.get()] { Run(one); });
  // Fewer will do; without any, the caller's thread copies.
  const auto has_none = [](const std::unique_ptr<Lane>& lane) { return !lane->thread.joinable(); };
  lanes_.erase(std::remove_if(lanes_.begin(), lanes_.end(), has_none), lanes_.end());
  const unsigned processors = std::thread::hardware_concurrency();
  const unsigned fetchers = std::clamp(processors, kSparedProcessors + 2, kSparedProcessors + kMostFetchers);
  for (unsigned i = kSparedProcessors; fetches && i < fetchers; ++i) {
    std::thread thread = StartThread([this] { RunFetches(); });
    if (thread.joinable()) fetchers_.push_back(std::move(thread));
  }
}

SocketCopier::~SocketCopier() {
  {
    MutexLock lock(&mutex_);
    over_ = true;
  }
  changed_.NotifyAll();
  // A thread that waits for the rest of a part has no more to wait for.
  for (const auto& lane : lanes_) lane->in.Close();
  for (const auto& lane : lanes_) lane->thread.join();
  for (std::thread& fetcher : fetchers_) fetcher.join();
}

SocketCopier::Part* SocketCopier::Add(Part part) {
  if (failed_) return nullptr;
  parts_.push_back(std::make_unique<Part>(std::move(part)));
  return parts_.back().get();
}

bool SocketCopier::Copy(char* to, size_t bytes, std::function<void()> done) {
  Lane* lane = nullptr;
  Part* part = nullptr;
  {
    MutexLock lock(&mutex_);
    part = Add({to, bytes, std::move(done)});
    if (part == nullptr) return false;
    if (bytes >= kWorthALane && !lanes_.empty()) {
      lane = lanes_[next_++ % lanes_.size()].get();
      lane->parts.push_back(part);
    }
  }
  if (lane != nullptr) {
    changed_.NotifyAll();
    return All(bytes, [&](size_t, size_t left) {
      return splice(socket_, nullptr, lane->in.get(), nullptr, left, SPLICE_F_MOVE);
    });
  }
  if (!All(bytes, [&](size_t at, size_t left) { return recv(socket_, to + at, left, MSG_WAITALL); })) return false;
  Complete(part);
  return true;
}

bool SocketCopier::Fetch(char* to, size_t bytes, std::function<bool()> fetch, std::function<void()> done) {
  Part* part = nullptr;
  {
    MutexLock lock(&mutex_);
    part = Add({to, bytes, std::move(done), std::move(fetch)});
    if (part == nullptr) return false;
    if (!fetchers_.empty()) to_fetch_.push_back(part);
  }
  if (!fetchers_.empty()) {
    changed_.NotifyAll();
    return true;
  }
  if (part->fetch()) {
    Complete(part);
    return true;
  }
  Fail();
  return false;
}

bool SocketCopier::Finish() {
  MutexLock lock(&mutex_);
  while (!parts_.empty() && !failed_) changed_.Wait(&mutex_);
  return !failed_;
}

void SocketCopier::Complete(Part* part) {
  MutexLock lock(&mutex_);
  part->copied = true;
  for (; !parts_.empty() && parts_.front()->copied; parts_.pop_front()) parts_.front()->done();
  changed_.NotifyAll();
}

void SocketCopier::Fail() {
  MutexLock lock(&mutex_);
  failed_ = true;
  changed_.NotifyAll();
}

void SocketCopier::Run(Lane* lane) {
  while (true) {
    Part* part = nullptr;
    {
      MutexLock lock(&mutex_);
      while (!over_ && lane->parts.empty()) changed_.Wait(&mutex_);
      if (lane->parts.empty()) return;
      part = lane->parts.front();
      lane->parts.pop_front();
    }
    if (!All(part->bytes, [&](size_t at, size_t left) { return read(lane->out.get(), part->to + at, left); }))
      return Fail();
    Complete(part);
  }
}

void SocketCopier::RunFetches() {
  while (true) {
    Part* part = nullptr;
    {
      MutexLock lock(&mutex_);
      while (!over_ && to_fetch_.empty()) changed_.Wait(&mutex_);
      if (over_) return;
      part = to_fetch_.front();
      to_fetch_.pop_front();
    }
    if (!part->fetch()) return Fail();
    Complete(part);
  }
}

}  // namespace cuda_remote::checkpoint
