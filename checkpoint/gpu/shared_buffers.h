// SPDX-License-Identifier: Apache-2.0
// Buffers that the GPU server has mapped and registered with the driver: the GPU copies to and from them at the bus's
// speed, and threads of the tool fill and empty them, where the channel's rings would take two more copies by one
// thread.
//
// Only for servers on the same machine. They lie where a job's pinned memory could lie too, at the far end of it. If
// the tool dies, the server keeps them until the next tool comes, or the session ends.
#ifndef CUDA_REMOTE_CHECKPOINT_GPU_SHARED_BUFFERS_H_
#define CUDA_REMOTE_CHECKPOINT_GPU_SHARED_BUFFERS_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "proto/agent/types.h"
#include "proto/base/unique_fd.h"
#include "proto/channel/client_channel.h"

namespace cuda_remote::checkpoint {

class SharedBuffers {
 public:
  static constexpr size_t kCount = 28;
  static constexpr size_t kBytes = 2u << 20;  // of each

  // Takes the memory, all of it. Null if there is none.
  static std::unique_ptr<SharedBuffers> Make();
  ~SharedBuffers();
  SharedBuffers(const SharedBuffers&) = delete;
  SharedBuffers& operator=(const SharedBuffers&) = delete;

  // Lets the server of `channel`'s session map them. False if it cannot; then the channel has to do. The channel must
  // outlive the attachment. One at a time, or the two ends of a move.
  bool Attach(ClientChannel* channel);
  // Ends all of that, when no request on the way uses them; does nothing without one.
  void Detach();

  // For a server that is not attached to: the request that lets it map them, which ends with another one or the
  // session.
  void MapRequest(agent::SideRequest* request) const;

  // Buffer `index`, here and at the server.
  char* data(size_t index) const { return memory_ + index * kBytes; }
  uint64_t address(size_t index) const;

 private:
  SharedBuffers() = default;

  UniqueFd fd_;
  void* mapping_ = nullptr;
  char* memory_ = nullptr;  // in it
  std::vector<ClientChannel*> attached_;
};

}  // namespace cuda_remote::checkpoint

#endif  // CUDA_REMOTE_CHECKPOINT_GPU_SHARED_BUFFERS_H_
