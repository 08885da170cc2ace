// SPDX-License-Identifier: Apache-2.0
// Two tunnel ends against each other over a stream that breaks at any moment, without a network.

#include "proto/control/tunnel_end.h"

#include <dlfcn.h>
#include <errno.h>
#include <gtest/gtest.h>
#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <random>
#include <thread>

#include "proto/base/testing/value_of.h"

// The distribution's libgrpc is not instrumented, so the thread sanitizer does not see that its slices count references
// atomically.
extern "C" const char* __tsan_default_suppressions() { return "race:ReceivedFrames::CopyTo\nrace:libgrpc.so\n"; }

namespace cuda_remote::control {
namespace {

using ring::RingMemory;
using ring::RingReader;
using ring::RingStatus;
using ring::RingWriter;

constexpr uint64_t kCapacity[ring::kRingCount] = {256 << 10, 128 << 10, 64 << 10};

constexpr uint64_t kBulkCapacity[ring::kRingCount] = {1 << 20, 1 << 20, 64 << 10};

std::shared_ptr<RingMemory> Memory(const uint64_t* capacity = kCapacity) {
  return ValueOf(RingMemory::Create(capacity));
}

// Messages in one direction, at most `room` under way; broken for both sides at once.
struct Pipe {
  explicit Pipe(size_t messages_under_way = 4) : room(messages_under_way) {}
  const size_t room;
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<grpc::ByteBuffer> messages;
  bool broken = false;
  std::atomic<int> passed{0};
  bool Put(const grpc::ByteBuffer& buffer) {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [&] { return broken || messages.size() < room; });
    if (broken) return false;
    messages.push_back(buffer);
    ++passed;
    changed.notify_all();
    return true;
  }
  bool Get(grpc::ByteBuffer* buffer) {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [&] { return broken || !messages.empty(); });
    if (broken) return false;  // what was under way is lost
    *buffer = messages.front();
    messages.pop_front();
    changed.notify_all();
    return true;
  }
  bool IsBroken() {
    std::lock_guard<std::mutex> lock(mutex);
    return broken;
  }
  bool IsEmpty() {
    std::lock_guard<std::mutex> lock(mutex);
    return messages.empty();
  }
  void Break() {
    std::lock_guard<std::mutex> lock(mutex);
    broken = true;
    changed.notify_all();
  }
};

class FakeStream final : public TunnelStream {
 public:
  FakeStream(Pipe* in, Pipe* out) : in_(in), out_(out) {}
  bool Read(grpc::ByteBuffer* buffer) override { return in_->Get(buffer); }
  bool Write(const grpc::ByteBuffer& buffer) override { return out_->Put(buffer); }
  void Cancel() override {
    in_->Break();
    out_->Break();
  }

 private:
  Pipe* const in_;
  Pipe* const out_;
};

// How many threads the system still gives; negative: as many as are wanted.
std::atomic<int> g_threads_left{-1};

// Frames of all sizes below `longest`, of which what a message may not have is payload.
struct Frames {
  static constexpr uint32_t kLongestMessage = 3000;

  uint64_t count;
  uint32_t longest = kLongestMessage;

  FrameHeader At(uint64_t sequence) const {
    FrameHeader header;
    const uint32_t bytes = uint32_t(sequence * 7919 % longest);
    header.sequence = sequence;
    header.message_bytes = std::min(bytes, kLongestMessage);
    header.payload_bytes = bytes - header.message_bytes;
    return header;
  }
};

void Produce(RingMemory* memory, ring::RingIndex index, const Frames& frames) {
  RingWriter writer(memory, index);
  for (uint64_t sequence = 1; sequence <= frames.count; ++sequence) {
    const FrameHeader header = frames.At(sequence);
    const uint64_t bytes = ring::FrameBytes(header.message_bytes, header.payload_bytes);
    char* where;
    while (writer.Reserve(bytes, &where) != RingStatus::kOk) writer.WaitRoom(bytes, 100);
    memcpy(where, &header, sizeof(header));
    memset(where + sizeof(header), int(sequence), header.message_bytes + header.payload_bytes);
    if (sequence % 3 == 0) {
      writer.PublishQuietly(bytes);
      writer.Wake();
    } else {
      writer.Commit(bytes);
    }
  }
}

void Consume(RingMemory* memory, ring::RingIndex index, const Frames& frames) {
  RingReader reader(memory, index);
  for (uint64_t sequence = 1; sequence <= frames.count;) {
    FrameHeader header;
    const char* frame;
    const RingStatus status = reader.Peek(&header, &frame);
    ASSERT_NE(status, RingStatus::kCorrupt) << "ring " << index << " after frame " << sequence;
    if (status == RingStatus::kNotYet) {
      reader.Wait(100);
      continue;
    }
    const FrameHeader expected = frames.At(sequence);
    ASSERT_EQ(header.sequence, sequence) << "ring " << index;
    ASSERT_EQ(header.message_bytes, expected.message_bytes);
    ASSERT_EQ(header.payload_bytes, expected.payload_bytes);
    const uint32_t bytes = header.message_bytes + header.payload_bytes;
    for (uint32_t i = 0; i < bytes; ++i) ASSERT_EQ(frame[sizeof(header) + i], char(sequence));
    reader.Pop(header);
    ++sequence;
  }
}

struct Carried {
  uint64_t streams = 0;
  int over_lanes = 0;  // messages
};

// Carries frames both ways, to the relay in these rings, over one stream with its lanes after the other: each breaks
// after some milliseconds, with a lane or by itself.
Carried CarryOverBreakingStreams(uint32_t lanes, const uint64_t* capacity, const Frames& frames,
                                 const std::vector<ring::RingIndex>& to_relay) {
  const auto relay_memory = Memory(capacity), server_memory = Memory(capacity);
  TunnelEnd relay(TunnelEnd::Side::kRelay, relay_memory), server(TunnelEnd::Side::kServer, server_memory);
  std::vector<std::thread> users;
  users.emplace_back([&] { Produce(relay_memory.get(), ring::kRequestRing, frames); });
  users.emplace_back([&] { Consume(server_memory.get(), ring::kRequestRing, frames); });
  for (const ring::RingIndex index : to_relay) {
    users.emplace_back([&, index] { Produce(server_memory.get(), index, frames); });
    users.emplace_back([&, index] { Consume(relay_memory.get(), index, frames); });
  }
  std::atomic<bool> done{false};
  Carried carried;
  std::thread tunnels([&] {
    std::mt19937 random(6 + lanes);
    while (!done) {
      const uint64_t number = ++carried.streams;
      Pipe up, down;
      FakeStream relay_stream(&down, &up), server_stream(&up, &down);
      // As over the network: each side says how far it is, then both go on.
      const auto relay_has = relay.received_positions(), server_has = server.received_positions();
      TunnelEnd::Outcome relay_outcome = TunnelEnd::Outcome::kEnded, server_outcome = TunnelEnd::Outcome::kEnded;
      std::string relay_reason, server_reason;
      const uint64_t name = lanes != 0 ? number : 0;
      std::vector<std::thread> threads;
      threads.emplace_back([&] { relay_outcome = relay.Run(&relay_stream, server_has, &relay_reason, name); });
      threads.emplace_back([&] { server_outcome = server.Run(&server_stream, relay_has, &server_reason, name); });
      std::deque<Pipe> lane_up(lanes), lane_down(lanes);
      std::deque<FakeStream> ends;
      for (uint32_t i = 0; i < lanes; ++i) {
        FakeStream* const relay_lane = &ends.emplace_back(&lane_down[i], &lane_up[i]);
        FakeStream* const server_lane = &ends.emplace_back(&lane_up[i], &lane_down[i]);
        threads.emplace_back([&, i, relay_lane] { relay.RunLane(relay_lane, number, i); });
        threads.emplace_back([&, i, server_lane] { server.RunLane(server_lane, number, i); });
      }
      const unsigned limit = (lanes != 0 ? 5 : 1) + random() % 60;
      for (unsigned waited = 0; waited < limit && !done; ++waited) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      for (uint32_t i = 0; i < lanes; ++i) carried.over_lanes += lane_up[i].passed + lane_down[i].passed;
      // Now a lane breaks, now the stream; the rest has to follow.
      const unsigned which = random() % (lanes + 1);
      if (which != lanes && !done) {
        lane_up[which].Break();
        lane_down[which].Break();
        // What breaks while nothing is under way shows with the next batch only.
        for (int waited = 0; waited < 200 && !up.IsBroken(); ++waited) {
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
      }
      relay_stream.Cancel();
      for (std::thread& thread : threads) thread.join();
      EXPECT_EQ(relay_outcome, TunnelEnd::Outcome::kBroken) << relay_reason;
      EXPECT_EQ(server_outcome, TunnelEnd::Outcome::kBroken) << server_reason;
    }
  });
  for (std::thread& user : users) user.join();
  done = true;
  tunnels.join();
  return carried;
}

TEST(TunnelEnd, NothingIsLostOverBreakingStreams) {
  EXPECT_GT(CarryOverBreakingStreams(0, kCapacity, {8000}, {ring::kReplyRing, ring::kEventRing}).streams, 3u);
}

// The same with lanes, each of which breaks by itself, too; the frames are long enough for them.
TEST(TunnelEnd, NothingIsLostOverBreakingLanes) {
  const Carried carried = CarryOverBreakingStreams(3, kBulkCapacity, {3000, 60000}, {ring::kReplyRing});
  EXPECT_GT(carried.streams, 3u);
  EXPECT_GT(carried.over_lanes, 20);
}

// What a lane must not bring, and what must not come with a gap.
TEST(TunnelEnd, HostileLanes) {
  const auto frame = [](uint64_t position, uint64_t bytes) {
    FrameHeader header;
    header.sequence = 1;
    header.payload_bytes = uint32_t(bytes - sizeof(header));
    std::string text(bytes, 'x');
    memcpy(&text[0], &header, sizeof(header));
    TunnelMessage message;
    message.position = position;
    const grpc::Slice slice(text);
    return EncodeTunnelMessage(message, &slice);
  };
  TunnelMessage acknowledgement, goodbye, counts, wrong_counts, announce;
  acknowledgement.acknowledged = 8;
  goodbye.end = "bye";
  counts.lanes = std::string(1, 5);
  wrong_counts.lanes = std::string(3, char(0x80));
  announce.lanes = std::string(1, 100);
  struct Case {
    const char* what;
    std::vector<grpc::ByteBuffer> main, lane;
    uint64_t number;
    const char* says;
  };
  const auto plain = [](const TunnelMessage& message) { return EncodeTunnelMessage(message, nullptr); };
  const std::vector<Case> cases = {
      {"a gap without lanes", {frame(800, 80)}, {}, 0, "gap"},
      {"a gap that is not aligned", {frame(801, 80)}, {}, 1, "gap"},
      {"beyond the ring", {frame(256 << 10, 80)}, {}, 1, "room"},
      {"far beyond the ring", {frame(uint64_t(1) << 62, 80)}, {}, 1, "room"},
      {"at the end of all positions", {frame(~uint64_t(0) & ~uint64_t(7), 80)}, {}, 1, "room"},
      {"twice", {frame(800, 80), frame(800, 80)}, {}, 1, "twice"},
      {"partly twice", {frame(800, 80), frame(840, 80)}, {}, 1, "twice"},
      {"around others", {frame(800, 80), frame(720, 800)}, {}, 1, "twice"},
      {"counts that make no sense", {plain(wrong_counts)}, {}, 1, "counts"},
      {"counts that fall", {plain(announce), plain(counts)}, {}, 1, "counts"},
      {"an acknowledgement over a lane", {plain(announce)}, {plain(acknowledgement)}, 1, "lane"},
      {"a goodbye over a lane", {plain(announce)}, {plain(goodbye)}, 1, "lane"},
      {"counts over a lane", {plain(announce)}, {plain(counts)}, 1, "lane"},
      {"garbage over a lane",
       {plain(announce)},
       {grpc::ByteBuffer(std::vector<grpc::Slice>{grpc::Slice("\xff")}.data(), 1)},
       1,
       "not a tunnel"},
  };
  for (const Case& one : cases) {
    const auto memory = Memory();
    TunnelEnd server(TunnelEnd::Side::kServer, memory);
    Pipe up{64}, down{64}, lane_up{64}, lane_down{64};
    FakeStream stream(&up, &down), lane(&lane_up, &lane_down);
    std::string reason;
    TunnelEnd::Outcome outcome = TunnelEnd::Outcome::kEnded;
    std::thread run([&] { outcome = server.Run(&stream, {0, 0}, &reason, one.number); });
    std::thread lane_run([&] {
      if (one.number != 0) server.RunLane(&lane, one.number, 0);
    });
    for (const auto& message : one.main) up.Put(message);
    for (const auto& message : one.lane) lane_up.Put(message);
    run.join();
    lane_run.join();
    EXPECT_EQ(outcome, TunnelEnd::Outcome::kFailed) << one.what;
    EXPECT_NE(reason.find(one.says), std::string::npos) << one.what << ": " << reason;
  }
}

// Where messages are checked, a damaged one breaks the stream, also one that came over a lane of which nothing more is
// announced; what is damaged again and again fails.
TEST(TunnelEnd, DamageBreaksTheStream) {
  TunnelMessage message, announce;
  announce.lanes = std::string(1, 1);
  for (const bool over_lane : {false, true}) {
    TunnelEnd server(TunnelEnd::Side::kServer, Memory(), /*checked=*/true);
    TunnelEnd::Outcome outcome = TunnelEnd::Outcome::kBroken;
    int runs = 0;
    for (; outcome == TunnelEnd::Outcome::kBroken && runs < 100; ++runs) {
      Pipe up{64}, down{64}, lane_up{64}, lane_down{64};
      FakeStream stream(&up, &down), lane(&lane_up, &lane_down);
      std::string reason;
      std::thread run([&] { outcome = server.Run(&stream, {0, 0}, &reason, 1); });
      std::thread lane_run([&] {
        if (over_lane) server.RunLane(&lane, 1, 0);
      });
      std::vector<grpc::Slice> slices;
      (void)EncodeTunnelMessage(announce, nullptr, true).Dump(&slices);
      std::string bytes(slices[0].begin(), slices[0].end());
      bytes[size_t(runs) % bytes.size()] ^= 16;
      const grpc::Slice slice(bytes);
      if (over_lane) up.Put(EncodeTunnelMessage(announce, nullptr, true));
      (over_lane ? lane_up : up).Put(grpc::ByteBuffer(&slice, 1));
      run.join();
      lane_run.join();
      EXPECT_EQ(server.damaged(), uint64_t(runs) + 1);
    }
    EXPECT_EQ(outcome, TunnelEnd::Outcome::kFailed);
    EXPECT_EQ(runs, 16);
    EXPECT_NE(server.end_reason().find("damaged again and again"), std::string::npos);
  }
}

// Without threads a stream breaks, and the next one goes on.
TEST(TunnelEnd, WithoutThreadsAStreamBreaks) {
  const auto relay_memory = Memory(), server_memory = Memory();
  TunnelEnd relay(TunnelEnd::Side::kRelay, relay_memory), server(TunnelEnd::Side::kServer, server_memory);
  std::string reason;
  for (int left = 0; left < 4; ++left) {
    Pipe up, down;
    FakeStream stream(&up, &down);
    g_threads_left = left;
    EXPECT_EQ(server.Run(&stream, {0, 0}, &reason), TunnelEnd::Outcome::kBroken) << left;
    g_threads_left = -1;
    EXPECT_NE(reason.find("no more threads"), std::string::npos) << reason;
    EXPECT_TRUE(up.IsBroken());
  }
  // With a lane that has none, the whole stream breaks.
  for (int left = 0; left < 2; ++left) {
    Pipe up, down, lane_up, lane_down;
    FakeStream stream(&up, &down), lane(&lane_up, &lane_down);
    TunnelEnd::Outcome outcome = TunnelEnd::Outcome::kEnded;
    std::thread run([&] { outcome = server.Run(&stream, {0, 0}, &reason, uint64_t(left) + 1); });
    // When it reads, it has its threads.
    up.Put(EncodeTunnelMessage(TunnelMessage(), nullptr));
    while (!up.IsEmpty()) std::this_thread::yield();
    g_threads_left = left;
    server.RunLane(&lane, uint64_t(left) + 1, 0);
    g_threads_left = -1;
    run.join();
    EXPECT_EQ(outcome, TunnelEnd::Outcome::kBroken) << left;
  }
  Pipe up, down;
  FakeStream relay_stream(&down, &up), server_stream(&up, &down);
  std::string relay_reason;
  std::thread relay_thread([&] { relay.Run(&relay_stream, {0}, &relay_reason); });
  std::thread server_thread([&] { server.Run(&server_stream, {0, 0}, &reason); });
  const Frames frames{100};
  Produce(relay_memory.get(), ring::kRequestRing, frames);
  Consume(server_memory.get(), ring::kRequestRing, frames);
  relay_stream.Cancel();
  relay_thread.join();
  server_thread.join();
}

TEST(TunnelEnd, LanesOfOtherRunsAreRefused) {
  TunnelEnd server(TunnelEnd::Side::kServer, Memory());
  server.End("over");
  Pipe up, down;
  FakeStream lane(&up, &down);
  EXPECT_FALSE(server.RunLane(&lane, 7, 0));
}

// Both ends always have something to send and to acknowledge, and the stream has room for one message: the way that
// flow control looks on a busy machine. An end that did not read while it waits to write would stop both.
TEST(TunnelEnd, FullInBothDirectionsIsNoDeadlock) {
  const auto relay_memory = Memory(), server_memory = Memory();
  TunnelEnd relay(TunnelEnd::Side::kRelay, relay_memory), server(TunnelEnd::Side::kServer, server_memory);
  Pipe up{1}, down{1};
  FakeStream relay_stream(&down, &up), server_stream(&up, &down);
  std::string relay_reason, server_reason;
  std::thread relay_thread([&] { relay.Run(&relay_stream, {0}, &relay_reason); });
  std::thread server_thread([&] { server.Run(&server_stream, {0, 0}, &server_reason); });
  const Frames frames{20000};
  std::vector<std::thread> users;
  users.emplace_back([&] { Produce(relay_memory.get(), ring::kRequestRing, frames); });
  users.emplace_back([&] { Consume(server_memory.get(), ring::kRequestRing, frames); });
  users.emplace_back([&] { Produce(server_memory.get(), ring::kReplyRing, frames); });
  users.emplace_back([&] { Consume(relay_memory.get(), ring::kReplyRing, frames); });
  for (std::thread& user : users) user.join();
  relay_stream.Cancel();
  relay_thread.join();
  server_thread.join();
  EXPECT_EQ(relay.end_reason() + server.end_reason(), "");
}

TEST(TunnelEnd, TheEndComesBehindAllFrames) {
  const auto relay_memory = Memory(), server_memory = Memory();
  TunnelEnd relay(TunnelEnd::Side::kRelay, relay_memory), server(TunnelEnd::Side::kServer, server_memory);
  Produce(server_memory.get(), ring::kReplyRing, {30});
  server.End("the worker is done");
  Pipe up, down;
  FakeStream relay_stream(&down, &up), server_stream(&up, &down);
  std::string relay_reason, server_reason;
  TunnelEnd::Outcome server_outcome;
  std::thread server_thread([&] { server_outcome = server.Run(&server_stream, {0, 0}, &server_reason); });
  EXPECT_EQ(relay.Run(&relay_stream, {0}, &relay_reason), TunnelEnd::Outcome::kPeerEnded);
  EXPECT_EQ(relay_reason, "the worker is done");
  relay_stream.Cancel();
  server_thread.join();
  EXPECT_EQ(server_outcome, TunnelEnd::Outcome::kEnded);
  Consume(relay_memory.get(), ring::kReplyRing, {30});
}

TEST(TunnelEnd, ImpossibleResumptionIsRefused) {
  for (const uint64_t position : {uint64_t{8}, uint64_t{1}, uint64_t{1} << 40, UINT64_MAX}) {
    TunnelEnd relay(TunnelEnd::Side::kRelay, Memory());
    Pipe up, down;
    FakeStream stream(&down, &up);
    std::string reason;
    EXPECT_EQ(relay.Run(&stream, {position}, &reason), TunnelEnd::Outcome::kFailed) << position;
    EXPECT_NE(reason.find("resume"), std::string::npos);
  }
}

TEST(TunnelEnd, CorruptLocalRingEndsBothSides) {
  const auto memory = Memory();
  TunnelEnd relay(TunnelEnd::Side::kRelay, memory), server(TunnelEnd::Side::kServer, Memory());
  memset(memory->data(ring::kRequestRing), 0xff, 64);
  memory->control(ring::kRequestRing)->tail.store(64);
  Pipe up, down;
  FakeStream relay_stream(&down, &up), server_stream(&up, &down);
  std::string relay_reason, server_reason;
  TunnelEnd::Outcome relay_outcome;
  std::thread relay_thread([&] { relay_outcome = relay.Run(&relay_stream, {0}, &relay_reason); });
  EXPECT_EQ(server.Run(&server_stream, {0, 0}, &server_reason), TunnelEnd::Outcome::kPeerEnded);
  EXPECT_NE(server_reason.find("protocol error"), std::string::npos) << server_reason;
  server_stream.Cancel();
  relay_thread.join();
  EXPECT_EQ(relay_outcome, TunnelEnd::Outcome::kFailed);
}

}  // namespace
}  // namespace cuda_remote::control

// In front of the C library's.
extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*run)(void*),
                              void* argument) noexcept {
  static const auto create = reinterpret_cast<decltype(&pthread_create)>(dlsym(RTLD_NEXT, "pthread_create"));
  std::atomic<int>& left = cuda_remote::control::g_threads_left;
  if (left >= 0 && left-- <= 0) {
    left = 0;
    return EAGAIN;
  }
  return create(thread, attributes, run, argument);
}
