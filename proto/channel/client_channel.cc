// SPDX-License-Identifier: Apache-2.0
#include "proto/channel/client_channel.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <new>
#include <utility>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#include "proto/base/clock.h"
#include "proto/base/standard_descriptors.h"
#include "proto/base/status_macros.h"
#include "proto/base/unique_fd.h"
#include "proto/channel/handshake.h"
#include "proto/ring/futex.h"
#include "proto/ring/ring.h"
#include "proto/ring/turn_lock.h"
#include "proto/threads/mutex.h"

namespace cuda_remote {
namespace {

using ring::RingStatus;

// A cold worker loads the driver and makes a context first.
constexpr int kHandshakeTimeoutMs = 60000;
// How often a waiting thread looks whether the peer still lives.
constexpr int kPeerCheckMs = 100;
// How often fire-and-forget traffic looks.
constexpr uint64_t kSendsPerPeerCheck = 4096;
// How long a sender sleeps on a full ring before it reads replies again.
constexpr int kFullRingFirstMs = 2;
// A waiting thread of an eager client looks this long. Waking a processor that sleeps deeply takes some hundred
// microseconds, which is 5 % of a copy of 256 MiB.
constexpr int64_t kEagerSpinNs = 10000000;
// How often TryBegin and WaitFor look again.
constexpr int kTryPauseUs = 50;
// Payloads from this size on are bulk.
constexpr size_t kBulk = 32 << 10;
// How much of the ring is made present at a time.
constexpr uint64_t kPopulate = 1 << 20;

// As memcpy, past the caches where that can be had; ordered before later stores, too. What the GPU reads by itself need
// not go through them: an ordinary copy first fetches each line that it is about to overwrite, which halves its rate,
// since the ring is long and its lines have left the caches by the time they come round again.
void CopyPastCaches(char* to, const char* from, size_t bytes) {
#if defined(__x86_64__)
  constexpr size_t kLine = 64;
  const size_t head = (kLine - reinterpret_cast<uintptr_t>(to) % kLine) % kLine;
  if (bytes < head + kLine) {
    memcpy(to, from, bytes);
    return;
  }
  memcpy(to, from, head);
  to += head;
  from += head;
  bytes -= head;
  for (; bytes >= kLine; to += kLine, from += kLine, bytes -= kLine) {
    const __m128i a = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    const __m128i b = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 16));
    const __m128i c = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 32));
    const __m128i d = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 48));
    _mm_stream_si128(reinterpret_cast<__m128i*>(to), a);
    _mm_stream_si128(reinterpret_cast<__m128i*>(to + 16), b);
    _mm_stream_si128(reinterpret_cast<__m128i*>(to + 32), c);
    _mm_stream_si128(reinterpret_cast<__m128i*>(to + 48), d);
  }
  _mm_sfence();
#endif
  memcpy(to, from, bytes);
}

}  // namespace

class ClientChannel::Impl {
 public:
  Impl(int socket, std::unique_ptr<ring::RingMemory> memory, uint64_t next_sequence, Welcome welcome)
      : socket_(socket),
        memory_(std::move(memory)),
        longest_piece_(size_t(std::min<uint64_t>(kMaxPayloadBytes, memory_->capacity(ring::kRequestRing) / 4))),
        next_sequence_(next_sequence ? next_sequence : 1),
        last_marked_(next_sequence ? next_sequence - 1 : 0),
        request_(memory_.get(), ring::kRequestRing),
        reply_(memory_.get(), ring::kReplyRing),
        event_(memory_.get(), ring::kEventRing),
        welcome_(std::move(welcome)),
        populated_(request_.position()),
        populate_until_(populated_ + request_.capacity()) {
    RegisterForFork(this);
  }

  ~Impl() {
    UnregisterForFork(this);
    for (Pending*& bucket : buckets_) FreeList(bucket);
    FreeList(free_);
  }

  ChannelStatus Send(FrameHeader header, std::string_view message, std::string_view payload, uint64_t* sequence,
                     bool mark, bool quiet) {
    if (const ChannelStatus status = CheckSizes(message, payload); status != ChannelStatus::kOk) return status;
    header.flags |= kFlagNoReply;
    ChannelStatus status;
    {
      std::lock_guard<ring::TurnLock> lock(send_mutex_);
      header.sequence = TakeSequence();
      if (header.sequence % kSendsPerPeerCheck == 0) CheckPeer();
      if (sequence) *sequence = header.sequence;
      if (mark) last_marked_.store(header.sequence, std::memory_order_release);
      status = Write(&header, message, payload, quiet);
    }
    // Waking the worker is a system call, for which no other thread should have to wait.
    request_.Wake();
    return status;
  }

  uint64_t Begin(FrameHeader header, std::string_view message, std::string_view payload, void* out, size_t out_bytes,
                 bool mark) {
    if (CheckSizes(message, payload) != ChannelStatus::kOk) return 0;
    std::unique_lock<ring::TurnLock> lock(send_mutex_);
    return BeginLocked(&lock, header, message, payload, out, out_bytes, mark);
  }

  // With the lock, which it gives up.
  uint64_t BeginLocked(std::unique_lock<ring::TurnLock>* held, FrameHeader header, std::string_view message,
                       std::string_view payload, void* out, size_t out_bytes, bool mark) {
    std::unique_lock<ring::TurnLock>& lock = *held;
    header.flags &= ~uint32_t(kFlagNoReply);
    header.sequence = TakeSequence();
    {
      MutexLock pending_lock(&pending_mutex_);
      if (!AddPendingLocked(header.sequence, header.call, out, out_bytes)) return 0;
    }
    if (mark) last_marked_.store(header.sequence, std::memory_order_release);
    if (Write(&header, message, payload, false) == ChannelStatus::kOk) {
      lock.unlock();
      request_.Wake();
      return header.sequence;
    }
    // The session is over; whoever reads replies will find nothing for this one.
    MutexLock pending_lock(&pending_mutex_);
    Pending* const pending = FindLocked(header.sequence);
    while (reader_active_) {
      pending_lock.Unlock();
      sched_yield();
      pending_lock.Lock();
    }
    RemoveLocked(pending);
    return 0;
  }

  uint64_t TryBegin(FrameHeader header, std::string_view message, int timeout_ms, ChannelStatus* status) {
    if (*status = CheckSizes(message, {}); *status != ChannelStatus::kOk) return 0;
    const int64_t deadline = NowMs() + timeout_ms;
    const uint64_t bytes = ring::FrameBytes(message.size(), 0);
    while (true) {
      if (*status = state(); *status != ChannelStatus::kOk) return 0;
      std::unique_lock<ring::TurnLock> lock(send_mutex_, std::try_to_lock);
      if (lock.owns_lock()) {
        request_.Resync();
        char* where;
        // Then the request below finds room, too.
        if (request_.Reserve(bytes, &where) == RingStatus::kOk) {
          const uint64_t sequence = BeginLocked(&lock, header, message, {}, nullptr, 0, false);
          if (sequence == 0) *status = state() == ChannelStatus::kOk ? ChannelStatus::kSystemError : state();
          return sequence;
        }
        lock.unlock();
        DrainReplies();  // which the server may have to wait for
        if (CheckPeer()) Fail(ChannelStatus::kClosed, "");
      }
      if (NowMs() >= deadline) {
        *status = ChannelStatus::kTimeout;
        return 0;
      }
      usleep(kTryPauseUs);
    }
  }

  ChannelStatus Wait(uint64_t sequence, Reply* reply) {
    MutexLock lock(&pending_mutex_);
    Pending* const pending = FindLocked(sequence);
    if (!pending) return ChannelStatus::kSystemError;
    while (!pending->done) {
      if (!reader_active_) {
        // Nobody touches `pending` now, so this thread may give up if the session is over.
        if (state() != ChannelStatus::kOk) break;
        reader_active_ = true;
        lock.Unlock();
        ReadUntil(pending);
        lock.Lock();
        LeaveReaderRoleLocked();
        continue;
      }
      pending->word.store(0, std::memory_order_relaxed);
      AddWaiterLocked(pending);
      lock.Unlock();
      ring::FutexWait(&pending->word, 0, -1, false);
      lock.Lock();
      RemoveWaiterLocked(pending);
    }
    return TakeLocked(pending, reply);
  }

  // Does not have the reader role while it waits, and nobody wakes it: a thread of the application that waits reads its
  // reply itself, and leaves the role without a system call.
  ChannelStatus WaitFor(uint64_t sequence, int timeout_ms, Reply* reply) {
    const int64_t deadline = NowMs() + timeout_ms;
    MutexLock lock(&pending_mutex_);
    Pending* const pending = FindLocked(sequence);
    if (!pending) return ChannelStatus::kSystemError;
    for (bool peer_gone = false; !pending->done && (reader_active_ || state() == ChannelStatus::kOk);) {
      lock.Unlock();
      DrainReplies();
      lock.Lock();
      if (pending->done) break;
      if (NowMs() >= deadline) return ChannelStatus::kTimeout;
      // What it sent before has been read, or another thread is at it.
      const bool ends = peer_gone && !reader_active_;
      lock.Unlock();
      if (ends) Fail(ChannelStatus::kClosed, "");
      peer_gone = CheckPeer();
      usleep(kTryPauseUs);
      lock.Lock();
    }
    return TakeLocked(pending, reply);
  }

  void Abandon(uint64_t sequence) {
    MutexLock lock(&pending_mutex_);
    Pending* const pending = FindLocked(sequence);
    if (!pending) return;
    if (pending->done || !reader_active_) {
      RemoveLocked(pending);
    } else {
      pending->abandoned = true;  // whoever reads may be about to fill it in
    }
  }

  ChannelStatus SendFd(uint64_t tag, int fd) {
    if (!welcome_.shared_memory) return ChannelStatus::kProtocolError;
    if (state() != ChannelStatus::kOk) return state();
    std::string body;
    EncodeTag(tag, &body);
    const ChannelStatus status = SendPacket(socket_.get(), PacketType::kFd, body, fd);
    if (status == ChannelStatus::kClosed) CheckPeer();
    return status;
  }

  ChannelStatus ReadEvent(FrameHeader* header, std::string* message, int timeout_ms) {
    event_.Resync();
    while (true) {
      const char* frame;
      switch (event_.Peek(header, &frame)) {
        case RingStatus::kOk:
          message->assign(frame + sizeof(FrameHeader), header->message_bytes);
          event_.Pop(*header);
          return ChannelStatus::kOk;
        case RingStatus::kCorrupt:
          return Fail(ChannelStatus::kProtocolError, "the server wrote an impossible event");
        case RingStatus::kNotYet:
          break;
      }
      if (state() != ChannelStatus::kOk) return state();
      if (timeout_ms == 0) return ChannelStatus::kTimeout;
      const int slice = timeout_ms < 0 ? kPeerCheckMs * 5 : std::min(timeout_ms, kPeerCheckMs * 5);
      event_.Wait(slice);
      if (event_.Ready()) continue;
      if (timeout_ms > 0) timeout_ms -= slice;
      if (CheckPeer() && !event_.Ready()) return Fail(ChannelStatus::kClosed, "");
    }
  }

  void InterruptEvents() { event_.Interrupt(); }

  ChannelFds DupFds() const {
    ChannelFds fds;
    fds.socket = fcntl(socket_.get(), F_DUPFD_CLOEXEC, kStandardDescriptors);
    fds.ring = fcntl(memory_->fd(), F_DUPFD_CLOEXEC, kStandardDescriptors);
    if (fds.socket >= 0 && fds.ring >= 0) return fds;
    if (fds.socket >= 0) close(fds.socket);
    if (fds.ring >= 0) close(fds.ring);
    return {};
  }

  uint64_t next_sequence() const { return next_sequence_.load(std::memory_order_relaxed); }
  uint64_t last_marked() const { return last_marked_.load(std::memory_order_acquire); }
  bool Fits(size_t message_bytes, size_t payload_bytes) const {
    return message_bytes <= kMaxMessageBytes && payload_bytes <= kMaxTotalPayloadBytes &&
           ring::FrameBytes(message_bytes, 0) <= request_.max_frame() / 2;
  }
  bool alive() const { return state() == ChannelStatus::kOk && !peer_gone_.load(std::memory_order_acquire); }
  std::string end_reason() {
    MutexLock lock(&reason_mutex_);
    return reason_;
  }
  const Welcome& welcome() const { return welcome_; }
  void SetEager(bool eager) {
    const bool many = ring::UsableProcessors() >= ring::kManyProcessors;
    reply_.SpinAtMost(eager && many ? kEagerSpinNs : ring::SpinBudget::DefaultMaxNs());
  }
  void SetStdoutSink(void (*sink)(const char*, size_t)) { sink_.store(sink, std::memory_order_release); }
  void SetStderrSink(void (*sink)(const char*, size_t)) { error_sink_.store(sink, std::memory_order_release); }

 private:
  // One request whose reply is still to come. Everything but `word` is guarded by pending_mutex_, or belongs to the
  // thread with the reader role while `done` is false.
  struct Pending {
    uint64_t sequence = 0;
    uint32_t call = 0;
    Pending* next = nullptr;         // in its bucket, or in the free list
    Pending* waiter_next = nullptr;  // in the list of sleeping threads
    Pending* waiter_before = nullptr;
    bool waiting = false;
    std::atomic<uint32_t> word{0};  // 0: sleep; 1: look again
    bool done = false;
    bool begun = false;  // the first frame of the reply was read
    bool abandoned = false;
    uint32_t result = 0;
    uint32_t pending_error = 0;
    char* out = nullptr;
    size_t out_bytes = 0;
    size_t received = 0;
    std::string message;
  };
  static constexpr size_t kBuckets = 256;

  // ------------------------------------------------------------------------------------------------- requests

  ChannelStatus CheckSizes(std::string_view message, std::string_view payload) const {
    return Fits(message.size(), payload.size()) ? ChannelStatus::kOk : ChannelStatus::kTooLarge;
  }

  // Under send_mutex_, like all changes of the number.
  uint64_t TakeSequence() {
    const uint64_t sequence = next_sequence_.load(std::memory_order_relaxed);
    next_sequence_.store(sequence + 1, std::memory_order_relaxed);
    return sequence;
  }

  // Under send_mutex_. All frames of one request stand together in the ring. The caller wakes the worker afterwards.
  ChannelStatus Write(FrameHeader* header, std::string_view message, std::string_view payload, bool quiet) {
    if (state() != ChannelStatus::kOk) return state();
    request_.Resync();
    while (payload.size() > longest_piece_) {
      header->flags |= kFlagMorePayload;
      const ChannelStatus status = WriteFrame(header, message, payload.substr(0, longest_piece_), false);
      if (status != ChannelStatus::kOk) return status;
      message = {};
      payload.remove_prefix(longest_piece_);
      // The next piece may have to wait for the room of this one.
      request_.Wake();
    }
    header->flags &= ~uint32_t(kFlagMorePayload);
    return WriteFrame(header, message, payload, quiet);
  }

  ChannelStatus WriteFrame(FrameHeader* header, std::string_view message, std::string_view piece, bool quiet) {
    header->message_bytes = uint32_t(message.size());
    header->payload_bytes = uint32_t(piece.size());
    const uint64_t bytes = ring::FrameBytes(message.size(), piece.size());
    char* where;
    RingStatus room = request_.Reserve(bytes, &where);
    if (room != RingStatus::kOk) {
      if (room == RingStatus::kNotYet) room = WaitForRoom(bytes, &where);
      if (room == RingStatus::kNotYet) return state();
      if (room == RingStatus::kCorrupt)
        return Fail(ChannelStatus::kProtocolError, "the server moved the request ring impossibly");
    }
    memcpy(where, header, sizeof(*header));
    if (!message.empty()) memcpy(where + sizeof(*header), message.data(), message.size());
    if (!piece.empty()) CopyPayload(where + sizeof(*header) + message.size(), piece.data(), piece.size());
    if (quiet) {
      request_.PublishQuietly(bytes);
    } else {
      request_.Publish(bytes);
    }
    return ChannelStatus::kOk;
  }

  // Under send_mutex_, like the rest.
  void CopyPayload(char* to, const char* from, size_t bytes) {
    if (bytes < kBulk) {
      memcpy(to, from, bytes);
      return;
    }
    Populate(bytes);
    // A worker lets the GPU read what is bulk; a relay's processor reads it itself, best from its caches.
    if (welcome_.shared_memory) {
      CopyPastCaches(to, from, bytes);
    } else {
      memcpy(to, from, bytes);
    }
  }

  // The first time round, each page of the ring would fault when it is written to, which takes several times as long as
  // the copy: those of bulk are made present together.
  void Populate(size_t bytes) {
    const uint64_t position = request_.position();
    const uint64_t end = position + sizeof(FrameHeader) + bytes;
    if (end <= populated_ || populated_ >= populate_until_) return;
    const uint64_t capacity = request_.capacity();
    const uint64_t start = std::max(populated_, position) & ~uint64_t(ring::kPageBytes - 1);
    const uint64_t length = std::min((end - start + kPopulate - 1) / kPopulate * kPopulate, capacity);
    populated_ = start + length;
#if defined(MADV_POPULATE_WRITE)
    // The data area is mapped twice in a row, so this is one piece. Where it fails, pages come one by one.
    madvise(memory_->data(ring::kRequestRing) + (start & (capacity - 1)), length, MADV_POPULATE_WRITE);
#endif
  }

  // kNotYet: the session is over.
  RingStatus WaitForRoom(uint64_t bytes, char** where) {
    int sleep_ms = kFullRingFirstMs;
    while (true) {
      // The server may be waiting for room in the reply ring, and nobody else may be reading.
      DrainReplies();
      request_.WaitRoom(bytes, sleep_ms);
      const RingStatus status = request_.Reserve(bytes, where);
      if (status != RingStatus::kNotYet) return status;
      if (state() != ChannelStatus::kOk) return RingStatus::kNotYet;
      if (CheckPeer()) {
        Fail(ChannelStatus::kClosed, "");
        return RingStatus::kNotYet;
      }
      sleep_ms = std::min(sleep_ms * 2, kPeerCheckMs);
    }
  }

  // -------------------------------------------------------------------------------------------------- replies

  void DrainReplies() {
    MutexLock lock(&pending_mutex_);
    if (reader_active_) return;
    reader_active_ = true;
    lock.Unlock();
    reply_.Resync();
    while (state() == ChannelStatus::kOk && ReadOne() == RingStatus::kOk) {
    }
    lock.Lock();
    LeaveReaderRoleLocked();
  }

  // With the reader role. Returns when `mine` is done or the session is over.
  void ReadUntil(Pending* mine) {
    reply_.Resync();
    while (!mine->done) {
      const RingStatus status = ReadOne();
      if (status == RingStatus::kOk) continue;
      if (status == RingStatus::kCorrupt || state() != ChannelStatus::kOk) return;
      reply_.Wait(kPeerCheckMs);
      if (reply_.Ready()) continue;
      if (CheckPeer() && !reply_.Ready()) {
        Fail(ChannelStatus::kClosed, "");
        return;
      }
    }
  }

  // With the reader role: reads one frame, if there is one. kCorrupt: the session has failed.
  RingStatus ReadOne() {
    FrameHeader header;
    const char* frame;
    RingStatus status = reply_.Peek(&header, &frame);
    if (status == RingStatus::kNotYet) return status;
    const char* why = "the server moved the reply ring impossibly";
    if (status == RingStatus::kOk) {
      status = RingStatus::kCorrupt;
      if ((header.flags & kFlagEvent) && !(header.flags & kFlagReply)) {
        const auto& which = header.aux == kOutputToStderr ? error_sink_ : sink_;
        if (auto* sink = which.load(std::memory_order_acquire)) {
          sink(frame + sizeof(header) + header.message_bytes, header.payload_bytes);
        }
        status = RingStatus::kOk;
      } else if (!(header.flags & kFlagReply)) {
        why = "the server wrote a frame that is neither reply nor event";
      } else {
        why = Deliver(header, frame);
        if (!why) status = RingStatus::kOk;
      }
    }
    if (status == RingStatus::kOk) {
      reply_.Pop(header);
    } else {
      Fail(ChannelStatus::kProtocolError, why);
    }
    return status;
  }

  // Gives a reply to the request that it answers. Null, or what is wrong with it.
  const char* Deliver(const FrameHeader& header, const char* frame) {
    MutexLock lock(&pending_mutex_);
    Pending* const pending = FindLocked(header.sequence);
    // A reply to a former holder of the session, or to one whose Begin failed.
    if (!pending) return nullptr;
    if (pending->done || pending->call != header.call) return "the server's reply does not fit its request";
    lock.Unlock();
    // The owner cannot take `pending` away: it waits until done, or until nobody has the reader role.
    if (!pending->begun) {
      pending->begun = true;
      pending->result = header.context_or_result;
      pending->pending_error = header.aux;
      try {
        pending->message.assign(frame + sizeof(header), header.message_bytes);
      } catch (...) {  // not further: the caller holds the reader role
        return "out of memory for a reply";
      }
    } else if (header.message_bytes != 0) {
      return "the server's reply has two messages";
    }
    if (header.payload_bytes > pending->out_bytes - pending->received)
      return "the server's reply is longer than was asked for";
    if (header.payload_bytes) {
      memcpy(pending->out + pending->received, frame + sizeof(header) + header.message_bytes, header.payload_bytes);
      pending->received += header.payload_bytes;
    }
    if (header.flags & kFlagMorePayload) return nullptr;
    lock.Lock();
    pending->done = true;
    if (pending->abandoned) {
      RemoveLocked(pending);
    } else if (pending->waiting) {
      Wake(pending);
    }
    return nullptr;
  }

  // ------------------------------------------------------------------- table of pending requests, under pending_mutex_

  Pending* FindLocked(uint64_t sequence) CR_REQUIRES(pending_mutex_) {
    Pending* pending = buckets_[sequence % kBuckets];
    while (pending && pending->sequence != sequence) pending = pending->next;
    return pending;
  }

  bool AddPendingLocked(uint64_t sequence, uint32_t call, void* out, size_t out_bytes) CR_REQUIRES(pending_mutex_) {
    Pending* pending = free_;
    if (pending) {
      free_ = pending->next;
    } else {
      pending = new (std::nothrow) Pending;
      if (!pending) return false;
    }
    pending->sequence = sequence;
    pending->call = call;
    pending->done = pending->begun = pending->waiting = pending->abandoned = false;
    pending->out = static_cast<char*>(out);
    pending->out_bytes = out ? out_bytes : 0;
    pending->received = 0;
    pending->next = buckets_[sequence % kBuckets];
    buckets_[sequence % kBuckets] = pending;
    return true;
  }

  // Ends a wait: the reply, or how the session has ended.
  ChannelStatus TakeLocked(Pending* pending, Reply* reply) CR_REQUIRES(pending_mutex_) {
    ChannelStatus status = state();
    if (pending->done) {
      status = ChannelStatus::kOk;
      reply->result = pending->result;
      reply->pending_error = pending->pending_error;
      reply->payload_bytes = pending->received;
      // Both strings keep a buffer, so that nothing is allocated in the long run.
      reply->message.swap(pending->message);
    }
    RemoveLocked(pending);
    return status;
  }

  void RemoveLocked(Pending* pending) CR_REQUIRES(pending_mutex_) {
    Pending** link = &buckets_[pending->sequence % kBuckets];
    while (*link != pending) link = &(*link)->next;
    *link = pending->next;
    pending->next = free_;
    free_ = pending;
  }

  static void FreeList(Pending* list) {
    while (list) {
      Pending* const next = list->next;
      delete list;
      list = next;
    }
  }

  void AddWaiterLocked(Pending* pending) CR_REQUIRES(pending_mutex_) {
    pending->waiting = true;
    pending->waiter_before = nullptr;
    pending->waiter_next = waiters_;
    if (waiters_) waiters_->waiter_before = pending;
    waiters_ = pending;
  }

  void RemoveWaiterLocked(Pending* pending) CR_REQUIRES(pending_mutex_) {
    pending->waiting = false;
    if (pending->waiter_before) {
      pending->waiter_before->waiter_next = pending->waiter_next;
    } else {
      waiters_ = pending->waiter_next;
    }
    if (pending->waiter_next) pending->waiter_next->waiter_before = pending->waiter_before;
  }

  void Wake(Pending* pending) {
    pending->word.store(1, std::memory_order_relaxed);
    ring::FutexWake(&pending->word, false);
  }

  // One sleeper takes over; all of them if the session is over.
  void LeaveReaderRoleLocked() CR_REQUIRES(pending_mutex_) {
    reader_active_ = false;
    const bool all = state() != ChannelStatus::kOk;
    for (Pending* waiter = waiters_; waiter; waiter = waiter->waiter_next) {
      if (waiter->done) continue;  // was woken already
      Wake(waiter);
      if (!all) return;
    }
  }

  // ------------------------------------------------------------------------------------------------ end of the session

  ChannelStatus state() const { return state_.load(std::memory_order_acquire); }

  ChannelStatus Fail(ChannelStatus status, const char* reason) {
    ChannelStatus expected = ChannelStatus::kOk;
    {
      MutexLock lock(&reason_mutex_);
      if (reason_.empty()) reason_ = *reason ? reason : "the connection to the server is closed";
    }
    // What was read from a broken session is not to be trusted, and the server has to know.
    if (state_.compare_exchange_strong(expected, status) && status == ChannelStatus::kProtocolError) {
      shutdown(socket_.get(), SHUT_RDWR);
    }
    return state();
  }

  // Looks at the socket; true if the peer is gone.
  bool CheckPeer() {
    if (peer_gone_.load(std::memory_order_acquire)) return true;
    MutexLock lock(&reason_mutex_);
    Packet packet;
    const ChannelStatus status = ReceivePacket(socket_.get(), &packet, 0);
    if (status == ChannelStatus::kTimeout) return false;
    if (status == ChannelStatus::kOk && packet.type == PacketType::kEnd) DecodeEnd(packet.body, &reason_);
    if (reason_.empty()) {
      reason_ = status == ChannelStatus::kClosed ? "the server's process for this session ended"
                                                 : "the server sent something unexpected over the session's socket";
    }
    peer_gone_.store(true, std::memory_order_release);
    return true;
  }

  // ------------------------------------------------------------------------------------------------------- fork

  // The child of a fork gets copies of all descriptors; as long as they are open there, the server thinks that the
  // client lives. So they are closed there at once.
  static constexpr int kMaxForkEntries = 64;
  static std::atomic<Impl*> fork_entries_[kMaxForkEntries];

  static void RegisterForFork(Impl* impl) {
    // Not std::call_once: its thread-local symbols would show among the client library's exports.
    [[maybe_unused]] static const int once = [] {
      return pthread_atfork(nullptr, nullptr, [] {
        for (auto& entry : fork_entries_) {
          Impl* const impl = entry.exchange(nullptr);
          if (!impl) continue;
          impl->socket_.Close();
          impl->memory_->CloseInForkedChild();
        }
      });
    }();
    for (auto& entry : fork_entries_) {
      Impl* expected = nullptr;
      if (entry.compare_exchange_strong(expected, impl)) return;
    }
  }

  static void UnregisterForFork(Impl* impl) {
    for (auto& entry : fork_entries_) {
      Impl* expected = impl;
      if (entry.compare_exchange_strong(expected, nullptr)) return;
    }
  }

  // What every call reads and hardly anybody writes.
  UniqueFd socket_;
  const std::unique_ptr<ring::RingMemory> memory_;
  const size_t longest_piece_;  // of a payload, for one frame
  std::atomic<ChannelStatus> state_{ChannelStatus::kOk};
  std::atomic<bool> peer_gone_{false};

  // Threads that wait look at the lock's line all the time. What it guards and a request needs lies on one line: with
  // many threads it comes from another processor each time.
  alignas(64) ring::TurnLock send_mutex_;
  alignas(64) std::atomic<uint64_t> next_sequence_;  // send_mutex_ for changes, as the next one
  std::atomic<uint64_t> last_marked_;
  ring::RingWriter request_;  // send_mutex_, but for Wake

  alignas(64) ring::RingReader reply_;  // reader role
  ring::RingReader event_;              // the thread in ReadEvent

  mutable Mutex pending_mutex_;  // taken under send_mutex_, never the other way round
  bool reader_active_ CR_GUARDED_BY(pending_mutex_) = false;
  Pending* buckets_[kBuckets] CR_GUARDED_BY(pending_mutex_) = {};
  Pending* free_ CR_GUARDED_BY(pending_mutex_) = nullptr;
  Pending* waiters_ CR_GUARDED_BY(pending_mutex_) = nullptr;

  Mutex reason_mutex_;  // also: one thread at a time reads the socket
  std::string reason_ CR_GUARDED_BY(reason_mutex_);
  std::atomic<void (*)(const char*, size_t)> sink_{nullptr};
  std::atomic<void (*)(const char*, size_t)> error_sink_{nullptr};
  const Welcome welcome_;
  uint64_t populated_;  // send_mutex_: up to this position; see Populate
  const uint64_t populate_until_;
};

std::atomic<ClientChannel::Impl*> ClientChannel::Impl::fork_entries_[kMaxForkEntries] = {};

ClientChannel::ClientChannel(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
ClientChannel::~ClientChannel() = default;

StatusOr<std::unique_ptr<ClientChannel>> ClientChannel::Connect(const std::string& unix_path, const Hello& hello,
                                                                Welcome* welcome) try {
  const StandardDescriptorsTaken taken;
  CR_ASSIGN_OR_RETURN(UniqueFd socket, ConnectServer(unix_path));
  CR_ASSIGN_OR_RETURN(UniqueFd ring, ClientHandshake(socket.get(), hello, kHandshakeTimeoutMs, welcome));
  return Adopt({socket.Release(), ring.Release()}, 1, *welcome);
} catch (...) {
  return Error("out of memory");
}

StatusOr<std::unique_ptr<ClientChannel>> ClientChannel::Adopt(ChannelFds fds, uint64_t next_sequence,
                                                              const Welcome& welcome) try {
  UniqueFd socket(fds.socket), ring(fds.ring);
  if (!socket.ok() || !ring.ok()) return Error("a channel needs a socket and the rings' memory");
  CR_ASSIGN_OR_RETURN(std::unique_ptr<ring::RingMemory> memory, ring::RingMemory::Map(std::move(ring)));
  auto impl = std::make_unique<Impl>(socket.Release(), std::move(memory), next_sequence, welcome);
  return std::unique_ptr<ClientChannel>(new ClientChannel(std::move(impl)));
} catch (...) {
  return Error("out of memory");
}

// Allocation failures are the only exceptions below; they must not reach the application.
ChannelStatus ClientChannel::Send(FrameHeader header, std::string_view message, std::string_view payload,
                                  uint64_t* sequence, bool mark, bool quiet) try {
  return impl_->Send(header, message, payload, sequence, mark, quiet);
} catch (...) {
  return ChannelStatus::kSystemError;
}

uint64_t ClientChannel::Begin(FrameHeader header, std::string_view message, std::string_view payload, void* payload_out,
                              size_t payload_out_bytes, bool mark) try {
  return impl_->Begin(header, message, payload, payload_out, payload_out_bytes, mark);
} catch (...) {
  return 0;
}

ChannelStatus ClientChannel::Wait(uint64_t sequence, Reply* reply) try {
  return impl_->Wait(sequence, reply);
} catch (...) {
  return ChannelStatus::kSystemError;
}

uint64_t ClientChannel::TryBegin(FrameHeader header, std::string_view message, int timeout_ms,
                                 ChannelStatus* status) try {
  return impl_->TryBegin(header, message, timeout_ms, status);
} catch (...) {
  *status = ChannelStatus::kSystemError;
  return 0;
}

ChannelStatus ClientChannel::WaitFor(uint64_t sequence, int timeout_ms, Reply* reply) try {
  return impl_->WaitFor(sequence, timeout_ms, reply);
} catch (...) {
  return ChannelStatus::kSystemError;
}

void ClientChannel::Abandon(uint64_t sequence) { impl_->Abandon(sequence); }

ChannelStatus ClientChannel::Call(FrameHeader header, std::string_view message, std::string_view payload,
                                  void* payload_out, size_t payload_out_bytes, Reply* reply) {
  if (!Fits(message.size(), payload.size())) return ChannelStatus::kTooLarge;
  const uint64_t sequence = Begin(header, message, payload, payload_out, payload_out_bytes);
  if (sequence == 0) return alive() ? ChannelStatus::kSystemError : ChannelStatus::kClosed;
  return Wait(sequence, reply);
}

ChannelStatus ClientChannel::SendFd(uint64_t tag, int fd) try { return impl_->SendFd(tag, fd); } catch (...) {
  return ChannelStatus::kSystemError;
}

ChannelStatus ClientChannel::ReadEvent(FrameHeader* header, std::string* message, int timeout_ms) try {
  return impl_->ReadEvent(header, message, timeout_ms);
} catch (...) {
  return ChannelStatus::kSystemError;
}

void ClientChannel::InterruptEvents() { impl_->InterruptEvents(); }

ChannelFds ClientChannel::DupFds() const { return impl_->DupFds(); }
uint64_t ClientChannel::next_sequence() const { return impl_->next_sequence(); }
uint64_t ClientChannel::last_marked() const { return impl_->last_marked(); }
bool ClientChannel::FitsHere(size_t message_bytes, size_t payload_bytes) const {
  static_assert(ring::FrameBytes(kFitsAlways, 0) <= ring::kMinCapacity / 4);
  return impl_->Fits(message_bytes, payload_bytes);
}
bool ClientChannel::alive() const { return impl_->alive(); }
std::string ClientChannel::end_reason() const { return impl_->end_reason(); }
const Welcome& ClientChannel::welcome() const { return impl_->welcome(); }
void ClientChannel::SetEager(bool eager) { impl_->SetEager(eager); }
void ClientChannel::SetStdoutSink(void (*sink)(const char*, size_t)) { impl_->SetStdoutSink(sink); }
void ClientChannel::SetStderrSink(void (*sink)(const char*, size_t)) { impl_->SetStderrSink(sink); }

}  // namespace cuda_remote
