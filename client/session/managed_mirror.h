// SPDX-License-Identifier: Apache-2.0
// Memory that host and kernels use and that the server does not share with this process, kept in step with it.
//
// What is kept so: managed memory over a relay that cannot lie on the GPU (managed_home.h), and `__managed__`
// variables, which the driver places in the server's process; both lie at the same address here and there. Pinned
// memory over a relay that kernels use, also at the same address; and the application's own pages that it registered,
// which have another address there. What the host has changed is found by comparison (proto/mirror) and sent before
// every request that may make the GPU read or write memory (Push); what the GPU has changed is fetched after every call
// that waits for the GPU (Pull). There is no page protection, hence no signal handler, and system calls may read and
// write the memory as they like. The price is a comparison of all of it at each such call.
//
// The host must not wait, without a CUDA call, for a kernel to change such memory: devices report
// CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS as 0 for this reason, over every channel, since a job can move.
//
// Thread-safe. Never takes the session's mutex, so it may be called under it.
#ifndef CUDA_REMOTE_CLIENT_SESSION_MANAGED_MIRROR_H_
#define CUDA_REMOTE_CLIENT_SESSION_MANAGED_MIRROR_H_

#include <cuda.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "proto/channel/client_channel.h"

namespace cuda_remote::client {

class ManagedMirror {
 public:
  // Whether anything is kept in step. Cheap: asked at every call.
  bool active() const { return ranges_count_.load(std::memory_order_acquire) != 0; }

  // Maps memory of this process where a variable lies on the server, page by page as needed; pages stay mapped for
  // good. False if something else of this process lies there.
  bool MapVariable(uint64_t address, uint64_t bytes);

  // Begins to keep a range in step, with the server's consent (kOpMirrorAdd). The range's bytes here and there are both
  // taken for zero so far. CUDA_SUCCESS if it is kept already.
  // `memory` is where the bytes are here, `address` where they are there.
  CUresult Add(ClientChannel* channel, uint64_t address, uint64_t bytes, uint64_t memory);
  // Ends that; an unknown range is ignored. The server forgets its side with the memory.
  void Remove(uint64_t address);

  // Sends what the host has changed. Not more than a status comes back, and later.
  ChannelStatus Push(ClientChannel* channel);
  // Fetches what the GPU has changed.
  ChannelStatus Pull(ClientChannel* channel);

  // What another server, which has taken over, is to keep in step from now on.
  struct Place {
    uint64_t address;
    uint64_t bytes;
    uint64_t memory;
    bool fresh;  // the server's bytes are zero
  };
  // Starts over with that server, this process's bytes being the right ones. The result is that of the first failure,
  // after which all is as before.
  CUresult MoveTo(ClientChannel* channel, const std::vector<Place>& places);
  // After a MoveTo: the former server is the one to keep in step with again.
  void MoveBack();
  // After a MoveTo: there is no way back.
  void ForgetFormer();

 private:
  struct Unmapper {
    size_t bytes;
    void operator()(char* memory) const;
  };
  struct Range {
    uint64_t bytes = 0;
    char* memory = nullptr;
    std::unique_ptr<char, Unmapper> base;
  };

  static CUresult AddOnServer(ClientChannel* channel, uint64_t address, uint64_t bytes);
  ChannelStatus PushLocked(ClientChannel* channel);
  ChannelStatus SendRuns(ClientChannel* channel, std::string* runs);
  void MoveBackLocked();
  CUresult MoveToLocked(ClientChannel* channel, const std::vector<Place>& places);
  CUresult AddLocked(ClientChannel* channel, uint64_t address, uint64_t bytes, uint64_t memory);
  // Takes what the server sent. False for what no server sends.
  bool ApplyLocked(std::string_view runs);

  std::mutex mutex_;
  std::map<uint64_t, Range> ranges_;  // by the server's address
  std::map<uint64_t, Range> former_;  // of the server before, while there is a way back
  std::atomic<size_t> ranges_count_{0};
  std::set<uint64_t> variable_pages_;
  std::string runs_;  // storage for Push
  std::string pulled_;
};

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_SESSION_MANAGED_MIRROR_H_
