// SPDX-License-Identifier: Apache-2.0
// Copies what arrives at a Unix stream socket to memory, with several threads, and what those fetch themselves.
//
// A socket gives its bytes to one thread at a time. This moves references to the sender's pages from the socket into
// pipes instead, which takes a third of the time of copying them, and a thread for each pipe copies out of it.
//
// For one thread; the callbacks come from others.
#ifndef CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_SOCKET_COPIER_H_
#define CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_SOCKET_COPIER_H_

#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "proto/base/unique_fd.h"
#include "proto/threads/mutex.h"

namespace cuda_remote::checkpoint {

class SocketCopier {
 public:
  // The socket stays the caller's and must outlive this. `fetches`: whether Fetch will be called.
  SocketCopier(int socket, bool fetches);
  // Gives up the copies that are not complete.
  ~SocketCopier();
  SocketCopier(const SocketCopier&) = delete;
  SocketCopier& operator=(const SocketCopier&) = delete;

  // Takes the next `bytes` of the socket, which go to `to`. Returns when they have left the socket; `done` is called,
  // in the order of the calls of Copy, when they are at `to`. It must not call this. False: the socket has ended.
  bool Copy(char* to, size_t bytes, std::function<void()> done);
  // The same of bytes that are not the socket's: `fetch` brings them to `to`, or returns false if that is impossible.
  // It is called by one of the threads.
  bool Fetch(char* to, size_t bytes, std::function<bool()> fetch, std::function<void()> done);
  // Waits until all is copied. False: that is impossible.
  bool Finish();

 private:
  struct Part {
    char* to;
    size_t bytes;
    std::function<void()> done;
    std::function<bool()> fetch = nullptr;  // null: it comes out of the lane's pipe
    bool copied = false;
  };
  struct Lane {
    UniqueFd in, out;  // of its pipe
    std::deque<Part*> parts;
    std::thread thread;
  };
  void Run(Lane* lane);
  void RunFetches();
  // Null: a copy has failed.
  Part* Add(Part part) CR_REQUIRES(mutex_);
  void Complete(Part* part);
  void Fail();

  const int socket_;
  size_t next_ = 0;  // lane
  std::vector<std::unique_ptr<Lane>> lanes_;
  std::vector<std::thread> fetchers_;
  Mutex mutex_;
  Condition changed_;
  std::deque<std::unique_ptr<Part>> parts_ CR_GUARDED_BY(mutex_);  // not done yet, in order
  std::deque<Part*> to_fetch_ CR_GUARDED_BY(mutex_);
  bool over_ CR_GUARDED_BY(mutex_) = false, failed_ CR_GUARDED_BY(mutex_) = false;
};

}  // namespace cuda_remote::checkpoint

#endif  // CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_SOCKET_COPIER_H_
