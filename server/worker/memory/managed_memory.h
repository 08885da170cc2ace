// SPDX-License-Identifier: Apache-2.0
// Managed memory with a home on the GPU.
//
// The client has a file (memfd) mapped at some addresses; here, device memory is mapped at the same addresses, and the
// file somewhere else. Which of the two has the newest bytes of a page is the client's to know
// (client/memory/managed_pages.h): it has pages copied from the file to the device (Flush) and back (Fetch). A client
// on another machine keeps its file, and the bytes travel with its requests (Write, Read).
//
// Short segments that host and kernels use in turn may be host memory for a while: then the file is mapped, and
// registered, at the client's address, and Flush and Fetch copy nothing (managed_turns.h). The client need not know.
//
// Copies are made in streams of this class's own, which wait for no other stream, and have ended when the functions
// return, except where one says otherwise. Thread-safe: the executor, its watcher and waiters copy. The caller makes
// sure that no work on the GPU uses the same pages.
#ifndef CUDA_REMOTE_SERVER_WORKER_MEMORY_MANAGED_MEMORY_H_
#define CUDA_REMOTE_SERVER_WORKER_MEMORY_MANAGED_MEMORY_H_

#include <cuda.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "proto/base/unique_fd.h"
#include "proto/driverabi/job_addresses.h"
#include "proto/threads/mutex.h"
#include "server/driver/driver_table.h"
#include "server/worker/memory/bulk_copies.h"
#include "server/worker/memory/managed_turns.h"
#include "server/worker/session/current_context.h"

namespace cuda_remote::server {

using driverabi::kManagedBase, driverabi::kManagedBytes;

class ManagedMemory {
 public:
  static constexpr uint64_t kPage = 2 << 20;

  // `staging` and what follows: of BulkCopies.
  ManagedMemory(const DriverTable& driver, StagingPool* staging, unsigned threads, std::function<void()> start)
      : driver_(driver), staging_(staging), bulk_(driver, staging, threads, std::move(start)) {}

  // Device memory on `device`, which all `devices` may use, for [address, address + bytes), and the file's part there.
  // All of it zero. The caller keeps `fd`; -1: the client is on another machine, and so are all its files. With a
  // context of the device current. CUDA_ERROR_OUT_OF_MEMORY if the GPU would be nearly full then.
  CUresult Map(uint64_t address, uint64_t bytes, int device, const std::vector<int>& devices, int fd, uint64_t offset);
  // Frees it. CUDA_ERROR_INVALID_VALUE if nothing begins at `address`.
  CUresult Unmap(uint64_t address);
  // Makes device memory zero that stays, and lets go of the file's pages, which the client may then cut out of it.
  CUresult Clear(uint64_t address);

  // How many bytes begin at `address`, 0: none. Whether a range lies in one piece.
  uint64_t BytesAt(uint64_t address) const;
  bool Contains(uint64_t address, uint64_t bytes) const;

  // `runs`: pairs of address and length. CUDA_ERROR_INVALID_VALUE, and nothing is copied, if one does not lie in one
  // piece, or `runs` is malformed.
  CUresult Flush(std::string_view runs);
  CUresult Fetch(std::string_view runs);
  CUresult Fetch(uint64_t address, uint64_t bytes);
  // The same at the end of a wait for the GPU. `in_place`: all of these segments are host memory, and still will be
  // when the client has handed them over again, so the file's pages are those that kernels use.
  CUresult FetchAtWait(std::string_view runs, bool* in_place);
  // As Fetch, but in the legacy stream, behind all work of blocking streams and all flushes, and it goes on. False if
  // that cannot be had for these pages. If it can, the caller polls FetchState, which is CUDA_ERROR_NOT_READY until the
  // pages are here, and then calls EndFetch; or it calls LeaveFetch: then whoever fetches later waits for it. Both
  // return FetchAtWait's `in_place`. For sessions with one context, and no streams but blocking ones. Executor only;
  // leaves that context current.
  bool BeginFetch(std::string_view runs);
  CUresult FetchState() CR_UNGUARDED;  // of the executor, which alone begins fetches
  bool EndFetch();
  bool LeaveFetch();
  // As Flush, but a short copy may go on: then flushing() is true, and the caller makes everything that may use the
  // memory or the file wait for it: a stream's further work by OrderBehindFlush, anything else by AwaitFlush.
  // `idle`: the session's GPU has nothing to do, nothing is captured, and there is one context. Then a short copy may
  // even wait for one of these two calls, so that it goes into the stream that OrderBehindFlush names, where it waits
  // for nothing. Executor only.
  // Segments also change their place then, if it is time to.
  CUresult BeginFlush(std::string_view runs, bool idle);
  bool flushing() const { return flushing_.load(std::memory_order_acquire); }
  // `stream` is not captured; its context is current. `blocking`: whether it waits for the legacy stream.
  CUresult OrderBehindFlush(CUstream stream, bool blocking);
  CUresult AwaitFlush();
  // The same for segments without a file. `runs`: of proto/mirror; those before a wrong one have been written.
  CUresult Write(std::string_view runs);
  CUresult Read(uint64_t address, uint64_t bytes, std::string* out);
  // Whether the segments have no file.
  bool carried() const;

  // Whether segments are host memory. Then NoteWork is told of all work that may use any managed memory, before it
  // begins, and says whether there are segments that the host does not use any more. LeaveHost puts these back into
  // device memory, if the session's GPU has nothing to do; StayOnHost leaves them for now. Executor only.
  bool on_host() const { return on_host_count_.load(std::memory_order_acquire) != 0; }
  bool NoteWork();
  void LeaveHost();
  void StayOnHost();

  // The context to copy in, if that of the memory's device is not known; executor only, before the functions above.
  void UseContext(int device, ContextRef context);
  // The context is about to die, and the stream in it.
  void ContextDies(uint64_t id);

 private:
  // Registered with the driver piece by piece. Registering costs as much as copying the bytes several times by
  // BulkCopies, which short copies are too short for. So a piece is registered when all of it has been copied so many
  // times.
  static constexpr uint64_t kRegistered = 32 << 20;
  static constexpr uint64_t kShort = 4 << 20;
  static constexpr uint64_t kTimesOfShort = 1, kTimesOfLong = 4;
  // Bytes of flushes that are put off, at most.
  static constexpr uint64_t kMostKept = 256 << 10;
  static_assert(kMostKept < BulkCopies::kWorth);
  // What stays free of a GPU's memory: 1/kLeftPart, at most kMostLeft. Natively, managed memory makes room for what the
  // driver needs itself, such as the code of a kernel that is launched for the first time. Here it stays where it is.
  static constexpr uint64_t kMostLeft = 128 << 20, kLeftPart = 64;
  // Segments that are host memory at a time, at most.
  static constexpr size_t kMostOnHost = 64;
  struct Piece {
    uint64_t moved = 0;
    bool registered = false;
  };
  // A client's file, for as long as segments lie in it.
  struct File {
    UniqueFd fd;
    uint64_t device, number;
  };
  struct Segment {
    uint64_t bytes = 0;
    int device = 0;
    char* memory = nullptr;      // the file's part
    std::shared_ptr<File> file;  // null: the client's is on another machine
    uint64_t offset = 0;
    std::vector<Piece> pieces;
    std::vector<int> devices;  // that may use it
    bool on_host = false;
    CUmemGenericAllocationHandle device_memory = 0;  // of a segment that is host memory
    ManagedTurns turns;
  };
  struct Lane {
    ContextRef context;
    CUstream stream = nullptr;
    CUevent flushed = nullptr;  // behind what BeginFlush has put into the stream, or OrderBehindFlush into another one
    bool flushing = false;      // it may not be done
    bool elsewhere = false;     // it is in another stream, and nothing in this one waits for it yet
    bool ordered = false;       // something in a blocking stream, or the legacy one, comes behind it
    CUevent fetched = nullptr;  // behind what BeginFetch has put into the legacy stream
    bool fetching = false;      // it may not be done, and LeaveFetch was called
  };

  struct Run {
    uint64_t address, bytes;
  };

  bool ReserveLocked() CR_REQUIRES(mutex_);
  const Segment* FindLocked(uint64_t address, uint64_t bytes, uint64_t* start) const CR_REQUIRES(mutex_);
  Segment* FindLocked(uint64_t address, uint64_t bytes, uint64_t* start) CR_REQUIRES(mutex_) {
    return const_cast<Segment*>(static_cast<const ManagedMemory*>(this)->FindLocked(address, bytes, start));
  }
  // Whether the GPU of the current context has room for `bytes` and for what stays free.
  bool LeavesRoomLocked(uint64_t bytes) const CR_REQUIRES(mutex_);
  // The stream of the device's, with its context current in this thread. Null: there is no context.
  CUstream EnterLocked(int device) CR_REQUIRES(mutex_);
  // Puts off the flush of `runs`. False if it must begin now.
  bool KeepLocked(const std::vector<Run>& runs) CR_REQUIRES(mutex_);
  std::vector<Run> TakeKeptLocked() CR_REQUIRES(mutex_);
  // Begins what was put off: in the lane's stream, or in one whose context is current.
  CUresult FlushKeptLocked() CR_REQUIRES(mutex_);
  CUresult FlushKeptInLocked(CUstream stream, bool blocking) CR_REQUIRES(mutex_);
  // Copies `runs`, which a client has sent; empty: they are wrong.
  std::vector<Run> RunsLocked(std::string_view runs) const CR_REQUIRES(mutex_);
  CUresult Copy(std::string_view runs, bool to_device, bool may_go_on);
  // Behind what was put off. Leaves in `runs` what was copied.
  CUresult CopyNowLocked(std::vector<Run>* runs, bool to_device, bool may_go_on) CR_REQUIRES(mutex_);
  // Copies ranges, each in one segment, and has ended when it returns, or else BeginFlush describes what goes on.
  CUresult CopyLocked(const std::vector<Run>& runs, bool to_device, bool may_go_on) CR_REQUIRES(mutex_);
  // Notes that what is in the lane's stream goes on.
  CUresult LeaveLocked(Lane* lane) CR_REQUIRES(mutex_);
  CUresult AwaitFlushLocked() CR_REQUIRES(mutex_);
  void AwaitFetchLocked() CR_REQUIRES(mutex_);
  // Begins to copy a range of one segment in `stream`, whose context is current; what is worth BulkCopies goes to
  // `bulk` instead.
  CUresult BeginCopyLocked(Segment* segment, uint64_t start, const Run& run, bool to_device, CUstream stream,
                           std::map<int, std::vector<BulkCopies::Part>>* bulk) CR_REQUIRES(mutex_);
  std::shared_ptr<File> OpenFileLocked(int fd) CR_REQUIRES(mutex_);
  CUresult MapFileLocked(int fd, uint64_t offset, Segment* segment) CR_REQUIRES(mutex_);
  // Waits for the copies of these devices.
  CUresult AwaitLocked(const std::vector<bool>& devices) CR_REQUIRES(mutex_);
  void RegisterLocked(Segment* segment, size_t piece) CR_REQUIRES(mutex_);
  void UnregisterLocked(Segment* segment) CR_REQUIRES(mutex_);
  CUresult ClearLocked(const Segment& segment, uint64_t address) CR_REQUIRES(mutex_);
  CUresult BackLocked(uint64_t address, const Segment& segment) CR_REQUIRES(mutex_);
  // Maps device memory at the segment's address.
  CUresult ShowDeviceLocked(uint64_t address, const Segment& segment, CUmemGenericAllocationHandle memory)
      CR_REQUIRES(mutex_);
  // Nothing uses the segment. The contents go along, except from a file that is not to be `copied`.
  CUresult PlaceOnHostLocked(uint64_t address, Segment* segment) CR_REQUIRES(mutex_);
  CUresult PlaceOnDeviceLocked(uint64_t address, Segment* segment, bool copied) CR_REQUIRES(mutex_);
  // The client has handed over all of these segments. Puts them where they are to be; `runs` are those that it has
  // changed.
  CUresult PlaceLocked(const std::vector<Run>& runs) CR_REQUIRES(mutex_);
  void ForEachSegmentLocked(const std::vector<Run>& runs, const std::function<void(Segment*)>& use) CR_REQUIRES(mutex_);
  // Takes out what needs no copy.
  void LeaveOutHostLocked(std::vector<Run>* runs) const CR_REQUIRES(mutex_);
  // Of the segments of the last BeginFetch: notes what their turns are at, and returns whether all of them stay.
  bool NoteFetchedLocked(const std::function<void(ManagedTurns*)>& note) CR_REQUIRES(mutex_);
  static bool StaysOnHost(const Segment& segment) { return segment.on_host && segment.turns.wants_host(); }

  const DriverTable& driver_;
  StagingPool* const staging_;
  mutable Mutex mutex_;
  uint64_t reserved_ CR_GUARDED_BY(mutex_) = 0;  // bytes of addresses, 0: none yet
  std::map<uint64_t, Segment> segments_ CR_GUARDED_BY(mutex_);
  std::map<int, Lane> lanes_ CR_GUARDED_BY(mutex_);
  std::atomic<bool> flushing_{false};            // any lane's, or something is in `kept_`
  std::vector<Run> kept_ CR_GUARDED_BY(mutex_);  // of one device: flushes that were put off
  uint64_t kept_bytes_ CR_GUARDED_BY(mutex_) = 0;
  CUevent fetch_ CR_GUARDED_BY(mutex_) = nullptr;        // of the last BeginFetch
  std::vector<uint64_t> fetched_ CR_GUARDED_BY(mutex_);  // its segments
  std::vector<uint64_t> on_host_ CR_GUARDED_BY(mutex_);
  std::atomic<size_t> on_host_count_{0};
  std::weak_ptr<File> file_ CR_GUARDED_BY(mutex_);  // of the segment that came last
  BulkCopies bulk_;
};

}  // namespace cuda_remote::server

#endif  // CUDA_REMOTE_SERVER_WORKER_MEMORY_MANAGED_MEMORY_H_
