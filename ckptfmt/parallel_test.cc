// SPDX-License-Identifier: Apache-2.0
// Tests of images whose chunks come from several threads in any order, and are read by several.

#include <errno.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <future>
#include <random>
#include <thread>

#include "ckptfmt/file.h"
#include "ckptfmt/index.h"
#include "ckptfmt/testing.h"

namespace cuda_remote::ckptfmt {
namespace {

using testing::HasSubstr;

std::string Message(const absl::Status& status) { return std::string(status.message()); }

struct Given {
  uint32_t region;
  uint64_t index;
  std::string_view bytes;
};

// All chunks of the sample, in order.
std::vector<Given> Chunks(const std::vector<SampleRegion>& samples) {
  std::vector<Given> chunks;
  for (uint32_t i = 0; i < samples.size(); ++i) {
    for (uint64_t at = 0; at < samples[i].bytes.size(); at += kChunkBytes) {
      chunks.push_back({i, at / kChunkBytes, std::string_view(samples[i].bytes).substr(at, kChunkBytes)});
    }
  }
  return chunks;
}

void AnnounceAll(ImageWriter& writer, const std::vector<SampleRegion>& samples) {
  for (uint32_t i = 0; i < samples.size(); ++i) {
    const absl::StatusOr<uint32_t> number = writer.AddRegion(samples[i].region);
    ASSERT_TRUE(number.ok()) << number.status();
    ASSERT_EQ(*number, i);
  }
}

Index IndexOf(const std::string& dir) {
  absl::StatusOr<Index> index = DecodeIndex(ReadFile(dir + "/memory/index"), "index");
  EXPECT_TRUE(index.ok()) << index.status();
  return *index;
}

TEST(Parallel, ChunksInAnyOrderMakeTheSameImage) {
  TestFolder folder;
  ASSERT_TRUE(WriteSample(folder / "ordered").ok());
  const Index expected = IndexOf(folder / "ordered");
  const std::vector<SampleRegion> samples = SampleRegions();
  std::mt19937 random(1);
  for (int round = 0; round < 6; ++round) {
    WriterOptions options;
    options.writers = 4;
    options.zstd_level = round % 2;
    auto writer = ImageWriter::Create(folder / "image", options);
    ASSERT_TRUE(writer.ok()) << writer.status();
    AnnounceAll(**writer, samples);
    std::vector<Given> chunks = Chunks(samples);
    std::shuffle(chunks.begin(), chunks.end(), random);
    std::atomic<size_t> next{0}, done{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < 3; ++i) {
      threads.emplace_back([&] {
        for (size_t at; (at = next.fetch_add(1)) < chunks.size();) {
          const Given& chunk = chunks[at];
          EXPECT_TRUE((*writer)->AddChunk(chunk.region, chunk.index, chunk.bytes, [&] { ++done; }).ok());
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    ASSERT_TRUE((*writer)->WriteLog(kSampleLog).ok());
    ASSERT_TRUE((*writer)->Commit(SampleInfo()).ok());
    EXPECT_EQ(done, chunks.size());
    const ImageSizes sizes = (*writer)->sizes();
    EXPECT_EQ(sizes.zero_bytes, 5000 + kChunkBytes);
    EXPECT_EQ(sizes.shared_bytes, 2 * kChunkBytes);

    std::vector<std::string> regions;
    ASSERT_TRUE(ReadAll(folder / "image", &regions).ok());
    ASSERT_EQ(regions.size(), samples.size());
    for (size_t i = 0; i < samples.size(); ++i) EXPECT_TRUE(regions[i] == samples[i].bytes) << i;
    // But for the places, which depend on the threads.
    const Index index = IndexOf(folder / "image");
    ASSERT_EQ(index.chunks.size(), expected.chunks.size());
    for (size_t i = 0; i < index.chunks.size(); ++i) EXPECT_EQ(index.chunks[i].hash, expected.chunks[i].hash) << i;
    ASSERT_EQ(index.regions.size(), expected.regions.size());
    for (size_t i = 0; i < index.regions.size(); ++i) EXPECT_EQ(index.regions[i].chunks, expected.regions[i].chunks);
  }
}

TEST(Parallel, OneWriterAndChunksInOrderGiveTheSameBytes) {
  TestFolder folder;
  ASSERT_TRUE(WriteSample(folder / "ordered").ok());
  const std::vector<SampleRegion> samples = SampleRegions();
  auto writer = ImageWriter::Create(folder / "image", OneWriter());
  ASSERT_TRUE(writer.ok()) << writer.status();
  AnnounceAll(**writer, samples);
  for (const Given& chunk : Chunks(samples)) {
    ASSERT_TRUE((*writer)->AddChunk(chunk.region, chunk.index, chunk.bytes, nullptr).ok());
  }
  ASSERT_TRUE((*writer)->WriteLog(kSampleLog).ok());
  ASSERT_TRUE((*writer)->Commit(SampleInfo()).ok());
  for (const char* file : {"memory/index", "memory/data-00000"}) {
    EXPECT_EQ(ReadFile(folder / "image/" + file), ReadFile(folder / "ordered/" + file)) << file;
  }
}

std::atomic<int> g_writes_left{0};
ssize_t FullDisk(int fd, const void* data, size_t bytes) {
  if (g_writes_left.fetch_sub(1) > 0) return write(fd, data, bytes);
  errno = ENOSPC;
  return -1;
}

TEST(Parallel, AFailingWriterGivesAllChunksBackAndLeavesNothing) {
  TestFolder folder;
  for (const int writes : {0, 1, 5}) {
    std::atomic<int> done{0};
    int given = 0;
    {
      WriterOptions options;
      options.writers = 3;
      auto writer = ImageWriter::Create(folder / "image", options);
      ASSERT_TRUE(writer.ok()) << writer.status();
      Region region;
      constexpr int kChunks = 40;
      region.bytes = kChunks * kChunkBytes;
      ASSERT_TRUE((*writer)->AddRegion(region).ok());
      g_writes_left = writes;
      g_write_for_testing = &FullDisk;
      const std::string memory = Noise(kChunkBytes + kChunks, 7);
      absl::Status status;
      for (; given < kChunks; ++given) {
        // Each one another chunk, in the same memory.
        status = (*writer)->AddChunk(0, uint64_t(given), std::string_view(memory).substr(size_t(given), kChunkBytes),
                                     [&done] { ++done; });
        if (!status.ok()) {
          EXPECT_THAT(Message(status), HasSubstr("No space left"));
        }
      }
      status = (*writer)->WaitForChunks([](uint64_t, uint64_t) { return true; });
      EXPECT_THAT(Message(status), HasSubstr("No space left"));
      // Whoever waits for memory must get it, without the writer's end.
      for (int i = 0; i < 5000 && done < kChunks; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(2));
      EXPECT_EQ(done, kChunks);
      g_write_for_testing = nullptr;
      EXPECT_FALSE((*writer)->Commit(SampleInfo()).ok());
    }
    EXPECT_FALSE(std::filesystem::exists(folder / "image"));
    EXPECT_FALSE(std::filesystem::exists(folder / "image.partial"));
  }
}

TEST(Parallel, AnImageThatIsGivenUpGivesItsChunksBack) {
  TestFolder folder;
  const std::string memory = Noise(30 * kChunkBytes, 3);
  std::atomic<int> done{0};
  {
    auto writer = ImageWriter::Create(folder / "image", OneWriter());
    ASSERT_TRUE(writer.ok()) << writer.status();
    Region region;
    region.bytes = memory.size();
    ASSERT_TRUE((*writer)->AddRegion(region).ok());
    for (uint64_t i = 0; i < 30; ++i) {
      ASSERT_TRUE(
          (*writer)
              ->AddChunk(0, i, std::string_view(memory).substr(i * kChunkBytes, kChunkBytes), [&done] { ++done; })
              .ok());
    }
  }
  EXPECT_EQ(done, 30);
  EXPECT_FALSE(std::filesystem::exists(folder / "image.partial"));
}

std::atomic<bool> g_slow{false};
ssize_t SlowDisk(int fd, const void* data, size_t bytes) {
  while (g_slow) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return write(fd, data, bytes);
}

TEST(Parallel, WaitingForTheFilesTellsHowFarItIsAndCanBeCancelled) {
  TestFolder folder;
  const std::string memory = Noise(20 * kChunkBytes, 3);
  for (const bool cancel : {false, true}) {
    auto writer = ImageWriter::Create(folder / "image", OneWriter());
    ASSERT_TRUE(writer.ok()) << writer.status();
    const auto never = [](uint64_t, uint64_t) { return false; };
    EXPECT_TRUE((*writer)->WaitForChunks(never).ok()) << "there is nothing to wait for";
    Region region;
    region.bytes = memory.size();
    ASSERT_TRUE((*writer)->AddRegion(region).ok());
    g_slow = true;
    g_write_for_testing = &SlowDisk;
    for (uint64_t i = 0; i < 20; ++i) {
      ASSERT_TRUE(
          (*writer)->AddChunk(0, i, std::string_view(memory).substr(i * kChunkBytes, kChunkBytes), nullptr).ok());
    }
    uint64_t last = 0;
    int asked = 0;
    const absl::Status waited = (*writer)->WaitForChunks([&](uint64_t done, uint64_t total) {
      EXPECT_EQ(total, memory.size());
      EXPECT_GE(done, last);
      last = done;
      if (++asked < 2) return true;
      g_slow = false;
      return !cancel;
    });
    g_slow = false;
    EXPECT_GE(asked, 2);
    if (cancel) {
      EXPECT_TRUE(absl::IsCancelled(waited)) << waited;
      EXPECT_FALSE((*writer)->WriteLog("log").ok()) << "an image that was given up cannot go on";
    } else {
      EXPECT_TRUE(waited.ok()) << waited;
      EXPECT_EQ(last, memory.size());
      ASSERT_TRUE((*writer)->WriteLog("log").ok());
      ASSERT_TRUE((*writer)->Commit(SampleInfo()).ok());
    }
    writer->reset();
    g_write_for_testing = nullptr;
  }
  EXPECT_FALSE(std::filesystem::exists(folder / "image.partial"));
  EXPECT_TRUE(ReadAll(folder / "image").ok()) << "the first one, which the second did not replace";
}

// Bytes that have reached a file.
std::atomic<uint64_t> g_written{0};
ssize_t CountingWrite(int fd, const void* bytes, size_t count) {
  g_written += count;
  return write(fd, bytes, count);
}

TEST(Parallel, HeldChunksAreNotWrittenBeforeTheyAreWaitedFor) {
  TestFolder folder;
  const std::string memory = Noise(20 * kChunkBytes, 5);
  for (const bool wait : {true, false}) {
    const std::string dir = folder / (wait ? "waited" : "committed");
    auto writer = ImageWriter::Create(dir);
    ASSERT_TRUE(writer.ok()) << writer.status();
    Region region;
    region.bytes = memory.size();
    ASSERT_TRUE((*writer)->AddRegion(region).ok());
    g_written = 0;
    g_write_for_testing = &CountingWrite;
    std::atomic<int> done{0};
    (*writer)->HoldChunks();
    for (uint64_t i = 0; i < 20; ++i) {
      const std::string_view bytes = std::string_view(memory).substr(i * kChunkBytes, kChunkBytes);
      ASSERT_TRUE((*writer)->AddChunk(0, i, bytes, [&] { ++done; }).ok());
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    EXPECT_EQ(g_written, 0u);
    EXPECT_EQ(done, 0);
    ASSERT_TRUE((*writer)->WriteLog("log").ok());
    if (wait) {
      const absl::Status waited = (*writer)->WaitForChunks([](uint64_t, uint64_t) { return true; });
      EXPECT_TRUE(waited.ok()) << waited;
      EXPECT_EQ(done, 20);
    }
    ASSERT_TRUE((*writer)->Commit(SampleInfo()).ok());
    g_write_for_testing = nullptr;
    EXPECT_EQ(done, 20);
    EXPECT_TRUE(ReadAll(dir).ok());
  }
}

TEST(Parallel, ReleasedChunksAreWrittenBeforeTheyAreWaitedFor) {
  TestFolder folder;
  const std::string memory = Noise(kChunkBytes, 8);
  auto writer = ImageWriter::Create(folder / "image");
  ASSERT_TRUE(writer.ok()) << writer.status();
  Region region;
  region.bytes = memory.size();
  ASSERT_TRUE((*writer)->AddRegion(region).ok());
  std::promise<void> done;
  (*writer)->HoldChunks();
  ASSERT_TRUE((*writer)->AddChunk(0, 0, memory, [&] { done.set_value(); }).ok());
  (*writer)->ReleaseChunks();
  done.get_future().wait();
  ASSERT_TRUE((*writer)->WriteLog("log").ok());
  ASSERT_TRUE((*writer)->Commit(SampleInfo()).ok());
  EXPECT_TRUE(ReadAll(folder / "image").ok());
}

TEST(Parallel, HeldChunksOfAnImageThatIsGivenUpComeBack) {
  TestFolder folder;
  const std::string memory = Noise(4 * kChunkBytes, 6);
  auto writer = ImageWriter::Create(folder / "image");
  ASSERT_TRUE(writer.ok()) << writer.status();
  Region region;
  region.bytes = memory.size();
  ASSERT_TRUE((*writer)->AddRegion(region).ok());
  std::atomic<int> done{0};
  (*writer)->HoldChunks();
  for (uint64_t i = 0; i < 4; ++i) {
    const std::string_view bytes = std::string_view(memory).substr(i * kChunkBytes, kChunkBytes);
    ASSERT_TRUE((*writer)->AddChunk(0, i, bytes, [&] { ++done; }).ok());
  }
  writer->reset();
  EXPECT_EQ(done, 4);
  EXPECT_FALSE(std::filesystem::exists(folder / "image.partial"));
}

TEST(Parallel, MisuseIsAnErrorAndGivesTheChunkBack) {
  TestFolder folder;
  const std::string memory = Noise(kChunkBytes, 3);
  int done = 0;
  const auto note = [&done] { ++done; };
  {
    auto writer = ImageWriter::Create(folder / "image", OneWriter());
    ASSERT_TRUE(writer.ok()) << writer.status();
    Region region;
    region.bytes = kChunkBytes + 10;
    ASSERT_TRUE((*writer)->AddRegion(region).ok());
    EXPECT_THAT(Message((*writer)->AddChunk(1, 0, memory, note)), HasSubstr("no such chunk"));
    EXPECT_THAT(Message((*writer)->AddChunk(0, 2, memory, note)), HasSubstr("no such chunk"));
    EXPECT_THAT(Message((*writer)->AddChunk(0, 1, memory, note)), HasSubstr("no such chunk")) << "its length";
    EXPECT_EQ(done, 3);
    ASSERT_TRUE((*writer)->AddChunk(0, 0, memory, nullptr).ok());
    EXPECT_THAT(Message((*writer)->AddChunk(0, 0, memory, note)), HasSubstr("given before"));
    EXPECT_EQ(done, 4);
    ASSERT_TRUE((*writer)->WriteLog("log").ok());
    EXPECT_THAT(Message((*writer)->Commit(SampleInfo())), HasSubstr("1 chunks of region 0 were not given"));
  }
  EXPECT_FALSE(std::filesystem::exists(folder / "image"));
}

TEST(Parallel, ChunksAreReadBySeveralThreads) {
  TestFolder folder;
  const std::vector<SampleRegion> samples = SampleRegions();
  for (const int level : {0, 3}) {
    WriterOptions options;
    options.writers = 2;
    options.zstd_level = level;
    ASSERT_TRUE(WriteSample(folder / "image", false, options).ok());
    auto reader = ImageReader::Open(folder / "image");
    ASSERT_TRUE(reader.ok()) << reader.status();
    const std::vector<Given> chunks = Chunks(samples);
    std::atomic<size_t> next{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([&] {
        std::string bytes(kChunkBytes, '?');
        for (size_t at; (at = next.fetch_add(1)) < 4 * chunks.size();) {
          const Given& chunk = chunks[at % chunks.size()];
          bool zero = false;
          EXPECT_TRUE((*reader)->ReadChunk(chunk.region, chunk.index, bytes.data(), &zero).ok());
          EXPECT_TRUE(std::string_view(bytes).substr(0, chunk.bytes.size()) == chunk.bytes);
          EXPECT_EQ(zero, chunk.bytes.find_first_not_of('\0') == std::string_view::npos);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    bool zero;
    std::string bytes(kChunkBytes, '?');
    EXPECT_FALSE((*reader)->ReadChunk(99, 0, bytes.data(), &zero).ok());
    EXPECT_FALSE((*reader)->ReadChunk(0, 1, bytes.data(), &zero).ok());
  }
}

TEST(Parallel, DamageOfMemoryIsLeftToWhoReadsIt) {
  TestFolder folder;
  ASSERT_TRUE(WriteSample(folder / "image").ok());
  const std::string data = folder / "image/memory/data-00000";
  std::string bytes = ReadFile(data);
  bytes[1000 + 5] ^= 1;  // in the large region's first chunk
  WriteFile(data, bytes);
  auto reader = ImageReader::Open(folder / "image");
  ASSERT_TRUE(reader.ok()) << reader.status();
  EXPECT_TRUE((*reader)->Verify(nullptr, ImageReader::Files::kAllButMemory).ok());
  EXPECT_THAT(Message((*reader)->Verify()), HasSubstr("data-00000 is damaged"));
  std::string chunk(kChunkBytes, '?');
  bool zero;
  EXPECT_THAT(Message((*reader)->ReadChunk(3, 0, chunk.data(), &zero)),
              HasSubstr("data-00000 is damaged: the 2097152 bytes from offset 1000"));
  EXPECT_TRUE((*reader)->ReadChunk(0, 0, chunk.data(), &zero).ok());
  // Of several damaged files one is told, and the others' threads end.
  for (const char* name : {"log", "client/pages-1.img", "client/sub/core.img"}) {
    std::string file = ReadFile(folder / "image/" + name);
    file[0] ^= 1;
    WriteFile(folder / "image/" + name, file);
  }
  EXPECT_THAT(Message((*reader)->Verify(nullptr, ImageReader::Files::kAllButMemory)), HasSubstr("is damaged"));
}

int FastDisk(uint64_t) { return 0; }

int DiskOf100MB(uint64_t bytes) {
  // 100 MB/s.
  std::this_thread::sleep_for(std::chrono::nanoseconds(bytes * 10));
  return 0;
}

TEST(Parallel, CompressesIfTheDiskIsSlowAndTheBytesShrink) {
  TestFolder folder;
  constexpr uint64_t kChunks = 80;
  const std::string noise = Noise(kChunkBytes + kChunks, 7);
  const auto stored = [&](bool slow, bool shrinks) {
    WriterOptions options;
    options.writers = 1;
    options.zstd_level = -1;
    auto writer = ImageWriter::Create(folder / "image", options);
    Region region;
    region.bytes = kChunks * kChunkBytes;
    EXPECT_TRUE((*writer)->BeginRegion(region).ok());
    g_disk_for_testing = slow ? &DiskOf100MB : &FastDisk;
    for (uint64_t i = 0; i < kChunks; ++i) {
      std::string chunk(kChunkBytes, char(i + 1));
      if (!shrinks) chunk = noise.substr(size_t(i), kChunkBytes);
      EXPECT_TRUE((*writer)->AddData(chunk).ok());
    }
    EXPECT_TRUE((*writer)->EndRegion().ok());
    EXPECT_TRUE((*writer)->WriteLog("log").ok());
    EXPECT_TRUE((*writer)->Commit(SampleInfo()).ok());
    g_disk_for_testing = nullptr;
    EXPECT_TRUE(ReadAll(folder / "image").ok());
    return (*writer)->sizes().stored_bytes;
  };
  EXPECT_EQ(stored(false, true), kChunks * kChunkBytes);
  // Until it is known that the disk is slow, two strides.
  EXPECT_LT(stored(true, true), kChunks * kChunkBytes / 2);
  EXPECT_EQ(stored(true, false), kChunks * kChunkBytes);
}

std::atomic<int> g_disk_failures{0};

// As the kernel: it tells each failure once.
int FailOnce(uint64_t bytes) { return bytes > 0 && g_disk_failures++ == 0 ? EIO : 0; }

TEST(Parallel, BytesThatTheDiskDidNotTakeAreNoImage) {
  TestFolder folder;
  WriterOptions options;
  options.writers = 1;
  auto writer = ImageWriter::Create(folder / "image", options);
  ASSERT_TRUE(writer.ok());
  Region region;
  region.bytes = 50 * kChunkBytes;
  ASSERT_TRUE((*writer)->BeginRegion(region).ok());
  g_disk_failures = 0;
  g_disk_for_testing = &FailOnce;
  absl::Status status;
  for (int i = 0; i < 50 && status.ok(); ++i) status = (*writer)->AddData(std::string(kChunkBytes, char(i + 1)));
  if (status.ok()) status = (*writer)->EndRegion();
  if (status.ok()) status = (*writer)->WriteLog("log");
  if (status.ok()) status = (*writer)->Commit(SampleInfo());
  g_disk_for_testing = nullptr;
  EXPECT_GT(g_disk_failures, 0);
  EXPECT_TRUE(absl::IsDataLoss(status)) << status;
  EXPECT_THAT(std::string(status.message()), testing::HasSubstr("memory/data-00000"));
  writer->reset();
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

}  // namespace
}  // namespace cuda_remote::ckptfmt
