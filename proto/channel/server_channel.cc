// SPDX-License-Identifier: Apache-2.0
#include "proto/channel/server_channel.h"

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <deque>
#include <map>
#include <thread>
#include <utility>

#include "proto/base/clock.h"
#include "proto/base/environment.h"
#include "proto/base/status_macros.h"
#include "proto/base/unique_fd.h"
#include "proto/channel/end_reasons.h"
#include "proto/channel/handshake.h"
#include "proto/ring/ring.h"
#include "proto/threads/mutex.h"

namespace cuda_remote {
namespace {

using ring::RingStatus;

// Waits end early when the session ends; this is only the net below (a hostile client can undo a wake-up).
constexpr int kWaitMs = 1000;
// Descriptors that a client may pass before it uses them.
constexpr size_t kMaxWaitingFds = 64;
// Room is given back when this part of the ring has been read, or everything.
constexpr uint64_t kGiveBackPart = 32;
// Frames of a long reply: while one is being copied the one before is on its way, which through a relay takes longer.
constexpr uint64_t kReplyPiece = 256 << 10;
// From this length of a payload on, more of them are to be expected.
constexpr uint32_t kBulk = 32 << 10;
constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE (Linux 5.14), which older headers lack
// For tests: what has been given back is overwritten at once, not only when the ring comes round.
const bool kPoison = TrustedVariable("CUDA_REMOTE_POISON") != nullptr;
constexpr uint32_t kRequestFlags = kFlagNoReply | kFlagReplay | kFlagMorePayload;

}  // namespace

class ServerChannel::Impl {
 public:
  Impl(int socket, std::unique_ptr<ring::RingMemory> memory, std::function<void(const std::string&)> peer_gone)
      : socket_(socket),
        memory_(std::move(memory)),
        request_(memory_.get(), ring::kRequestRing),
        reply_(memory_.get(), ring::kReplyRing),
        event_(memory_.get(), ring::kEventRing),
        peer_gone_(std::move(peer_gone)),
        stop_fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {}

  ~Impl() {
    Stop();
    if (thread_.joinable()) thread_.join();
  }

  void Start() {
    // Signals are for the worker's own threads.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    thread_ = std::thread([this] { SocketLoop(); });
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  int socket() const { return socket_.get(); }

  bool Next(FrameHeader* header, std::string* message, PayloadView* payload) {
    FreeCurrent();
    if (!Read(header)) return false;
    const char* const frame = frame_;
    message->assign(frame + sizeof(FrameHeader), header->message_bytes);
    if (header->payload_bytes >= kBulk && !populated_) Populate();
    if (!(header->flags & kFlagMorePayload)) {
      *payload = {frame + sizeof(FrameHeader) + header->message_bytes, header->payload_bytes, false};
      return true;
    }
    // A long payload: its frames follow one another.
    FrameHeader piece = *header;
    while (true) {
      assembled_.append(frame_ + sizeof(FrameHeader) + piece.message_bytes, piece.payload_bytes);
      if (!(piece.flags & kFlagMorePayload)) break;
      FreeCurrent(/*keep_assembled=*/true);
      if (!Read(&piece)) return false;
      if (piece.sequence != header->sequence || piece.call != header->call || piece.message_bytes != 0) {
        Fail("a payload in several frames was interrupted by another frame");
        return false;
      }
      if (assembled_.size() + piece.payload_bytes > kMaxTotalPayloadBytes) {
        Fail("a payload is longer than 2 GiB");
        return false;
      }
    }
    header->flags &= ~uint32_t(kFlagMorePayload);
    *payload = {assembled_.data(), assembled_.size(), true};
    return true;
  }

  bool HasNext() { return request_.ReadyAtAll() && !over(); }

  uint64_t Hold() {
    MutexLock lock(&hold_mutex_);
    Held held;
    held.id = ++last_hold_;
    held.end = request_.position();
    held.assembled = std::move(assembled_);
    assembled_.clear();
    held_.push_back(std::move(held));
    holds_.store(held_.size(), std::memory_order_release);
    has_current_ = false;
    return last_hold_;
  }

  void Release(uint64_t hold) {
    MutexLock lock(&hold_mutex_);
    for (Held& held : held_) {
      if (held.id != hold || held.released) continue;
      held.released = true;
      std::string().swap(held.assembled);
      break;
    }
    uint64_t end = 0;
    bool any = false;
    while (!held_.empty() && held_.front().released) {
      end = held_.front().end;
      any = true;
      held_.pop_front();
    }
    if (any) GiveBack(end);
    holds_.store(held_.size(), std::memory_order_release);
  }

  ChannelStatus Reply(FrameHeader header, std::string_view message, const std::string_view* pieces, size_t count) {
    MutexLock lock(&reply_mutex_);
    return Write(&reply_, header, message, pieces, count);
  }

  ChannelStatus Event(FrameHeader header, std::string_view message) {
    if (ring::FrameBytes(message.size(), 0) > event_.max_frame()) return ChannelStatus::kTooLarge;
    MutexLock lock(&event_mutex_);
    return Write(&event_, header, message, nullptr, 0);
  }

  int TakeFd(uint64_t tag, int timeout_ms) {
    MutexLock lock(&fd_mutex_);
    const auto end = Now() + std::chrono::milliseconds(timeout_ms);
    while (fds_.count(tag) == 0 && !over() && fd_arrived_.WaitUntil(&fd_mutex_, end)) {
    }
    const auto found = fds_.find(tag);
    if (found == fds_.end()) return -1;
    const int fd = found->second.Release();
    fds_.erase(found);
    return fd;
  }

  void Stop() {
    stopped_.store(true, std::memory_order_release);
    Finish("stopped");
  }

  void End(const std::string& reason) {
    std::string body;
    EncodeEnd(reason, &body);
    SendPacket(socket_.get(), PacketType::kEnd, body, -1);
    stopped_.store(true, std::memory_order_release);
    Finish(reason);
  }

  std::string end_reason() const {
    MutexLock lock(&reason_mutex_);
    return reason_;
  }

 private:
  struct Held {
    uint64_t id = 0;
    uint64_t end = 0;
    bool released = false;
    std::string assembled;
  };

  bool over() const { return over_.load(std::memory_order_acquire); }

  // The next frame at frame_, checked. False: the session is over.
  bool Read(FrameHeader* header) {
    while (true) {
      if (over()) return false;
      switch (request_.Peek(header, &frame_)) {
        case RingStatus::kNotYet:
          request_.Wait(kWaitMs);
          continue;
        case RingStatus::kCorrupt:
          Fail("the request ring holds something impossible");
          return false;
        case RingStatus::kOk:
          break;
      }
      if ((header->flags & ~kRequestFlags) != 0 || header->sequence == 0) {
        Fail("a request has a wrong header");
        return false;
      }
      request_.Skip(*header);
      has_current_ = true;
      return true;
    }
  }

  // Maps the request ring's pages at once: page by page, the first pass of bulk through the ring would take several
  // times as long. Without it (an older kernel, no memory) the pages come one by one.
  void Populate() {
    populated_ = true;
    madvise(memory_->data(ring::kRequestRing), 2 * memory_->capacity(ring::kRequestRing), kPopulateWrite);
  }

  // Gives room in the request ring back up to `position`.
  void GiveBack(uint64_t position) {
    if (kPoison) {
      const uint64_t from = request_.freed();
      memset(const_cast<char*>(request_.at(from)), 0xdb, size_t(position - from));
    }
    request_.FreeUntil(position);
  }

  // The frame that was read last is used up.
  void FreeCurrent(bool keep_assembled = false) {
    if (!keep_assembled) {
      // A long payload's memory is not kept for the short ones that usually follow.
      if (assembled_.capacity() > kMaxPayloadBytes) std::string().swap(assembled_);
      assembled_.clear();
    }
    if (!has_current_) return;
    has_current_ = false;
    if (holds_.load(std::memory_order_acquire) == 0) {
      // Giving room back costs a fence and a line of memory that the client reads: not for each of many requests.
      const uint64_t used = request_.position() - request_.freed();
      if (used >= memory_->capacity(ring::kRequestRing) / kGiveBackPart || !request_.Ready()) {
        GiveBack(request_.position());
      }
      return;
    }
    MutexLock lock(&hold_mutex_);
    if (held_.empty()) {
      GiveBack(request_.position());
      return;
    }
    // Room goes back in order: behind what is held.
    if (!held_.back().released) {
      Held between;
      between.id = ++last_hold_;
      between.released = true;
      held_.push_back(std::move(between));
    }
    held_.back().end = request_.position();
  }

  // Under the ring's lock.
  ChannelStatus Write(ring::RingWriter* out, FrameHeader header, std::string_view message,
                      const std::string_view* pieces, size_t count) {
    if (message.size() > kMaxMessageBytes || ring::FrameBytes(message.size(), 0) > out->max_frame() / 2) {
      return ChannelStatus::kTooLarge;
    }
    uint64_t left = 0;
    for (size_t i = 0; i < count; ++i) left += pieces[i].size();
    if (left > kMaxTotalPayloadBytes) return ChannelStatus::kTooLarge;
    const uint64_t limit = std::min<uint64_t>(kReplyPiece, out->max_frame() / 2);
    size_t index = 0;
    size_t offset = 0;
    do {
      const uint64_t part = std::min(left, limit);
      const uint64_t bytes = ring::FrameBytes(message.size(), part);
      char* where;
      RingStatus room;
      while ((room = out->Reserve(bytes, &where)) == RingStatus::kNotYet) {
        if (over()) return ChannelStatus::kClosed;
        out->WaitRoom(bytes, kWaitMs);
      }
      if (room == RingStatus::kCorrupt) {
        Fail("the client moved a ring's position impossibly");
        return ChannelStatus::kProtocolError;
      }
      left -= part;
      header.message_bytes = uint32_t(message.size());
      header.payload_bytes = uint32_t(part);
      if (left) {
        header.flags |= kFlagMorePayload;
      } else {
        header.flags &= ~uint32_t(kFlagMorePayload);
      }
      memcpy(where, &header, sizeof(header));
      where += sizeof(header);
      if (!message.empty()) memcpy(where, message.data(), message.size());
      where += message.size();
      for (uint64_t written = 0; written < part;) {
        const size_t n = size_t(std::min<uint64_t>(pieces[index].size() - offset, part - written));
        if (n) memcpy(where + written, pieces[index].data() + offset, n);
        written += n;
        offset += n;
        if (offset == pieces[index].size()) {
          ++index;
          offset = 0;
        }
      }
      out->Commit(bytes);
      message = {};
    } while (left);
    return over() ? ChannelStatus::kClosed : ChannelStatus::kOk;
  }

  // The client broke the rules: it is told, and the session is over.
  void Fail(const std::string& reason) {
    std::string body;
    EncodeEnd("protocol error: " + reason, &body);
    SendPacket(socket_.get(), PacketType::kEnd, body, -1);
    Finish("protocol error: " + reason);
  }

  // The session is over for every thread. Wakes them.
  void Finish(const std::string& reason) {
    {
      MutexLock lock(&reason_mutex_);
      if (reason_.empty()) reason_ = reason;
    }
    {
      MutexLock lock(&fd_mutex_);
      over_.store(true, std::memory_order_release);
    }
    fd_arrived_.NotifyAll();
    request_.Interrupt();
    reply_.Interrupt();
    event_.Interrupt();
    const uint64_t one = 1;
    if (write(stop_fd_.get(), &one, sizeof(one)) < 0) return;  // full: it is awake anyway
  }

  void SocketLoop() {
    while (!over()) {
      pollfd waiting[2] = {{socket_.get(), POLLIN, 0}, {stop_fd_.get(), POLLIN, 0}};
      if (poll(waiting, 2, -1) < 0) continue;
      if (waiting[1].revents || !waiting[0].revents) continue;
      Packet packet;
      const ChannelStatus status = ReceivePacket(socket_.get(), &packet, 0);
      if (status == ChannelStatus::kTimeout) continue;
      uint64_t tag;
      if (status == ChannelStatus::kOk && packet.type == PacketType::kFd && packet.fd.ok() &&
          DecodeTag(packet.body, &tag)) {
        MutexLock lock(&fd_mutex_);
        if (fds_.size() < kMaxWaitingFds && fds_.emplace(tag, std::move(packet.fd)).second) {
          lock.Unlock();
          fd_arrived_.NotifyAll();
          continue;
        }
      }
      if (status == ChannelStatus::kClosed) {
        Finish(kClientGone);
      } else {
        Fail("unexpected packet on the session's socket");
      }
    }
    if (peer_gone_ && !stopped_.load(std::memory_order_acquire)) peer_gone_(end_reason());
  }

  const UniqueFd socket_;
  const std::unique_ptr<ring::RingMemory> memory_;
  ring::RingReader request_;  // executor; FreeUntil under hold_mutex_
  Mutex reply_mutex_;
  ring::RingWriter reply_;  // reply_mutex_
  Mutex event_mutex_;
  ring::RingWriter event_;  // event_mutex_
  const std::function<void(const std::string&)> peer_gone_;
  const UniqueFd stop_fd_;
  std::thread thread_;

  // Executor only.
  const char* frame_ = nullptr;
  bool has_current_ = false;
  bool populated_ = false;  // the request ring
  std::string assembled_;

  Mutex hold_mutex_;
  std::deque<Held> held_ CR_GUARDED_BY(hold_mutex_);
  // How many there are. While there are none, only the executor gives room back.
  std::atomic<size_t> holds_{0};
  uint64_t last_hold_ CR_GUARDED_BY(hold_mutex_) = 0;

  Mutex fd_mutex_;
  Condition fd_arrived_;
  std::map<uint64_t, UniqueFd> fds_ CR_GUARDED_BY(fd_mutex_);

  std::atomic<bool> over_{false};
  std::atomic<bool> stopped_{false};
  mutable Mutex reason_mutex_;
  std::string reason_ CR_GUARDED_BY(reason_mutex_);
};

ServerChannel::ServerChannel(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
ServerChannel::~ServerChannel() = default;

StatusOr<std::unique_ptr<ServerChannel>> ServerChannel::Create(
    UniqueFd client_socket, const Welcome& welcome, std::function<void(const std::string& reason)> peer_gone) {
  CR_ASSIGN_OR_RETURN(std::unique_ptr<ring::RingMemory> memory, ring::RingMemory::Create());
  std::string body;
  EncodeWelcome(welcome, &body);
  const ChannelStatus sent = SendPacket(client_socket.get(), PacketType::kWelcome, body, memory->fd());
  if (sent != ChannelStatus::kOk) {
    return Error(std::string("the client disconnected before its session began (") + ChannelStatusName(sent) + ")");
  }
  auto impl = std::make_unique<Impl>(client_socket.Release(), std::move(memory), std::move(peer_gone));
  impl->Start();
  return std::unique_ptr<ServerChannel>(new ServerChannel(std::move(impl)));
}

bool ServerChannel::Next(FrameHeader* header, std::string* message, PayloadView* payload) {
  return impl_->Next(header, message, payload);
}
bool ServerChannel::HasNext() { return impl_->HasNext(); }
uint64_t ServerChannel::Hold() { return impl_->Hold(); }
void ServerChannel::Release(uint64_t hold) { impl_->Release(hold); }

ChannelStatus ServerChannel::Reply(uint64_t sequence, uint32_t call, uint32_t result, uint32_t pending_error,
                                   std::string_view message, const std::string_view* payload_pieces,
                                   size_t piece_count) {
  FrameHeader header;
  header.sequence = sequence;
  header.call = call;
  header.flags = kFlagReply;
  header.context_or_result = result;
  header.aux = pending_error;
  return impl_->Reply(header, message, payload_pieces, piece_count);
}

ChannelStatus ServerChannel::Output(uint32_t operation, std::string_view bytes, bool to_stderr) {
  FrameHeader header;
  header.call = operation;
  header.flags = kFlagEvent;
  header.aux = to_stderr ? kOutputToStderr : 0;
  return impl_->Reply(header, {}, &bytes, 1);
}

ChannelStatus ServerChannel::Event(uint32_t operation, uint64_t sequence, std::string_view message) {
  FrameHeader header;
  header.call = operation;
  header.flags = kFlagEvent;
  header.sequence = sequence;
  return impl_->Event(header, message);
}

int ServerChannel::TakeFd(uint64_t tag, int timeout_ms) { return impl_->TakeFd(tag, timeout_ms); }
void ServerChannel::Stop() { impl_->Stop(); }
void ServerChannel::End(const std::string& reason) { impl_->End(reason); }
std::string ServerChannel::end_reason() const { return impl_->end_reason(); }

}  // namespace cuda_remote
