// SPDX-License-Identifier: Apache-2.0
// Rounds of copies against a server of the test's own, whose memory changes with every request: in the pause a copy
// that is used holds what the memory holds.

#include "checkpoint/gpu/precopy.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/gpu/peeker.h"
#include "proto/codec/codec.h"

namespace cuda_remote::checkpoint {
namespace {

using ckptfmt::kChunkBytes;
using ckptfmt::Region;
using ckptfmt::RegionKind;

constexpr uint32_t kInvalidValue = 1, kCapture = 900;

// Answers each request when it is waited for; `change` is called before that, and in the middle of each copy.
class Server final : public SideRequests {
 public:
  explicit Server(bool shares) : shares_(shares) {}
  ~Server() override {
    EXPECT_TRUE(open_.empty());
    if (buffers_ != nullptr) munmap(buffers_, buffer_bytes_);
  }

  bool shared_memory() const override { return shares_; }
  absl::StatusOr<uint64_t> Begin(const agent::SideRequest& request) override {
    if (die_after >= 0 && die_after-- == 0) dead_ = true;
    if (dead_) return absl::UnavailableError("the job has ended");
    EXPECT_LT(open_.size(), 64u);
    const uint64_t number = ++last_;
    open_[number] = request;
    if (request.operation != kOpHostMap) return number;
    wire::OpHostMap_Request map;
    EXPECT_TRUE(map.Decode(request.message));
    buffers_ = static_cast<char*>(mmap(nullptr, map.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, request.fd, 0));
    EXPECT_NE(buffers_, MAP_FAILED);
    buffers_at_ = map.address;
    buffer_bytes_ = map.bytes;
    return number;
  }
  absl::StatusOr<agent::SideAnswer> Wait(uint64_t number) override {
    const agent::SideRequest request = open_.at(number);
    open_.erase(number);
    if (dead_) return absl::UnavailableError("the job has ended");
    if (change) change();
    agent::SideAnswer answer;
    if (request.operation == kOpRegions) {
      wire::OpRegions_Request in;
      EXPECT_TRUE(in.Decode(request.message));
      wire::OpRegions_Reply out;
      // In pieces, as a server with many would.
      for (const auto& [address, bytes] : memory) {
        if (in.after > 0) {
          --in.after;
          continue;
        }
        if (out.regions.size() == 3) {
          out.more = true;
          break;
        }
        wire::Region region;
        region.kind = 1;
        region.address = address;
        region.bytes = bytes.size();
        region.context = 7;
        out.regions.push_back(region);
      }
      out.Encode(&answer.message);
    } else if (request.operation == kOpHashMemory) {
      answer.result = Hash(request, &answer.payload);
    } else if (request.operation == kOpPeekMemory) {
      answer.result = Peek(request, &answer.payload);
    }
    return answer;
  }

  std::vector<Region> Regions() const {
    std::vector<Region> out;
    for (const auto& [address, bytes] : memory) {
      Region region;
      region.address = address;
      region.bytes = bytes.size();
      region.context = 7;
      out.push_back(region);
    }
    return out;
  }

  std::map<uint64_t, std::string> memory;
  std::function<void()> change;
  int die_after = -1;     // requests
  int refuse_after = -1;  // copies
  uint64_t copied = 0;    // bytes
  uint64_t part_hashed = 0, whole_hashed = 0;
  std::set<uint64_t> at;  // where copies began

 private:
  const char* Find(uint64_t address, uint64_t bytes) const {
    auto it = memory.upper_bound(address);
    if (it == memory.begin()) return nullptr;
    --it;
    return address + bytes <= it->first + it->second.size() ? it->second.data() + (address - it->first) : nullptr;
  }
  uint32_t Hash(const agent::SideRequest& request, std::string* payload) {
    wire::OpHashMemory_Request in;
    EXPECT_TRUE(in.Decode(request.message));
    for (const wire::Region& region : in.regions) {
      for (uint64_t offset = 0; offset < region.bytes; offset += in.chunk_bytes) {
        const uint64_t bytes = std::min(in.chunk_bytes, region.bytes - offset);
        const char* const data = Find(region.address + offset, bytes);
        if (data == nullptr) return kInvalidValue;
        const ChunkHash hash = HashRows(data, bytes, std::max(in.every, 1u));
        (in.every > 1 ? part_hashed : whole_hashed) += bytes;
        payload->append(reinterpret_cast<const char*>(&hash), sizeof(hash));
      }
    }
    EXPECT_LE(payload->size(), request.payload_bytes);
    return 0;
  }
  uint32_t Peek(const agent::SideRequest& request, std::string* payload) {
    wire::OpPeekMemory_Request in;
    EXPECT_TRUE(in.Decode(request.message));
    EXPECT_EQ(in.context, 7u);
    if (refuse_after >= 0 && refuse_after-- == 0) return kCapture;
    const char* data = Find(in.address, in.bytes);
    if (data == nullptr) return kInvalidValue;
    std::string got(data, in.bytes / 2);
    if (change) change();  // torn
    data = Find(in.address, in.bytes);
    if (data == nullptr) return kInvalidValue;
    got.append(data + got.size(), in.bytes - got.size());
    copied += in.bytes;
    at.insert(in.address);
    if (in.to == 0) {
      *payload = std::move(got);
      return 0;
    }
    EXPECT_LE(in.to - buffers_at_ + in.bytes, buffer_bytes_);
    memcpy(buffers_ + (in.to - buffers_at_), got.data(), got.size());
    return 0;
  }

  const bool shares_;
  bool dead_ = false;
  uint64_t last_ = 0;
  std::map<uint64_t, agent::SideRequest> open_;
  char* buffers_ = nullptr;
  uint64_t buffers_at_ = 0;
  size_t buffer_bytes_ = 0;
};

std::string Random(std::mt19937_64* random, size_t bytes) {
  std::string out(bytes, 0);
  for (size_t i = 0; i + 8 <= bytes; i += 8) {
    const uint64_t word = (*random)();
    memcpy(&out[i], &word, 8);
  }
  return out;
}

// All copies that are left, compared with the memory. Returns how many bytes.
uint64_t TakeAll(Precopy* copies, ChunkPool* pool, const Server& server) {
  uint64_t right = 0;
  for (const Region& region : server.Regions()) {
    for (uint64_t at = 0; at < region.bytes; at += kChunkBytes) {
      char* const slot = copies->Take(region, at / kChunkBytes);
      if (slot == nullptr) continue;
      const std::string& bytes = server.memory.at(region.address);
      const size_t count = std::min<size_t>(kChunkBytes, bytes.size() - at);
      EXPECT_EQ(memcmp(slot, bytes.data() + at, count), 0) << region.address << " + " << at;
      right += count;
      pool->Give(slot);
    }
  }
  return right;
}

bool HasAllSlots(ChunkPool* pool) {
  std::vector<char*> slots;
  while (char* const slot = pool->TryTake()) slots.push_back(slot);
  for (char* const slot : slots) pool->Give(slot);
  return slots.size() * ChunkPool::kSlotBytes == pool->limit();
}

// Keeps copies by their addresses.
class Sink final : public CopySink {
 public:
  absl::StatusOr<Ranges> Follow(SideRequests*) override {
    if (++follows == fail_at) return absl::UnavailableError("the new server is gone");
    Ranges lost = std::exchange(lose, {});
    for (const auto& [begin, end] : lost) copies.erase(copies.lower_bound(begin), copies.lower_bound(end));
    return lost;
  }
  bool Has(const Region& region) const override { return region.address != without; }
  bool Put(const Peeker::Chunk& chunk, const char* bytes) override {
    std::lock_guard<std::mutex> lock(mutex_);
    if (chunk.address == refuse) return false;
    copies[chunk.address].assign(bytes, chunk.bytes);
    return true;
  }
  bool is_lost() const override { return false; }
  absl::Status Finish() override { return absl::OkStatus(); }

  std::map<uint64_t, std::string> copies;
  Ranges lose;                       // at the next Follow
  uint64_t without = 0, refuse = 0;  // a region, and a chunk
  int follows = 0, fail_at = -1;

 private:
  std::mutex mutex_;
};

class PrecopyTest : public testing::TestWithParam<bool> {
 protected:
  PrecopyTest() : server_(GetParam()) {
    if (GetParam()) shared_ = SharedBuffers::Make();
  }
  bool Run(Precopy* copies, uint64_t most_bytes = 64 * kChunkBytes) {
    status_ = copies->Look(&server_, nullptr);
    if (status_.ok()) status_ = copies->Run(&server_, shared_.get(), most_bytes, nullptr);
    return status_.ok();
  }
  // As in the pause.
  bool Compare(Precopy* copies) {
    const auto hashes = HashRegions(&server_, server_.Regions());
    status_ = hashes.status();
    copies->Compare(server_.Regions(),
                    hashes.ok() ? *hashes : std::vector<std::vector<ChunkHash>>(server_.Regions().size()));
    return status_.ok();
  }

  std::unique_ptr<SharedBuffers> shared_;
  Server server_;
  absl::Status status_;  // of the last of these
};

INSTANTIATE_TEST_SUITE_P(, PrecopyTest, testing::Bool(),
                         [](const auto& one) { return one.param ? "SharedBuffers" : "Channel"; });

TEST_P(PrecopyTest, CopiesWhatStandsAndLeavesWhatChanges) {
  std::mt19937_64 random(1);
  constexpr uint64_t kStill = 0x10000000, kBusy = 0x20000000, kSmall = 0x30000000;
  server_.memory[kStill] = Random(&random, 5 * kChunkBytes + 300000);
  server_.memory[kBusy] = Random(&random, 3 * kChunkBytes);
  server_.memory[kSmall] = Random(&random, 1000);
  server_.change = [&] { ++server_.memory[kBusy][kChunkBytes + 77]; };  // the second chunk
  ChunkPool pool(32 * kChunkBytes);
  Precopy copies(&pool);
  ASSERT_TRUE(Run(&copies)) << status_;
  EXPECT_EQ(server_.copied, 7 * kChunkBytes + 300000);
  EXPECT_EQ(server_.at.count(kBusy + kChunkBytes), 0u);
  EXPECT_EQ(server_.at.count(kSmall), 0u);
  server_.change = nullptr;
  // Between the last round and the lock.
  ++server_.memory[kStill][2 * kChunkBytes + 5];
  ASSERT_TRUE(Compare(&copies)) << status_;
  EXPECT_EQ(TakeAll(&copies, &pool, server_), 6 * kChunkBytes + 300000);
  EXPECT_EQ(copies.times().kept_bytes, 6 * kChunkBytes + 300000);
  EXPECT_TRUE(HasAllSlots(&pool));
}

// Hashes take bandwidth from the job's kernels. Whole ones are for the look after a round, which compares copies.
TEST_P(PrecopyTest, HashesAPartOfEachChunkToSeeWhatChanges) {
  std::mt19937_64 random(7);
  constexpr uint64_t kAt = 0x10000000, kBytes = 6 * kChunkBytes;
  server_.memory[kAt] = Random(&random, kBytes);
  // The second chunk in its first row, and the third one where no part shows it.
  server_.change = [&] {
    ++server_.memory[kAt][kChunkBytes + 77];
    ++server_.memory[kAt][2 * kChunkBytes + 3 * 8192 + 77];
  };
  ChunkPool pool(32 * kChunkBytes);
  Precopy copies(&pool);
  ASSERT_EQ(copies.Look(&server_, nullptr), absl::OkStatus());
  EXPECT_EQ(server_.part_hashed, kBytes);
  ASSERT_EQ(copies.Run(&server_, shared_.get(), 64 * kChunkBytes, nullptr), absl::OkStatus());
  EXPECT_EQ(copies.times().rounds, 1u);
  EXPECT_EQ(server_.copied, 5 * kChunkBytes);
  EXPECT_EQ(server_.at.count(kAt + kChunkBytes), 0u);
  EXPECT_EQ(server_.part_hashed, 3 * kBytes);
  EXPECT_EQ(server_.whole_hashed, kBytes);
  ASSERT_TRUE(Compare(&copies)) << status_;
  EXPECT_EQ(TakeAll(&copies, &pool, server_), 4 * kChunkBytes);
  EXPECT_TRUE(HasAllSlots(&pool));
}

// Each request costs the job time. One asks for memory of one allocation only, though another may follow it.
TEST_P(PrecopyTest, AsksForSeveralChunksTogether) {
  std::mt19937_64 random(6);
  constexpr uint64_t kFirst = 0x10000000, kSecond = kFirst + 6 * kChunkBytes;
  server_.memory[kFirst] = Random(&random, 6 * kChunkBytes);
  server_.memory[kSecond] = Random(&random, 17 * kChunkBytes + 300000);
  ChunkPool pool(64 * kChunkBytes);
  Precopy copies(&pool);
  // One that changes divides those around it.
  server_.change = [&] { ++server_.memory[kSecond][5 * kChunkBytes]; };
  ASSERT_TRUE(Run(&copies)) << status_;
  server_.change = nullptr;
  EXPECT_EQ(server_.copied, 22 * kChunkBytes + 300000);
  // 6 chunks, 5, and 12.
  if (GetParam()) {
    EXPECT_EQ(server_.at.size(), 2u + 2u + 3u);
  }
  ASSERT_TRUE(Compare(&copies)) << status_;
  EXPECT_EQ(TakeAll(&copies, &pool, server_), 22 * kChunkBytes + 300000);
  EXPECT_TRUE(HasAllSlots(&pool));
}

TEST_P(PrecopyTest, CopiesNothingOfAJobThatChangesEverything) {
  std::mt19937_64 random(2);
  server_.memory[0x10000000] = Random(&random, 4 * kChunkBytes);
  server_.change = [&] {
    for (size_t at = 0; at < 4 * kChunkBytes; at += kChunkBytes) ++server_.memory[0x10000000][at];
  };
  ChunkPool pool(32 * kChunkBytes);
  Precopy copies(&pool);
  ASSERT_TRUE(Run(&copies)) << status_;
  EXPECT_EQ(server_.copied, 0u);
  EXPECT_EQ(copies.times().rounds, 0u);
}

// Writes of all sizes, words that go back to what they were, chunks exchanged, memory freed and allocated at the same
// place with other sizes, all between and in the middle of copies.
TEST_P(PrecopyTest, NeverUsesAWrongCopy) {
  uint64_t all_right = 0;
  for (unsigned seed = 1; seed <= 6; ++seed) {
    std::mt19937_64 random(seed);
    server_.memory.clear();
    std::vector<uint64_t> places;
    for (int i = 0; i < 8; ++i) places.push_back(0x10000000 + uint64_t(i) * 0x1000000);
    const auto allocate = [&](uint64_t place) {
      server_.memory[place] = Random(&random, size_t(1 + random() % (3 * kChunkBytes)));
    };
    for (const uint64_t place : places) allocate(place);
    server_.change = [&] {
      if (random() % 4 != 0) return;
      const uint64_t place = places[random() % places.size()];
      const auto it = server_.memory.find(place);
      if (it == server_.memory.end()) return allocate(place);
      std::string& bytes = it->second;
      switch (random() % 6) {
        case 0:
          bytes[random() % bytes.size()] ^= 1;
          break;
        case 1: {
          const size_t at = random() % bytes.size(), count = std::min<size_t>(bytes.size() - at, random() % 5000);
          memset(&bytes[at], int(random() % 3), count);
          break;
        }
        case 2:
          if (bytes.size() >= 2 * kChunkBytes) std::swap_ranges(&bytes[0], &bytes[4096], &bytes[kChunkBytes]);
          break;
        case 3: {  // there and back
          static char before;
          char* const word = &bytes[bytes.size() / 3];
          if (random() % 2 == 0) before = *word;
          *word = before;
          break;
        }
        case 4:
          server_.memory.erase(it);
          break;
        case 5:
          server_.memory.erase(it);
          allocate(place);
          break;
      }
    };
    ChunkPool pool(64 * kChunkBytes);
    {
      Precopy copies(&pool);
      ASSERT_TRUE(Run(&copies)) << status_ << " seed " << seed;
      for (int i = 0; i < 20; ++i) server_.change();
      server_.change = nullptr;
      ASSERT_TRUE(Compare(&copies)) << status_;
      const uint64_t right = TakeAll(&copies, &pool, server_);
      EXPECT_EQ(right, copies.times().kept_bytes);
      all_right += right;
    }
    EXPECT_TRUE(HasAllSlots(&pool)) << seed;
  }
  EXPECT_GT(all_right, 0u);
}

TEST_P(PrecopyTest, CopiesIntoASink) {
  std::mt19937_64 random(6);
  constexpr uint64_t kStill = 0x10000000, kBusy = 0x30000000, kWithout = 0x40000000, kMany = 100;
  server_.memory[kStill] = Random(&random, kMany * kChunkBytes + 300000);  // more than the pool has slots
  server_.memory[kBusy] = Random(&random, 3 * kChunkBytes);
  server_.memory[kWithout] = Random(&random, 2 * kChunkBytes);
  server_.change = [&] { ++server_.memory[kBusy][kChunkBytes + 77]; };
  Sink sink;
  sink.without = kWithout;
  sink.refuse = kStill + 5 * kChunkBytes;
  ChunkPool pool(Precopy::kSinkSlots * kChunkBytes);
  Precopy copies(&pool, &sink);
  const auto right = [&] {
    uint64_t bytes = 0;
    for (const auto& [address, copy] : sink.copies) {
      const auto region = std::prev(server_.memory.upper_bound(address));
      const bool same = region->second.compare(address - region->first, copy.size(), copy) == 0;
      bytes += same ? copy.size() : 0;
    }
    return bytes;
  };
  ASSERT_TRUE(Run(&copies, UINT64_MAX)) << status_;
  EXPECT_EQ(right(), (kMany + 1) * kChunkBytes + 300000);  // all but two chunks
  EXPECT_EQ(copies.times().copied_bytes, (kMany + 1) * kChunkBytes + 300000);
  EXPECT_EQ(server_.at.count(kWithout), 0u);
  EXPECT_EQ(server_.at.count(kBusy + kChunkBytes), 0u);
  EXPECT_TRUE(HasAllSlots(&pool));
  // Later: what has changed, what the sink has lost, and what stands still by now.
  server_.change = nullptr;
  server_.at.clear();
  sink.refuse = 0;
  sink.lose = {{kStill + 7 * kChunkBytes, kStill + 9 * kChunkBytes},
               {kStill + 40 * kChunkBytes, kStill + 41 * kChunkBytes}};
  ++server_.memory[kStill][70 * kChunkBytes + 1];
  ASSERT_TRUE(Run(&copies, UINT64_MAX)) << status_;
  EXPECT_EQ(right(), (kMany + 3) * kChunkBytes + 300000);
  std::set<uint64_t> wanted = {kBusy + kChunkBytes};
  for (const uint64_t index : {5, 7, 8, 40, 70}) wanted.insert(kStill + index * kChunkBytes);
  for (const uint64_t address : server_.at) EXPECT_EQ(wanted.count(address / kChunkBytes * kChunkBytes), 1u) << address;
  EXPECT_TRUE(HasAllSlots(&pool));
  // A sink that is of no use any more.
  sink.fail_at = sink.follows + 2;
  EXPECT_FALSE(Run(&copies, UINT64_MAX));
  EXPECT_EQ(status_.message(), "the new server is gone");
  EXPECT_TRUE(HasAllSlots(&pool));
}

TEST_P(PrecopyTest, TakesNoMoreOfThePoolThanItMay) {
  std::mt19937_64 random(3);
  server_.memory[0x10000000] = Random(&random, 20 * kChunkBytes);
  ChunkPool pool(32 * kChunkBytes);
  Precopy copies(&pool);
  ASSERT_TRUE(Run(&copies, 6 * kChunkBytes)) << status_;
  EXPECT_EQ(copies.held_bytes(), 6 * kChunkBytes);
  ASSERT_TRUE(Compare(&copies)) << status_;
  EXPECT_EQ(TakeAll(&copies, &pool, server_), 6 * kChunkBytes);
}

// A job may have thousands of these; a slot of 2 MiB for each would be gigabytes.
TEST_P(PrecopyTest, SmallChunksTakeLittleOfThePool) {
  std::mt19937_64 random(8);
  constexpr uint64_t kSmall = 100 << 10, kMany = 300, kLarge = 5, kAll = kMany + kLarge;
  for (uint64_t i = 0; i < kMany; ++i) server_.memory[0x10000000 + i * 0x100000] = Random(&random, kSmall);
  for (uint64_t i = 0; i < kLarge; ++i) {
    server_.memory[0x50000000 + i * 0x1000000] = Random(&random, kChunkBytes + kSmall);
  }
  // 20 in a slot.
  constexpr uint64_t kSlots = kLarge + (kAll + 19) / 20;
  ChunkPool pool(400 * kChunkBytes);
  const auto taken = [&] { return pool.limit() - pool.free_bytes(); };
  {
    Precopy copies(&pool);
    ASSERT_TRUE(Run(&copies, 64 * kChunkBytes)) << status_;
    EXPECT_EQ(copies.held_bytes(), kAll * kSmall + kLarge * kChunkBytes);
    EXPECT_EQ(taken(), kSlots * kChunkBytes);
    EXPECT_GE(copies.pool_bytes(), taken());
    EXPECT_LE(copies.pool_bytes(), (kSlots + 1) * kChunkBytes);
    // What has changed leaves its slot to the others.
    ++server_.memory[0x10000000][5];
    ASSERT_TRUE(Compare(&copies)) << status_;
    EXPECT_EQ(TakeAll(&copies, &pool, server_), (kAll - 1) * kSmall + kLarge * kChunkBytes);
    EXPECT_TRUE(HasAllSlots(&pool));
  }
  {
    Precopy copies(&pool), others(&pool);
    ASSERT_TRUE(Run(&copies, 6 * kChunkBytes)) << status_;
    EXPECT_EQ(taken(), 6 * kChunkBytes);
    EXPECT_EQ(copies.held_bytes(), 6 * 20 * kSmall);
    // Of another process of the job.
    ASSERT_TRUE(Run(&others, 8 * kChunkBytes)) << status_;
    EXPECT_EQ(taken(), 8 * kChunkBytes);
    EXPECT_EQ(others.held_bytes(), 2 * 20 * kSmall);
    ASSERT_TRUE(Compare(&copies)) << status_;
    EXPECT_EQ(TakeAll(&copies, &pool, server_), 6 * 20 * kSmall);
  }
  EXPECT_TRUE(HasAllSlots(&pool));
}

// What an earlier image has is not copied; what is not known any more in a later look is.
TEST_P(PrecopyTest, LeavesWhatIsKnown) {
  std::mt19937_64 random(5);
  constexpr uint64_t kAt = 0x10000000, kMuch = 40;  // more than it pays to leave for the pause
  server_.memory[kAt] = Random(&random, (kMuch + 3) * kChunkBytes);
  const std::string before = server_.memory[kAt];
  const auto is_known = [&](const Region& region, uint64_t index, const ChunkHash& hash) {
    EXPECT_EQ(region.address, kAt);
    return index >= kMuch && hash == HashChunk(before.data() + index * kChunkBytes, kChunkBytes);
  };
  ChunkPool pool(64 * kChunkBytes);
  {
    Precopy copies(&pool, is_known);
    ASSERT_EQ(copies.Look(&server_, nullptr), absl::OkStatus());
    EXPECT_EQ(copies.known_bytes(), 3 * kChunkBytes);
    EXPECT_EQ(copies.held_bytes(), 0u);
    // Changes before the rounds begin, and stays so.
    ++server_.memory[kAt][(kMuch + 1) * kChunkBytes + 9];
    ASSERT_EQ(copies.Run(&server_, shared_.get(), 64 * kChunkBytes, nullptr), absl::OkStatus());
    for (const uint64_t index : {kMuch, kMuch + 2}) EXPECT_EQ(server_.at.count(kAt + index * kChunkBytes), 0u);
    ASSERT_TRUE(Compare(&copies)) << status_;
    EXPECT_GE(TakeAll(&copies, &pool, server_), kMuch * kChunkBytes);
  }
  // Little is unknown: no second look.
  server_.at.clear();
  const auto all_but_two = [&](const Region&, uint64_t index, const ChunkHash&) { return index >= 2; };
  Precopy copies(&pool, all_but_two);
  ASSERT_TRUE(Run(&copies)) << status_;
  EXPECT_EQ(copies.known_bytes(), (kMuch + 1) * kChunkBytes);
  EXPECT_TRUE(server_.at.empty());
  EXPECT_EQ(copies.times().rounds, 0u);
  EXPECT_TRUE(HasAllSlots(&pool));
}

TEST_P(PrecopyTest, OutlivesAJobThatEndsAndACapture) {
  std::mt19937_64 random(4);
  server_.memory[0x10000000] = Random(&random, 12 * kChunkBytes);
  ChunkPool pool(32 * kChunkBytes);
  {
    server_.refuse_after = 4;
    Precopy copies(&pool);
    ASSERT_TRUE(Run(&copies)) << status_;
    ASSERT_TRUE(Compare(&copies)) << status_;
    EXPECT_GT(TakeAll(&copies, &pool, server_), 0u);
    server_.refuse_after = -1;
  }
  EXPECT_TRUE(HasAllSlots(&pool));
  server_.die_after = 9;
  {
    Precopy copies(&pool);
    EXPECT_FALSE(Run(&copies));
    EXPECT_EQ(status_.message(), "the job has ended");
    EXPECT_FALSE(copies.held_bytes() > 0 && Compare(&copies));
    EXPECT_EQ(TakeAll(&copies, &pool, server_), 0u);
  }
  EXPECT_TRUE(HasAllSlots(&pool));
}

TEST_P(PrecopyTest, PeekerAwaitsTheEndOfACapture) {
  constexpr size_t kChunks = 6;
  constexpr uint64_t kAt = 0x10000000;
  std::mt19937_64 random(5);
  const std::string memory = Random(&random, kChunks * kChunkBytes);
  server_.memory[kAt] = memory;
  ChunkPool pool(32 * kChunkBytes);
  const std::unique_ptr<SharedBuffers> shared = SharedBuffers::Make();
  const absl::StatusOr<SharedBuffers*> attached = Peeker::Attach(&server_, shared.get());
  ASSERT_TRUE(attached.ok()) << attached.status();
  for (const Peeker::Captures captures : {Peeker::Captures::kRefuse, Peeker::Captures::kAwait}) {
    std::mutex mutex;
    std::set<size_t> right;
    uint32_t refused = 0;
    server_.refuse_after = 2;  // one copy
    {
      const auto use = [&](const Peeker::Chunk& chunk, char* slot) {
        const bool same = memcmp(slot, memory.data() + chunk.number * kChunkBytes, kChunkBytes) == 0;
        pool.Give(slot);
        std::lock_guard<std::mutex> lock(mutex);
        if (same) right.insert(chunk.number);
      };
      Peeker peeker(&server_, *attached, &pool, use, captures);
      for (size_t i = 0; i < kChunks; ++i) {
        ASSERT_EQ(peeker.Add({kAt + i * kChunkBytes, size_t(kChunkBytes), 7, i}, pool.Take()), absl::OkStatus());
      }
      ASSERT_EQ(peeker.Finish(), absl::OkStatus());
      refused = peeker.refused();
    }
    const bool awaits = captures == Peeker::Captures::kAwait;
    EXPECT_EQ(refused, awaits ? 0u : kCapture);
    EXPECT_EQ(right.size(), awaits ? kChunks : kChunks - 1);
  }
  EXPECT_TRUE(HasAllSlots(&pool));
}

}  // namespace
}  // namespace cuda_remote::checkpoint
