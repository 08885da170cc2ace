// SPDX-License-Identifier: Apache-2.0
// Tests of reading and writing GPU memory, against a server of the test's own on a thread of this process.

#include "checkpoint/gpu/memory_transfer.h"

#include <cuda.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>

#include "checkpoint/gpu/direct_copy.h"
#include "checkpoint/gpu/gpu_state.h"
#include "ckptfmt/image_reader.h"
#include "ckptfmt/image_store.h"
#include "ckptfmt/image_writer.h"
#include "proto/channel/handshake.h"
#include "proto/channel/server_channel.h"
#include "proto/chunkhash/chunk_hash.h"
#include "proto/codec/codec.h"
#include "proto/driverabi/job_addresses.h"

namespace cuda_remote::checkpoint {
namespace {

using ckptfmt::kChunkBytes;
using ckptfmt::Region;
using ckptfmt::RegionKind;
using testing::HasSubstr;

constexpr uint32_t kInvalidValue = CUDA_ERROR_INVALID_VALUE;

// A GPU server's answers to what transfers ask, with memory of its own, and with faults on demand.
class Server {
 public:
  static constexpr uint64_t kFirstAllocation = 0x180000000000;

  Server() {
    int sockets[2];
    EXPECT_TRUE(SocketPair(sockets));
    Welcome welcome;
    welcome.shared_memory = true;
    std::thread worker([&] {
      Packet hello;
      EXPECT_EQ(ReceivePacket(sockets[0], &hello, 5000), ChannelStatus::kOk);
      StatusOr<std::unique_ptr<ServerChannel>> server = ServerChannel::Create(UniqueFd(sockets[0]), welcome, nullptr);
      EXPECT_TRUE(server.ok()) << server.status().message();
      if (server.ok()) server_ = *std::move(server);
    });
    Welcome got;
    StatusOr<UniqueFd> ring = ClientHandshake(sockets[1], Hello(), 5000, &got);
    EXPECT_TRUE(ring.ok()) << ring.status().message();
    worker.join();
    StatusOr<std::unique_ptr<ClientChannel>> client =
        ClientChannel::Adopt({sockets[1], ring.ok() ? ring->Release() : -1}, 1, got);
    EXPECT_TRUE(client.ok()) << client.status().message();
    if (client.ok()) client_ = *std::move(client);
  }
  ~Server() {
    client_.reset();
    server_->Stop();
    if (executor_.joinable()) executor_.join();
    UnmapBuffers();
  }
  // It serves from the first call on.
  ClientChannel* channel() {
    if (!executor_.joinable()) executor_ = std::thread([this] { Serve(); });
    return client_.get();
  }

  // Memory that may be read and written; named regions by their object.
  void Have(const Region& region, std::string bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    memory_[region.kind == RegionKind::kAllocation ? region.address : region.object] = std::move(bytes);
  }
  const std::string& At(uint64_t key) {
    std::lock_guard<std::mutex> lock(mutex_);
    return memory_.at(key);
  }

  // Waits until everything sent before has been done.
  uint32_t Sync() {
    FrameHeader header;
    header.call = kOpPing;
    Reply reply;
    EXPECT_EQ(channel()->Call(header, "", {}, nullptr, 0, &reply), ChannelStatus::kOk);
    return first_error_;
  }

  std::atomic<bool> refuse_map{false}, refuse_copies{false}, refuse_hashes{false}, shorten_peeks{false};
  std::atomic<int> refuse_offers{0}, refuse_fetches{0};  // so many
  std::atomic<int> fetches{0};
  std::atomic<int> die_after{-1};                // requests
  std::atomic<uint64_t> unreadable{UINT64_MAX};  // an address
  std::atomic<int> copies{0}, pieces{0}, maps{0};
  std::atomic<bool> too_early{false};  // a copy before the region's first bytes went through the channel

 private:
  void Serve() {
    FrameHeader header;
    std::string message;
    PayloadView payload;
    while (server_->Next(&header, &message, &payload)) {
      if (die_after >= 0 && die_after-- == 0) {
        server_->End("told to die");
        return;
      }
      // Client and server share memory that a sanitizer does not know to be the same: what they tell each other there
      // is told again by this.
      std::lock_guard<std::mutex> lock(mutex_);
      std::string_view out;
      uint32_t result = 0;
      if (header.call == kOpReadMemory) result = Read(message, &out);
      if (header.call == kOpWriteMemory) result = Write(message, payload.view());
      if (header.call == kCall_cuMemcpyAsync) result = refuse_copies ? kInvalidValue : Copy(message);
      if (header.call == kOpHostMap) result = Map(message);
      if (header.call == kOpHashMemory) result = Hash(message, &out);
      std::string answer;
      if (header.call == kOpOfferMemory) result = Offer(message, &answer);
      if (header.call == kOpFetchMemory) result = Fetch(message);
      if (header.call == kOpMemAlloc) result = Allocate(message, &answer);
      if (header.call == kOpPeekMemory) result = Peek(message, &out);
      if (header.call == kOpDrain) wire::OpDrain_Reply().Encode(&answer);
      if (header.call == kOpHostUnmap) result = UnmapBuffers() ? 0 : kInvalidValue;
      if (header.flags & kFlagNoReply) {
        if (first_error_ == 0) first_error_ = result;
        continue;
      }
      server_->Reply(header.sequence, header.call, result, 0, answer, out);
    }
  }

  // The bytes that a request names, null if there are none.
  template <typename Request>
  char* Find(const Request& in) {
    if (in.object != 0) {
      const auto it = memory_.find(in.object);
      if (it == memory_.end() || in.address + in.bytes > it->second.size()) return nullptr;
      return &it->second[in.address];
    }
    char* const found = FindAddress(in.address, in.bytes);
    if (found) opened_.insert(std::prev(memory_.upper_bound(in.address))->first);
    return found;
  }
  char* FindAddress(uint64_t address, uint64_t bytes) {
    auto it = memory_.upper_bound(address);
    if (it == memory_.begin()) return nullptr;
    --it;
    const uint64_t offset = address - it->first;
    return offset + bytes <= it->second.size() ? &it->second[offset] : nullptr;
  }

  uint32_t Read(const std::string& message, std::string_view* out) {
    wire::OpReadMemory_Request in;
    if (!in.Decode(message)) return kInvalidValue;
    ++pieces;
    const char* const from = Find(in);
    if (!from || in.address == unreadable) return kInvalidValue;
    *out = {from, in.bytes};
    return 0;
  }
  uint32_t Hash(const std::string& message, std::string_view* out) {
    wire::OpHashMemory_Request in;
    if (!in.Decode(message) || refuse_hashes) return kInvalidValue;
    hashes_.clear();
    for (const wire::Region& region : in.regions) {
      for (uint64_t at = 0; at < region.bytes; at += in.chunk_bytes) {
        const uint64_t bytes = std::min(in.chunk_bytes, region.bytes - at);
        const char* const from = FindAddress(region.address + at, bytes);
        if (!from) return kInvalidValue;
        const ChunkHash hash = HashChunk(from, bytes);
        hashes_.append(reinterpret_cast<const char*>(&hash), sizeof(hash));
      }
    }
    *out = hashes_;
    return 0;
  }
  uint32_t Write(const std::string& message, std::string_view payload) {
    wire::OpWriteMemory_Request in;
    if (!in.Decode(message) || payload.size() != in.bytes) return kInvalidValue;
    ++pieces;
    char* const to = Find(in);
    if (!to) return kInvalidValue;
    memcpy(to, payload.data(), in.bytes);
    return 0;
  }
  uint32_t Copy(const std::string& message) {
    wire::cuMemcpyAsync_Request in;
    if (!in.Decode(message) || !in.blocking || !buffers_) return kInvalidValue;
    ++copies;
    const bool to_host = in.dst >= buffers_at_ && in.dst < buffers_at_ + buffers_bytes_;
    const uint64_t device = to_host ? in.src : in.dst;
    const uint64_t offset = (to_host ? in.dst : in.src) - buffers_at_;
    auto region = memory_.upper_bound(device);
    if (offset + in.bytes > buffers_bytes_ || region == memory_.begin()) return kInvalidValue;
    --region;
    if (opened_.count(region->first) == 0) too_early = true;
    char* const memory = FindAddress(device, in.bytes);
    if (!memory || device == unreadable) return kInvalidValue;
    memcpy(to_host ? buffers_ + offset : memory, to_host ? memory : buffers_ + offset, in.bytes);
    return 0;
  }
  uint32_t Allocate(const std::string& message, std::string* answer) {
    wire::OpMemAlloc_Request in;
    if (!in.Decode(message)) return kInvalidValue;
    wire::OpMemAlloc_Reply out;
    out.address = next_allocation_;
    next_allocation_ += uint64_t{1} << 32;
    memory_[out.address].resize(in.bytes);
    out.Encode(answer);
    return 0;
  }
  uint32_t Peek(const std::string& message, std::string_view* out) {
    wire::OpPeekMemory_Request in;
    if (!in.Decode(message)) return kInvalidValue;
    const char* const from = FindAddress(in.address, in.bytes);
    if (!from || in.address == unreadable) return kInvalidValue;
    if (in.to == 0) {
      *out = {from, in.bytes - (shorten_peeks ? 1 : 0)};
      return 0;
    }
    char* const to = FindAddress(in.to, in.bytes);
    if (!to) return kInvalidValue;
    memcpy(to, from, in.bytes);
    return 0;
  }
  // The two servers are of one process, so a key is where the bytes lie.
  uint32_t Offer(const std::string& message, std::string* answer) {
    wire::OpOfferMemory_Request in;
    const bool known = in.Decode(message) && memory_.count(in.address) != 0;
    if (!known || refuse_offers-- > 0) return kInvalidValue;
    const std::string& bytes = memory_.at(in.address);
    const auto place = reinterpret_cast<uint64_t>(&bytes);
    wire::OpOfferMemory_Reply out;
    out.key = {reinterpret_cast<const char*>(&place), sizeof(place)};
    out.bytes = bytes.size();
    out.Encode(answer);
    return 0;
  }
  uint32_t Fetch(const std::string& message) {
    wire::OpFetchMemory_Request in;
    uint64_t place;
    ++fetches;
    if (!in.Decode(message) || in.key.size() != sizeof(place) || refuse_fetches-- > 0) return kInvalidValue;
    memcpy(&place, in.key.data(), sizeof(place));
    const auto& bytes = *reinterpret_cast<const std::string*>(place);
    if (bytes.size() != in.bytes) return kInvalidValue;
    memory_.at(in.address) = bytes;
    return 0;
  }
  uint32_t Map(const std::string& message) {
    wire::OpHostMap_Request in;
    if (!in.Decode(message) || buffers_ || refuse_map) return kInvalidValue;
    // A worker refuses what lies elsewhere, or where it has managed memory.
    if (in.address < driverabi::kHostBase || in.bytes > driverabi::kManagedBase - in.address) return kInvalidValue;
    const int fd = server_->TakeFd(in.tag, 5000);
    if (fd < 0) return kInvalidValue;
    void* const memory = mmap(nullptr, in.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (memory == MAP_FAILED) return kInvalidValue;
    buffers_ = static_cast<char*>(memory);
    buffers_at_ = in.address;
    buffers_bytes_ = in.bytes;
    ++maps;
    return 0;
  }
  bool UnmapBuffers() {
    if (!buffers_) return false;
    munmap(buffers_, buffers_bytes_);
    buffers_ = nullptr;
    return true;
  }

  std::unique_ptr<ServerChannel> server_;
  std::unique_ptr<ClientChannel> client_;
  std::thread executor_;
  std::mutex mutex_;
  std::map<uint64_t, std::string> memory_;
  std::set<uint64_t> opened_;
  std::string hashes_;  // of the last answer
  uint64_t next_allocation_ = kFirstAllocation;
  std::atomic<uint32_t> first_error_{0};
  char* buffers_ = nullptr;
  uint64_t buffers_at_ = 0, buffers_bytes_ = 0;
};

std::string Noise(size_t size, uint64_t seed) {
  std::string bytes(size, '\0');
  uint64_t state = seed * 0x9e3779b97f4a7c15u + 1;
  for (size_t i = 0; i + 8 <= size; i += 8) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    memcpy(&bytes[i], &state, 8);
  }
  for (size_t i = size / 8 * 8; i < size; ++i) bytes[i] = char(i);
  return bytes;
}

struct Sample {
  std::vector<Region> regions;
  std::vector<std::string> bytes;
  uint64_t total = 0;
};

// Every kind, with sizes around those of chunks and pieces; more than the smallest pool in all.
Sample MakeSample() {
  Sample sample;
  const auto add = [&](RegionKind kind, uint64_t address, size_t bytes) {
    Region region;
    region.kind = kind;
    region.address = kind == RegionKind::kArray ? 0 : address;
    region.bytes = bytes;
    region.context = 0x7000000000010;
    if (kind != RegionKind::kAllocation) region.object = address + 1;
    if (kind == RegionKind::kModuleSymbol) region.symbol = "variable";
    sample.regions.push_back(region);
    sample.bytes.push_back(Noise(bytes, address));
    sample.total += bytes;
  };
  add(RegionKind::kAllocation, 0x100000000000, 100);
  add(RegionKind::kAllocation, 0x100010000000, 5 * kChunkBytes + 12345);
  add(RegionKind::kAllocation, 0x100020000000, 0);
  add(RegionKind::kAllocation, 0x100030000000, kChunkBytes);
  add(RegionKind::kModuleSymbol, 0x100040000000, kChunkBytes + (1 << 20) + 7);
  add(RegionKind::kArray, 0x100050000000, 3 << 20);
  add(RegionKind::kAllocation, 0x100060000000, 12 * kChunkBytes);
  add(RegionKind::kAllocation, 0x100080000000, 2 * kChunkBytes + 1);
  return sample;
}

uint64_t KeyOf(const Region& region) { return region.kind == RegionKind::kAllocation ? region.address : region.object; }

size_t FreeSlots(ChunkPool* pool) {
  std::vector<char*> slots;
  while (char* const slot = pool->TryTake()) slots.push_back(slot);
  for (char* slot : slots) pool->Give(slot);
  return slots.size();
}

class MemoryTransfer : public testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    g_transfer_threads_for_testing = 4;
    if (GetParam()) {
      shared_ = SharedBuffers::Make();
      ASSERT_TRUE(shared_);
    }
  }
  void TearDown() override { g_transfer_threads_for_testing = 0; }

  // Null without shared buffers.
  SharedBuffers* Attach(Server* server) {
    return shared_ && shared_->Attach(server->channel()) ? shared_.get() : nullptr;
  }

  std::unique_ptr<SharedBuffers> shared_;
};

void ExpectInImage(const std::string& path, const std::vector<Region>& regions, const std::vector<std::string>& bytes) {
  const auto reader = ckptfmt::ImageReader::Open(path);
  ASSERT_TRUE(reader.ok()) << reader.status();
  std::string chunk(kChunkBytes, '?');
  for (size_t i = 0; i < regions.size(); ++i) {
    for (uint64_t at = 0; at < regions[i].bytes; at += kChunkBytes) {
      bool zero = false;
      ASSERT_TRUE((*reader)->ReadChunk(i, at / kChunkBytes, &chunk[0], &zero).ok());
      const size_t size = std::min<uint64_t>(kChunkBytes, regions[i].bytes - at);
      ASSERT_EQ(chunk.substr(0, size), bytes[i].substr(at, size)) << i;
    }
  }
}

// A job has thousands of variables. They must not take a slot each: those were not prepared, and there may not be so
// many.
TEST(SaveMemory, SmallRegionsWaitInMemoryOfTheirOwnSize) {
  Server server;
  std::vector<Region> regions;
  std::vector<std::string> bytes;
  const auto add = [&](RegionKind kind, uint64_t key, size_t size) {
    Region region;
    region.kind = kind;
    (kind == RegionKind::kAllocation ? region.address : region.object) = key;
    region.context = 0x7000000000010;
    region.bytes = size;
    if (kind == RegionKind::kModuleSymbol) region.symbol = "variable" + std::to_string(key);
    regions.push_back(region);
    bytes.push_back(Noise(size, key));
    server.Have(region, bytes.back());
  };
  for (uint64_t i = 1; i <= 300; ++i) add(RegionKind::kModuleSymbol, i, i % 10 == 0 ? 5000 * i / 10 : 8);
  add(RegionKind::kAllocation, 0x100000000000, 2 * kChunkBytes + 100);
  EXPECT_LT(PoolBytesFor(regions), 40 * kChunkBytes);
  ChunkPool pool(40 * kChunkBytes);
  char folder[] = "/tmp/save-memory-test-XXXXXX";
  ASSERT_NE(mkdtemp(folder), nullptr);
  const std::string path = std::string(folder) + "/image";
  auto image = ckptfmt::ImageWriter::Create(path);
  ASSERT_TRUE(image.ok()) << image.status();
  (*image)->HoldChunks();  // nothing comes back meanwhile
  SaveTimes times;
  ASSERT_EQ(SaveMemory(server.channel(), regions, image->get(), &pool, /*holds=*/true, nullptr, nullptr, nullptr,
                       nullptr, nullptr, &times),
            absl::OkStatus());
  EXPECT_EQ(times.reading.regions, regions.size());
  EXPECT_EQ(times.reading.channel_chunks + times.reading.shared_chunks, regions.size() + 2);
  ASSERT_TRUE((*image)->WriteLog("").ok());
  ckptfmt::ImageInfo info;
  info.processes.resize(1);
  ASSERT_TRUE((*image)->Commit(info).ok());
  EXPECT_EQ(FreeSlots(&pool), 40u);
  image->reset();
  ExpectInImage(path, regions, bytes);
  std::filesystem::remove_all(folder);
}

// Allocations of 100 KiB, and ends of that size, wait in as much of the pool as they need; and if it is too small even
// so, they go through it.
TEST(SaveMemory, SmallChunksArePackedInThePool) {
  constexpr uint64_t kSmall = 100 << 10, kMany = 300, kLarge = 5;
  constexpr uint64_t kSlots = kLarge + (kMany + kLarge + 19) / 20;
  for (const bool fits : {true, false}) {
    Server server;
    std::vector<Region> regions;
    std::vector<std::string> bytes;
    for (uint64_t i = 1; i <= kMany + kLarge; ++i) {
      Region region;
      region.address = 0x100000000000 + i * 2 * kChunkBytes;
      region.bytes = (i % (kMany / kLarge) == 0 ? kChunkBytes : 0) + kSmall;
      region.context = 0x7000000000010;
      regions.push_back(region);
      bytes.push_back(Noise(region.bytes, i));
      server.Have(region, bytes.back());
    }
    EXPECT_GE(PoolBytesFor(regions), kSlots * kChunkBytes);
    EXPECT_LE(PoolBytesFor(regions), (kSlots + 1) * kChunkBytes);
    ChunkPool pool(fits ? (kSlots + 2) * kChunkBytes : 0);
    char folder[] = "/tmp/save-memory-test-XXXXXX";
    ASSERT_NE(mkdtemp(folder), nullptr);
    const std::string path = std::string(folder) + "/image";
    auto image = ckptfmt::ImageWriter::Create(path);
    ASSERT_TRUE(image.ok()) << image.status();
    (*image)->HoldChunks();
    SaveTimes times;
    ASSERT_EQ(SaveMemory(server.channel(), regions, image->get(), &pool, /*holds=*/true, nullptr, nullptr, nullptr,
                         nullptr, nullptr, &times),
              absl::OkStatus());
    if (fits) {
      EXPECT_EQ(pool.limit() - pool.free_bytes(), kSlots * kChunkBytes);
    }
    ASSERT_TRUE((*image)->WriteLog("").ok());
    ckptfmt::ImageInfo info;
    info.processes.resize(1);
    ASSERT_TRUE((*image)->Commit(info).ok());
    EXPECT_EQ(pool.free_bytes(), pool.limit());
    image->reset();
    ExpectInImage(path, regions, bytes);
    std::filesystem::remove_all(folder);
  }
}

// The processor is the job's while it stands still, unless its memory would not fit otherwise.
TEST(SaveMemory, HoldsChunksIfWhatIsReadFits) {
  char folder[] = "/tmp/save-memory-test-XXXXXX";
  ASSERT_NE(mkdtemp(folder), nullptr);
  const std::string store = std::string(folder) + "/store";
  constexpr size_t kSlots = ChunkPool::kLeastSlots, kChunks = 3 * kSlots;
  std::string memory = Noise(kChunks * kChunkBytes, 1);
  // How many slots the image keeps of the pool when the job would go on.
  const auto held = [&](size_t expected) {
    Server server;
    std::vector<Region> regions(1);
    regions[0].address = 0x100000000000;
    regions[0].bytes = memory.size();
    regions[0].context = 0x7000000000010;
    server.Have(regions[0], memory);
    ChunkPool pool(0);
    ckptfmt::WriterOptions options;
    options.job_folder = "/run/jobs/a";
    const auto opened = ckptfmt::ImageStore::Open(store);
    ASSERT_TRUE(opened.ok()) << opened.status();
    auto image = (*opened)->Create(options);
    ASSERT_TRUE(image.ok()) << image.status();
    (*image)->HoldChunks();
    SaveTimes times;
    ASSERT_EQ(SaveMemory(server.channel(), regions, image->get(), &pool, /*holds=*/true, nullptr, nullptr, nullptr,
                         nullptr, nullptr, &times),
              absl::OkStatus());
    if (expected > 0) std::this_thread::sleep_for(std::chrono::milliseconds(50));
    while (expected == 0 && pool.free_bytes() < pool.limit()) std::this_thread::yield();
    EXPECT_EQ(pool.limit() - pool.free_bytes(), expected * ChunkPool::kSlotBytes);
    ASSERT_TRUE((*image)->WriteLog("").ok());
    ckptfmt::ImageInfo info;
    info.processes.resize(1);
    info.job_folder = options.job_folder;
    ASSERT_TRUE((*image)->Commit(info).ok());
    EXPECT_EQ(pool.free_bytes(), pool.limit());
  };
  held(0);  // three times as much as the pool has
  for (size_t i = 0; i < 5; ++i) ++memory[3 * i * kChunkBytes];
  held(5);  // the rest is in the first image
  for (size_t i = 0; i < kSlots; ++i) ++memory[2 * i * kChunkBytes];
  held(0);
  std::filesystem::remove_all(folder);
}

TEST(SaveMemory, ReadsWhatEarlierImagesDoNotHave) {
  char folder[] = "/tmp/save-memory-test-XXXXXX";
  ASSERT_NE(mkdtemp(folder), nullptr);
  const std::string store = std::string(folder) + "/store";
  // Four whole chunks, one of them of zeros, and a shorter one; a small region, which is always read.
  std::string memory = Noise(2 * kChunkBytes, 1) + std::string(kChunkBytes, '\0') + Noise(kChunkBytes + 5000, 2);
  const std::string small = Noise(1000, 3);
  const auto save = [&](bool refuse, bool share, TransferTimes* read, uint64_t* unread) {
    Server server;
    server.refuse_hashes = refuse;
    std::vector<Region> regions(2);
    regions[0].address = 0x100000000000;
    regions[0].bytes = memory.size();
    regions[0].context = 0x7000000000010;
    regions[1].address = driverabi::kHostBase;
    regions[1].bytes = small.size();
    server.Have(regions[0], memory);
    server.Have(regions[1], small);
    ChunkPool pool(8 * kChunkBytes);
    const auto opened = ckptfmt::ImageStore::Open(store);
    ASSERT_TRUE(opened.ok()) << opened.status();
    ckptfmt::WriterOptions options;
    options.job_folder = "/run/jobs/a";
    auto image = (*opened)->Create(options);
    ASSERT_TRUE(image.ok()) << image.status();
    const std::unique_ptr<SharedBuffers> shared = share ? SharedBuffers::Make() : nullptr;
    SaveTimes times;
    ASSERT_EQ(SaveMemory(server.channel(), regions, image->get(), &pool, /*holds=*/true, shared.get(), nullptr, nullptr,
                         nullptr, nullptr, &times),
              absl::OkStatus());
    EXPECT_FALSE(server.too_early);
    ASSERT_TRUE((*image)->WriteLog("").ok());
    ckptfmt::ImageInfo info;
    info.processes.resize(1);
    info.job_folder = options.job_folder;
    ASSERT_TRUE((*image)->Commit(info).ok());
    *read = times.reading;
    *unread = times.unread_bytes;
    const std::string path = (*image)->dir();
    image->reset();
    const auto reader = ckptfmt::ImageReader::Open(path);
    ASSERT_TRUE(reader.ok()) << reader.status();
    std::string got;
    ASSERT_TRUE((*reader)
                    ->ReadRegion(0,
                                 [&](uint64_t, std::string_view bytes, bool) {
                                   got += bytes;
                                   return absl::OkStatus();
                                 })
                    .ok());
    EXPECT_TRUE(got == memory);
  };
  for (const bool share : {false, true}) {
    TransferTimes read;
    uint64_t unread = 0;
    const auto chunks = [&] { return read.channel_chunks + read.shared_chunks; };
    save(false, share, &read, &unread);
    // The chunk of zeros is known by its hash.
    if (!share) {
      EXPECT_EQ(chunks(), 5u);
      EXPECT_EQ(unread, kChunkBytes);
    }
    save(false, share, &read, &unread);
    EXPECT_EQ(chunks(), 1u) << "only the small region";
    EXPECT_EQ(unread, memory.size());
    // One changes in a single byte, and it is not the region's first.
    ++memory[kChunkBytes + 77];
    save(false, share, &read, &unread);
    EXPECT_EQ(chunks(), 2u);
    save(true, share, &read, &unread);
    EXPECT_EQ(chunks(), 6u) << "no hashes: all is read";
    EXPECT_EQ(unread, 0u);
    // Images have the hashes of what was stored then, too.
    ++memory[0];
    save(true, share, &read, &unread);
    save(false, share, &read, &unread);
    EXPECT_EQ(chunks(), 1u);
    // What is back to what it was two images before is known as well.
    --memory[0];
    save(false, share, &read, &unread);
    EXPECT_EQ(chunks(), 1u);
  }
  std::filesystem::remove_all(folder);
}

// What the GPU copied in the pause is read later as it was then.
TEST(GpuSnapshot, ReadsWhatItTookOrSaysWhyNot) {
  enum Kind { kAll, kUse, kCancelled, kUnreadable, kShort, kGone };
  static constexpr struct {
    absl::StatusCode code;
    const char* message;
  } kOutcomes[] = {
      {absl::StatusCode::kOk, ""},
      {absl::StatusCode::kResourceExhausted, "the disk is full"},
      {absl::StatusCode::kCancelled, "interrupted"},
      {absl::StatusCode::kFailedPrecondition,
       "the GPU server could not read what it kept on the GPU: CUDA_ERROR_INVALID_VALUE"},
      {absl::StatusCode::kDataLoss, "the GPU server's answer is malformed"},
      {absl::StatusCode::kUnavailable, "the session with the GPU server was lost: told to die"},
  };
  constexpr uint64_t kChunks = 6, kLeftOut = 1;
  Region region;
  region.address = 0x100000000000;
  region.bytes = (kChunks - 1) * kChunkBytes + 12345;
  region.context = 0x7000000000010;
  const std::string memory = Noise(region.bytes, 7);
  for (const Kind kind : {kAll, kUse, kCancelled, kUnreadable, kShort, kGone}) {
    Server server;
    server.Have(region, memory);
    GpuSnapshot snapshot;
    ASSERT_EQ(snapshot.Take(server.channel(), {region}, [](size_t, uint64_t index) { return index == kLeftOut; }),
              absl::OkStatus());
    for (uint64_t index = 0; index < kChunks; ++index) EXPECT_EQ(snapshot.Has(0, index), index != kLeftOut);
    EXPECT_EQ(snapshot.bytes(), region.bytes - kChunkBytes);
    // The job goes on.
    server.Have(region, Noise(region.bytes, 8));
    if (kind == kUnreadable) server.unreadable = Server::kFirstAllocation;
    server.shorten_peeks = kind == kShort;
    if (kind == kGone) server.die_after = 2;
    ChunkPool pool(0);
    size_t uses = 0;
    const auto use = [&](size_t, uint64_t index, char* slot, size_t bytes) -> absl::Status {
      EXPECT_EQ(memory.compare(index * kChunkBytes, bytes, slot, bytes), 0) << index;
      pool.Give(slot);
      if (++uses == 3 && kind == kUse) return absl::ResourceExhaustedError("the disk is full");
      return absl::OkStatus();
    };
    const auto go_on = [&](uint64_t done, uint64_t total) { return kind != kCancelled || done < total / 3; };
    ChannelRequests requests(server.channel());
    const absl::Status status = snapshot.Read(&requests, nullptr, &pool, use, go_on);
    EXPECT_EQ(status.code(), kOutcomes[kind].code) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(kOutcomes[kind].message));
    if (kind == kAll) {
      EXPECT_EQ(uses, kChunks - 1);
    }
    EXPECT_EQ(FreeSlots(&pool), ChunkPool::kLeastSlots) << status;
  }
}

INSTANTIATE_TEST_SUITE_P(All, MemoryTransfer, testing::Bool(),
                         [](const auto& info) { return info.param ? "SharedBuffers" : "Channel"; });

TEST_P(MemoryTransfer, ReadsEverythingThroughASmallPool) {
  for (const bool refuse : {false, true}) {
    const Sample sample = MakeSample();
    Server server;
    server.refuse_copies = refuse;
    std::vector<std::string> got;
    for (size_t i = 0; i < sample.regions.size(); ++i) {
      server.Have(sample.regions[i], sample.bytes[i]);
      got.push_back(std::string(sample.bytes[i].size(), '?'));
    }
    SharedBuffers* const attached = Attach(&server);
    ASSERT_EQ(attached != nullptr, GetParam());
    ChunkPool pool(0);
    ASSERT_LT(pool.limit(), sample.total);
    // Gives the slots back later, from another thread, as the image's writers do.
    std::mutex mutex;
    std::vector<char*> used;
    std::atomic<bool> end{false};
    std::thread giver([&] {
      while (!end || !used.empty()) {
        std::vector<char*> taken;
        {
          std::lock_guard<std::mutex> lock(mutex);
          taken.swap(used);
        }
        for (char* slot : taken) pool.Give(slot);
        usleep(1000);
      }
    });
    const auto use = [&](size_t region, uint64_t index, char* slot, size_t bytes) {
      memcpy(&got[region][index * kChunkBytes], slot, bytes);
      std::lock_guard<std::mutex> lock(mutex);
      used.push_back(slot);
      return absl::OkStatus();
    };
    uint64_t last = 0;
    const auto go_on = [&](uint64_t done, uint64_t total) {
      EXPECT_GT(done, last);
      EXPECT_EQ(total, sample.total);
      last = done;
      return true;
    };
    EXPECT_EQ(ReadMemory(server.channel(), sample.regions, &pool, attached, use, go_on), absl::OkStatus());
    end = true;
    giver.join();
    EXPECT_EQ(last, sample.total);
    for (size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(got[i] == sample.bytes[i]) << "region " << i;
    EXPECT_EQ(FreeSlots(&pool), ChunkPool::kLeastSlots);
    EXPECT_FALSE(server.too_early);
    if (attached) {
      attached->Detach();
      EXPECT_GE(server.copies, refuse ? 0 : 8) << "they hardly went through the buffers";
    } else {
      EXPECT_EQ(server.copies, 0);
    }
  }
}

TEST_P(MemoryTransfer, ReadingStopsAtTheFirstFailure) {
  const Sample sample = MakeSample();
  enum Kind { kUse, kCancelled, kUnreadable, kGone };
  for (const Kind kind : {kUse, kCancelled, kUnreadable, kGone}) {
    Server server;
    for (size_t i = 0; i < sample.regions.size(); ++i) server.Have(sample.regions[i], sample.bytes[i]);
    SharedBuffers* const attached = Attach(&server);
    if (kind == kUnreadable) server.unreadable = 0x100060000000 + 7 * kChunkBytes;
    if (kind == kGone) server.die_after = 17;
    ChunkPool pool(0);
    std::atomic<int> uses{0};
    const auto use = [&](size_t, uint64_t, char* slot, size_t) -> absl::Status {
      pool.Give(slot);
      if (kind != kUse || ++uses < 5) return absl::OkStatus();
      return absl::ResourceExhaustedError("the disk is full");
    };
    const auto go_on = [&](uint64_t done, uint64_t total) { return kind != kCancelled || done < total / 3; };
    const absl::Status status = ReadMemory(server.channel(), sample.regions, &pool, attached, use, go_on);
    static constexpr absl::StatusCode kCodes[] = {absl::StatusCode::kResourceExhausted, absl::StatusCode::kCancelled,
                                                  absl::StatusCode::kFailedPrecondition,
                                                  absl::StatusCode::kUnavailable};
    EXPECT_EQ(status.code(), kCodes[kind]);
    static constexpr const char* kErrors[] = {
        "the disk is full", "interrupted",
        "could not read GPU memory at 0x100060000000: CUDA_ERROR_INVALID_VALUE (1, invalid argument)",
        "the session with the GPU server was lost: told to die"};
    EXPECT_THAT(std::string(status.message()), HasSubstr(kErrors[kind]));
    EXPECT_EQ(FreeSlots(&pool), ChunkPool::kLeastSlots) << status;
    if (attached) attached->Detach();
  }
}

TEST_P(MemoryTransfer, WritesEverything) {
  for (const bool refuse : {false, true}) {
    const Sample sample = MakeSample();
    Server server;
    server.refuse_copies = refuse;
    for (const Region& region : sample.regions) server.Have(region, std::string(region.bytes, '\0'));
    SharedBuffers* const attached = Attach(&server);
    const auto fill = [&](size_t region, uint64_t index, char* out, size_t bytes) {
      memcpy(out, &sample.bytes[region][index * kChunkBytes], bytes);
      return absl::OkStatus();
    };
    uint64_t last = 0;
    const auto go_on = [&](uint64_t done, uint64_t) {
      last = done;
      return true;
    };
    EXPECT_EQ(WriteMemory(server.channel(), sample.regions, attached, fill, go_on), absl::OkStatus());
    if (attached) attached->Detach();
    EXPECT_EQ(server.Sync(), 0u);
    EXPECT_EQ(last, sample.total);
    EXPECT_FALSE(server.too_early);
    EXPECT_GE(server.copies, attached && !refuse ? 8 : 0);
    for (size_t i = 0; i < sample.regions.size(); ++i) {
      EXPECT_TRUE(server.At(KeyOf(sample.regions[i])) == sample.bytes[i]) << "region " << i;
    }
  }
}

TEST_P(MemoryTransfer, WritingStopsAtTheFirstFailure) {
  const Sample sample = MakeSample();
  enum Kind { kFill, kCancelled, kGone };
  for (const Kind kind : {kFill, kCancelled, kGone}) {
    Server server;
    for (const Region& region : sample.regions) server.Have(region, std::string(region.bytes, '\0'));
    SharedBuffers* const attached = Attach(&server);
    if (kind == kGone) server.die_after = 17;
    std::atomic<int> fills{0};
    const auto fill = [&](size_t, uint64_t, char* out, size_t bytes) -> absl::Status {
      memset(out, 1, bytes);
      if (kind != kFill || ++fills < 7) return absl::OkStatus();
      return absl::DataLossError("data-00000 is damaged");
    };
    const auto go_on = [&](uint64_t done, uint64_t total) { return kind != kCancelled || done < total / 3; };
    const absl::Status status = WriteMemory(server.channel(), sample.regions, attached, fill, go_on);
    if (status.ok()) {
      // All of it had room in the ring of a server that was gone: the Drain that follows is what finds out.
      EXPECT_EQ(kind, kGone);
      FrameHeader header;
      header.call = kOpDrain;
      Reply reply;
      EXPECT_NE(server.channel()->Call(header, "", {}, nullptr, 0, &reply), ChannelStatus::kOk);
      continue;
    }
    static constexpr const char* kErrors[] = {"data-00000 is damaged", "interrupted",
                                              "the session with the GPU server was lost: told to die"};
    EXPECT_THAT(std::string(status.message()), HasSubstr(kErrors[kind]));
    if (attached) attached->Detach();
  }
}

TEST(SharedBuffers, ServersThatCannotMapThemAndToolsThatDied) {
  Server server;
  server.refuse_map = true;
  const auto first = SharedBuffers::Make();
  ASSERT_TRUE(first);
  EXPECT_FALSE(first->Attach(server.channel()));
  server.refuse_map = false;
  EXPECT_TRUE(first->Attach(server.channel()));
  EXPECT_FALSE(first->Attach(server.channel())) << "once each";
  // `first` never detached, as far as the next one knows.
  const auto second = SharedBuffers::Make();
  EXPECT_TRUE(second->Attach(server.channel()));
  EXPECT_EQ(server.maps, 2);
  second->Detach();
  EXPECT_EQ(server.Sync(), 0u);
}

// Both servers have the same buffers mapped: no byte goes through this process.
TEST(CopyBetween, CopiesEverything) {
  g_transfer_threads_for_testing = 4;
  for (const int refuses : {0, 1, 2}) {
    const Sample sample = MakeSample();
    Server first, second;
    first.refuse_copies = refuses == 1;
    second.refuse_copies = refuses == 2;
    for (size_t i = 0; i < sample.regions.size(); ++i) {
      first.Have(sample.regions[i], sample.bytes[i]);
      second.Have(sample.regions[i], std::string(sample.bytes[i].size(), '?'));
    }
    const std::unique_ptr<SharedBuffers> shared = SharedBuffers::Make();
    ASSERT_TRUE(shared);
    ASSERT_TRUE(shared->Attach(first.channel()));
    ASSERT_TRUE(shared->Attach(second.channel()));
    // As a table of functions that lie elsewhere.
    const auto change = [&](size_t region, uint64_t index, char* bytes, size_t count) {
      EXPECT_LE(index * kChunkBytes + count, sample.regions[region].bytes);
      bytes[0] ^= 1;
      return absl::OkStatus();
    };
    uint64_t last = 0;
    const auto go_on = [&](uint64_t done, uint64_t total) {
      EXPECT_EQ(total, sample.total);
      last = done;
      return true;
    };
    ASSERT_EQ(CopyBetween(first.channel(), second.channel(), sample.regions, shared.get(), change, go_on),
              absl::OkStatus());
    EXPECT_EQ(second.Sync(), 0u);
    EXPECT_EQ(last, sample.total);
    for (size_t i = 0; i < sample.regions.size(); ++i) {
      std::string wanted = sample.bytes[i];
      for (size_t at = 0; at < wanted.size(); at += kChunkBytes) wanted[at] ^= 1;
      EXPECT_TRUE(second.At(KeyOf(sample.regions[i])) == wanted) << "region " << i << ", " << refuses << " refuses";
    }
    EXPECT_FALSE(first.too_early);
    EXPECT_FALSE(second.too_early);
    if (refuses == 0) {
      EXPECT_GE(std::min(first.copies.load(), second.copies.load()), 8);
    }
    shared->Detach();
  }
  g_transfer_threads_for_testing = 0;
}

TEST(CopyBetween, StopsAtTheFirstFailure) {
  g_transfer_threads_for_testing = 4;
  const Sample sample = MakeSample();
  enum Kind { kChange, kCancelled, kUnreadable, kFirstGone, kSecondGone };
  for (const Kind kind : {kChange, kCancelled, kUnreadable, kFirstGone, kSecondGone}) {
    Server first, second;
    for (size_t i = 0; i < sample.regions.size(); ++i) {
      first.Have(sample.regions[i], sample.bytes[i]);
      second.Have(sample.regions[i], sample.bytes[i]);
    }
    const std::unique_ptr<SharedBuffers> shared = SharedBuffers::Make();
    ASSERT_TRUE(shared && shared->Attach(first.channel()) && shared->Attach(second.channel()));
    if (kind == kUnreadable) first.unreadable = 0x100060000000 + 7 * kChunkBytes;
    if (kind == kFirstGone) first.die_after = 12;
    if (kind == kSecondGone) second.die_after = 12;
    std::atomic<int> changes{0};
    const auto change = [&](size_t, uint64_t, char*, size_t) -> absl::Status {
      if (kind != kChange || ++changes < 5) return absl::OkStatus();
      return absl::FailedPreconditionError("an address of code");
    };
    const auto go_on = [&](uint64_t done, uint64_t total) { return kind != kCancelled || done < total / 3; };
    const absl::Status status =
        CopyBetween(first.channel(), second.channel(), sample.regions, shared.get(), change, go_on);
    EXPECT_FALSE(status.ok()) << kind;
    static constexpr const char* kErrors[] = {"an address of code", "interrupted",
                                              "could not read GPU memory at 0x100060000000: CUDA_ERROR_INVALID_VALUE",
                                              "the session with the GPU server was lost: told to die",
                                              "the session with the GPU server was lost: told to die"};
    EXPECT_THAT(std::string(status.message()), HasSubstr(kErrors[kind])) << kind;
    shared->Detach();
  }
  g_transfer_threads_for_testing = 0;
}

// All allocations that are worth it, without the host; the rest as ever.
TEST(CopyMemory, GoesDirectly) {
  for (const int refused : {0, 1, 2, 100}) {
    for (const bool offers : {true, false}) {
      const Sample sample = MakeSample();
      Server first, second;
      (offers ? first.refuse_offers : second.refuse_fetches) = refused;
      for (size_t i = 0; i < sample.regions.size(); ++i) {
        first.Have(sample.regions[i], sample.bytes[i]);
        second.Have(sample.regions[i], std::string(sample.bytes[i].size(), '?'));
      }
      const std::unique_ptr<SharedBuffers> shared = SharedBuffers::Make();
      ASSERT_TRUE(shared);
      std::vector<Region> regions;  // variables would be compared with those of a real server
      for (const Region& region : sample.regions) {
        if (region.kind == RegionKind::kAllocation) regions.push_back(region);
      }
      uint64_t total = 0, worth = 0, last = 0;
      std::vector<uint64_t> sizes;
      for (const Region& region : regions) {
        total += region.bytes;
        if (region.bytes >= 4096) sizes.push_back(region.bytes);
      }
      std::sort(sizes.rbegin(), sizes.rend());
      for (size_t i = size_t(refused); i < sizes.size(); ++i) worth += sizes[i];
      const auto go_on = [&](uint64_t done, uint64_t all) {
        EXPECT_EQ(all, total);
        EXPECT_GE(done, last);
        last = done;
        return true;
      };
      CopiedBytes bytes;
      ASSERT_EQ(CopyMemory(first.channel(), regions, second.channel(), {}, {}, nullptr, shared.get(), go_on, &bytes),
                absl::OkStatus());
      EXPECT_EQ(second.Sync(), 0u);
      EXPECT_EQ(bytes.direct, worth) << refused;
      EXPECT_EQ(bytes.handed_over, 0u);
      EXPECT_EQ(last, total);
      for (size_t i = 0; i < sample.regions.size(); ++i) {
        if (sample.regions[i].kind != RegionKind::kAllocation) continue;
        EXPECT_TRUE(second.At(KeyOf(sample.regions[i])) == sample.bytes[i])
            << "region " << i << ", refused " << refused;
      }
      // Nobody maps buffers for some bytes.
      if (refused == 0) {
        EXPECT_EQ(first.maps + second.maps, 0);
      }
    }
  }
}

// A server that refuses everything is not asked for everything.
TEST(CopyMemory, StopsAskingInVain) {
  Sample sample;
  Server first, second;
  second.refuse_fetches = 1000;
  for (uint64_t i = 0; i < 30; ++i) {
    Region region;
    region.kind = RegionKind::kAllocation;
    region.address = 0x100000000000 + i * (1 << 20);
    region.bytes = 5000;
    region.context = 0x7000000000010;
    sample.regions.push_back(region);
    sample.bytes.push_back(Noise(5000, i));
    first.Have(region, sample.bytes.back());
    second.Have(region, std::string(5000, '?'));
  }
  CopiedBytes bytes;
  ASSERT_EQ(CopyMemory(first.channel(), sample.regions, second.channel(), {}, {}, nullptr, nullptr, nullptr, &bytes),
            absl::OkStatus());
  EXPECT_EQ(second.Sync(), 0u);
  EXPECT_EQ(bytes.direct, 0u);
  EXPECT_LT(second.fetches, 12);
  for (size_t i = 0; i < 30; ++i) EXPECT_TRUE(second.At(sample.regions[i].address) == sample.bytes[i]);
}

// What both servers have is not copied; what is only partly in such a block is.
TEST(CopyMemory, LeavesOutWhatWasHandedOver) {
  Sample sample;
  Server first, second;
  SharedBlocks handed_over;
  const uint64_t block = 0x100000000000, page = 2 << 20;
  handed_over.Add(block, page);
  struct {
    uint64_t address, bytes;
    bool handed_over;
  } const places[] = {{block, 5000, true},
                      {block + page - 5120, 5120, true},
                      {block + page, 5000, false},
                      {block + 4 * page - 512, 5000, false},
                      {block + 8 * page, 3 << 20, false}};
  handed_over.Add(block + 4 * page, page);
  uint64_t expected = 0, total = 0;
  for (const auto& place : places) {
    Region region;
    region.kind = RegionKind::kAllocation;
    region.address = place.address;
    region.bytes = place.bytes;
    region.context = 0x7000000000010;
    sample.regions.push_back(region);
    sample.bytes.push_back(Noise(place.bytes, place.address));
    first.Have(region, sample.bytes.back());
    second.Have(region, std::string(place.bytes, '?'));
    total += place.bytes;
    if (place.handed_over) expected += place.bytes;
  }
  // A variable's address says nothing about where it lies.
  Region variable = sample.regions[0];
  variable.kind = RegionKind::kModuleSymbol;
  EXPECT_FALSE(handed_over.Have(variable));
  uint64_t first_seen = 0, last = 0;
  const Continue go_on = [&](uint64_t done, uint64_t all) {
    EXPECT_EQ(all, total);
    if (first_seen == 0) first_seen = done;
    last = done;
    return true;
  };
  CopiedBytes bytes;
  ASSERT_EQ(
      CopyMemory(first.channel(), sample.regions, second.channel(), {}, handed_over, nullptr, nullptr, go_on, &bytes),
      absl::OkStatus());
  EXPECT_EQ(second.Sync(), 0u);
  EXPECT_EQ(bytes.handed_over, expected);
  EXPECT_EQ(bytes.direct, total - expected);
  EXPECT_GT(first_seen, expected);
  EXPECT_EQ(last, total);
  for (size_t i = 0; i < sample.regions.size(); ++i) {
    const std::string untouched(sample.bytes[i].size(), '?');
    EXPECT_TRUE(second.At(sample.regions[i].address) == (places[i].handed_over ? untouched : sample.bytes[i])) << i;
  }
  // Where functions lie elsewhere, memory is translated, which must not happen to what the first server has.
  MovedCode moved;
  moved.Add(1, 2, "table", {{0, 0x7f0000001000, 0x7f0000002000}});
  ASSERT_FALSE(moved.empty());
  const absl::Status refused = CopyMemory(first.channel(), sample.regions, second.channel(), moved, handed_over,
                                          nullptr, nullptr, go_on, &bytes);
  EXPECT_FALSE(refused.ok());
  EXPECT_THAT(std::string(refused.message()), HasSubstr("functions lie elsewhere"));
}

TEST(CopyMemory, ADirectCopyEnds) {
  const Sample sample = MakeSample();
  enum Kind { kCancelled, kFirstGone, kSecondGone };
  for (const Kind kind : {kCancelled, kFirstGone, kSecondGone}) {
    Server first, second;
    for (size_t i = 0; i < sample.regions.size(); ++i) {
      first.Have(sample.regions[i], sample.bytes[i]);
      second.Have(sample.regions[i], sample.bytes[i]);
    }
    if (kind == kFirstGone) first.die_after = 2;
    if (kind == kSecondGone) second.die_after = 2;
    const Continue go_on = [&](uint64_t done, uint64_t total) { return kind != kCancelled || done < total / 3; };
    const absl::Status status = CopyDirectly(first.channel(), second.channel(), sample.regions, go_on).status();
    EXPECT_EQ(status.code(), kind == kCancelled ? absl::StatusCode::kCancelled : absl::StatusCode::kUnavailable);
    EXPECT_THAT(std::string(status.message()), HasSubstr(kind == kCancelled ? "interrupted" : "told to die")) << kind;
  }
}

}  // namespace
}  // namespace cuda_remote::checkpoint
