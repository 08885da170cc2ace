// SPDX-License-Identifier: Apache-2.0
#include "proto/ring/ring.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <random>
#include <string>
#include <thread>

#include "proto/base/clock.h"
#include "proto/base/testing/value_of.h"

namespace cuda_remote::ring {
namespace {

constexpr uint64_t kSmall[kRingCount] = {kMinCapacity, kMinCapacity, kMinCapacity};

std::unique_ptr<RingMemory> Small() { return ValueOf(RingMemory::Create(kSmall)); }

std::unique_ptr<RingMemory> MapCopy(const RingMemory& memory) {
  return ValueOf(RingMemory::Map(UniqueFd(fcntl(memory.fd(), F_DUPFD_CLOEXEC, 0))));
}

// Writes one frame whose bytes follow from its sequence number; false if there is no room.
bool Put(RingWriter* writer, uint64_t sequence, uint32_t message, uint32_t payload, bool quiet = false) {
  FrameHeader header;
  header.sequence = sequence;
  header.message_bytes = message;
  header.payload_bytes = payload;
  char* where;
  const uint64_t bytes = FrameBytes(message, payload);
  if (writer->Reserve(bytes, &where) != RingStatus::kOk) return false;
  memcpy(where, &header, sizeof(header));
  for (uint32_t i = 0; i < message + payload; ++i) where[sizeof(header) + i] = char(sequence * 31 + i);
  if (quiet) {
    writer->PublishQuietly(bytes);
    writer->Wake();
  } else {
    writer->Commit(bytes);
  }
  return true;
}

void ExpectFrame(const FrameHeader& header, const char* frame, uint64_t sequence) {
  ASSERT_EQ(header.sequence, sequence);
  for (uint32_t i = 0; i < header.message_bytes + header.payload_bytes; ++i) {
    ASSERT_EQ(frame[sizeof(header) + i], char(sequence * 31 + i)) << "byte " << i << " of frame " << sequence;
  }
}

TEST(RingMemory, DataAreaIsMappedTwice) {
  auto memory = Small();
  for (int i = 0; i < kRingCount; ++i) {
    char* data = memory->data(RingIndex(i));
    data[0] = 7;
    EXPECT_EQ(data[kMinCapacity], 7);
    data[kMinCapacity * 2 - 1] = 9;
    EXPECT_EQ(data[kMinCapacity - 1], 9);
  }
}

TEST(RingMemory, DescriptorIsCloseOnExecAndSealed) {
  auto memory = Small();
  EXPECT_TRUE(fcntl(memory->fd(), F_GETFD) & FD_CLOEXEC);
  EXPECT_NE(ftruncate(memory->fd(), 0), 0);
  EXPECT_NE(ftruncate(memory->fd(), 1 << 30), 0);
}

TEST(RingMemory, RefusesWhatIsNotARing) {
  const auto why_not = [](int fd) { return RingMemory::Map(UniqueFd(fd)).status().message(); };
  // Not sealed: the maker could shrink it under our feet.
  int fd = memfd_create("x", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  ASSERT_EQ(ftruncate(fd, 1 << 20), 0);
  EXPECT_EQ(why_not(fd), "the server's shared memory is not sealed against shrinking");
  // Sealed, but empty.
  fd = memfd_create("x", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  ASSERT_EQ(ftruncate(fd, 1 << 20), 0);
  ASSERT_EQ(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW), 0);
  EXPECT_NE(why_not(fd), "");
  // A pipe.
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  EXPECT_NE(why_not(ends[0]), "");
  close(ends[1]);
  // Every field of the header matters.
  struct Case {
    const char* what;
    void (*spoil)(MemoryHeader*);
  };
  const Case cases[] = {
      {"version", [](MemoryHeader* h) { ++h->version; }},
      {"older version", [](MemoryHeader* h) { --h->version; }},
      {"magic", [](MemoryHeader* h) { h->magic ^= 1; }},
      {"header size", [](MemoryHeader* h) { h->header_bytes = 8192; }},
      {"capacity no power of two", [](MemoryHeader* h) { h->capacity[1] += 4096; }},
      {"capacity zero", [](MemoryHeader* h) { h->capacity[0] = 0; }},
      {"capacity huge", [](MemoryHeader* h) { h->capacity[2] = uint64_t{1} << 63; }},
      {"capacity larger than the file", [](MemoryHeader* h) { h->capacity[0] *= 2; }},
      {"capacity smaller than the file", [](MemoryHeader* h) { h->capacity[0] /= 2; }},
  };
  for (const Case& c : cases) {
    auto memory = Small();
    c.spoil(reinterpret_cast<MemoryHeader*>(reinterpret_cast<char*>(memory->control(kRequestRing)) - 512));
    EXPECT_NE(why_not(fcntl(memory->fd(), F_DUPFD_CLOEXEC, 0)), "") << c.what;
  }
}

TEST(Ring, WrapsManyTimesWithEverySize) {
  auto memory = Small();
  RingWriter writer(memory.get(), kRequestRing);
  RingReader reader(memory.get(), kRequestRing);
  std::mt19937 random(1);
  uint64_t written = 0, read = 0;
  for (int round = 0; round < 20000; ++round) {
    if (random() % 2) {
      if (Put(&writer, written + 1, random() % 300, random() % 9000)) ++written;
    } else {
      FrameHeader header;
      const char* frame;
      const RingStatus status = reader.Peek(&header, &frame);
      if (read == written) {
        ASSERT_EQ(status, RingStatus::kNotYet);
        continue;
      }
      ASSERT_EQ(status, RingStatus::kOk);
      ExpectFrame(header, frame, ++read);
      reader.Pop(header);
    }
  }
  EXPECT_GT(writer.position(), 100 * kMinCapacity);
}

TEST(Ring, FullMeansWait) {
  auto memory = Small();
  RingWriter writer(memory.get(), kReplyRing);
  RingReader reader(memory.get(), kReplyRing);
  uint64_t count = 0;
  while (Put(&writer, count + 1, 0, 1000)) ++count;
  EXPECT_EQ(count, kMinCapacity / FrameBytes(0, 1000));
  char* where;
  EXPECT_EQ(writer.Reserve(FrameBytes(0, 1000), &where), RingStatus::kNotYet);
  FrameHeader header;
  const char* frame;
  ASSERT_EQ(reader.Peek(&header, &frame), RingStatus::kOk);
  reader.Skip(header);
  EXPECT_FALSE(Put(&writer, 1, 0, 1000)) << "the frame was looked at but not given back";
  reader.FreeUntil(reader.position());
  EXPECT_TRUE(Put(&writer, count + 1, 0, 1000));
  // A frame of more than half the ring is the caller's mistake.
  EXPECT_EQ(writer.Reserve(kMinCapacity / 2 + 8, &where), RingStatus::kCorrupt);
}

TEST(Ring, RewindReadsAgain) {
  auto memory = Small();
  RingWriter writer(memory.get(), kReplyRing);
  RingReader reader(memory.get(), kReplyRing);
  for (int i = 1; i <= 5; ++i) ASSERT_TRUE(Put(&writer, i, 10, 10));
  FrameHeader header;
  const char* frame;
  for (int round = 0; round < 3; ++round) {
    for (int i = 1; i <= 5; ++i) {
      ASSERT_EQ(reader.Peek(&header, &frame), RingStatus::kOk);
      ExpectFrame(header, frame, i);
      reader.Skip(header);
    }
    EXPECT_EQ(reader.Peek(&header, &frame), RingStatus::kNotYet);
    reader.Rewind(reader.freed());
  }
}

TEST(Ring, HostilePositionsAreCorrupt) {
  // Whatever the producer claims, the reader stays inside its rules: kOk only for a sane frame.
  const uint64_t tails[] = {
      1, 4, 31, 16, 24, kMinCapacity + 8, kMinCapacity * 2, uint64_t(-8), uint64_t(-1), uint64_t{1} << 63};
  for (uint64_t tail : tails) {
    auto memory = Small();
    RingReader reader(memory.get(), kRequestRing);
    memory->control(kRequestRing)->tail.store(tail);
    FrameHeader header;
    const char* frame;
    EXPECT_EQ(reader.Peek(&header, &frame), RingStatus::kCorrupt) << tail;
  }
  const uint64_t heads[] = {8, 1, uint64_t(-1), uint64_t{1} << 63, uint64_t(-8) - kMinCapacity};
  for (uint64_t head : heads) {
    auto memory = Small();
    RingWriter writer(memory.get(), kRequestRing);
    while (Put(&writer, 1, 0, 1000)) {
    }
    memory->control(kRequestRing)->head.store(writer.position() + head);
    char* where;
    EXPECT_EQ(writer.Reserve(FrameBytes(0, 1000), &where), RingStatus::kCorrupt) << head;
  }
}

TEST(Ring, QuietFramesAreFoundByWaitingOrWithOthers) {
  auto memory = Small();
  RingWriter writer(memory.get(), kRequestRing);
  RingReader reader(memory.get(), kRequestRing);
  FrameHeader header;
  const char* frame;
  const auto expect = [&](uint64_t sequence) {
    ASSERT_EQ(reader.Peek(&header, &frame), RingStatus::kOk) << sequence;
    ExpectFrame(header, frame, sequence);
    reader.Pop(header);
  };
  for (uint64_t i = 1; i <= 3; ++i) ASSERT_TRUE(Put(&writer, i, 10, 20, true));
  EXPECT_EQ(memory->control(kRequestRing)->tail.load(), 0u);
  EXPECT_FALSE(reader.Ready());
  EXPECT_EQ(reader.Peek(&header, &frame), RingStatus::kNotYet) << "the line that quiet frames move on was looked at";
  reader.Wait(0);
  for (uint64_t i = 1; i <= 3; ++i) expect(i);
  // All read: the tail, which lies behind, must not pass for something new, or for something wrong.
  EXPECT_FALSE(reader.Ready());
  EXPECT_FALSE(reader.ReadyAtAll());
  EXPECT_EQ(reader.Peek(&header, &frame), RingStatus::kNotYet);
  // Another one publishes all before it.
  ASSERT_TRUE(Put(&writer, 4, 0, 0, true));
  ASSERT_TRUE(Put(&writer, 5, 7, 0));
  EXPECT_EQ(memory->control(kRequestRing)->tail.load(), writer.position());
  EXPECT_TRUE(reader.Ready());
  expect(4);
  expect(5);
  // A new writer goes on behind what the last one wrote quietly.
  ASSERT_TRUE(Put(&writer, 6, 0, 100, true));
  RingWriter next(memory.get(), kRequestRing);
  EXPECT_EQ(next.position(), writer.position());
  ASSERT_TRUE(Put(&next, 7, 0, 0, true));
  EXPECT_TRUE(reader.ReadyAtAll());
  reader.Wait(0);
  expect(6);
  expect(7);
  // Given back although the tail has not come over them.
  EXPECT_EQ(memory->control(kRequestRing)->head.load(), next.position());
}

TEST(Ring, QuietFramesFillTheRingLikeOthers) {
  auto memory = Small();
  RingWriter writer(memory.get(), kRequestRing);
  RingReader reader(memory.get(), kRequestRing);
  uint64_t count = 0;
  while (Put(&writer, count + 1, 0, 1000, true)) ++count;
  EXPECT_EQ(count, kMinCapacity / FrameBytes(0, 1000));
  // A writer that waits for room is woken, though for the reader's looks at the tail the ring was empty.
  std::atomic<bool> done{false};
  std::thread waiter([&] {
    while (!Put(&writer, count + 1, 0, 1000)) writer.WaitRoom(FrameBytes(0, 1000), 60000);
    done = true;
  });
  usleep(50000);
  EXPECT_FALSE(done);
  FrameHeader header;
  const char* frame;
  for (uint64_t i = 1; i <= count + 1; ++i) {
    RingStatus status;
    while ((status = reader.Peek(&header, &frame)) == RingStatus::kNotYet) reader.Wait(1000);
    ASSERT_EQ(status, RingStatus::kOk);
    ExpectFrame(header, frame, i);
    reader.Pop(header);
  }
  waiter.join();
}

TEST(Ring, ASleepingReaderIsWokenByAQuietFrame) {
  auto memory = Small();
  RingWriter writer(memory.get(), kRequestRing);
  for (uint64_t round = 1; round <= 20; ++round) {
    std::atomic<bool> awake{false};
    std::thread sleeper([&] {
      RingReader reader(memory.get(), kRequestRing);
      FrameHeader header;
      const char* frame;
      reader.Wait(60000);
      awake = true;
      ASSERT_EQ(reader.Peek(&header, &frame), RingStatus::kOk);
      ExpectFrame(header, frame, round);
      reader.Pop(header);
    });
    while (memory->control(kRequestRing)->consumer_parked.load() == 0 && !awake) usleep(100);
    EXPECT_FALSE(awake);
    ASSERT_TRUE(Put(&writer, round, 5, 5, true));
    const auto start = Now();
    sleeper.join();
    EXPECT_LT(Now() - start, std::chrono::seconds(20));
  }
}

TEST(Ring, HostileQuietPositions) {
  FrameHeader header;
  const char* frame;
  // What no writer can have written ends the session; what lies behind the reader is nothing new.
  for (const uint64_t quiet : {uint64_t(1), uint64_t(16), kMinCapacity + 8, uint64_t(-8), uint64_t{1} << 63}) {
    auto memory = Small();
    RingReader reader(memory.get(), kRequestRing);
    memory->control(kRequestRing)->quiet_tail.store(quiet);
    EXPECT_EQ(reader.Peek(&header, &frame), RingStatus::kNotYet);
    EXPECT_TRUE(reader.ReadyAtAll());
    reader.Wait(0);
    EXPECT_EQ(reader.Peek(&header, &frame), RingStatus::kCorrupt) << quiet;
  }
  auto memory = Small();
  RingWriter writer(memory.get(), kRequestRing);
  RingReader reader(memory.get(), kRequestRing);
  for (uint64_t i = 1; i <= 2; ++i) {
    ASSERT_TRUE(Put(&writer, i, 0, 100));
    ASSERT_EQ(reader.Peek(&header, &frame), RingStatus::kOk);
    reader.Pop(header);
  }
  memory->control(kRequestRing)->quiet_tail.store(8);
  EXPECT_FALSE(reader.ReadyAtAll());
  EXPECT_EQ(reader.Peek(&header, &frame), RingStatus::kNotYet);
  memory->control(kRequestRing)->tail.store(8);  // backwards
  EXPECT_EQ(reader.Peek(&header, &frame), RingStatus::kCorrupt);
}

TEST(Ring, HostileHeadersAreCorrupt) {
  struct Case {
    uint32_t message, payload;
  };
  const Case cases[] = {
      {kMaxMessageBytes + 1, 0}, {0, kMaxPayloadBytes + 1}, {UINT32_MAX, UINT32_MAX}, {4096, 0}, {0, 4096}};
  for (const Case& c : cases) {
    auto memory = Small();
    RingReader reader(memory.get(), kRequestRing);
    FrameHeader header;
    header.message_bytes = c.message;
    header.payload_bytes = c.payload;
    memcpy(memory->data(kRequestRing), &header, sizeof(header));
    memory->control(kRequestRing)->tail.store(64);  // less than the header says
    const char* frame;
    FrameHeader copy;
    EXPECT_EQ(reader.Peek(&copy, &frame), RingStatus::kCorrupt) << c.message << " " << c.payload;
  }
}

TEST(Ring, RandomScribblingNeverLeavesTheRing) {
  // The test proper is that nothing faults (and that the sanitizers agree).
  std::mt19937_64 random(3);
  auto memory = Small();
  for (int round = 0; round < 2000; ++round) {
    char* control = reinterpret_cast<char*>(memory->control(kRequestRing));
    for (int i = 0; i < 8; ++i) control[random() % sizeof(RingControl)] = char(random());
    for (int i = 0; i < 64; ++i) memory->data(kRequestRing)[random() % kMinCapacity] = char(random());
    if (round % 2)
      memory->control(kRequestRing)
          ->tail.store((memory->control(kRequestRing)->head.load() & ~7ull) + random() % 4096 / 8 * 8);
    RingReader reader(memory.get(), kRequestRing);
    RingWriter writer(memory.get(), kRequestRing);
    FrameHeader header;
    const char* frame;
    for (int i = 0; i < 10 && reader.Peek(&header, &frame) == RingStatus::kOk; ++i) {
      ASSERT_GE(frame, memory->data(kRequestRing));
      ASSERT_LE(frame + FrameBytes(header.message_bytes, header.payload_bytes),
                memory->data(kRequestRing) + 2 * kMinCapacity);
      reader.Pop(header);
    }
    char* where;
    if (writer.Reserve(1024, &where) == RingStatus::kOk) {
      memset(where, 1, 1024);
      writer.Commit(1024);
    }
  }
}

TEST(Ring, WholeFramesChecksBatches) {
  std::string batch;
  auto add = [&](uint32_t message, uint32_t payload) {
    FrameHeader header;
    header.message_bytes = message;
    header.payload_bytes = payload;
    const size_t start = batch.size();
    batch.resize(start + FrameBytes(message, payload));
    memcpy(&batch[start], &header, sizeof(header));
  };
  uint64_t frames;
  EXPECT_TRUE(WholeFrames(batch.data(), 0, &frames));
  EXPECT_EQ(frames, 0u);
  add(5, 0);
  add(0, 100);
  add(1000, 1000);
  EXPECT_TRUE(WholeFrames(batch.data(), batch.size(), &frames));
  EXPECT_EQ(frames, 3u);
  for (size_t cut = 1; cut < batch.size(); ++cut) {
    const bool boundary = cut == FrameBytes(5, 0) || cut == FrameBytes(5, 0) + FrameBytes(0, 100);
    EXPECT_EQ(WholeFrames(batch.data(), cut, &frames), boundary) << cut;
  }
}

// A child process produces, the parent consumes: sleeping and waking across processes, full rings on the way.
TEST(Ring, TwoProcesses) {
  auto memory = Small();
  constexpr uint64_t kFrames = 50000;
  const int fd = memory->fd();
  const pid_t child = fork();
  if (child == 0) {
    // The parent's mapping is not inherited.
    const auto mine = RingMemory::Map(UniqueFd(fcntl(fd, F_DUPFD_CLOEXEC, 0)));
    if (!mine.ok()) _exit(1);
    RingWriter writer((*mine).get(), kRequestRing);
    std::mt19937 random(5);
    for (uint64_t i = 1; i <= kFrames;) {
      const uint32_t message = random() % 100, payload = random() % 500;
      // Long runs of quiet ones, with which rings get full, and single ones.
      const bool quiet = i / 5000 % 3 == 1 || random() % 4 == 0;
      while (!Put(&writer, i, message, payload, quiet)) writer.WaitRoom(FrameBytes(message, payload), 1000);
      ++i;
      if (i % 10000 == 0) usleep(20000);  // the reader parks
    }
    _exit(0);
  }
  RingReader reader(memory.get(), kRequestRing);
  for (uint64_t i = 1; i <= kFrames;) {
    FrameHeader header;
    const char* frame;
    const RingStatus status = reader.Peek(&header, &frame);
    ASSERT_NE(status, RingStatus::kCorrupt);
    if (status == RingStatus::kNotYet) {
      reader.Wait(1000);
      continue;
    }
    ExpectFrame(header, frame, i++);
    if (i % 15000 == 0) usleep(20000);  // the writer parks
    reader.Pop(header);
  }
  int status;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

TEST(Ring, InterruptEndsAWait) {
  auto memory = Small();
  RingReader reader(memory.get(), kRequestRing);
  std::atomic<bool> done{false};
  std::thread waiter([&] {
    reader.Wait(60000);
    done = true;
  });
  while (!done) {
    reader.Interrupt();
    usleep(1000);
  }
  waiter.join();
}

TEST(Ring, WaitEndsAfterItsTime) {
  auto memory = Small();
  auto other = MapCopy(*memory);
  RingReader reader(other.get(), kEventRing);
  const auto start = Now();
  reader.Wait(30);
  const auto took = Now() - start;
  EXPECT_LT(took, std::chrono::seconds(5));
  FrameHeader header;
  const char* frame;
  EXPECT_EQ(reader.Peek(&header, &frame), RingStatus::kNotYet);
}

}  // namespace
}  // namespace cuda_remote::ring
