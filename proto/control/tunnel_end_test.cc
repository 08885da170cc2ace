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

std::shared_ptr<RingMemory> Memory() {
  std::string error;
  std::shared_ptr<RingMemory> memory = RingMemory::Create(kCapacity, &error);
  EXPECT_TRUE(memory) << error;
  return memory;
}

// Messages in one direction, at most `room` under way; broken for both sides at once.
struct Pipe {
  const size_t room = 4;
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<grpc::ByteBuffer> messages;
  bool broken = false;
  bool Put(const grpc::ByteBuffer& buffer) {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [&] { return broken || messages.size() < room; });
    if (broken) return false;
    messages.push_back(buffer);
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
