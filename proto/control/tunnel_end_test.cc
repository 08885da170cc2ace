// Two tunnel ends against each other over a stream that breaks at any moment, without a network.

#include "proto/control/tunnel_end.h"

#include <gtest/gtest.h>

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <random>
#include <thread>

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
  std::string error;
  std::shared_ptr<RingMemory> memory = RingMemory::Create(capacity, &error);
  EXPECT_TRUE(memory) << error;
  return memory;
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

uint32_t Size(uint64_t sequence) { return uint32_t(sequence * 7919 % 3000); }

void Produce(RingMemory* memory, ring::RingIndex index, uint64_t count) {
  RingWriter writer(memory, index);
  for (uint64_t sequence = 1; sequence <= count; ++sequence) {
    FrameHeader header;
    header.sequence = sequence;
    header.message_bytes = Size(sequence);
    const uint64_t bytes = ring::FrameBytes(header.message_bytes, 0);
    char* where;
    while (writer.Reserve(bytes, &where) != RingStatus::kOk) writer.WaitRoom(bytes, 100);
    memcpy(where, &header, sizeof(header));
    memset(where + sizeof(header), int(sequence), header.message_bytes);
    writer.Commit(bytes);
  }
}

void Consume(RingMemory* memory, ring::RingIndex index, uint64_t count) {
  RingReader reader(memory, index);
  for (uint64_t sequence = 1; sequence <= count;) {
    FrameHeader header;
    const char* frame;
    const RingStatus status = reader.Peek(&header, &frame);
    ASSERT_NE(status, RingStatus::kCorrupt) << "ring " << index << " after frame " << sequence;
    if (status == RingStatus::kNotYet) {
      reader.Wait(100);
      continue;
    }
    ASSERT_EQ(header.sequence, sequence) << "ring " << index;
    ASSERT_EQ(header.message_bytes, Size(sequence));
    for (uint32_t i = 0; i < header.message_bytes; ++i) ASSERT_EQ(frame[sizeof(header) + i], char(sequence));
    reader.Pop(header);
    ++sequence;
  }
}

TEST(TunnelEnd, NothingIsLostOverBreakingStreams) {
  const auto relay_memory = Memory(), server_memory = Memory();
  TunnelEnd relay(TunnelEnd::Side::kRelay, relay_memory), server(TunnelEnd::Side::kServer, server_memory);
  constexpr uint64_t kFrames = 8000;
  std::vector<std::thread> ends;
  ends.emplace_back([&] { Produce(relay_memory.get(), ring::kRequestRing, kFrames); });
  ends.emplace_back([&] { Consume(server_memory.get(), ring::kRequestRing, kFrames); });
  for (const ring::RingIndex index : {ring::kReplyRing, ring::kEventRing}) {
    ends.emplace_back([&, index] { Produce(server_memory.get(), index, kFrames); });
    ends.emplace_back([&, index] { Consume(relay_memory.get(), index, kFrames); });
  }
  std::atomic<bool> done{false};
  int streams = 0;
  std::thread tunnels([&] {
    std::mt19937 random(6);
    while (!done) {
      ++streams;
      Pipe up, down;
      FakeStream relay_stream(&down, &up), server_stream(&up, &down);
      // As over the network: each side says how far it is, then both go on.
      const auto relay_has = relay.received_positions(), server_has = server.received_positions();
      TunnelEnd::Outcome relay_outcome = TunnelEnd::Outcome::kEnded, server_outcome = TunnelEnd::Outcome::kEnded;
      std::string relay_reason, server_reason;
      std::thread relay_thread([&] { relay_outcome = relay.Run(&relay_stream, server_has, &relay_reason); });
      std::thread server_thread([&] { server_outcome = server.Run(&server_stream, relay_has, &server_reason); });
      for (unsigned waited = 0, limit = 1 + random() % 60; waited < limit && !done; ++waited) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      relay_stream.Cancel();
      relay_thread.join();
      server_thread.join();
      EXPECT_EQ(relay_outcome, TunnelEnd::Outcome::kBroken) << relay_reason;
      EXPECT_EQ(server_outcome, TunnelEnd::Outcome::kBroken) << server_reason;
    }
  });
  for (std::thread& end : ends) end.join();
  done = true;
  tunnels.join();
  EXPECT_GT(streams, 3);
}

// The same with lanes, each of which breaks by itself, too; the frames are long enough for them.
TEST(TunnelEnd, NothingIsLostOverBreakingLanes) {
  const auto relay_memory = Memory(kBulkCapacity), server_memory = Memory(kBulkCapacity);
  TunnelEnd relay(TunnelEnd::Side::kRelay, relay_memory), server(TunnelEnd::Side::kServer, server_memory);
  constexpr uint64_t kFrames = 3000;
  constexpr uint32_t kLanes = 3;
  const auto long_frames = [](RingMemory* memory, ring::RingIndex index, bool produce) {
    RingWriter writer(memory, index);
    RingReader reader(memory, index);
    for (uint64_t sequence = 1; sequence <= kFrames;) {
      const uint32_t payload = uint32_t(sequence * 7919 % 60000);
      FrameHeader header;
      if (produce) {
        header.sequence = sequence;
        header.payload_bytes = payload;
        char* where;
        const uint64_t bytes = ring::FrameBytes(0, payload);
        while (writer.Reserve(bytes, &where) != RingStatus::kOk) writer.WaitRoom(bytes, 100);
        memcpy(where, &header, sizeof(header));
        memset(where + sizeof(header), int(sequence), payload);
        writer.Commit(bytes);
      } else {
        const char* frame;
        const RingStatus status = reader.Peek(&header, &frame);
        ASSERT_NE(status, RingStatus::kCorrupt) << "ring " << index << " after frame " << sequence;
        if (status == RingStatus::kNotYet) {
          reader.Wait(100);
          continue;
        }
        ASSERT_EQ(header.sequence, sequence) << "ring " << index;
        ASSERT_EQ(header.payload_bytes, payload);
        for (uint32_t i = 0; i < payload; ++i) ASSERT_EQ(frame[sizeof(header) + i], char(sequence));
        reader.Pop(header);
      }
      ++sequence;
    }
  };
  std::vector<std::thread> users;
  users.emplace_back([&] { long_frames(relay_memory.get(), ring::kRequestRing, true); });
  users.emplace_back([&] { long_frames(server_memory.get(), ring::kRequestRing, false); });
  users.emplace_back([&] { long_frames(server_memory.get(), ring::kReplyRing, true); });
  users.emplace_back([&] { long_frames(relay_memory.get(), ring::kReplyRing, false); });
  std::atomic<bool> done{false};
  std::atomic<int> over_lanes{0};
  uint64_t number = 0;
  std::thread tunnels([&] {
    std::mt19937 random(7);
    while (!done) {
      ++number;
      Pipe up, down;
      FakeStream relay_stream(&down, &up), server_stream(&up, &down);
      const auto relay_has = relay.received_positions(), server_has = server.received_positions();
      TunnelEnd::Outcome relay_outcome = TunnelEnd::Outcome::kEnded, server_outcome = TunnelEnd::Outcome::kEnded;
      std::string relay_reason, server_reason;
      std::vector<std::thread> threads;
      threads.emplace_back([&] { relay_outcome = relay.Run(&relay_stream, server_has, &relay_reason, number); });
      threads.emplace_back([&] { server_outcome = server.Run(&server_stream, relay_has, &server_reason, number); });
      Pipe lane_up[kLanes], lane_down[kLanes];
      std::vector<std::unique_ptr<FakeStream>> lanes;
      for (uint32_t i = 0; i < kLanes; ++i) {
        lanes.push_back(std::make_unique<FakeStream>(&lane_down[i], &lane_up[i]));
        lanes.push_back(std::make_unique<FakeStream>(&lane_up[i], &lane_down[i]));
        FakeStream* const ends[2] = {lanes[2 * i].get(), lanes[2 * i + 1].get()};
        threads.emplace_back([&, i, end = ends[0]] { relay.RunLane(end, number, i); });
        threads.emplace_back([&, i, end = ends[1]] { server.RunLane(end, number, i); });
      }
      for (unsigned waited = 0, limit = 5 + random() % 60; waited < limit && !done; ++waited) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      for (uint32_t i = 0; i < kLanes; ++i) over_lanes += lane_up[i].passed + lane_down[i].passed;
      // Now a lane breaks, now the stream; the rest has to follow.
      const unsigned which = random() % (kLanes + 1);
      if (which == kLanes || done) {
        relay_stream.Cancel();
      } else {
        lane_up[which].Break();
        lane_down[which].Break();
        // What breaks while nothing is under way shows with the next batch only.
        for (int waited = 0; waited < 200 && !up.IsBroken(); ++waited) {
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
        relay_stream.Cancel();
      }
      for (std::thread& thread : threads) thread.join();
      EXPECT_EQ(relay_outcome, TunnelEnd::Outcome::kBroken) << relay_reason;
      EXPECT_EQ(server_outcome, TunnelEnd::Outcome::kBroken) << server_reason;
    }
  });
  for (std::thread& user : users) user.join();
  done = true;
  tunnels.join();
  EXPECT_GT(number, 3u);
  EXPECT_GT(over_lanes.load(), 20);
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
  constexpr uint64_t kFrames = 20000;
  std::vector<std::thread> users;
  users.emplace_back([&] { Produce(relay_memory.get(), ring::kRequestRing, kFrames); });
  users.emplace_back([&] { Consume(server_memory.get(), ring::kRequestRing, kFrames); });
  users.emplace_back([&] { Produce(server_memory.get(), ring::kReplyRing, kFrames); });
  users.emplace_back([&] { Consume(relay_memory.get(), ring::kReplyRing, kFrames); });
  for (std::thread& user : users) user.join();
  relay_stream.Cancel();
  relay_thread.join();
  server_thread.join();
  EXPECT_EQ(relay.end_reason() + server.end_reason(), "");
}

TEST(TunnelEnd, TheEndComesBehindAllFrames) {
  const auto relay_memory = Memory(), server_memory = Memory();
  TunnelEnd relay(TunnelEnd::Side::kRelay, relay_memory), server(TunnelEnd::Side::kServer, server_memory);
  Produce(server_memory.get(), ring::kReplyRing, 30);
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
  Consume(relay_memory.get(), ring::kReplyRing, 30);
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
