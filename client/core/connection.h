// SPDX-License-Identifier: Apache-2.0
// The session's channel to its GPU server, and what became of it.
//
// The channel is replaced only while no call can use it: before the session is there, and on the agent's thread while
// the gate is closed. So `channel` needs no lock. All else: any thread.
#ifndef CUDA_REMOTE_CLIENT_CORE_CONNECTION_H_
#define CUDA_REMOTE_CLIENT_CORE_CONNECTION_H_

#include <cuda.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "proto/channel/client_channel.h"

namespace cuda_remote::client {

class Connection {
 public:
  ClientChannel& channel() { return *channel_; }
  const ClientChannel& channel() const { return *channel_; }
  // Null: there is none, since the process was released for a snapshot.
  ClientChannel* get() { return channel_.get(); }
  // Whether the server shares memory with this process (ring), or only sees what is sent (relay).
  bool shared_memory() const { return channel_->welcome().shared_memory; }
  // Uses `channel` (null: none) from here on, with what the GPU prints going to the application's streams. Returns the
  // one before.
  std::unique_ptr<ClientChannel> Replace(std::unique_ptr<ClientChannel> channel);

  // Set once the server is gone; every later call fails with this. CUDA_SUCCESS while all is well.
  CUresult lost() const { return lost_.load(std::memory_order_acquire); }
  // Notes that the channel failed, and says so once on stderr; `server` names it. Returns what calls return from now
  // on.
  CUresult Lose(ChannelStatus status, const std::string& server);
  // Goes on as before: with another channel, `lost` is CUDA_SUCCESS; without it, it is what it was. Returns what it was
  // now.
  CUresult Restore(CUresult lost) { return lost_.exchange(lost); }

  // The first error of a fire-and-forget call that no synchronising call has reported yet.
  void SetPendingError(CUresult error) {
    CUresult none = CUDA_SUCCESS;
    pending_error_.compare_exchange_strong(none, error);
  }
  CUresult TakePendingError() {
    if (pending_error_.load(std::memory_order_relaxed) == CUDA_SUCCESS) return CUDA_SUCCESS;
    return pending_error_.exchange(CUDA_SUCCESS);
  }

  // The application asked for threads that sleep while they wait for the GPU.
  void WaitAsleep();
  // A tag for a descriptor that the server is sent.
  uint64_t NextTag() { return next_tag_.fetch_add(1); }

 private:
  std::unique_ptr<ClientChannel> channel_;
  std::atomic<CUresult> lost_{CUDA_SUCCESS};
  std::atomic<CUresult> pending_error_{CUDA_SUCCESS};
  std::atomic<bool> wait_asleep_{false};
  std::atomic<uint64_t> next_tag_{1};
};

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_CORE_CONNECTION_H_
