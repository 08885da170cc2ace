// SPDX-License-Identifier: Apache-2.0
// Both ends of a channel against each other: in one process with the worker's side on threads, and in two processes.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "proto/base/clock.h"
#include "proto/base/testing/value_of.h"
#include "proto/base/unique_fd.h"
#include "proto/channel/client_channel.h"
#include "proto/channel/handshake.h"
#include "proto/channel/server_channel.h"
#include "proto/ring/ring.h"

namespace cuda_remote {
namespace {

// Calls of the test's own worker.
enum : uint32_t {
  kEcho = 1,
  kCount = 2,
  kPayloadOut = 3,
  kPrint = 4,
  kEventPlease = 5,
  kFdSize = 6,
  kDie = 7,
  kHang = 8,
  kSlow = 9
};

uint64_t Number(std::string_view bytes) {
  uint64_t value = 0;
  memcpy(&value, bytes.data(), std::min<size_t>(8, bytes.size()));
  return value;
}
std::string Bytes(uint64_t value) { return std::string(reinterpret_cast<char*>(&value), 8); }
char Pattern(size_t i) { return char(i * 131 + (i >> 13)); }
std::string PatternBytes(size_t n) {
  std::string out(n, 0);
  for (size_t i = 0; i < n; ++i) out[i] = Pattern(i);
  return out;
}

// Serves one channel until it ends.
void Serve(ServerChannel* channel) {
  FrameHeader header;
  std::string message;
  PayloadView payload;
  uint64_t count = 0;
  std::vector<std::thread> slow;
  while (channel->Next(&header, &message, &payload)) {
    std::string reply, out;
    uint32_t result = 0;
    switch (header.call) {
      case kEcho:
        reply = message;
        out.assign(payload.data, payload.bytes);
        break;
      case kCount:
        ++count;
        for (size_t i = 0; i < payload.bytes; ++i) result |= payload.data[i] != Pattern(i);
        reply = Bytes(count);
        break;
      case kPayloadOut:
        out = PatternBytes(Number(message));
        break;
      case kPrint:
        channel->Output(0x1000d, message);
        break;
      case kEventPlease:
        channel->Event(0x1000e, 0, message);
        break;
      case kFdSize: {
        const int fd = channel->TakeFd(Number(message), 5000);
        reply = Bytes(fd < 0 ? 0 : uint64_t(lseek(fd, 0, SEEK_END)));
        if (fd >= 0) close(fd);
        break;
      }
      case kDie:
        kill(getpid(), SIGKILL);
        break;
      case kHang:
        continue;
      case kSlow:
        slow.emplace_back([channel, header, message, prints = payload.bytes != 0] {
          usleep(unsigned(Number(message)));
          if (prints) channel->Output(0x1000d, "late");
          channel->Reply(header.sequence, header.call, 0, 0, message);
        });
        continue;
    }
    if (!(header.flags & kFlagNoReply)) {
      const std::string_view pieces[] = {
          std::string_view(out).substr(0, out.size() / 3), {}, std::string_view(out).substr(out.size() / 3)};
      channel->Reply(header.sequence, header.call, result, header.context_or_result, reply, pieces, 3);
    }
  }
  for (std::thread& thread : slow) thread.join();
}

// A client channel with a worker on a thread of this process.
struct Pair {
  std::unique_ptr<ServerChannel> server;
  std::unique_ptr<ClientChannel> client;
  std::thread executor;
  std::mutex mutex;
  std::string gone_reason;
  std::atomic<int> gone{0};

  explicit Pair(bool shared_memory = true, bool serve = true) {
    int sockets[2];
    EXPECT_TRUE(SocketPair(sockets));
    Welcome welcome;
    welcome.session = 42;
    welcome.shared_memory = shared_memory;
    welcome.server = "test";
    std::thread worker([&] {
      Packet hello;
      EXPECT_EQ(ReceivePacket(sockets[0], &hello, 5000), ChannelStatus::kOk);
      EXPECT_EQ(hello.type, PacketType::kHello);
      server = ValueOf(ServerChannel::Create(UniqueFd(sockets[0]), welcome, [this](const std::string& reason) {
        std::lock_guard<std::mutex> lock(mutex);
        gone_reason = reason;
        ++gone;
      }));
    });
    Welcome got;
    StatusOr<UniqueFd> ring = ClientHandshake(sockets[1], Hello(), 5000, &got);
    worker.join();
    EXPECT_EQ(got.session, 42u);
    client = ValueOf(ClientChannel::Adopt({sockets[1], ValueOf(std::move(ring)).Release()}, 1, got));
    if (serve) executor = std::thread([this] { Serve(server.get()); });
  }
  ~Pair() {
    client.reset();
    if (server) server->Stop();
    if (executor.joinable()) executor.join();
    server.reset();
  }
  std::string reason() {
    std::lock_guard<std::mutex> lock(mutex);
    return gone_reason;
  }
};

FrameHeader Header(uint32_t call) {
  FrameHeader header;
  header.call = call;
  return header;
}

template <typename Condition>
bool Eventually(Condition condition) {
  for (int i = 0; i < 5000; ++i) {
    if (condition()) return true;
    usleep(1000);
  }
  return false;
}

TEST(Channel, CallsComeBack) {
  Pair pair;
  Reply reply;
  char out[100];
  for (uint32_t i = 0; i < 1000; ++i) {
    FrameHeader header = Header(kEcho);
    header.context_or_result = i;
    ASSERT_EQ(pair.client->Call(header, "message" + std::to_string(i), "payload", out, sizeof(out), &reply),
              ChannelStatus::kOk);
    EXPECT_EQ(reply.message, "message" + std::to_string(i));
    EXPECT_EQ(reply.payload_bytes, 7u);
    EXPECT_EQ(std::string(out, 7), "payload");
    EXPECT_EQ(reply.result, 0u);
    EXPECT_EQ(reply.pending_error, i) << "aux travels";
  }
}

TEST(Channel, FireAndForgetKeepsOrder) {
  Pair pair;
  Reply reply;
  for (int i = 0; i < 20000; ++i) ASSERT_EQ(pair.client->Send(Header(kCount), "", ""), ChannelStatus::kOk);
  ASSERT_EQ(pair.client->Call(Header(kCount), "", "", nullptr, 0, &reply), ChannelStatus::kOk);
  EXPECT_EQ(Number(reply.message), 20001u);
}

// Quiet requests are executed although nothing follows them, and in their place among the others.
TEST(Channel, QuietRequestsAreNotLeftLying) {
  Pair pair;
  const ChannelFds fds = pair.client->DupFds();
  close(fds.socket);
  const auto memory = ValueOf(ring::RingMemory::Map(UniqueFd(fds.ring)));
  const ring::RingControl& control = *memory->control(ring::kRequestRing);
  const auto all_read = [&] { return control.head.load() == ring::WrittenUntil(control); };
  for (int i = 0; i < 100; ++i) {
    ASSERT_EQ(pair.client->Send(Header(kCount), "", "", nullptr, false, true), ChannelStatus::kOk);
    if (i % 10 == 0) {
      ASSERT_TRUE(Eventually(all_read));
    }
  }
  ASSERT_TRUE(Eventually(all_read));
  EXPECT_EQ(control.tail.load(), 0u);
  Reply reply;
  ASSERT_EQ(pair.client->Call(Header(kCount), "", "", nullptr, 0, &reply), ChannelStatus::kOk);
  EXPECT_EQ(Number(reply.message), 101u);
  EXPECT_EQ(control.tail.load(), ring::WrittenUntil(control));
}

TEST(Channel, QuietRequestsOfManyThreads) {
  Pair pair;
  constexpr int kThreads = 4, kEach = 3000;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 random(unsigned(t) + 1);
      Reply reply;
      uint64_t before = 0;
      for (int i = 0; i < kEach; ++i) {
        if (random() % 50 != 0) {
          const bool quiet = random() % 2 != 0;
          ASSERT_EQ(pair.client->Send(Header(kCount), "", "", nullptr, false, quiet), ChannelStatus::kOk);
          continue;
        }
        // All of this thread's before this one have been executed.
        ASSERT_EQ(pair.client->Call(Header(kCount), "", "", nullptr, 0, &reply), ChannelStatus::kOk);
        ASSERT_GT(Number(reply.message), uint64_t(i));
        ASSERT_GT(Number(reply.message), before);
        before = Number(reply.message);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  Reply reply;
  ASSERT_EQ(pair.client->Call(Header(kCount), "", "", nullptr, 0, &reply), ChannelStatus::kOk);
  EXPECT_EQ(Number(reply.message), uint64_t(kThreads) * kEach + 1);
}

// A ring that is full of quiet requests is emptied like any other.
TEST(Channel, QuietRequestsFillTheRing) {
  Pair pair;
  const std::string payload(1 << 20, 'x');
  for (int i = 0; i < 150; ++i) {
    ASSERT_EQ(pair.client->Send(Header(kHang), "", payload, nullptr, false, true), ChannelStatus::kOk);
  }
  Reply reply;
  ASSERT_EQ(pair.client->Call(Header(kEcho), "behind all", "", nullptr, 0, &reply), ChannelStatus::kOk);
  EXPECT_EQ(reply.message, "behind all");
}

TEST(Channel, LongPayloadsBothWays) {
  Pair pair;
  Reply reply;
  for (size_t size : {size_t{1}, size_t{kMaxPayloadBytes}, size_t{kMaxPayloadBytes + 1}, size_t{100} << 20}) {
    const std::string data = PatternBytes(size);
    ASSERT_EQ(pair.client->Call(Header(kCount), "x", data, nullptr, 0, &reply), ChannelStatus::kOk) << size;
    EXPECT_EQ(reply.result, 0u) << "the bytes arrived changed, size " << size;
    std::string out(size, 0);
    ASSERT_EQ(pair.client->Call(Header(kPayloadOut), Bytes(size), "", &out[0], size, &reply), ChannelStatus::kOk)
        << size;
    EXPECT_EQ(reply.payload_bytes, size);
    EXPECT_EQ(out, data);
  }
}

// More replies than fit, none read yet, and then more requests than fit: neither side may wait for the other for ever.
TEST(Channel, BothRingsFullIsNoDeadlock) {
  Pair pair;
  constexpr size_t kPiece = 1 << 20, kPieces = 150;
  std::string out(kPiece * kPieces, 0);
  std::vector<uint64_t> sequences;
  for (size_t i = 0; i < kPieces; ++i) {
    sequences.push_back(pair.client->Begin(Header(kPayloadOut), Bytes(kPiece), "", &out[i * kPiece], kPiece));
    ASSERT_NE(sequences.back(), 0u);
  }
  const std::string data = PatternBytes(kPiece);
  for (size_t i = 0; i < kPieces; ++i) ASSERT_EQ(pair.client->Send(Header(kCount), "", data), ChannelStatus::kOk);
  for (size_t i = 0; i < kPieces; ++i) {
    Reply reply;
    ASSERT_EQ(pair.client->Wait(sequences[kPieces - 1 - i], &reply), ChannelStatus::kOk);
    EXPECT_EQ(reply.payload_bytes, kPiece);
  }
  for (size_t i = 0; i < kPieces; ++i) ASSERT_EQ(memcmp(&out[i * kPiece], data.data(), kPiece), 0) << i;
}

TEST(Channel, ManyThreadsEachGetTheirOwn) {
  Pair pair;
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 random{unsigned(t)};
      Reply reply;
      for (int i = 0; i < 1500; ++i) {
        const std::string text = std::to_string(t) + ":" + std::to_string(i);
        char out[64] = {};
        switch (random() % 4) {
          case 0:
            wrong += pair.client->Send(Header(kEcho), text, "") != ChannelStatus::kOk;
            break;
          case 1: {
            // Out of order: the slow one is begun first and waited for last.
            Reply slow;
            const uint64_t first = pair.client->Begin(Header(kSlow), Bytes(random() % 300), "", nullptr, 0);
            const uint64_t second = pair.client->Begin(Header(kEcho), text, text, out, sizeof(out));
            wrong += pair.client->Wait(second, &reply) != ChannelStatus::kOk || reply.message != text || out != text;
            wrong += pair.client->Wait(first, &slow) != ChannelStatus::kOk;
            i += 20;
            break;
          }
          default:
            wrong += pair.client->Call(Header(kEcho), text, text, out, sizeof(out), &reply) != ChannelStatus::kOk ||
                     reply.message != text || out != text;
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

std::string g_printed;

TEST(Channel, DeviceOutputComesBeforeTheReply) {
  Pair pair;
  g_printed.clear();
  pair.client->SetStdoutSink([](const char* bytes, size_t count) { g_printed.append(bytes, count); });
  Reply reply;
  std::string expected;
  for (int i = 0; i < 100; ++i) {
    const std::string line = "line " + std::to_string(i) + "\n";
    expected += line;
    ASSERT_EQ(pair.client->Send(Header(kPrint), line, ""), ChannelStatus::kOk);
    ASSERT_EQ(pair.client->Call(Header(kEcho), "", "", nullptr, 0, &reply), ChannelStatus::kOk);
    ASSERT_EQ(g_printed, expected);
  }
}

TEST(Channel, EventsArriveInOrder) {
  Pair pair;
  FrameHeader header;
  std::string message;
  EXPECT_EQ(pair.client->ReadEvent(&header, &message, 10), ChannelStatus::kTimeout);
  // More than the event ring holds: the worker waits meanwhile.
  constexpr int kEvents = 40000;
  std::thread sender([&] {
    for (int i = 0; i < kEvents; ++i) pair.client->Send(Header(kEventPlease), Bytes(i), "");
  });
  for (int i = 0; i < kEvents; ++i) {
    ASSERT_EQ(pair.client->ReadEvent(&header, &message, 20000), ChannelStatus::kOk);
    ASSERT_EQ(header.call, 0x1000eu);
    ASSERT_EQ(Number(message), uint64_t(i));
  }
  sender.join();
}

TEST(Channel, DescriptorsTravelByTag) {
  Pair pair;
  Reply reply;
  for (uint64_t i = 1; i <= 100; ++i) {
    const int fd = memfd_create("t", MFD_CLOEXEC);
    ASSERT_EQ(ftruncate(fd, off_t(i * 10)), 0);
    ASSERT_EQ(pair.client->SendFd(1000 + i, fd), ChannelStatus::kOk);
    close(fd);
    ASSERT_EQ(pair.client->Call(Header(kFdSize), Bytes(1000 + i), "", nullptr, 0, &reply), ChannelStatus::kOk);
    ASSERT_EQ(Number(reply.message), i * 10);
  }
}

TEST(Channel, NoDescriptorsWithoutSharedMemory) {
  Pair pair(/*shared_memory=*/false);
  EXPECT_EQ(pair.client->SendFd(1, 0), ChannelStatus::kProtocolError);
  Reply reply;
  EXPECT_EQ(pair.client->Call(Header(kEcho), "still", "", nullptr, 0, &reply), ChannelStatus::kOk);
}

TEST(Channel, LimitsAreTheCallersError) {
  Pair pair;
  Reply reply;
  const std::string big(kMaxMessageBytes + 1, 'x');
  EXPECT_EQ(pair.client->Call(Header(kEcho), big, "", nullptr, 0, &reply), ChannelStatus::kTooLarge);
  EXPECT_EQ(pair.client->Send(Header(kEcho), big, ""), ChannelStatus::kTooLarge);
  EXPECT_FALSE(pair.client->Fits(big.size(), 0));
  EXPECT_FALSE(pair.client->Fits(0, kMaxTotalPayloadBytes + 1));
  EXPECT_TRUE(pair.client->Fits(kMaxMessageBytes, kMaxTotalPayloadBytes));
  EXPECT_EQ(pair.client->Call(Header(kEcho), big.substr(1), "", nullptr, 0, &reply), ChannelStatus::kOk);
  EXPECT_EQ(reply.message.size(), kMaxMessageBytes);
}

// A reply that is longer than its destination must not be written beyond it.
TEST(Channel, ReplyLongerThanAskedForEndsTheSession) {
  Pair pair;
  Reply reply;
  std::string out(101, 'x');
  EXPECT_EQ(pair.client->Call(Header(kPayloadOut), Bytes(101), "", &out[0], 100, &reply),
            ChannelStatus::kProtocolError);
  EXPECT_EQ(out, std::string(101, 'x'));
  EXPECT_FALSE(pair.client->alive());
  EXPECT_NE(pair.client->end_reason().find("longer"), std::string::npos);
  EXPECT_EQ(pair.client->Send(Header(kEcho), "", ""), ChannelStatus::kProtocolError);
  EXPECT_TRUE(Eventually([&] { return pair.gone == 1; }));
}

TEST(Channel, ClientGoneIsNoticed) {
  Pair pair;
  Reply reply;
  ASSERT_EQ(pair.client->Call(Header(kEcho), "", "", nullptr, 0, &reply), ChannelStatus::kOk);
  pair.client.reset();
  EXPECT_TRUE(Eventually([&] { return pair.gone == 1; }));
  EXPECT_EQ(pair.reason(), "the client is gone");
  pair.executor.join();
}

TEST(Channel, ServersReasonReachesTheClient) {
  Pair pair;
  std::thread ender([&] {
    usleep(50000);
    pair.server->End("the session used more memory than --memory-limit allows");
  });
  Reply reply;
  EXPECT_EQ(pair.client->Call(Header(kHang), "", "", nullptr, 0, &reply), ChannelStatus::kClosed);
  EXPECT_NE(pair.client->end_reason().find("--memory-limit"), std::string::npos);
  ender.join();
  EXPECT_EQ(pair.gone, 0) << "the worker ended it itself";
}

TEST(Channel, EveryWaiterLearnsOfTheEnd) {
  Pair pair;
  std::vector<std::thread> threads;
  std::atomic<int> closed{0};
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      Reply reply;
      closed += pair.client->Call(Header(kHang), "", "", nullptr, 0, &reply) == ChannelStatus::kClosed;
    });
  }
  usleep(50000);
  pair.server->End("enough");
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(closed, 4);
}

TEST(Channel, WaitsThatEnd) {
  Pair pair;
  Reply reply;
  ChannelStatus status;
  // An answer in time, and one that takes longer than the first waits.
  uint64_t sequence = pair.client->TryBegin(Header(kEcho), "at once", 1000, &status);
  ASSERT_NE(sequence, 0u);
  EXPECT_EQ(pair.client->WaitFor(sequence, 10000, &reply), ChannelStatus::kOk);
  EXPECT_EQ(reply.message, "at once");
  sequence = pair.client->TryBegin(Header(kSlow), Bytes(100000), 1000, &status);
  ASSERT_NE(sequence, 0u);
  EXPECT_EQ(pair.client->WaitFor(sequence, 1, &reply), ChannelStatus::kTimeout);
  EXPECT_EQ(pair.client->WaitFor(sequence, 0, &reply), ChannelStatus::kTimeout);
  EXPECT_EQ(pair.client->WaitFor(sequence, 10000, &reply), ChannelStatus::kOk);
  EXPECT_EQ(Number(reply.message), 100000u);
  // Given up: the answer comes and is dropped, while this thread, another one, or nobody reads.
  std::vector<std::thread> others;
  for (int i = 0; i < 3; ++i) {
    others.emplace_back([&] {
      Reply mine;
      for (int j = 0; j < 200; ++j) {
        EXPECT_EQ(pair.client->Call(Header(kSlow), Bytes(100), "", nullptr, 0, &mine), ChannelStatus::kOk);
      }
    });
  }
  for (unsigned i = 0; i < 100; ++i) {
    sequence = pair.client->TryBegin(Header(kSlow), Bytes(i * 10), 1000, &status);
    ASSERT_NE(sequence, 0u);
    if (i % 2 == 0) pair.client->WaitFor(sequence, 1, &reply);
    pair.client->Abandon(sequence);
  }
  for (std::thread& other : others) other.join();
  ASSERT_EQ(pair.client->Call(Header(kEcho), "still there", "", nullptr, 0, &reply), ChannelStatus::kOk);
  EXPECT_EQ(reply.message, "still there");
}

// A thread of the application reads its replies itself while the checkpoint agent waits for another one: the agent
// would have to wake it.
TEST(Channel, AWaitWithALimitLeavesTheReadingToOthers) {
  static std::atomic<pid_t> reader;
  Pair pair;
  pair.client->SetStdoutSink([](const char*, size_t) { reader = gettid(); });
  ChannelStatus status;
  const uint64_t sequence = pair.client->TryBegin(Header(kSlow), Bytes(1000000), 1000, &status);
  ASSERT_NE(sequence, 0u);
  std::thread agent([&] {
    Reply reply;
    EXPECT_EQ(pair.client->WaitFor(sequence, 30000, &reply), ChannelStatus::kOk);
  });
  usleep(50000);
  // Most of the time: on a busy machine this thread may come late.
  int own = 0;
  constexpr int kTries = 20;
  for (int i = 0; i < kTries; ++i) {
    Reply reply;
    EXPECT_EQ(pair.client->Call(Header(kSlow), Bytes(20000), "print", nullptr, 0, &reply), ChannelStatus::kOk);
    if (reader == gettid()) ++own;
  }
  agent.join();
  EXPECT_GT(own, kTries / 4);
}

// A worker that reads nothing: the ring fills, and a thread stands in the middle of a request.
TEST(Channel, AFullRingIsNotWaitedFor) {
  Pair pair(/*shared_memory=*/true, /*serve=*/false);
  std::thread sender([&] {
    const std::string payload(kMaxPayloadBytes, 'x');
    while (pair.client->Send(Header(kCount), "", payload) == ChannelStatus::kOk) {
    }
  });
  ChannelStatus status = ChannelStatus::kOk;
  uint64_t sequence;
  while ((sequence = pair.client->TryBegin(Header(kEcho), "?", 100, &status)) != 0) pair.client->Abandon(sequence);
  EXPECT_EQ(status, ChannelStatus::kTimeout);
  pair.server.reset();
  sender.join();
  EXPECT_EQ(pair.client->TryBegin(Header(kEcho), "?", 100, &status), 0u);
  EXPECT_NE(status, ChannelStatus::kTimeout);
}

TEST(Channel, GarbageInTheRequestRingEndsTheSession) {
  Pair pair;
  ChannelFds fds = pair.client->DupFds();
  const auto memory = ValueOf(ring::RingMemory::Map(UniqueFd(fds.ring)));
  std::mt19937_64 random(9);
  ring::RingControl* control = memory->control(ring::kRequestRing);
  for (size_t i = 0; i < 100000; ++i) memory->data(ring::kRequestRing)[i] = char(random());
  control->tail.store(control->tail.load() + 8192);
  ring::RingReader(memory.get(), ring::kRequestRing).Interrupt();
  EXPECT_TRUE(Eventually([&] { return pair.gone == 1; }));
  EXPECT_NE(pair.reason().find("protocol error"), std::string::npos) << pair.reason();
  Reply reply;
  EXPECT_NE(pair.client->Call(Header(kEcho), "", "", nullptr, 0, &reply), ChannelStatus::kOk);
  EXPECT_NE(pair.client->end_reason(), "");
  close(fds.socket);
}

TEST(Channel, BadRequestsEndTheSession) {
  struct Case {
    const char* what;
    uint32_t flags;
    uint64_t sequence;
    uint32_t second_call;  // 0: no second frame
  };
  const Case cases[] = {
      {"unknown flag", 1u << 20, 1, 0},
      {"a reply", kFlagReply, 1, 0},
      {"an event", kFlagEvent, 1, 0},
      {"sequence 0", 0, 0, 0},
      {"interrupted payload", kFlagMorePayload, 1, kCount},
  };
  for (const Case& c : cases) {
    Pair pair;
    ChannelFds fds = pair.client->DupFds();
    const auto memory = ValueOf(ring::RingMemory::Map(UniqueFd(fds.ring)));
    ring::RingWriter writer(memory.get(), ring::kRequestRing);
    FrameHeader header = Header(kEcho);
    header.flags = c.flags;
    header.sequence = c.sequence;
    char* where;
    ASSERT_EQ(writer.Reserve(32, &where), ring::RingStatus::kOk);
    memcpy(where, &header, 32);
    writer.Commit(32);
    if (c.second_call) {
      header.call = c.second_call;
      header.sequence = 2;
      ASSERT_EQ(writer.Reserve(32, &where), ring::RingStatus::kOk);
      memcpy(where, &header, 32);
      writer.Commit(32);
    }
    EXPECT_TRUE(Eventually([&] { return pair.gone == 1; })) << c.what;
    EXPECT_NE(pair.reason().find("protocol error"), std::string::npos) << c.what;
    close(fds.socket);
  }
}

TEST(Channel, GarbageOnTheSocketEndsTheSession) {
  for (int kind = 0; kind < 4; ++kind) {
    Pair pair;
    ChannelFds fds = pair.client->DupFds();
    close(fds.ring);
    const std::string noise(kind == 3 ? 100000 : 100, 'n');
    if (kind == 0) {
      send(fds.socket, noise.data(), noise.size(), MSG_NOSIGNAL);
    } else if (kind == 1) {
      SendPacket(fds.socket, PacketType::kHello, "", -1);
    } else if (kind == 2) {
      SendPacket(fds.socket, PacketType::kFd, "\xff\xff", 0);
    } else {
      send(fds.socket, noise.data(), noise.size(), MSG_NOSIGNAL);
    }
    EXPECT_TRUE(Eventually([&] { return pair.gone == 1; })) << kind;
    close(fds.socket);
  }
}

// A hoard of descriptors would use up the worker's own.
TEST(Channel, TooManyUnusedDescriptorsEndTheSession) {
  Pair pair;
  for (uint64_t i = 1; i <= 70; ++i) pair.client->SendFd(i, 0);
  EXPECT_TRUE(Eventually([&] { return pair.gone == 1; }));
}

TEST(Channel, HandOverAndBack) {
  Pair pair;
  Reply reply;
  for (int i = 0; i < 10; ++i)
    ASSERT_EQ(pair.client->Call(Header(kCount), "", "", nullptr, 0, &reply), ChannelStatus::kOk);
  // A reply to the first holder that nobody waits for any more must be dropped.
  {
    auto tool = ValueOf(ClientChannel::Adopt(pair.client->DupFds(), pair.client->next_sequence() + (uint64_t{1} << 32),
                                             pair.client->welcome()));
    for (int i = 0; i < 10; ++i) ASSERT_EQ(tool->Call(Header(kCount), "", "", nullptr, 0, &reply), ChannelStatus::kOk);
    EXPECT_EQ(Number(reply.message), 20u);
    std::string out(3 << 20, 0);
    ASSERT_EQ(tool->Call(Header(kPayloadOut), Bytes(out.size()), "", &out[0], out.size(), &reply), ChannelStatus::kOk);
  }
  // The tool failed; the first holder goes on with what it has.
  ASSERT_EQ(pair.client->Call(Header(kCount), "", "", nullptr, 0, &reply), ChannelStatus::kOk);
  EXPECT_EQ(Number(reply.message), 21u);
  // What the first holder has sent quietly is there for the worker, whoever goes on.
  for (int i = 0; i < 5; ++i) {
    ASSERT_EQ(pair.client->Send(Header(kCount), "", "", nullptr, false, true), ChannelStatus::kOk);
  }
  // The tool succeeds: the first holder lets go, and gets the channel back later.
  auto tool = ValueOf(ClientChannel::Adopt(pair.client->DupFds(), pair.client->next_sequence() + (uint64_t{1} << 32),
                                           pair.client->welcome()));
  pair.client.reset();
  ASSERT_EQ(tool->Call(Header(kCount), "", "", nullptr, 0, &reply), ChannelStatus::kOk);
  EXPECT_EQ(Number(reply.message), 27u);
  EXPECT_EQ(pair.gone, 0);
  const uint64_t unread = tool->Begin(Header(kEcho), "nobody reads this", "", nullptr, 0);
  ASSERT_NE(unread, 0u);
  pair.client = ValueOf(ClientChannel::Adopt(tool->DupFds(), tool->next_sequence(), tool->welcome()));
  tool.reset();
  ASSERT_EQ(pair.client->Call(Header(kCount), "", "", nullptr, 0, &reply), ChannelStatus::kOk);
  EXPECT_EQ(Number(reply.message), 28u);
}

TEST(Channel, HeldPayloadsStayValid) {
  Pair pair(true, /*serve=*/false);
  const std::string data = PatternBytes(1 << 20);
  std::thread sender([&] {
    for (int i = 0; i < 300; ++i) pair.client->Send(Header(kCount), std::to_string(i), data);
    pair.client->Send(Header(kCount), "long", data + data + data);
    Reply reply;
    EXPECT_EQ(pair.client->Call(Header(kEcho), "", "", nullptr, 0, &reply), ChannelStatus::kOk);
  });
  struct Kept {
    uint64_t hold;
    PayloadView payload;
  };
  std::vector<Kept> kept;
  FrameHeader header;
  std::string message;
  PayloadView payload;
  std::mt19937 random(2);
  const auto check = [&](size_t index) {
    for (size_t i = 0; i < kept[index].payload.bytes; i += 997) {
      ASSERT_EQ(kept[index].payload.data[i], Pattern(i % (1 << 20)));
    }
    pair.server->Release(kept[index].hold);
    kept.erase(kept.begin() + long(index));
  };
  for (int n = 0; n < 301; ++n) {
    ASSERT_TRUE(pair.server->Next(&header, &message, &payload));
    EXPECT_EQ(payload.is_private, message == "long");
    if (n % 3 != 2) kept.push_back({pair.server->Hold(), payload});
    // Out of order, but the oldest not for ever: room goes back in order.
    while (kept.size() > 20) check(random() % 2 ? 0 : random() % kept.size());
  }
  while (!kept.empty()) check(kept.size() - 1);
  ASSERT_TRUE(pair.server->Next(&header, &message, &payload));
  pair.server->Reply(header.sequence, header.call, 0, 0, "");
  sender.join();
}

// ------------------------------------------------------------------------------------------------ two processes

// Starts a worker in a child process, as cr-server does; returns its PID and connects `client`.
pid_t StartWorker(std::unique_ptr<ClientChannel>* client) {
  int sockets[2];
  if (!SocketPair(sockets)) return -1;
  const pid_t child = fork();
  if (child == 0) {
    close(sockets[1]);
    Packet hello;
    if (ReceivePacket(sockets[0], &hello, 5000) != ChannelStatus::kOk) _exit(9);
    Welcome welcome;
    welcome.shared_memory = true;
    StatusOr<std::unique_ptr<ServerChannel>> made = ServerChannel::Create(UniqueFd(sockets[0]), welcome, nullptr);
    if (!made.ok()) _exit(8);
    std::unique_ptr<ServerChannel> channel = *std::move(made);
    Serve(channel.get());
    const bool client_gone = channel->end_reason() == "the client is gone";
    channel.reset();
    _exit(client_gone ? 0 : 7);
  }
  close(sockets[0]);
  Welcome welcome;
  UniqueFd ring = ValueOf(ClientHandshake(sockets[1], Hello(), 5000, &welcome));
  *client = ValueOf(ClientChannel::Adopt({sockets[1], ring.Release()}, 1, welcome));
  return child;
}

TEST(TwoProcesses, WorkAndEnd) {
  std::unique_ptr<ClientChannel> client;
  const pid_t worker = StartWorker(&client);
  Reply reply;
  for (int i = 0; i < 2000; ++i) {
    for (int k = 0; k < 20; ++k) ASSERT_EQ(client->Send(Header(kCount), "", ""), ChannelStatus::kOk);
    ASSERT_EQ(client->Call(Header(kCount), "", "", nullptr, 0, &reply), ChannelStatus::kOk);
    ASSERT_EQ(Number(reply.message), uint64_t(i + 1) * 21);
  }
  client.reset();
  int status;
  ASSERT_EQ(waitpid(worker, &status, 0), worker);
  EXPECT_EQ(status, 0);
}

TEST(TwoProcesses, DeadWorkerIsNoticedByAWaiter) {
  std::unique_ptr<ClientChannel> client;
  const pid_t worker = StartWorker(&client);
  Reply reply;
  const auto start = Now();
  EXPECT_EQ(client->Call(Header(kDie), "", "", nullptr, 0, &reply), ChannelStatus::kClosed);
  EXPECT_LT(Now() - start, std::chrono::seconds(3));
  EXPECT_FALSE(client->alive());
  FrameHeader header;
  std::string message;
  EXPECT_EQ(client->ReadEvent(&header, &message, -1), ChannelStatus::kClosed);
  waitpid(worker, nullptr, 0);
}

TEST(TwoProcesses, DeadWorkerIsNoticedByASender) {
  std::unique_ptr<ClientChannel> client;
  const pid_t worker = StartWorker(&client);
  kill(worker, SIGKILL);
  waitpid(worker, nullptr, 0);
  const std::string data(1 << 20, 'x');
  ChannelStatus status = ChannelStatus::kOk;
  for (int i = 0; i < 1000 && status == ChannelStatus::kOk; ++i) status = client->Send(Header(kCount), "", data);
  EXPECT_EQ(status, ChannelStatus::kClosed);
}

// A forked child that lives on must not keep the session alive, nor disturb it.
TEST(TwoProcesses, ForkedChildHasNoChannel) {
  std::unique_ptr<ClientChannel> client;
  const pid_t worker = StartWorker(&client);
  Reply reply;
  ASSERT_EQ(client->Call(Header(kCount), "", "", nullptr, 0, &reply), ChannelStatus::kOk);
  int release[2];
  ASSERT_EQ(pipe(release), 0);
  const pid_t child = fork();
  if (child == 0) {
    char byte;
    close(release[1]);
    if (read(release[0], &byte, 1) < 0) _exit(1);
    _exit(0);
  }
  ASSERT_EQ(client->Call(Header(kCount), "", "", nullptr, 0, &reply), ChannelStatus::kOk);
  client.reset();
  int status;
  ASSERT_EQ(waitpid(worker, &status, 0), worker) << "the worker did not see that the client is gone";
  EXPECT_EQ(status, 0);
  close(release[0]);
  close(release[1]);
  waitpid(child, &status, 0);
}

TEST(TwoProcesses, IdleCostsNothing) {
  std::unique_ptr<ClientChannel> client;
  const pid_t worker = StartWorker(&client);
  Reply reply;
  ASSERT_EQ(client->Call(Header(kCount), "", "", nullptr, 0, &reply), ChannelStatus::kOk);
  const auto ticks = [&] {
    char path[64], text[1024] = {};
    snprintf(path, sizeof(path), "/proc/%d/stat", worker);
    const int fd = open(path, O_RDONLY);
    EXPECT_GT(read(fd, text, sizeof(text) - 1), 0);
    close(fd);
    unsigned long user = 0, system = 0;
    sscanf(strrchr(text, ')') + 2, "%*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %lu %lu", &user, &system);
    return user + system;
  };
  // The first seconds may still have the end of the call in them.
  unsigned long used = 0;
  for (int second = 0; second == 0 || (second < 30 && used > 1); ++second) {
    const unsigned long before = ticks();
    usleep(1000000);
    used = ticks() - before;
  }
  EXPECT_LE(used, 1u) << "an idle worker uses processor time";
  client.reset();
  waitpid(worker, nullptr, 0);
}

}  // namespace
}  // namespace cuda_remote
