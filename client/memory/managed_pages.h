// SPDX-License-Identifier: Apache-2.0
// Managed memory whose home is the GPU: which side has the newest bytes of which page.
//
// Segments of a memory file are mapped in this process; the server has device memory at the same addresses, and maps
// the file, too (kOpManagedMap), unless it is on another machine. A page belongs to one side at a time:
//
// - A new segment is this process's, and not watched: the program fills it like any memory.
// - HandOver, before work that may use it, has the server copy what was written to the device, and takes the pages'
//   mappings away. From then on the segment is watched (page_faults.h).
// - The first access to a page after that fetches it, with some of its neighbours; more of them, the longer the program
//   goes on from one to the next. A fetched page is protected against writes, so that HandOver knows what was written:
//   writing takes the protection away, for more pages at a time the longer the program goes on.
//
// What is not mapped cannot be written, and what is mapped and protected neither, so nothing is lost if other threads
// use the memory meanwhile.
//
// Devices report CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS as 0: the host must leave managed memory alone while the
// GPU works. An access that comes all the same waits until the GPU has finished, and a line on stderr says so.
//
// Thread-safe. A thread of its own deals with faults. Nothing here takes a lock that is held while the application's
// memory is touched: not the session's, and of the channel's only what channel users hold while they touch their own.
// So whoever sends from, or receives into, managed memory goes by a buffer (Overlaps).
#ifndef CUDA_REMOTE_CLIENT_MEMORY_MANAGED_PAGES_H_
#define CUDA_REMOTE_CLIENT_MEMORY_MANAGED_PAGES_H_

#include <cuda.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <shared_mutex>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "client/memory/page_faults.h"
#include "proto/channel/client_channel.h"
#include "proto/threads/mutex.h"

namespace cuda_remote::client {

class ManagedPages {
 public:
  // Whether there are segments. Cheap: asked at every call.
  bool active() const { return active_.load(std::memory_order_acquire); }
  // Whether the host has anything that HandOver would take.
  bool touched() const {
    return touched_count_.load(std::memory_order_acquire) != 0 && enabled_.load(std::memory_order_acquire);
  }
  // With a server that has the segments in another way, there is nothing to hand over.
  void Enable(bool enabled) { enabled_.store(enabled, std::memory_order_release); }

  // The memory file, and where its begin is mapped. `carried`: the server does not have the file, so the bytes travel
  // in the channel.
  void SetFile(int fd, uint64_t base, bool carried) { file_ = fd, base_ = base, carried_ = carried; }
  // Who is asked for the right to watch memory, and which accesses are watched at least (page_faults.h).
  void SetFaultSource(PageFaults::DeviceSource source, PageFaults::Accesses accesses) {
    MutexLock lock(&mutex_);
    if (!faults_.open()) faults_.SetSource(std::move(source), accesses);
  }
  void SetCarried(bool carried) { carried_ = carried; }
  bool carried() const { return carried_; }

  // The segment is there, here and on the server, and zero. Whole pages.
  void Add(uint64_t address, uint64_t bytes);
  // The program frees it: nothing of it is handed over from now on, so that what other threads send names no memory
  // that the server has freed.
  void Leave(uint64_t address);
  // Whether kernels have ever used the file's pages themselves: what comes into the segment next should not begin so.
  bool WasInPlace(uint64_t address);
  // It is about to go, or will be zero on the server again and is to be zero here: the caller cuts it out of the file.
  void Remove(uint64_t address);
  // The bytes, which lie in one segment, become zero. They belong to nobody just now.
  void Clear(uint64_t address, uint64_t bytes);

  // The program has advised, or not any more, that the bytes are mostly the host's: as WillUse, but for good. They lie
  // in one allocation.
  void PreferHost(uint64_t address, uint64_t bytes, bool preferred);

  // Which memory a stream's work may use, and the host meanwhile, is the stream's affair; cuStreamAttachMemAsync.
  // `stream`: kGlobal, kHost or a stream's handle.
  static constexpr uint64_t kGlobal = ~uint64_t{0};
  static constexpr uint64_t kHost = ~uint64_t{0} - 1;
  void Attach(uint64_t address, uint64_t bytes, uint64_t stream);

  // Held, shared, from HandOver until the work is in the channel: a page that was fetched between the two would be the
  // host's while the work changes it.
  std::shared_mutex& sending() { return sending_; }

  // Gives everything that the host has to the server: before work that may use any of it. `ends_later`: pages that
  // kernels use themselves (Expected) may stay mapped until EndHandOver, which comes when the work is in the channel:
  // what is written to them until then reaches the kernels. So the server begins while they are taken.
  CUresult HandOver(ClientChannel* channel, bool ends_later = false);
  void EndHandOver() {
    if (ending_.load(std::memory_order_acquire)) UnmapLeft();
  }
  // The same for the segments in which these addresses lie.
  CUresult HandOver(ClientChannel* channel, const std::vector<uint64_t>& addresses);

  // The host is going to use the bytes: its first access to them fetches as much at once as an access that goes on.
  void WillUse(uint64_t address, uint64_t bytes);

  // What a call that waits for the GPU asks the server to fetch when it is done, so that no other request is needed.
  struct Expected {
    explicit Expected(ManagedPages* pages) : pages(pages) {}
    // Others may ask for the same pages again. The request must be over, or not sent.
    ~Expected() { pages->ForgetExpected(*this); }
    Expected(const Expected&) = delete;
    Expected& operator=(const Expected&) = delete;
    ManagedPages* const pages;
    std::vector<uint64_t> runs;  // address and length of each
    char answer = 0;             // arrives if they have been fetched (proto/mirror/fetched.h)
    std::string_view payload() const {
      return {reinterpret_cast<const char*>(runs.data()), runs.size() * sizeof(uint64_t)};
    }
  };
  // Before such a call, with `sending` held: what it may ask for, if anything. Until the lock that it returns is let go
  // of, which is when the request is in the channel, no page changes hands. After that the server copies them before it
  // does anything that is asked for later, or never. One call at a time asks for a segment's: the answer to the first
  // would let the program write to pages that the second brings.
  std::unique_lock<Mutex> Expect(std::unique_ptr<Expected>* expected) CR_UNGUARDED;
  // It has returned, and the pages have been fetched; `sequence` is the request's.
  void Arrived(ClientChannel* channel, const Expected& expected, uint64_t sequence);

  // A call that waits for the GPU has returned. Where the host has used the same few pages after each of the last such
  // calls, they are fetched before it asks for them. Cheap if there are none.
  void Anticipate(ClientChannel* channel) {
    if (habits_.load(std::memory_order_acquire) != 0) AnticipateAll(channel);
  }

  // Takes everything back, and stops watching. The server's bytes count for nothing from then on. `channel` null: the
  // server is gone, and the host goes on with what it has.
  CUresult Settle(ClientChannel* channel);

  // Whether the bytes overlap what may be watched.
  bool Overlaps(const void* memory, size_t bytes) const {
    const uint64_t address = reinterpret_cast<uint64_t>(memory);
    return active() && address < end_.load(std::memory_order_acquire) && bytes > 0 && address + bytes > base_;
  }

  // The host runs a function of the application in a stream's order: what the stream waits for is what it may use, so
  // nothing else is waited for.
  void EnterHostFunction() { host_functions_.fetch_add(1, std::memory_order_acq_rel); }
  void LeaveHostFunction() { host_functions_.fetch_sub(1, std::memory_order_acq_rel); }

 private:
  static constexpr uint64_t kPage = PageFaults::kPage;
  static constexpr uint64_t kNoPage = ~uint64_t{0};

  struct Segment {
    uint64_t bytes = 0;
    bool watched = false;
    bool touched = true;                // the host has pages
    std::vector<uint64_t> host;         // a bit for each page that the host has; all of them, unless watched
    std::vector<uint64_t> dirty;        // of those: not protected
    uint64_t first = 0, last = 0;       // pages that the host may have: first <= page < last
    uint64_t next_read = 0, reads = 0;  // pages: where a sequential access would go on, and how many were fetched last
    uint64_t next_write = 0, writes = 0;  // the same for taking protection away
    uint64_t marker = kNoPage;    // a page of the host's that is not mapped: its fault has the next ones fetched ahead
    bool mostly_written = false;  // at the last HandOver: then pages that are fetched by a write are not protected
    uint64_t wanted_first = 0, wanted_last = 0;  // WillUse
    std::map<uint64_t, uint64_t> preferred;      // PreferHost: first page -> one past the last
    // What the host had at the last HandOver, for how many of them it has been the same, and how often since then it
    // was to be fetched ahead. Habit: whether Expect and Anticipate look at it.
    uint64_t had_first = 0, had_last = 0, repeats = 0, ahead = 0;
    bool habit = false;
    bool in_place = false;  // until the next HandOver, which leaves the pages where they are
    bool was_in_place = false;
    const Expected* expected = nullptr;                          // of the call that asks for them, if one does
    std::map<uint64_t, std::pair<uint64_t, uint64_t>> attached;  // first page -> one past the last, stream
  };
  using Segments = std::map<uint64_t, Segment>;

  static bool Get(const std::vector<uint64_t>& bits, uint64_t page) { return bits[page / 64] >> (page % 64) & 1; }
  static void Set(std::vector<uint64_t>* bits, uint64_t first, uint64_t last, bool value);

  Segments::iterator FindLocked(uint64_t address) CR_REQUIRES(mutex_);
  bool WatchLocked(uint64_t start, Segment* segment) CR_REQUIRES(mutex_);
  void TouchLocked(Segment* segment, bool touched) CR_REQUIRES(mutex_);
  CUresult HandOverLocked(ClientChannel* channel, uint64_t start, Segment* segment, bool ends_later)
      CR_REQUIRES(mutex_);
  void UnmapLeft();
  // Notes that [first, last), in pages, is to be flushed.
  void AddRunLocked(uint64_t start, uint64_t first, uint64_t last) CR_REQUIRES(mutex_);
  // The same for what the file has of [from, to), in bytes of the segment: the rest is zero.
  void AddFileRunsLocked(uint64_t start, uint64_t from, uint64_t to) CR_REQUIRES(mutex_);
  CUresult SendRunsLocked(ClientChannel* channel) CR_REQUIRES(mutex_);
  CUresult SendBytesLocked(ClientChannel* channel) CR_REQUIRES(mutex_);
  // Calls use(first, last) for each run of pages of `bits` in [from, to) that have `value`.
  template <typename Use>
  static void ForEachRun(const std::vector<uint64_t>& bits, uint64_t from, uint64_t to, bool value, const Use& use);
  // Settle but for the thread.
  CUresult TakeBackLocked(ClientChannel* channel) CR_REQUIRES(mutex_);
  bool StartLocked() CR_REQUIRES(mutex_);
  void Serve();
  void ResolveLocked(const PageFaults::Fault& fault) CR_REQUIRES(mutex_);
  void AnticipateAll(ClientChannel* channel);
  void ForgetExpected(const Expected& expected);
  void SetHabitLocked(Segment* segment, bool habit) CR_REQUIRES(mutex_);
  // The pages of the segment's habit have been fetched.
  void ShowLocked(uint64_t start, Segment* segment) CR_REQUIRES(mutex_);
  // Notes that the host has the pages from now on.
  void TakeLocked(Segment* segment, uint64_t first, uint64_t last) CR_REQUIRES(mutex_);
  // What a page may be fetched with, in pages, and what its fetching has to wait for.
  struct Reach {
    uint64_t from, to;
    uint32_t wait;
    uint64_t stream;
  };
  Reach ReachOfLocked(const Segment& segment, uint64_t page) const CR_REQUIRES(mutex_);
  void FetchForLocked(uint64_t start, Segment* segment, uint64_t page, bool is_write) CR_REQUIRES(mutex_);
  // Pages behind those that a sequential access has come to, before it asks for them. `map` is called while they are on
  // their way.
  void FetchAheadLocked(uint64_t start, Segment* segment, bool is_write, const std::function<void()>& map)
      CR_REQUIRES(mutex_);
  CUresult FetchLocked(ClientChannel* channel, uint64_t address, uint64_t bytes, uint32_t wait, uint64_t stream,
                       bool* busy) CR_REQUIRES(mutex_);
  // The two halves of Fetch. 0: it could not be sent.
  uint64_t BeginFetchLocked(ClientChannel* channel, uint64_t address, uint64_t bytes, uint32_t wait, uint64_t stream)
      CR_REQUIRES(mutex_);
  CUresult EndFetchLocked(ClientChannel* channel, uint64_t sequence, uint64_t address, uint64_t bytes, bool* busy)
      CR_REQUIRES(mutex_);
  void LoseLocked() CR_REQUIRES(mutex_);

  std::shared_mutex sending_;  // before mutex_
  Mutex mutex_;
  std::atomic<uint64_t> hand_overs_{0};
  Segments segments_ CR_GUARDED_BY(mutex_);
  std::atomic<bool> active_{false};
  std::atomic<size_t> touched_count_{0};
  std::atomic<bool> enabled_{true};
  std::atomic<size_t> habits_{0};  // segments with one
  std::atomic<uint64_t> end_{0};
  int file_ = -1;
  uint64_t base_ = 0;
  std::atomic<bool> carried_{false};
  std::string carry_ CR_GUARDED_BY(mutex_);  // bytes on their way
  PageFaults faults_;
  std::thread server_;
  ClientChannel* channel_ CR_GUARDED_BY(mutex_) = nullptr;  // of the last HandOver
  std::vector<uint64_t> runs_ CR_GUARDED_BY(mutex_);
  std::vector<std::pair<uint64_t, uint64_t>> left_ CR_GUARDED_BY(mutex_);  // address, bytes: what EndHandOver unmaps
  std::atomic<bool> ending_{false};
  std::atomic<int> host_functions_{0};
  std::atomic<bool> said_{false}, lost_{false};  // lines on stderr, once each
};

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_MEMORY_MANAGED_PAGES_H_
