// SPDX-License-Identifier: Apache-2.0
// The lanes of a relay's stream: connections of their own for bulk (proto/control/tunnel_end.h), opened once there is
// some.
//
// A lane that cannot be had is done without; one that breaks breaks the stream, which its TunnelEnd sees to.
//
// Thread-safe: no; made and destroyed by the thread that serves the stream.
#ifndef CUDA_REMOTE_CLIENT_RELAY_RELAY_LANES_H_
#define CUDA_REMOTE_CLIENT_RELAY_RELAY_LANES_H_

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "proto/control/tunnel_end.h"
#include "proto/threads/mutex.h"

namespace cuda_remote::client {

// How many lanes a relay opens for one session: CUDA_REMOTE_TUNNEL_LANES, or as many as the machine has processors for.
uint32_t WantedLanes();

class RelayLanes {
 public:
  // For the stream `number` of the session with this token. `channel` makes a new connection; any thread. `checked` as
  // for `end`, which must outlive it. Returns at once.
  RelayLanes(control::TunnelEnd* end, std::function<std::shared_ptr<grpc::Channel>()> channel, std::string resume_token,
             uint64_t number, uint32_t count, bool checked);
  // After the stream's Run has returned: ends what is left, and waits for it.
  ~RelayLanes();
  RelayLanes(const RelayLanes&) = delete;
  RelayLanes& operator=(const RelayLanes&) = delete;

 private:
  // One lane's thread, from the first bulk to the lane's end.
  void Serve(size_t index);

  control::TunnelEnd* const end_;
  const std::function<std::shared_ptr<grpc::Channel>()> channel_;
  const std::string resume_token_;
  const uint64_t number_;
  const bool checked_;
  Mutex mutex_;
  std::atomic<bool> stop_{false};
  std::vector<grpc::ClientContext*> contexts_ CR_GUARDED_BY(mutex_);  // of the lanes that there are, by index
  std::vector<std::thread> threads_;
};

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_RELAY_RELAY_LANES_H_
