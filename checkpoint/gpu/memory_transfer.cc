// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/gpu/memory_transfer.h"

#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <deque>
#include <memory>
#include <system_error>
#include <thread>

#include "proto/base/clock.h"
#include "proto/base/text.h"
#include "proto/codec/codec.h"
#include "proto/frame/handle.h"
#include "proto/threads/mutex.h"

namespace cuda_remote::checkpoint {

unsigned g_transfer_threads_for_testing = 0;

namespace {

using ckptfmt::kChunkBytes;
using ckptfmt::Region;
using ckptfmt::RegionKind;

static_assert(kChunkBytes == ChunkPool::kSlotBytes && kChunkBytes == SharedBuffers::kBytes);
// Of a chunk, in a request through the channel.
constexpr uint64_t kPiece = kMaxPayloadBytes;
constexpr size_t kPiecesPerChunk = (kChunkBytes + kPiece - 1) / kPiece;
// So many bytes open a region; one of less than kWorthSharing goes through the channel, where nobody
// waits for answers.
constexpr size_t kOpening = 4096, kWorthSharing = 256 << 10;
// Threads that only copy, and those that read files and hash as well; each has a few chunks on the way, and all have
// kCount together.
constexpr unsigned kMostCopying = 6, kMostFilling = 14;

std::string NameOf(const Region& region) {
  const bool array = region.kind == RegionKind::kArray;
  const std::string text = Hex(array ? region.object : region.address);
  if (array) return "the CUDA array " + text;
  if (region.kind == RegionKind::kHeap) return "the kernels' heap at " + text;
  if (region.kind == RegionKind::kAllocation) return "GPU memory at " + text;
  return "the GPU variable " + region.symbol;
}

template <typename Request>
Request Place(const Region& region, uint64_t offset, uint64_t bytes) {
  Request request;
  const bool named = region.kind != RegionKind::kAllocation;
  request.address = named ? offset : region.address + offset;
  request.bytes = bytes;
  if (named) {
    request.object = region.object;
    request.symbol = region.symbol;
  }
  request.context = region.context;
  return request;
}

uint64_t BeginRead(ClientChannel* channel, const Region& region, uint64_t offset, char* out, uint64_t bytes) {
  FrameHeader header;
  header.call = kOpReadMemory;
  std::string message;
  Place<wire::OpReadMemory_Request>(region, offset, bytes).Encode(&message);
  return channel->Begin(header, message, {}, out, bytes);
}

// What the threads of one transfer share.
class Transfer {
 public:
  struct Chunk {
    size_t region;
    uint64_t index;
    size_t bytes;
    bool first;  // of its region, in this transfer
    uint64_t offset() const { return index * kChunkBytes; }
  };

  Transfer(ClientChannel* channel, const std::vector<Region>& regions, SharedBuffers* shared, const Continue& go_on,
           const SkipChunk& skip)
      : channel_(channel), regions_(regions), shared_(shared), go_on_(go_on) {
    for (size_t i = 0; i < regions.size(); ++i) {
      bool first = true;
      for (uint64_t at = 0; at < regions[i].bytes; at += kChunkBytes) {
        if (skip && skip(i, at / kChunkBytes)) continue;
        const size_t bytes = size_t(std::min(kChunkBytes, regions[i].bytes - at));
        chunks_.push_back({i, at / kChunkBytes, bytes, first});
        total_ += bytes;
        first = false;
      }
    }
    opened_ = std::make_unique<std::atomic<bool>[]>(regions.size());
  }

  ClientChannel* channel() const { return channel_; }
  SharedBuffers* shared() const { return shared_; }
  const Region& RegionOf(const Chunk& chunk) const { return regions_[chunk.region]; }
  bool stopped() const { return stopped_.load(std::memory_order_relaxed); }

  // The next chunk, null after the last one.
  const Chunk* Next() {
    const size_t index = next_.fetch_add(1, std::memory_order_relaxed);
    return index < chunks_.size() ? &chunks_[index] : nullptr;
  }

  // Whether a chunk may go through a shared buffer, once its region is open.
  bool CanShare(const Chunk& chunk) const {
    const Region& region = RegionOf(chunk);
    return shared_ && region.kind == RegionKind::kAllocation && region.context != 0;
  }
  // A region is open once a read or write of its first bytes is on its way through the channel: the server then sees to
  // it that copies reach all of the region (mappings without access).
  bool IsOpen(const Chunk& chunk) const { return opened_[chunk.region].load(std::memory_order_acquire); }
  void Opened(const Chunk& chunk) { opened_[chunk.region].store(true, std::memory_order_release); }
  // Until the thread that has the region's first chunk has opened it, or the transfer has failed. Chunks are taken in
  // order, and that thread waits for no other one.
  void AwaitOpen(const Chunk& chunk) const {
    while (!IsOpen(chunk) && !stopped()) std::this_thread::sleep_for(std::chrono::microseconds(20));
  }

  // Begins a copy between the GPU and a shared buffer, which is answered when it is done. 0: the session is over.
  uint64_t BeginCopy(const Chunk& chunk, size_t buffer, bool to_host) {
    return BeginCopyOn(channel_, chunk, buffer, to_host);
  }
  uint64_t BeginCopyOn(ClientChannel* channel, const Chunk& chunk, size_t buffer, bool to_host) {
    const Region& region = RegionOf(chunk);
    const uint64_t device = region.address + chunk.offset();
    wire::cuMemcpyAsync_Request request;
    request.dst = to_host ? shared_->address(buffer) : device;
    request.src = to_host ? device : shared_->address(buffer);
    request.bytes = chunk.bytes;
    request.blocking = true;
    FrameHeader header;
    header.call = kCall_cuMemcpyAsync;
    header.context_or_result = SlotOf(region.context);
    std::string message;
    request.Encode(&message);
    return channel->Begin(header, message, {}, nullptr, 0);
  }

  // The first failure is the one that is told.
  void Fail(const absl::Status& failure) {
    MutexLock lock(&mutex_);
    failure_.Update(failure);
    stopped_ = true;
  }
  void FailGone(ChannelStatus status) { Fail(Gone(channel_, status)); }

  void Advance(size_t bytes) {
    MutexLock lock(&mutex_);
    done_ += bytes;
    if (stopped_ || !go_on_ || go_on_(done_, total_)) return;
    failure_ = absl::CancelledError("interrupted");
    stopped_ = true;
  }

  // Runs share(thread, of how many) on several threads. Fails if one of them did.
  absl::Status Run(unsigned most, const std::function<void(size_t thread, size_t count)>& share) {
    const size_t count = std::min<size_t>(most, std::max<size_t>(chunks_.size(), 1));
    const auto run = [&](size_t thread) {
      try {
        share(thread, count);
      } catch (const std::exception& exception) {
        Fail(absl::InternalError(exception.what()));
      }
    };
    std::vector<std::thread> threads;
    try {
      while (threads.size() + 1 < count) threads.emplace_back(run, threads.size() + 1);
    } catch (const std::system_error&) {
      // Fewer will do.
    }
    run(0);
    for (std::thread& thread : threads) thread.join();
    MutexLock lock(&mutex_);
    return failure_;
  }

 private:
  ClientChannel* const channel_;
  const std::vector<Region>& regions_;
  SharedBuffers* const shared_;
  const Continue& go_on_;
  std::vector<Chunk> chunks_;
  std::unique_ptr<std::atomic<bool>[]> opened_;  // by region
  uint64_t total_ = 0;
  std::atomic<size_t> next_{0};
  std::atomic<bool> stopped_{false};
  Mutex mutex_;
  uint64_t done_ CR_GUARDED_BY(mutex_) = 0;
  absl::Status failure_ CR_GUARDED_BY(mutex_);
};

// One thread's part of ReadMemory.
class ReadShare {
 public:
  ReadShare(Transfer* transfer, ChunkPool* pool, const UseChunk& use, size_t thread, size_t count)
      : transfer_(transfer), pool_(pool), use_(use), most_(SharedBuffers::kCount / count) {
    for (size_t i = 0; i < most_; ++i) free_buffers_.push_back(thread * most_ + i);
  }

  const TransferTimes& times() const { return times_; }

  // After an exception: the slots are written to until every request is answered.
  ~ReadShare() {
    uint32_t result;
    uint64_t bytes;
    for (const Flight& flight : flights_) {
      Wait(flight, &result, &bytes);
      pool_->Give(flight.slot);
    }
  }

  void Run() {
    bool more = true;
    const Transfer::Chunk* chunk = nullptr;  // the next one
    while (more || !flights_.empty()) {
      more = more && !transfer_->stopped();
      char* slot = nullptr;
      const bool has_room = more && flights_.size() < most_;
      if (has_room && !chunk) more = (chunk = transfer_->Next()) != nullptr;
      // With chunks on the way this thread must not wait for a slot: it has slots itself.
      if (has_room && chunk) {
        const Moment start = Now();
        slot = flights_.empty() ? pool_->Take(chunk->bytes) : pool_->TryTake(chunk->bytes);
        // Memory that was not prepared is found here, and not while bytes arrive in it.
        if (slot) *static_cast<volatile char*>(slot) = 0;
        times_.slots += SecondsSince(start);
      }
      if (slot) {
        Start(*chunk, slot);
        chunk = nullptr;
      } else if (!flights_.empty()) {
        Finish();
      }
    }
  }

 private:
  static constexpr size_t kNone = SIZE_MAX;
  struct Flight {
    const Transfer::Chunk* chunk;
    char* slot;
    size_t buffer = kNone;  // or the shared one
    uint64_t sequences[kPiecesPerChunk] = {};
    size_t requests = 0;
  };

  void Start(const Transfer::Chunk& chunk, char* slot) {
    const Moment start = Now();
    flights_.push_back({&chunk, slot});
    Flight& flight = flights_.back();
    const bool opens = chunk.first && chunk.bytes >= kWorthSharing;
    if (transfer_->CanShare(chunk) && (opens || transfer_->IsOpen(chunk))) {
      flight.buffer = free_buffers_.back();
      free_buffers_.pop_back();
      // The server executes requests in their order. The copy brings these bytes once more.
      if (opens) flight.sequences[flight.requests++] = OpeningRead(chunk, slot);
      flight.sequences[flight.requests++] = transfer_->BeginCopy(chunk, flight.buffer, true);
      transfer_->Opened(chunk);
    } else {
      BeginPieces(&flight);
      transfer_->Opened(chunk);
    }
    times_.requests += SecondsSince(start);
  }

  uint64_t OpeningRead(const Transfer::Chunk& chunk, char* slot) {
    return BeginRead(transfer_->channel(), transfer_->RegionOf(chunk), chunk.offset(), slot, kOpening);
  }

  void BeginPieces(Flight* flight) {
    flight->requests = 0;
    for (uint64_t at = 0; at < flight->chunk->bytes; at += kPiece) {
      const uint64_t bytes = std::min<uint64_t>(kPiece, flight->chunk->bytes - at);
      flight->sequences[flight->requests] = BeginRead(transfer_->channel(), transfer_->RegionOf(*flight->chunk),
                                                      flight->chunk->offset() + at, flight->slot + at, bytes);
      ++flight->requests;
    }
  }

  // Waits for all requests, whatever becomes of them: the slot is written to until then. What they said is in *result,
  // and in *bytes how many came.
  ChannelStatus Wait(const Flight& flight, uint32_t* result, uint64_t* bytes) {
    ChannelStatus first = ChannelStatus::kOk;
    *result = 0;
    *bytes = 0;
    for (size_t i = 0; i < flight.requests; ++i) {
      ChannelStatus status = ChannelStatus::kClosed;
      if (flight.sequences[i] != 0) status = transfer_->channel()->Wait(flight.sequences[i], &reply_);
      if (status == ChannelStatus::kOk) {
        if (*result == 0) *result = reply_.result;
        *bytes += reply_.payload_bytes;
      } else if (first == ChannelStatus::kOk) {
        first = status;
      }
    }
    return first;
  }

  void Finish() {
    Flight flight = flights_.front();
    flights_.pop_front();
    uint32_t result;
    uint64_t got;
    const Moment start = Now();
    ChannelStatus status = Wait(flight, &result, &got);
    Waited(flight, SecondsSince(start));
    if (flight.buffer != kNone) {
      if (status == ChannelStatus::kOk && result == 0) {
        const Moment arrived = Now();
        memcpy(flight.slot, transfer_->shared()->data(flight.buffer), flight.chunk->bytes);
        got = flight.chunk->bytes;
        times_.emptying += SecondsSince(arrived);
      } else if (status == ChannelStatus::kOk && !transfer_->stopped()) {
        // Something that this way does not reach; the other one says what is wrong.
        BeginPieces(&flight);
        status = Wait(flight, &result, &got);
      }
      free_buffers_.push_back(flight.buffer);
    }
    const Transfer::Chunk& chunk = *flight.chunk;
    if (status == ChannelStatus::kOk && result == 0 && got == chunk.bytes && !transfer_->stopped()) {
      const Moment using_it = Now();
      const absl::Status used = use_(chunk.region, chunk.index, flight.slot, chunk.bytes);
      times_.using_ += SecondsSince(using_it);
      if (used.ok()) {
        transfer_->Advance(chunk.bytes);
      } else {
        transfer_->Fail(used);
      }
      return;
    }
    pool_->Give(flight.slot);
    if (status != ChannelStatus::kOk) {
      transfer_->FailGone(status);
    } else if (result != 0 || got != chunk.bytes) {
      transfer_->Fail(Failed("read " + NameOf(transfer_->RegionOf(chunk)), result));
    }
  }

  void Waited(const Flight& flight, double seconds) {
    const bool shared = flight.buffer != kNone;
    (shared ? times_.copies : times_.channel) += seconds;
    ++(shared ? times_.shared_chunks : times_.channel_chunks);
    (shared ? times_.shared_bytes : times_.channel_bytes) += flight.chunk->bytes;
    if (seconds <= times_.longest) return;
    times_.longest = seconds;
    times_.longest_chunk = std::to_string(flight.chunk->bytes) + " bytes of " +
                           NameOf(transfer_->RegionOf(*flight.chunk)) +
                           (shared ? " through a shared buffer" : " through the channel");
  }

  TransferTimes times_;
  Transfer* const transfer_;
  ChunkPool* const pool_;
  const UseChunk& use_;
  const size_t most_;  // chunks on the way
  std::vector<size_t> free_buffers_;
  std::deque<Flight> flights_;
  Reply reply_;
};

// One thread's part of WriteMemory.
class WriteShare {
 public:
  WriteShare(Transfer* transfer, const FillChunk& fill, size_t thread, size_t count)
      : transfer_(transfer), fill_(fill), first_buffer_(thread * (SharedBuffers::kCount / count)) {
    flights_.resize(SharedBuffers::kCount / count);
  }

  void Run() {
    for (size_t turn = 0; !transfer_->stopped(); turn = (turn + 1) % flights_.size()) {
      const Transfer::Chunk* const chunk = transfer_->Next();
      if (!chunk) break;
      if (transfer_->CanShare(*chunk) && (chunk->index > 0 || chunk->bytes >= kWorthSharing)) {
        // The buffer's last copy, which must be done before it is filled again.
        Finish(turn);
        Share(*chunk, turn);
      } else {
        Send(*chunk);
      }
    }
    for (size_t turn = 0; turn < flights_.size(); ++turn) Finish(turn);
  }

 private:
  struct Flight {
    const Transfer::Chunk* chunk = nullptr;
    uint64_t sequence = 0;
  };

  bool Fill(const Transfer::Chunk& chunk, char* out) {
    const absl::Status filled = fill_(chunk.region, chunk.index, out, chunk.bytes);
    if (!filled.ok()) transfer_->Fail(filled);
    return filled.ok();
  }

  void Share(const Transfer::Chunk& chunk, size_t turn) {
    const size_t buffer = first_buffer_ + turn;
    char* const bytes = transfer_->shared()->data(buffer);
    if (!Fill(chunk, bytes)) return;
    if (chunk.index == 0) {
      // The copy brings these bytes once more.
      if (!SendFrom(chunk, bytes, kOpening)) return;
      transfer_->Opened(chunk);
    } else {
      transfer_->AwaitOpen(chunk);
      if (transfer_->stopped()) return;
    }
    flights_[turn] = {&chunk, transfer_->BeginCopy(chunk, buffer, false)};
    if (flights_[turn].sequence == 0) transfer_->FailGone(ChannelStatus::kClosed);
  }

  void Send(const Transfer::Chunk& chunk) {
    if (!own_) own_.reset(new char[kChunkBytes]);
    if (Fill(chunk, own_.get()) && SendFrom(chunk, own_.get(), chunk.bytes)) transfer_->Advance(chunk.bytes);
  }

  // The first `count` bytes of a chunk, through the channel.
  bool SendFrom(const Transfer::Chunk& chunk, const char* bytes, size_t count) {
    const absl::Status sent =
        SendBytes(transfer_->channel(), transfer_->RegionOf(chunk), chunk.offset(), {bytes, count});
    if (!sent.ok()) transfer_->Fail(sent);
    return sent.ok();
  }

  void Finish(size_t turn) {
    Flight flight;
    std::swap(flight, flights_[turn]);
    if (flight.sequence == 0) return;
    const ChannelStatus status = transfer_->channel()->Wait(flight.sequence, &reply_);
    if (status != ChannelStatus::kOk) {
      transfer_->FailGone(status);
      return;
    }
    if (reply_.pending_error != 0) {
      transfer_->Fail(Failed("write " + NameOf(transfer_->RegionOf(*flight.chunk)), reply_.pending_error));
      return;
    }
    // Something that this way does not reach; if the other one does not either, the Drain tells.
    const char* const bytes = transfer_->shared()->data(first_buffer_ + turn);
    if (reply_.result == 0 || SendFrom(*flight.chunk, bytes, flight.chunk->bytes)) {
      transfer_->Advance(flight.chunk->bytes);
    }
  }

  Transfer* const transfer_;
  const FillChunk& fill_;
  const size_t first_buffer_;
  std::vector<Flight> flights_;
  std::unique_ptr<char[]> own_;  // for chunks that go through the channel
  Reply reply_;
};

// One thread's part of CopyBetween.
class CopyShare {
 public:
  // `transfer` is the first server's; `opened` says of which regions the second one has got the first bytes.
  CopyShare(Transfer* transfer, ClientChannel* to, std::atomic<bool>* opened, const ChangeChunk& change, size_t thread,
            size_t count)
      : transfer_(transfer), to_(to), opened_(opened), change_(change), most_(SharedBuffers::kCount / count) {
    for (size_t i = 0; i < most_; ++i) free_buffers_.push_back(thread * most_ + i);
  }

  // After an exception: buffers are written to until every request is answered.
  ~CopyShare() {
    for (const Flight& flight : flights_) {
      for (const uint64_t read : flight.reads) {
        if (read != 0) transfer_->channel()->Wait(read, &reply_);
      }
      if (flight.write != 0) to_->Wait(flight.write, &reply_);
    }
  }

  void Run() {
    bool more = true;
    while (more || !flights_.empty()) {
      more = more && !transfer_->stopped();
      const Transfer::Chunk* chunk = nullptr;
      if (more && !free_buffers_.empty()) {
        chunk = transfer_->Next();
        more = chunk != nullptr;
      }
      if (!chunk) {
        if (!flights_.empty()) Finish();
      } else if (transfer_->CanShare(*chunk) && (Opens(*chunk) || transfer_->IsOpen(*chunk))) {
        Begin(*chunk);
      } else {
        Pass(*chunk);
      }
    }
  }

 private:
  struct Flight {
    const Transfer::Chunk* chunk;
    size_t buffer;
    uint64_t reads[2] = {};  // the opening one, and the copy
    uint64_t write = 0;      // then the copy to the second server
  };

  static bool Opens(const Transfer::Chunk& chunk) { return chunk.first && chunk.bytes >= kWorthSharing; }

  void Begin(const Transfer::Chunk& chunk) {
    Flight flight{&chunk, free_buffers_.back()};
    free_buffers_.pop_back();
    const Region& region = transfer_->RegionOf(chunk);
    if (Opens(chunk)) flight.reads[0] = BeginRead(transfer_->channel(), region, chunk.offset(), opening_, kOpening);
    flight.reads[1] = transfer_->BeginCopy(chunk, flight.buffer, true);
    transfer_->Opened(chunk);
    flights_.push_back(flight);
  }

  // The oldest chunk: from the first server to the second, or done.
  void Finish() {
    Flight flight = flights_.front();
    flights_.pop_front();
    if (flight.write != 0) {
      Written(flight);
      return;
    }
    const Transfer::Chunk& chunk = *flight.chunk;
    uint32_t result = 0;
    ChannelStatus status = ChannelStatus::kOk;
    for (size_t i = Opens(chunk) ? 0 : 1; i < 2; ++i) {
      const ChannelStatus one =
          flight.reads[i] != 0 ? transfer_->channel()->Wait(flight.reads[i], &reply_) : ChannelStatus::kClosed;
      if (status == ChannelStatus::kOk) status = one;
      if (one == ChannelStatus::kOk && result == 0) result = reply_.result;
    }
    if (status != ChannelStatus::kOk) {
      transfer_->FailGone(status);
    } else if (!transfer_->stopped() && result != 0) {
      // Something that this way does not reach; the other one says what is wrong.
      Pass(chunk);
    } else if (!transfer_->stopped()) {
      char* const bytes = transfer_->shared()->data(flight.buffer);
      if (Change(chunk, bytes) && OpenSecond(chunk, bytes) && !transfer_->stopped()) {
        flight.write = transfer_->BeginCopyOn(to_, chunk, flight.buffer, false);
        if (flight.write != 0) {
          flights_.push_back(flight);
          return;
        }
        GoneSecond(ChannelStatus::kClosed);
      }
    }
    free_buffers_.push_back(flight.buffer);
  }

  void Written(const Flight& flight) {
    const Transfer::Chunk& chunk = *flight.chunk;
    const ChannelStatus status = to_->Wait(flight.write, &reply_);
    if (status != ChannelStatus::kOk) {
      GoneSecond(status);
    } else if (reply_.pending_error != 0) {
      transfer_->Fail(Failed("write " + NameOf(transfer_->RegionOf(chunk)), reply_.pending_error));
    } else if (reply_.result == 0 || Send(chunk, transfer_->shared()->data(flight.buffer), chunk.bytes)) {
      transfer_->Advance(chunk.bytes);
    }
    free_buffers_.push_back(flight.buffer);
  }

  // As Transfer::IsOpen, for the second server.
  bool OpenSecond(const Transfer::Chunk& chunk, const char* bytes) {
    if (Opens(chunk)) {
      if (!Send(chunk, bytes, kOpening)) return false;
      opened_[chunk.region].store(true, std::memory_order_release);
      return true;
    }
    while (!opened_[chunk.region].load(std::memory_order_acquire) && !transfer_->stopped()) {
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
    return true;
  }

  // A chunk through both channels.
  void Pass(const Transfer::Chunk& chunk) {
    if (!own_) own_.reset(new char[kChunkBytes]);
    const Region& region = transfer_->RegionOf(chunk);
    for (size_t at = 0; at < chunk.bytes; at += kPiece) {
      const size_t bytes = std::min<size_t>(kPiece, chunk.bytes - at);
      const uint64_t read = BeginRead(transfer_->channel(), region, chunk.offset() + at, own_.get() + at, bytes);
      const ChannelStatus status = read != 0 ? transfer_->channel()->Wait(read, &reply_) : ChannelStatus::kClosed;
      if (status != ChannelStatus::kOk) return transfer_->FailGone(status);
      if (reply_.result == 0 && reply_.payload_bytes == bytes) continue;
      return transfer_->Fail(Failed("read " + NameOf(region), reply_.result));
    }
    if (!Change(chunk, own_.get()) || !Send(chunk, own_.get(), chunk.bytes)) return;
    transfer_->Opened(chunk);
    opened_[chunk.region].store(true, std::memory_order_release);
    transfer_->Advance(chunk.bytes);
  }

  bool Change(const Transfer::Chunk& chunk, char* bytes) {
    const absl::Status changed = change_(chunk.region, chunk.index, bytes, chunk.bytes);
    if (!changed.ok()) transfer_->Fail(changed);
    return changed.ok();
  }

  bool Send(const Transfer::Chunk& chunk, const char* bytes, size_t count) {
    const absl::Status sent = SendBytes(to_, transfer_->RegionOf(chunk), chunk.offset(), {bytes, count});
    if (!sent.ok()) transfer_->Fail(sent);
    return sent.ok();
  }

  void GoneSecond(ChannelStatus status) { transfer_->Fail(Gone(to_, status)); }

  Transfer* const transfer_;
  ClientChannel* const to_;
  std::atomic<bool>* const opened_;
  const ChangeChunk& change_;
  const size_t most_;  // chunks on the way
  std::vector<size_t> free_buffers_;
  std::deque<Flight> flights_;
  char opening_[kOpening];
  std::unique_ptr<char[]> own_;
  Reply reply_;
};

// A share of the processors: the server and the threads that write files need some, too.
unsigned Threads(unsigned eighths, unsigned most) {
  if (g_transfer_threads_for_testing != 0) return g_transfer_threads_for_testing;
  return std::clamp(std::thread::hardware_concurrency() * eighths / 8, 1u, most);
}

}  // namespace

absl::Status ReadMemory(ClientChannel* channel, const std::vector<Region>& regions, ChunkPool* pool,
                        SharedBuffers* shared, const UseChunk& use, const Continue& go_on, TransferTimes* times,
                        const SkipChunk& skip) {
  Transfer transfer(channel, regions, shared, go_on, skip);
  Mutex mutex;
  TransferTimes all;
  all.regions = regions.size();
  rusage before{}, after{};
  getrusage(RUSAGE_SELF, &before);
  const auto share = [&](size_t thread, size_t count) {
    ReadShare mine(&transfer, pool, use, thread, count);
    mine.Run();
    MutexLock lock(&mutex);
    all.Add(mine.times());
    ++all.threads;
  };
  absl::Status status = transfer.Run(Threads(3, kMostCopying), share);
  getrusage(RUSAGE_SELF, &after);
  all.page_faults = uint64_t(after.ru_minflt + after.ru_majflt - before.ru_minflt - before.ru_majflt);
  if (times) times->Add(all);
  return status;
}

void TransferTimes::Add(const TransferTimes& other) {
  threads += other.threads;
  regions += other.regions;
  channel_chunks += other.channel_chunks;
  channel_bytes += other.channel_bytes;
  shared_chunks += other.shared_chunks;
  shared_bytes += other.shared_bytes;
  slots += other.slots;
  requests += other.requests;
  channel += other.channel;
  copies += other.copies;
  emptying += other.emptying;
  using_ += other.using_;
  page_faults += other.page_faults;
  if (other.longest <= longest) return;
  longest = other.longest;
  longest_chunk = other.longest_chunk;
}

absl::Status WriteMemory(ClientChannel* channel, const std::vector<Region>& regions, SharedBuffers* shared,
                         const FillChunk& fill, const Continue& go_on) {
  Transfer transfer(channel, regions, shared, go_on, nullptr);
  const auto share = [&](size_t thread, size_t count) { WriteShare(&transfer, fill, thread, count).Run(); };
  return transfer.Run(Threads(7, kMostFilling), share);
}

absl::Status CopyBetween(ClientChannel* from, ClientChannel* to, const std::vector<Region>& regions,
                         SharedBuffers* shared, const ChangeChunk& change, const Continue& go_on,
                         const SkipChunk& skip) {
  Transfer transfer(from, regions, shared, go_on, skip);
  const auto opened = std::make_unique<std::atomic<bool>[]>(regions.size());
  const auto share = [&](size_t thread, size_t count) {
    CopyShare(&transfer, to, opened.get(), change, thread, count).Run();
  };
  return transfer.Run(Threads(3, kMostCopying), share);
}

absl::Status SendBytes(ClientChannel* channel, const Region& region, uint64_t offset, std::string_view bytes) {
  for (uint64_t at = 0; at < bytes.size(); at += kPiece) {
    const std::string_view piece = bytes.substr(at, kPiece);
    FrameHeader header;
    header.call = kOpWriteMemory;
    std::string message;
    Place<wire::OpWriteMemory_Request>(region, offset + at, piece.size()).Encode(&message);
    const ChannelStatus status = channel->Send(header, message, piece);
    if (status != ChannelStatus::kOk) return Gone(channel, status);
  }
  return absl::OkStatus();
}

}  // namespace cuda_remote::checkpoint
