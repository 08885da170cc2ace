// SPDX-License-Identifier: Apache-2.0
#include "proto/control/tunnel_end.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "proto/base/clock.h"
#include "proto/threads/mutex.h"
#include "proto/threads/start_thread.h"

namespace cuda_remote::control {
namespace {

using ring::RingStatus;

// Frames up to this size are copied into the message; longer ones are sent from the ring's memory.
constexpr uint64_t kCopyBytes = 4096;
constexpr int kIdleWaitMs = 1000;
// How often to look for progress of the local consumer while the other end may be waiting for an acknowledgement.
constexpr int kAcknowledgeWaitMs = 2;
constexpr int kGoodbyeMs = 2000;
// Messages from this size on are copied by another thread than the one that reads.
constexpr size_t kLongMessage = 256 << 10;
// Requests that nobody waits for wait so long for company: a call that its caller waits for often follows at once, and
// every message costs the other end a wake-up.
constexpr int64_t kLingerNs = 4000;
// Batches from this size on may go over a lane.
constexpr uint64_t kLaneBytes = 64 << 10;
// Pieces that wait for one in front of them; an honest peer has one or two for each lane.
constexpr size_t kMostPieces = 1024;
// How long the reading thread holds back for an answer, at most (see AwaitAnswer).
constexpr int64_t kAnswerNs = 30000;
// Damaged messages in a row, with no byte of progress between them, that mean that the connection is of no use.
constexpr unsigned kMostDamaged = 16;
// How often a checked stream carries something, and how long a message may take to arrive: the longest is 2 MiB.
constexpr auto kBeat = std::chrono::seconds(5);
constexpr int64_t kDeafNs = 30'000'000'000;
constexpr char kNoThreads[] = "the system gives this process no more threads";
constexpr auto kNoThreadsPause = std::chrono::milliseconds(200);

// Ring memory stays mapped as long as gRPC refers to it.
grpc::Slice RingSlice(const std::shared_ptr<ring::RingMemory>& memory, const char* data, size_t bytes) {
  if (bytes <= kCopyBytes) return grpc::Slice(data, bytes);
  return grpc::Slice(
      const_cast<char*>(data), bytes, [](void* keep) { delete static_cast<std::shared_ptr<ring::RingMemory>*>(keep); },
      new std::shared_ptr<ring::RingMemory>(memory));
}

}  // namespace

TunnelEnd::TunnelEnd(Side side, std::shared_ptr<ring::RingMemory> memory, bool checked)
    : side_(side), memory_(std::move(memory)), checked_(checked), answer_(kAnswerNs) {
  const auto add_out = [&](ring::RingIndex index) {
    out_.push_back(std::make_unique<Out>());
    out_.back()->index = index;
    out_.back()->reader = std::make_unique<ring::RingReader>(memory_.get(), index);
  };
  const auto add_in = [&](ring::RingIndex index) {
    in_.push_back(std::make_unique<In>());
    in_.back()->index = index;
    in_.back()->writer = std::make_unique<ring::RingWriter>(memory_.get(), index);
  };
  if (side == Side::kRelay) {
    add_out(ring::kRequestRing);
    add_in(ring::kReplyRing);
    add_in(ring::kEventRing);
  } else {
    add_out(ring::kReplyRing);
    add_out(ring::kEventRing);
    add_in(ring::kRequestRing);
  }
}

std::vector<uint64_t> TunnelEnd::received_positions() const {
  std::vector<uint64_t> positions;
  for (const auto& in : in_) positions.push_back(in->position.load());
  return positions;
}

std::string TunnelEnd::end_reason() const {
  MutexLock lock(&reason_mutex_);
  return reason_;
}

bool TunnelEnd::outstanding() const {
  for (const auto& out : out_) {
    if (out->reader->freed() != ring::WrittenUntil(*memory_->control(out->index))) return true;
  }
  return false;
}

double TunnelEnd::silence() const { return outstanding() ? double(NowNs() - heard_ns_.load()) / 1e9 : 0; }

double TunnelEnd::since_sent() const { return double(NowNs() - written_ns_.load()) / 1e9; }

void TunnelEnd::InterruptAll() {
  for (const auto& out : out_) out->reader->Interrupt();
}

void TunnelEnd::End(const std::string& reason) {
  {
    MutexLock lock(&reason_mutex_);
    if (reason_.empty()) reason_ = reason.empty() ? "ended" : reason;
  }
  ended_.store(true, std::memory_order_release);
  InterruptAll();
}

void TunnelEnd::Fail(const std::string& reason) {
  failed_.store(true, std::memory_order_release);
  End("protocol error: " + reason);
}

bool TunnelEnd::Write(TunnelStream* stream, const grpc::ByteBuffer& buffer) {
  MutexLock lock(&write_mutex_);
  const bool written = stream->Write(buffer);
  written_ns_.store(NowNs(), std::memory_order_release);
  return written;
}

void TunnelEnd::FillAcknowledgements(TunnelMessage* message) {
  for (size_t i = 0; i < in_.size(); ++i) {
    In& in = *in_[i];
    // The consumer's claim, within what it can have consumed.
    const uint64_t consumed = std::min(in.writer->given_back(), in.position.load());
    if (consumed <= in.acknowledged.load()) continue;
    in.acknowledged.store(consumed);
    if (i == 0) {
      message->acknowledged = consumed;
    } else {
      message->second = consumed;  // relay only: the event ring
    }
  }
}

// The other end must not run out of room because of what was consumed here and not told.
bool TunnelEnd::AcknowledgementsDue() const {
  for (const auto& in : in_) {
    const uint64_t consumed = std::min(in->writer->given_back(), in->position.load());
    const uint64_t told = in->acknowledged.load();
    if (consumed > told && consumed - told >= in->writer->capacity() / 8) return true;
  }
  return false;
}

bool TunnelEnd::Backlog() const {
  for (const auto& in : in_) {
    if (in->position.load() - in->acknowledged.load() >= in->writer->capacity() / 8) return true;
  }
  return false;
}

void TunnelEnd::WakeAcknowledgements() {
  {
    MutexLock lock(&acknowledge_mutex_);
    received_ = true;
  }
  acknowledge_wake_.NotifyOne();
}

// Acknowledgements ride along with frames; this thread sends them where no frames go, or not soon enough. What the
// local consumer takes is seen by looking, and only while there is a backlog: a quiet session wakes nobody.
void TunnelEnd::AcknowledgeLoop(TunnelStream* stream, Writers* writers) {
  while (!writers->stop.load(std::memory_order_acquire)) {
    {
      MutexLock lock(&acknowledge_mutex_);
      const auto now = Now();
      auto end = Moment::max();
      if (Backlog()) {
        end = now + std::chrono::milliseconds(kAcknowledgeWaitMs);
      } else if (checked_) {
        end = now + kBeat;
      }
      while (!received_ && !writers->stop.load(std::memory_order_acquire)) {
        if (end == Moment::max()) {
          acknowledge_wake_.Wait(&acknowledge_mutex_);
        } else if (!acknowledge_wake_.WaitUntil(&acknowledge_mutex_, end)) {
          break;
        }
      }
      received_ = false;
    }
    if (checked_) KeepAlive(stream);
    if (!AcknowledgementsDue()) continue;
    TunnelMessage message;
    FillAcknowledgements(&message);
    if (message.acknowledged == 0 && message.second == 0) continue;  // a sender was faster
    if (!Write(stream, Encode(message))) break;
  }
  writers->present.fetch_sub(1);
}

void TunnelEnd::KeepAlive(TunnelStream* stream) {
  const int64_t now = NowNs();
  if (now - written_ns_.load() > std::chrono::nanoseconds(kBeat).count()) Write(stream, Encode(TunnelMessage()));
  if (now - heard_ns_.load() > kDeafNs) stream->Cancel();
  if (lane_count_.load(std::memory_order_relaxed) == 0) return;
  MutexLock lock(&lanes_mutex_);
  for (Lane* const lane : lanes_) {
    const int64_t since = lane->since_ns.load();
    if (since != 0 && now - since > kDeafNs) lane->stream->Cancel();
  }
}

void TunnelEnd::SendLoop(Out* out, TunnelStream* stream, Writers* writers) {
  const uint64_t batch_limit = std::min<uint64_t>(kBatchBytes, out->reader->capacity() / 4);
  while (!writers->stop.load(std::memory_order_acquire)) {
    const uint64_t start = out->reader->position();
    RingStatus status = RingStatus::kOk;
    bool awaited = false;
    int64_t linger_until = 0;
    while (out->reader->position() - start < batch_limit) {
      FrameHeader header;
      const char* frame;
      status = out->reader->Peek(&header, &frame);
      if (status == RingStatus::kNotYet && !awaited && out->reader->position() != start) {
        const int64_t now = NowNs();
        if (linger_until == 0) linger_until = now + kLingerNs;
        if (now < linger_until) {
          ring::CpuPause();
          continue;
        }
      }
      if (status != RingStatus::kOk) break;
      awaited = awaited || side_ == Side::kServer || (header.flags & kFlagNoReply) == 0;
      out->reader->Skip(header);
    }
    if (status == RingStatus::kCorrupt) {
      Fail("the ring of this session's process holds something impossible");
      break;
    }
    const uint64_t bytes = out->reader->position() - start;
    if (bytes > 0) {
      out->sent.store(out->reader->position());
      const Batch batch{out, start, bytes};
      if (bytes >= kLaneBytes && out == out_[0].get()) {
        CountBulk(bytes);
        if (Dispatch(batch)) continue;
      }
      TunnelMessage message;
      FillAcknowledgements(&message);
      if (out == out_[0].get()) message.lanes = TakeCounts();
      if (!Write(stream, Encode(batch, message))) break;
      continue;
    }
    if (counts_due_.load(std::memory_order_relaxed) && out == out_[0].get()) {
      TunnelMessage message;
      message.lanes = TakeCounts();
      FillAcknowledgements(&message);
      if (!Write(stream, Encode(message))) break;
      continue;
    }
    if (ended_.load(std::memory_order_acquire) && !out->reader->ReadyAtAll()) break;
    out->reader->Wait(kIdleWaitMs);
  }
  // The last sender to leave says goodbye, behind all frames.
  if (writers->sending.fetch_sub(1) == 1 && ended_.load(std::memory_order_acquire)) {
    TunnelMessage message;
    message.end = end_reason();
    message.position = out_[0]->sent.load();
    Write(stream, Encode(message));
  }
  writers->present.fetch_sub(1);
}

grpc::ByteBuffer TunnelEnd::Encode(const Batch& batch, TunnelMessage message) const {
  message.position = batch.position;
  // The relay's `second` is free for an acknowledgement; the server's names the ring.
  if (side_ == Side::kServer) message.second = uint32_t(batch.out->index);
  const grpc::Slice frames = RingSlice(memory_, batch.out->reader->at(batch.position), size_t(batch.bytes));
  return EncodeTunnelMessage(message, &frames, checked_);
}

bool TunnelEnd::Acknowledge(Out* out, uint64_t position) {
  if (position == 0) return true;
  // Never beyond what was sent; an old one (sent before a stream broke) says nothing new.
  if (position > out->sent.load() || position % ring::kFrameAlignment != 0) return false;
  if (position > out->reader->freed()) out->reader->FreeUntil(position);
  return true;
}

const char* TunnelEnd::Receive(const TunnelMessage& message, const ReceivedFrames& frames, bool lane) {
  if (lane) {
    if (message.acknowledged != 0 || !message.end.empty() || !message.lanes.empty() ||
        (side_ == Side::kServer && message.second != 0)) {
      return "a message without frames over a lane";
    }
  } else if (side_ == Side::kRelay) {
    if (!Acknowledge(out_[0].get(), message.acknowledged)) {
      return "an impossible acknowledgement";
    }
  } else if (!Acknowledge(out_[0].get(), message.acknowledged) || !Acknowledge(out_[1].get(), message.second)) {
    return "an impossible acknowledgement";
  }
  if (!message.lanes.empty() && !LearnCounts(message.lanes)) {
    return "impossible counts of lanes";
  }
  if (frames.size() == 0) return nullptr;
  In* in = in_[0].get();
  if (side_ == Side::kRelay) {
    if (message.second != ring::kReplyRing && message.second != ring::kEventRing) {
      return "frames for a ring that does not exist";
    }
    in = in_[message.second == ring::kReplyRing ? 0 : 1].get();
  }
  if (frames.size() >= kLaneBytes) CountBulk(frames.size());
  return PutInPlace(in, message.position, frames);
}

const char* TunnelEnd::PutInPlace(In* in, uint64_t position, const ReceivedFrames& frames) {
  uint64_t bytes = frames.size(), skip = 0;
  char* where;
  {
    MutexLock lock(&in->mutex);
    const uint64_t have = in->position.load();
    if (position < have) {
      // Sent again after a broken stream: what is here already is skipped.
      skip = have - position;
      if (skip >= bytes) return nullptr;
      position = have;
      bytes -= skip;
    } else if (position > have &&
               (!takes_lanes_.load() || in != in_[0].get() || position % ring::kFrameAlignment != 0)) {
      return "frames with a gap in front of them";
    }
    // As RingWriter::Reserve, but not only at the end of what there is.
    const uint64_t capacity = in->writer->capacity(), head = in->writer->given_back();
    if (bytes > in->writer->max_frame() || have - head > capacity || head % ring::kFrameAlignment != 0) {
      return "a batch is too long, or the ring's process moved it impossibly";
    }
    if (position - have > capacity || position + bytes - head > capacity) return "more frames than there is room for";
    where = memory_->data(in->index) + (position & (capacity - 1));
    const auto behind = in->pieces.lower_bound(position);
    if ((behind != in->pieces.end() && behind->first < position + bytes) ||
        (behind != in->pieces.begin() && std::prev(behind)->second.end > position)) {
      return "the same frames twice";
    }
    if (in->pieces.size() >= kMostPieces) return "too many pieces with gaps between them";
    in->pieces.emplace_hint(behind, position, In::Piece{position + bytes, false});
  }
  // Nobody else has to do with this part of the ring now.
  frames.CopyTo(skip, where);
  uint64_t count;
  if (!ring::WholeFrames(where, bytes, &count)) return "a batch that does not consist of whole frames";
  MutexLock lock(&in->mutex);
  in->pieces.find(position)->second.placed = true;
  uint64_t whole = in->position.load();
  for (auto first = in->pieces.begin(); first != in->pieces.end() && first->first == whole && first->second.placed;) {
    whole = first->second.end;
    first = in->pieces.erase(first);
  }
  if (const uint64_t more = whole - in->position.load(); more > 0) {
    // The position first: an acknowledgement is measured against it.
    in->position.store(whole);
    in->writer->Commit(more);
  }
  return nullptr;
}

void TunnelEnd::Damaged() {
  damaged_.fetch_add(1);
  uint64_t here = 0;
  for (const auto& in : in_) here += in->position.load();
  MutexLock lock(&damage_mutex_);
  damage_in_a_row_ = here == damage_at_ ? damage_in_a_row_ + 1 : 1;
  damage_at_ = here;
  if (damage_in_a_row_ >= kMostDamaged)
    Fail("messages over this connection arrive damaged again and again; check the network between the hosts");
}

bool TunnelEnd::Place(const grpc::ByteBuffer& buffer, Arrivals* arrivals, bool lane) {
  if (checked_ && CheckTunnelMessage(buffer) != Integrity::kIntact) {
    // As a broken stream: everything that was not acknowledged comes again.
    Damaged();
    return false;
  }
  TunnelMessage message;
  ReceivedFrames frames;
  const char* const wrong =
      DecodeTunnelMessage(buffer, &message, &frames) ? Receive(message, frames, lane) : "not a tunnel message";
  if (wrong) {
    Fail(std::string("the other end sent ") + wrong);
    return false;
  }
  if (!message.end.empty()) {
    AwaitLanes(message.position);
    MutexLock lock(&arrivals->mutex);
    arrivals->reason = message.end;
    arrivals->outcome = Outcome::kPeerEnded;
    return false;
  }
  if (Backlog()) WakeAcknowledgements();
  return true;
}

// When a read begins, gRPC tells the other end what the last message took of the stream's window: in a packet of its
// own, unless something was written since the message came, which takes it along. A call's answer, or the call after an
// answer, usually follows at once. So the thread looks for it for a moment: one packet instead of two, which are two
// system calls and a wake-up more, and meet in gRPC's lock, where the later one is left to a third thread.
void TunnelEnd::AwaitAnswer(int64_t arrived_ns) {
  const auto written = [&] { return written_ns_.load(std::memory_order_acquire) >= arrived_ns; };
  // The last answer was not met: would looking on have met it?
  const int64_t last = written_ns_.load(std::memory_order_acquire);
  if (answer_missed_ns_ != 0 && last >= answer_missed_ns_) answer_.Slept(last - answer_missed_ns_);
  answer_missed_ns_ = answer_.Spin(written) ? 0 : NowNs();
}

// A message is placed by the thread that read it, unless it is long or others are in front of it.
void TunnelEnd::ReadLoop(TunnelStream* stream, Arrivals* arrivals, Lane* lane) {
  grpc::ByteBuffer buffer;
  // With what messages are besides their frames.
  uint64_t room = 0, most = 0;
  for (const auto& in : in_) room += 2 * in->writer->capacity();
  while ((!lane || AwaitArrival(lane)) && stream->Read(&buffer)) {
    if (lane) {
      lane->since_ns.store(0);
    } else {
      heard_ns_.store(NowNs());
    }
    bool hand_over;
    {
      MutexLock lock(&arrivals->mutex);
      if (arrivals->ended) return;
      hand_over = buffer.Length() >= kLongMessage || arrivals->busy || !arrivals->waiting.empty();
      if (hand_over) {
        arrivals->waiting_bytes += buffer.Length();
        arrivals->waiting.push_back(buffer);  // shares its bytes: grpc::ByteBuffer cannot be moved
      }
      most = arrivals->waiting_bytes;
    }
    if (most > room) return Fail("the other end sent more frames than there is room for");
    if (hand_over) {
      arrivals->changed.NotifyOne();
      buffer = grpc::ByteBuffer();
    } else {
      const int64_t arrived_ns = NowNs();
      if (!Place(buffer, arrivals, lane != nullptr)) return;
      if (!lane) AwaitAnswer(arrived_ns);
    }
  }
}

void TunnelEnd::PlaceLoop(TunnelStream* stream, Arrivals* arrivals, Lane* lane) {
  MutexLock lock(&arrivals->mutex);
  while (true) {
    while (!arrivals->over && arrivals->waiting.empty()) arrivals->changed.Wait(&arrivals->mutex);
    if (arrivals->waiting.empty()) return;
    const grpc::ByteBuffer buffer = arrivals->waiting.front();
    arrivals->waiting.pop_front();
    arrivals->waiting_bytes -= buffer.Length();
    arrivals->busy = true;
    lock.Unlock();
    const bool more = Place(buffer, arrivals, lane != nullptr);
    lock.Lock();
    arrivals->busy = false;
    if (more) continue;
    arrivals->ended = true;
    lock.Unlock();
    // The reader may be waiting for a message that will not come, or that nobody has announced yet.
    stream->Cancel();
    if (lane) EndLane(lane);
    return;
  }
}

TunnelEnd::Outcome TunnelEnd::Run(TunnelStream* stream, const std::vector<uint64_t>& peer_positions,
                                  std::string* reason, uint64_t number) {
  if (failed_.load()) {
    *reason = end_reason();
    return Outcome::kFailed;
  }
  for (size_t i = 0; i < out_.size(); ++i) {
    const uint64_t position = i < peer_positions.size() ? peer_positions[i] : 0;
    ring::RingReader* const reader = out_[i]->reader.get();
    if (position < reader->freed() || position > std::max(out_[i]->sent.load(), reader->freed()) ||
        position % ring::kFrameAlignment != 0) {
      Fail("the other end wants to resume at a position that does not exist");
      *reason = end_reason();
      stream->Cancel();
      return Outcome::kFailed;
    }
    reader->Rewind(position);
  }
  // What was acknowledged over a stream that then broke may not have arrived.
  for (const auto& in : in_) {
    in->acknowledged.store(0);
    MutexLock lock(&in->mutex);
    in->pieces.clear();  // come again
  }
  takes_lanes_.store(number != 0);
  {
    MutexLock lock(&lanes_mutex_);
    run_ = number;
    main_ = stream;
    counts_due_.store(false);
    for (uint32_t i = 0; i < kMostLanes; ++i) {
      given_[i] = 0;
      announced_[i].store(0);
    }
  }
  lanes_changed_.NotifyAll();

  heard_ns_.store(NowNs());
  Writers writers;
  writers.sending = int(out_.size());
  writers.present = int(out_.size()) + 1;
  std::vector<std::thread> threads;
  for (const auto& out : out_)
    threads.push_back(StartThread([this, &out, stream, &writers] { SendLoop(out.get(), stream, &writers); }));
  threads.push_back(StartThread([this, stream, &writers] { AcknowledgeLoop(stream, &writers); }));
  Arrivals arrivals;
  std::thread placer = StartThread([this, stream, &arrivals] { PlaceLoop(stream, &arrivals, nullptr); });
  const auto missing = std::count_if(threads.begin(), threads.end(), [](const auto& one) { return !one.joinable(); });
  writers.present.fetch_sub(int(missing));
  if (missing == 0 && placer.joinable()) {
    ReadLoop(stream, &arrivals, nullptr);
  } else {
    *reason = kNoThreads;
    std::this_thread::sleep_for(kNoThreadsPause);  // the other end comes back at once
    stream->Cancel();
  }
  stream->DoneReading();
  {
    MutexLock lock(&arrivals.mutex);
    arrivals.over = true;
  }
  arrivals.changed.NotifyAll();
  if (placer.joinable()) placer.join();
  EndLanes();
  writers.stop.store(true, std::memory_order_release);
  InterruptAll();
  WakeAcknowledgements();
  // A writer may be stuck in a connection that does not move; a goodbye gets a moment.
  for (int waited = 0; waited < kGoodbyeMs && writers.present.load() > 0; ++waited)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  if (writers.present.load() > 0) stream->Cancel();
  for (std::thread& thread : threads) {
    if (thread.joinable()) thread.join();
  }
  {
    MutexLock lock(&arrivals.mutex);
    if (arrivals.outcome == Outcome::kPeerEnded) {
      *reason = arrivals.reason;
      return arrivals.outcome;
    }
  }
  if (failed_.load()) {
    *reason = end_reason();
    return Outcome::kFailed;
  }
  if (ended_.load()) {
    *reason = end_reason();
    return Outcome::kEnded;
  }
  return Outcome::kBroken;
}

}  // namespace cuda_remote::control
