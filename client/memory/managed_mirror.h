// SPDX-License-Identifier: Apache-2.0
// Mirrored memory: host and kernels use it, the server does not share it with this process, and so both have a copy.
//
// What is kept so: managed memory over a relay that cannot lie on the GPU (managed_home.h), and `__managed__`
// variables, which the driver places in the server's process; both lie at the same address here and there. Pinned
// memory over a relay that kernels use, also at the same address; and the application's own pages that it registered,
// which have another address there. What the host has changed is found by comparison (proto/mirror) and sent before
// every request that may make the GPU read or write memory (Push); what the GPU has changed is fetched after every call
// that waits for the GPU (Pull). No thread ever waits for a page, and system calls may read and write the memory as
// they like. Push compares the pages that the kernel says were written (page_writes.h), where it can and where that is
// enough; of other memory it compares all (Writers). The server compares all of it at each Pull.
//
// The host must not wait, without a CUDA call, for a kernel to change such memory: devices report
// CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS as 0 for this reason, over every channel, since a job can move. Where
// host and kernel have changed the same bytes of managed memory, one of them loses what it wrote, and a line on stderr
// says so: the kernel if a Push comes between, else the host.
//
// Thread-safe. Never takes a lock of the tables (README, "Locks"), so it may be called under one.
#ifndef CUDA_REMOTE_CLIENT_MEMORY_MANAGED_MIRROR_H_
#define CUDA_REMOTE_CLIENT_MEMORY_MANAGED_MIRROR_H_

#include <cuda.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "client/memory/page_writes.h"
#include "client/memory/transfers.h"
#include "proto/channel/client_channel.h"
#include "proto/threads/mutex.h"

namespace cuda_remote::client {

class ManagedMirror {
 public:
  // Whether anything is mirrored. Cheap: asked at every call.
  bool active() const { return ranges_count_.load(std::memory_order_acquire) != 0; }

  // Maps memory of this process where a variable lies on the server, page by page as needed; pages stay mapped for
  // good. False if something else of this process lies there.
  bool MapVariable(uint64_t address, uint64_t bytes);

  // Who may write to a range while the GPU has work.
  enum class Writers {
    // A transfer (O_DIRECT, libaio, a network card) may be in progress at a Push, and the kernel reports its pages when
    // it begins, not when the bytes come. Another mapping, a file or another process may bring bytes that it never
    // reports. So Push compares all.
    kAnybody,
    // The same, but no other mapping. Push compares the pages that were written, now or a short time ago; if a transfer
    // may be in progress (transfers.h), or was at the last Push, or there may be other processes that have the memory,
    // then all. Nobody sees a transfer that takes longer than that short time and goes on without a descriptor.
    kTransfers,
    // There is nothing of the kind, the user says (Settings::mapped_writers). Push compares the pages that were
    // written.
    kReported,
    // The host has to leave it alone then, as CUDA demands of managed memory. Push compares the pages that were
    // written.
    kNobodyBesideTheGpu,
  };

  // Begins to mirror a range, with the server's consent (kOpMirrorAdd). The range's bytes here and there are both
  // taken for zero so far. CUDA_SUCCESS if it is mirrored already.
  // `memory` is where the bytes are here, `address` where they are there.
  CUresult Add(ClientChannel* channel, uint64_t address, uint64_t bytes, uint64_t memory, Writers writers);
  // The same for a variable, at its own address, once MapVariable has made room for it. Variables that were there
  // before are gone, with what was in them.
  CUresult AddVariable(ClientChannel* channel, uint64_t address, uint64_t bytes);
  // Ends that; an unknown range is ignored. The server forgets its side with the memory.
  void Remove(uint64_t address) {
    if (active()) RemoveRange(address);
  }

  // Sends what the host has changed: before work that may use any of the memory. Not more than a status comes back, and
  // later.
  ChannelStatus Push(ClientChannel* channel);
  // The same for the ranges in which these addresses of the server's lie.
  ChannelStatus Push(ClientChannel* channel, const std::vector<uint64_t>& addresses);
  // Fetches what the GPU has changed.
  ChannelStatus Pull(ClientChannel* channel);

  // Managed memory that the server shares with this process, so that nothing is mirrored: the first time that the host
  // is found to have written to it while a kernel was at work, a line on stderr says so. Some kernels are looked at, at
  // most, since looking takes time: the first ones, and then a few. Ends with StopWatching.
  void WatchShared(uint64_t address, uint64_t bytes);
  // Not any more; of one range, or because the host may write to some of it at any time (memory that is attached).
  void UnwatchShared(uint64_t address);
  void UnwatchShared();
  // Whether anything is watched so. Cheap: asked at every call.
  bool watches_shared() const { return watches_shared_.load(std::memory_order_acquire); }
  // A kernel is about to be launched. All known work has ended; the program may not know yet. The program may know, or
  // something else that nobody tells apart from that.
  void WorkBegins();
  void WorkEnded();
  void WorkMayHaveEnded();
  // A function of the host's runs in a stream's order. It may write meanwhile, and another thread launch a kernel that
  // comes behind it.
  void HostFunctionBegins();
  void HostFunctionEnds();

  // For a snapshot of the process: closes what it cannot contain. The next Push compares everything.
  void StopWatching();

  // What is to be mirrored with another server, which has taken over.
  struct Place {
    uint64_t address;
    uint64_t bytes;
    uint64_t memory;
    bool fresh;  // the server's bytes are zero
    Writers writers;
  };
  // Starts over with that server, this process's bytes being the right ones. The result is that of the first failure,
  // after which all is as before.
  CUresult MoveTo(ClientChannel* channel, const std::vector<Place>& places);
  // After a MoveTo: memory is mirrored with the former server again.
  void MoveBack();
  // After a MoveTo: there is no way back.
  void ForgetFormer();

 private:
  void RemoveRange(uint64_t address);
  struct Unmapper {
    size_t bytes;
    void operator()(char* memory) const;
  };
  struct Range {
    uint64_t bytes = 0;
    char* memory = nullptr;
    std::unique_ptr<char, Unmapper> base;
    Writers writers = Writers::kAnybody;
    // Whether its whole pages are watched, and which these are, in bytes of the range.
    enum { kUnknown, kWatched, kCompared } watch = kUnknown;
    uint64_t first = 0, last = 0;
    // Of kTransfers.
    RecentPages recent;
    bool doubted = false;  // a transfer was possible at the last Push
    // What this Push compares: all, or what lies outside of [first, last), and `written`.
    bool all = false;
    std::vector<std::pair<uint64_t, uint64_t>> written;
  };
  using Ranges = std::map<uint64_t, Range>;

  static CUresult AddOnServer(ClientChannel* channel, uint64_t address, uint64_t bytes);
  ChannelStatus PushLocked(ClientChannel* channel) CR_REQUIRES(mutex_);
  ChannelStatus PushLocked(ClientChannel* channel, const std::vector<Ranges::iterator>& ranges) CR_REQUIRES(mutex_);
  // The first half for one range: sets what is to be compared. False: the memory is gone.
  bool CollectLocked(Range* range) CR_REQUIRES(mutex_);
  ChannelStatus PushRangeLocked(ClientChannel* channel, uint64_t address, const Range& range) CR_REQUIRES(mutex_);
  ChannelStatus PushPartLocked(ClientChannel* channel, uint64_t address, const Range& range, uint64_t from, uint64_t to)
      CR_REQUIRES(mutex_);
  // Begins to watch the range, if that is worth it and possible.
  void WatchLocked(Range* range) CR_REQUIRES(mutex_);
  void UnwatchLocked(Range* range) CR_REQUIRES(mutex_);
  ChannelStatus SendRuns(ClientChannel* channel, std::string* runs);
  void MoveBackLocked() CR_REQUIRES(mutex_);
  CUresult MoveToLocked(ClientChannel* channel, const std::vector<Place>& places) CR_REQUIRES(mutex_);
  bool IsMirroredLocked(uint64_t address, uint64_t bytes) const CR_REQUIRES(mutex_);
  CUresult AddLocked(ClientChannel* channel, uint64_t address, uint64_t bytes, uint64_t memory, Writers writers)
      CR_REQUIRES(mutex_);
  // The range in which the server's address lies.
  Ranges::iterator FindLocked(uint64_t address) CR_REQUIRES(mutex_);
  // Takes what the server sent. False for what no server sends.
  bool ApplyLocked(std::string_view runs) CR_REQUIRES(mutex_);

  void UnwatchSharedLocked() CR_REQUIRES(mutex_);

  Mutex mutex_;
  Ranges ranges_ CR_GUARDED_BY(mutex_);  // by the server's address
  Ranges former_ CR_GUARDED_BY(mutex_);  // of the server before, while there is a way back
  std::atomic<size_t> ranges_count_{0};
  std::set<uint64_t> variable_pages_ CR_GUARDED_BY(mutex_);
  PageWrites writes_ CR_GUARDED_BY(mutex_);
  std::map<uint64_t, uint64_t> shared_ CR_GUARDED_BY(mutex_);  // WatchShared: address -> bytes
  std::atomic<bool> watches_shared_{false};
  bool working_ CR_GUARDED_BY(mutex_) = false;         // what is written to them now is written beside a kernel
  uint64_t host_functions_ CR_GUARDED_BY(mutex_) = 0;  // running now
  uint64_t looked_at_ CR_GUARDED_BY(mutex_) = 0;
  std::string runs_ CR_GUARDED_BY(mutex_);
  std::string pulled_ CR_GUARDED_BY(mutex_);
  bool said_ CR_GUARDED_BY(mutex_) = false, said_of_kernel_ CR_GUARDED_BY(mutex_) = false;  // lines on stderr
  bool said_of_shared_ CR_GUARDED_BY(mutex_) = false;  // the same, or nothing is to be said of it
  std::vector<std::pair<uint64_t, uint64_t>> collected_ CR_GUARDED_BY(mutex_);  // storage
};

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_MEMORY_MANAGED_MIRROR_H_
