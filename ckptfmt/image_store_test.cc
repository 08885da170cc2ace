// SPDX-License-Identifier: Apache-2.0
// Tests of folders with several images: what they share, what removing one frees, and what is left when a tool dies.

#include "ckptfmt/image_store.h"

#include <errno.h>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>

#include "ckptfmt/file.h"
#include "ckptfmt/folder.h"
#include "ckptfmt/index.h"
#include "ckptfmt/manifest.h"
#include "ckptfmt/testing.h"
#include "proto/base/status_macros.h"
#include "proto/chunkhash/chunk_hash.h"

namespace cuda_remote::ckptfmt {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

std::string Message(const absl::Status& status) { return std::string(status.message()); }

constexpr size_t kChunks = 10;

// Memory of kChunks chunks, each of them by its number here.
using Memory = std::vector<uint64_t>;

Memory FirstMemory() {
  Memory memory(kChunks);
  for (size_t i = 0; i < kChunks; ++i) memory[i] = i + 1;
  return memory;
}

const std::string& BytesOf(uint64_t seed) {
  static std::map<uint64_t, std::string> made;
  std::string& bytes = made[seed];
  if (bytes.empty()) bytes = seed == 0 ? std::string(kChunkBytes, '\0') : Noise(kChunkBytes, seed);
  return bytes;
}

absl::Status Fill(ImageWriter& writer, const Memory& memory, const std::string& job) {
  Region region;
  region.bytes = memory.size() * kChunkBytes;
  CR_RETURN_IF_ERROR(writer.BeginRegion(region));
  for (const uint64_t seed : memory) {
    CR_RETURN_IF_ERROR(writer.AddData(BytesOf(seed)));
  }
  CR_RETURN_IF_ERROR(writer.EndRegion());
  CR_RETURN_IF_ERROR(writer.WriteLog(kSampleLog));
  WriteFile(writer.client_dir() + "/pages-1.img", "pages of " + job);
  ImageInfo info = SampleInfo();
  info.job_folder = job;
  return writer.Commit(info);
}

absl::Status Save(const std::string& dir, const Memory& memory, size_t keep, const std::string& job = "job",
                  ImageSizes* sizes = nullptr) {
  auto store = ImageStore::Open(dir);
  if (!store.ok()) return store.status();
  WriterOptions options;
  options.writers = 1;
  auto writer = (*store)->Create(options);
  if (!writer.ok()) return writer.status();
  CR_RETURN_IF_ERROR(Fill(**writer, memory, job));
  if (sizes) *sizes = (*writer)->sizes();
  return (*store)->Prune(keep).status();
}

// What an image holds; empty if it is not whole.
Memory Load(const std::string& dir, std::string* error) {
  Memory memory;
  auto reader = ImageReader::Open(dir, ImageReader::Owner::kTrusted);
  absl::Status status = reader.status();
  if (status.ok()) status = (*reader)->Verify();
  if (status.ok()) {
    status = (*reader)->ReadRegion(0, [&](uint64_t, std::string_view bytes, bool zero) {
      if (zero) {
        memory.push_back(0);
        return absl::OkStatus();
      }
      for (uint64_t seed = 1; seed < 200; ++seed) {
        // Noise of other seeds differs in its first bytes.
        if (Noise(64, seed) != bytes.substr(0, 64)) continue;
        if (bytes != BytesOf(seed)) break;
        memory.push_back(seed);
        return absl::OkStatus();
      }
      return absl::DataLossError("bytes that nobody has written");
    });
  }
  *error = Message(status);
  return status.ok() ? memory : Memory();
}

void ExpectHolds(const std::string& dir, const Memory& memory) {
  std::string error;
  EXPECT_EQ(Load(dir, &error), memory) << dir << ": " << error;
}

// What is in a folder besides the store's lock file.
std::vector<std::string> Names(const std::string& dir) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(dir)) {
    if (entry.path().filename() != kLockName) names.push_back(entry.path().filename().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

// What the files below `dir` take on the disk; each once, whatever its names are.
uint64_t DiskBytes(const std::string& dir) {
  std::map<ino_t, uint64_t> files;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(dir)) {
    struct stat facts;
    if (entry.is_regular_file() && stat(entry.path().c_str(), &facts) == 0) {
      files[facts.st_ino] = uint64_t(facts.st_blocks) * 512;
    }
  }
  uint64_t bytes = 0;
  for (const auto& [id, size] : files) bytes += size;
  return bytes;
}

// For logs, indexes and manifests.
constexpr uint64_t kSlack = 200 << 10;

TEST(Store, ImagesShareWhatIsTheSame) {
  TestFolder folder;
  const std::string dir = folder / "store";
  Memory first = FirstMemory();
  ImageSizes sizes;
  ASSERT_TRUE(Save(dir, first, 10, "job", &sizes).ok());
  EXPECT_EQ(sizes.linked_bytes, 0u);
  EXPECT_EQ(sizes.stored_bytes, kChunks * kChunkBytes);
  const uint64_t before = DiskBytes(dir);
  // One changed; one that was elsewhere; one of zeros.
  Memory second = first;
  second[3] = 100;
  second[5] = first[6];
  second[7] = 0;
  ASSERT_TRUE(Save(dir, second, 10, "job", &sizes).ok());
  EXPECT_EQ(sizes.linked_bytes, (kChunks - 3) * kChunkBytes);
  EXPECT_EQ(sizes.stored_bytes, (kChunks - 2) * kChunkBytes);
  EXPECT_EQ(sizes.shared_bytes, kChunkBytes);
  EXPECT_LT(DiskBytes(dir), before + kChunkBytes + kSlack);
  // Nothing changed since, but what had been before is there again.
  Memory third = second;
  third[7] = first[7];
  ASSERT_TRUE(Save(dir, third, 10).ok());
  EXPECT_LT(DiskBytes(dir), before + kChunkBytes + 2 * kSlack);
  EXPECT_THAT(Names(dir), ElementsAre("image-000001", "image-000002", "image-000003"));
  ExpectHolds(dir + "/image-000001", first);
  ExpectHolds(dir + "/image-000002", second);
  ExpectHolds(dir + "/image-000003", third);
  ExpectHolds(dir, third);
}

TEST(Store, EachImageStandsForItself) {
  TestFolder folder;
  const std::string dir = folder / "store";
  Memory memory = FirstMemory();
  ASSERT_TRUE(Save(dir, memory, 10).ok());
  memory[0] = 100;
  ASSERT_TRUE(Save(dir, memory, 10).ok());
  // Copied out by cp, by cr-inspect, and left alone.
  std::filesystem::copy(dir + "/image-000002", folder / "copied", std::filesystem::copy_options::recursive);
  std::filesystem::permissions(folder / "copied", std::filesystem::perms::owner_all);
  {
    auto reader = ImageReader::Open(dir);
    ASSERT_TRUE(reader.ok());
    uint64_t last = 0, all = 1;
    ASSERT_TRUE(ExportImage(**reader, folder / "exported", [&](uint64_t done, uint64_t total) {
                  last = done;
                  all = total;
                }).ok());
    EXPECT_EQ(last, all);
  }
  std::filesystem::remove_all(dir + "/image-000001");
  ExpectHolds(dir, memory);
  std::filesystem::remove_all(dir);
  ExpectHolds(folder / "copied", memory);
  ExpectHolds(folder / "exported", memory);
  EXPECT_EQ((*ImageReader::Open(folder / "exported"))->sizes().linked_bytes, 0u);
  EXPECT_EQ(ReadFile(folder / "exported/client/pages-1.img"), "pages of job");
  EXPECT_EQ((*ImageReader::Open(folder / "exported"))->info().created_unix_ms, SampleInfo().created_unix_ms);
}

TEST(Store, ExportsWhatImagesHave) {
  TestFolder folder;
  ASSERT_TRUE(WriteSample(folder / "image").ok());
  std::vector<std::string> before, after;
  ASSERT_TRUE(ReadAll(folder / "image", &before).ok());
  auto reader = ImageReader::Open(folder / "image");
  ASSERT_TRUE(ExportImage(**reader, folder / "exported", nullptr).ok());
  ASSERT_TRUE(ReadAll(folder / "exported", &after).ok());
  EXPECT_EQ(before, after);
  EXPECT_EQ(ReadFile(folder / "exported/client/sub/core.img"), "core");
  EXPECT_FALSE(ExportImage(**reader, folder.path(), nullptr).ok()) << "a folder with other things";
}

TEST(Store, ExportsASignedImageWithItsSignature) {
  TestFolder folder;
  const std::string dir = folder / "store";
  Memory memory = FirstMemory();
  ASSERT_TRUE(Save(dir, memory, 2).ok());
  memory[0] = 100;
  ASSERT_TRUE(Save(dir, memory, 2).ok());
  const std::string image = dir + "/image-000002", to = folder / "exported";
  std::ofstream(image + "/signature") << "signed";
  {
    auto reader = ImageReader::Open(image);
    ASSERT_TRUE(reader.ok());
    ASSERT_TRUE(ExportImage(**reader, to, nullptr).ok());
    EXPECT_FALSE(ExportImage(**reader, folder.path(), nullptr).ok()) << "a folder with other things";
    EXPECT_FALSE(std::filesystem::exists(folder.path() + ".partial"));
  }
  for (const char* file : {"signature", "manifest.pb", "memory/index"}) {
    EXPECT_EQ(ReadFile(to + "/" + file), ReadFile(image + "/" + file)) << file;
  }
  // The chunk of the first image alone is in the same data file as others.
  EXPECT_LE(DiskBytes(to), kChunks * kChunkBytes + kSlack);
  std::filesystem::remove_all(dir);
  ExpectHolds(to, memory);
  // Damage does not get on.
  auto damaged = ImageReader::Open(to);
  ASSERT_TRUE(damaged.ok());
  std::ofstream(to + "/client/pages-1.img", std::ios::in | std::ios::out) << "x";
  EXPECT_FALSE(ExportImage(**damaged, folder / "again", nullptr).ok());
  EXPECT_FALSE(std::filesystem::exists(folder / "again"));
  EXPECT_FALSE(std::filesystem::exists(folder / "again.partial"));
}

TEST(Store, TheLastOnesAreKeptAndTheRestIsFreed) {
  TestFolder folder;
  const std::string dir = folder / "store";
  Memory memory = FirstMemory();
  std::vector<Memory> saved;
  for (uint64_t i = 0; i < 12; ++i) {
    memory[(i * 7) % kChunks] = 100 + i;
    saved.push_back(memory);
    ASSERT_TRUE(Save(dir, memory, 3).ok());
    // The last image, and what the two before have had in the place of what changed since.
    EXPECT_LE(DiskBytes(dir), (kChunks + 2) * kChunkBytes + 3 * kSlack) << i;
  }
  EXPECT_THAT(Names(dir), ElementsAre("image-000010", "image-000011", "image-000012"));
  for (size_t i = 9; i < 12; ++i) ExpectHolds(dir + "/image-0000" + std::to_string(i + 1), saved[i]);
  ASSERT_TRUE(Save(dir, memory, 1).ok());
  EXPECT_THAT(Names(dir), ElementsAre("image-000013"));
  EXPECT_LE(DiskBytes(dir), kChunks * kChunkBytes + kSlack);
  ExpectHolds(dir, memory);
}

TEST(Store, NoBytesAreFreedThatAnotherFolderHas) {
  TestFolder folder;
  const std::string dir = folder / "store";
  const Memory first = FirstMemory();
  ASSERT_TRUE(Save(dir, first, 1).ok());
  // As cp -al makes it.
  std::filesystem::copy(dir + "/image-000001", folder / "elsewhere",
                        std::filesystem::copy_options::recursive | std::filesystem::copy_options::create_hard_links);
  std::filesystem::permissions(folder / "elsewhere", std::filesystem::perms::owner_all);
  Memory second = first;
  second[0] = 100;
  ASSERT_TRUE(Save(dir, second, 1).ok());
  ExpectHolds(dir, second);
  ExpectHolds(folder / "elsewhere", first);
  // Nor those of an image that cannot be read at the moment.
  Memory third = second;
  third[1] = 101;
  ASSERT_TRUE(Save(dir, third, 2).ok());
  const std::string index = ReadFile(dir + "/image-000002/memory/index");
  WriteFile(dir + "/image-000002/memory/index", "x" + index.substr(1));
  Memory fourth = third;
  fourth[2] = 102;
  ASSERT_TRUE(Save(dir, fourth, 1).ok());
  WriteFile(dir + "/image-000002/memory/index", index);
  ExpectHolds(dir + "/image-000002", second);
  ExpectHolds(dir, fourth);
}

TEST(Store, ImagesOfOtherJobsStay) {
  TestFolder folder;
  const std::string dir = folder / "store";
  const Memory memory = FirstMemory();
  ASSERT_TRUE(Save(dir, memory, 1, "a").ok());
  ImageSizes sizes;
  ASSERT_TRUE(Save(dir, memory, 1, "b", &sizes).ok());
  EXPECT_EQ(sizes.linked_bytes, sizes.stored_bytes) << "jobs share, too";
  ASSERT_TRUE(Save(dir, memory, 1, "a").ok());
  EXPECT_THAT(Names(dir), ElementsAre("image-000002", "image-000003"));
}

TEST(Store, ImagesOfOtherHostsStay) {
  TestFolder folder;
  const std::string dir = folder / "store";
  for (const char* host : {"a", "b", "a"}) {
    auto store = ImageStore::Open(dir);
    ASSERT_TRUE(store.ok()) << store.status();
    auto writer = (*store)->Create({});
    ASSERT_TRUE(FillSample(**writer, true).ok());
    EXPECT_FALSE((*store)->Prune(1).ok()) << "nothing has been saved";
    ImageInfo info = SampleInfo();
    info.host = host;
    ASSERT_TRUE((*writer)->Commit(info).ok());
    ASSERT_TRUE((*store)->Prune(1).ok());
  }
  EXPECT_THAT(Names(dir), ElementsAre("image-000002", "image-000003"));
}

TEST(Store, AnImageThatIsReadStays) {
  TestFolder folder;
  const std::string dir = folder / "store";
  const Memory first = FirstMemory();
  ASSERT_TRUE(Save(dir, first, 1).ok());
  Memory second = first;
  second[0] = 100;
  {
    auto reader = ImageReader::Open(dir);
    ASSERT_TRUE(reader.ok());
    ASSERT_TRUE(Save(dir, second, 1).ok());
    ExpectHolds(dir + "/image-000001", first);
    ExpectHolds(dir + "/image-000002", second);
  }
  ASSERT_TRUE(Save(dir, second, 1).ok());
  EXPECT_THAT(Names(dir), ElementsAre("image-000003"));
}

TEST(Store, OneWriterAtATime) {
  TestFolder folder;
  const std::string dir = folder / "store";
  {
    auto first = ImageStore::Open(dir);
    ASSERT_TRUE(first.ok()) << first.status();
    const absl::Status second = ImageStore::Open(dir).status();
    EXPECT_TRUE(absl::IsUnavailable(second)) << second;
    EXPECT_THAT(Message(second), HasSubstr(dir));
  }
  EXPECT_TRUE(ImageStore::Open(dir).ok());
}

TEST(Store, ItsLocksAreSeenOnOtherHosts) {
  TestFolder folder;
  const std::string dir = folder / "store", lock = dir + "/" + kLockName, image = dir + "/image-000001";
  {
    auto store = ImageStore::Open(dir);
    ASSERT_TRUE(store.ok()) << store.status();
    EXPECT_EQ(AccessTo(lock), O_RDWR);
    EXPECT_FALSE(CouldLock(lock, LOCK_EX));
    auto writer = (*store)->Create({});
    ASSERT_TRUE(writer.ok()) << writer.status();
    const std::string partial = image + ".partial/" + kLockName;
    EXPECT_EQ(AccessTo(partial), O_RDWR);
    EXPECT_FALSE(CouldLock(partial, LOCK_EX));
    ASSERT_TRUE(Fill(**writer, FirstMemory(), "job").ok());
    EXPECT_FALSE(std::filesystem::exists(image + "/" + kLockName)) << "the image is complete, and nobody's";
  }
  EXPECT_TRUE(CouldLock(lock, LOCK_EX));
  const std::string manifest = image + "/" + kManifestName;
  {
    auto reader = ImageReader::Open(dir);
    ASSERT_TRUE(reader.ok()) << reader.status();
    EXPECT_FALSE(CouldLock(manifest, LOCK_EX));
    EXPECT_TRUE(CouldLock(manifest, LOCK_SH));
  }
  EXPECT_TRUE(CouldLock(manifest, LOCK_EX));
  // Those of others are seen here.
  const OtherHosts hosts;
  UniqueFd other(open(lock.c_str(), O_RDWR));
  ASSERT_EQ(flock(other.get(), LOCK_EX | LOCK_NB), 0);
  const absl::Status refused = Save(dir, FirstMemory(), 1);
  EXPECT_TRUE(absl::IsUnavailable(refused)) << refused;
  other.Close();
  UniqueFd reader(open(manifest.c_str(), O_RDONLY));
  ASSERT_EQ(flock(reader.get(), LOCK_SH | LOCK_NB), 0);
  ASSERT_TRUE(Save(dir, FirstMemory(), 1).ok());
  EXPECT_THAT(Names(dir), ElementsAre("image-000001", "image-000002"));
  reader.Close();
  ASSERT_TRUE(Save(dir, FirstMemory(), 1).ok());
  EXPECT_THAT(Names(dir), ElementsAre("image-000003"));
}

TEST(Store, ALockThatAForkedProcessHasGoesWithTheStore) {
  TestFolder folder;
  const std::string dir = folder / "store";
  auto store = ImageStore::Open(dir);
  ASSERT_TRUE(store.ok()) << store.status();
  const pid_t child = fork();
  if (child == 0) {
    pause();
    _exit(0);
  }
  store->reset();
  EXPECT_TRUE(ImageStore::Open(dir).ok());
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
}

TEST(Store, WhatUsersDoToTheLockFile) {
  TestFolder folder;
  const std::string dir = folder / "store", lock = dir + "/" + kLockName, target = folder / "target";
  ASSERT_TRUE(Save(dir, FirstMemory(), 1).ok());
  // A store of before has none, and a reader makes none.
  ASSERT_EQ(unlink(lock.c_str()), 0);
  ExpectHolds(dir, FirstMemory());
  EXPECT_FALSE(std::filesystem::exists(lock));
  const auto refused = [&](const char* what) {
    const absl::Status status = Save(dir, FirstMemory(), 1);
    EXPECT_TRUE(absl::IsFailedPrecondition(status)) << what << ": " << status;
    EXPECT_THAT(Message(status), HasSubstr(lock + " is not a plain file")) << what;
    ExpectHolds(dir, FirstMemory());
    std::filesystem::remove(lock);
  };
  ASSERT_EQ(symlink(target.c_str(), lock.c_str()), 0);
  refused("a link");
  EXPECT_FALSE(std::filesystem::exists(target));
  ASSERT_EQ(mkfifo(lock.c_str(), 0600), 0);
  refused("a pipe");
  ASSERT_EQ(mkdir(lock.c_str(), 0700), 0);
  refused("a folder");
  // Removed while a tool has it: on this machine, nobody else gets in.
  {
    auto store = ImageStore::Open(dir);
    ASSERT_TRUE(store.ok()) << store.status();
    ASSERT_EQ(unlink(lock.c_str()), 0);
    EXPECT_TRUE(absl::IsUnavailable(ImageStore::Open(dir).status()));
  }
  // A copy has it, too; and a store may have lost its images.
  ASSERT_TRUE(Save(dir, FirstMemory(), 1).ok());
  ASSERT_EQ(system(("cp -a " + dir + " " + (folder / "copy")).c_str()), 0);
  {
    auto store = ImageStore::Open(dir);
    ASSERT_TRUE(Save(folder / "copy", FirstMemory(), 1).ok());
  }
  std::filesystem::remove_all(folder / "copy/image-000002");
  EXPECT_THAT(Names(folder / "copy"), ElementsAre("image-000003"));
  std::filesystem::remove_all(folder / "copy/image-000003");
  EXPECT_TRUE(Save(folder / "copy", FirstMemory(), 1).ok());
}

TEST(Store, OtherFoldersAreNotTouched) {
  TestFolder folder;
  ASSERT_TRUE(WriteSample(folder / "image", true).ok());
  EXPECT_TRUE(absl::IsAlreadyExists(ImageStore::Open(folder / "image").status()));
  EXPECT_TRUE(absl::IsAlreadyExists(ImageStore::Open(folder.path()).status()));
  EXPECT_FALSE(std::filesystem::exists(folder / kLockName));
  EXPECT_TRUE(absl::IsAlreadyExists(ImageWriter::Create(folder.path()).status()));
  EXPECT_FALSE(ImageStore::Open(folder / "no/such/store").ok());
  ASSERT_TRUE(Save(folder / "store", FirstMemory(), 1).ok());
  EXPECT_THAT(Message(ImageWriter::Create(folder / "store").status()), HasSubstr("--keep"));
  ExpectHolds(folder / "store", FirstMemory());
  const std::string open = folder / "open";
  std::filesystem::create_directory(open);
  ASSERT_EQ(chmod(open.c_str(), 0777), 0);
  EXPECT_TRUE(absl::IsPermissionDenied(ImageStore::Open(open).status()));
  ASSERT_EQ(chmod(open.c_str(), 0755), 0);
  EXPECT_TRUE(ImageStore::Open(open).ok());
  // A folder that looks like a dead image, and is none.
  std::filesystem::create_directories(open + "/image-000001.partial");
  WriteFile(open + "/image-000001.partial/thesis.tex", "mine");
  EXPECT_THAT(Message(ImageStore::Open(open).status()), HasSubstr("thesis.tex"));
  EXPECT_EQ(ReadFile(open + "/image-000001.partial/thesis.tex"), "mine");
}

TEST(Store, AnImageThatCannotBeLookedAtIsNotRemoved) {
  TestFolder folder;
  // The image has a path that is not too long, and its manifest has one that is.
  std::string dir = folder.path();
  const size_t length = 4096 - strlen("/image-000001/manifest.pb");
  while (dir.size() < length) {
    const size_t left = length - dir.size() - 1;
    dir += "/" + std::string(left <= 200 ? left : std::min<size_t>(left - 2, 200), 'd');
    ASSERT_EQ(mkdir(dir.c_str(), 0700), 0);
  }
  Save(dir, FirstMemory(), 1).IgnoreError();
  const int fd = open(dir.c_str(), O_RDONLY | O_DIRECTORY);
  const auto is_there = [&] { return faccessat(fd, "image-000001/manifest.pb", F_OK, 0) == 0; };
  ASSERT_TRUE(is_there());
  EXPECT_THAT(Message(Save(dir, FirstMemory(), 1)), HasSubstr("too long"));
  EXPECT_TRUE(is_there());
  close(fd);
}

TEST(Store, NothingIsSharedWithWhatOthersCouldHaveWritten) {
  TestFolder folder;
  const std::string dir = folder / "store";
  const Memory memory = FirstMemory();
  ASSERT_TRUE(Save(dir, memory, 5).ok());
  const std::string data = dir + "/image-000001/memory/data-00000";
  ASSERT_EQ(chmod(data.c_str(), 0666), 0);
  ImageSizes sizes;
  ASSERT_TRUE(Save(dir, memory, 5, "job", &sizes).ok());
  EXPECT_EQ(sizes.linked_bytes, 0u);
}

TEST(Store, EqualityNeedsBothHashes) {
  // As if somebody had made bytes with the XXH3-128 of others: the index says so of a chunk that is there.
  TestFolder folder;
  const std::string dir = folder / "store";
  const Memory memory = FirstMemory();
  ASSERT_TRUE(Save(dir, memory, 5).ok());
  auto writer = ImageWriter::Create(folder / "image");
  ASSERT_TRUE(writer.ok());
  auto reader = ImageReader::Open(dir);
  // Another secret: nothing is known of its chunks.
  EXPECT_TRUE((*writer)->ShareWith(**reader).ok());
  ASSERT_TRUE(Fill(**writer, memory, "job").ok());
  EXPECT_EQ((*writer)->sizes().linked_bytes, 0u);
  const Index a = (*reader)->index();
  const Index b = (*ImageReader::Open(folder / "image"))->index();
  ASSERT_EQ(a.chunks.size(), b.chunks.size());
  for (size_t i = 0; i < a.chunks.size(); ++i) {
    EXPECT_TRUE(a.chunks[i].hash == b.chunks[i].hash);
    EXPECT_FALSE(a.chunks[i].keyed == b.chunks[i].keyed);
  }
}

ChunkHash GpuHashOf(std::string_view bytes) { return HashChunk(bytes.data(), bytes.size()); }

// Jobs that save one region again and again into one store, without reading what they need not.
class Unread : public testing::Test {
 protected:
  // Chunk i as it is in `memory`; the last one is 5 bytes shorter.
  std::string_view Chunk(const Memory& memory, size_t i) const {
    const std::string_view bytes = BytesOf(memory[i]);
    return i + 1 < memory.size() ? bytes : bytes.substr(0, bytes.size() - 5);
  }
  // How many chunks had to be read; -1 if something else failed.
  int Save(const Memory& memory) {
    const auto store = ImageStore::Open(dir_);
    if (!store.ok()) return -1;
    WriterOptions options;
    options.job_folder = job_folder_;
    const auto writer = (*store)->Create(options);
    if (!writer.ok()) return -1;
    region_.bytes = memory.size() * kChunkBytes - 5;
    const auto number = (*writer)->AddRegion(region_);
    int read = 0;
    for (size_t i = 0; i < memory.size(); ++i) {
      const ChunkHash hash = GpuHashOf(Chunk(memory, i));
      const bool has = (*writer)->Has(region_, i, hash);
      if ((*writer)->AddUnread(*number, i, hash) != has) return -1;
      if (has) continue;
      ++read;
      if (!(*writer)->AddChunk(*number, i, Chunk(memory, i), nullptr).ok()) return -1;
    }
    // Once each, and none that is not there.
    if ((*writer)->AddUnread(*number, 0, GpuHashOf(Chunk(memory, 0)))) return -1;
    if ((*writer)->AddUnread(*number, memory.size(), GpuHashOf(Chunk(memory, 0)))) return -1;
    if ((*writer)->AddUnread(*number + 1, 0, GpuHashOf(Chunk(memory, 0)))) return -1;
    ImageInfo info = SampleInfo();
    info.processes.resize(2);
    for (size_t i = 0; i < info.processes.size(); ++i) {
      if (!(*writer)->WriteLog(kSampleLog).ok()) return -1;
    }
    info.job_folder = job_folder_;
    info.host = host_;
    if (!(*writer)->Commit(info).ok()) return -1;
    return HoldsWhatItShould(memory) ? read : -1;
  }
  // The newest image, all of it read.
  bool HoldsWhatItShould(const Memory& memory) const {
    std::vector<std::string> regions;
    std::string want;
    for (size_t i = 0; i < memory.size(); ++i) want += Chunk(memory, i);
    return ReadAll(dir_, &regions).ok() && regions[0] == want;
  }

  TestFolder folder_;
  std::string dir_ = folder_ / "store", job_folder_ = "/run/jobs/a", host_;
  Region region_;
};

TEST_F(Unread, ChunksOfTheSamePlaceAndHash) {
  // The chunk of zeros is known by its hash alone.
  EXPECT_EQ(Save({1, 2, 0, 3, 2}), 4);
  EXPECT_EQ(Save({1, 2, 0, 3, 2}), 0);
  // A hash that is known at another place only proves nothing: somebody may have made bytes for it.
  EXPECT_EQ(Save({3, 4, 1, 1, 2}), 4);
  // Images before the last one count, too.
  EXPECT_EQ(Save({1, 4, 1, 3, 2}), 0);
  // Any process may have the region.
  region_.process = 1;
  EXPECT_EQ(Save({1, 4, 1, 3, 2}), 0);
  // A longer region has another last chunk.
  EXPECT_EQ(Save({1, 4, 1, 3, 2, 5}), 2);
}

TEST_F(Unread, NothingOfAnotherRegionOrJob) {
  const Memory memory = {1, 2, 3};
  EXPECT_EQ(Save(memory), 3);
  const Region same = region_;
  for (const auto& change : std::vector<std::function<void()>>{
           [&] { region_.address += kChunkBytes; }, [&] { region_.kind = RegionKind::kHeap; },
           [&] { region_.object = 77; }, [&] { region_.context = 78; }, [&] { region_.device = 5; },
           [&] { region_.module_index = 9; }, [&] { region_.symbol = "x"; }}) {
    region_ = same;
    change();
    EXPECT_EQ(Save(memory), 3);
    EXPECT_EQ(Save(memory), 0);
  }
  region_ = same;
  job_folder_ = "/run/jobs/b";
  EXPECT_EQ(Save(memory), 3);
  EXPECT_EQ(Save(memory), 0);
  host_ = "another";
  job_folder_ = "/run/jobs/c";
  EXPECT_EQ(Save(memory), 3);
  EXPECT_EQ(Save(memory), 3) << "the image before is of another machine";
  // A job that nobody named shares with none.
  host_.clear();
  job_folder_.clear();
  EXPECT_EQ(Save(memory), 3);
  EXPECT_EQ(Save(memory), 3);
}

// What an image has lost is read, and so written, again.
TEST_F(Unread, NothingOfImagesThatAreDamaged) {
  const Memory memory = {1, 2, 3, 4};
  EXPECT_EQ(Save(memory), 4);
  const std::string image = dir_ + "/image-000001/";
  const auto data_files = [&] {
    std::vector<std::string> names;
    for (const auto& file : std::filesystem::directory_iterator(image + "memory")) {
      if (file.path().filename().string().rfind("data-", 0) == 0) names.push_back(file.path());
    }
    return names;
  };
  // Cut off in the middle of a chunk.
  uintmax_t bytes = 0;
  for (const std::string& name : data_files()) {
    bytes += std::filesystem::file_size(name);
    std::filesystem::resize_file(name, std::filesystem::file_size(name) - 7);
  }
  ASSERT_EQ(bytes, 4 * kChunkBytes - 5);
  const int again = Save(memory);
  EXPECT_GE(again, 1);
  EXPECT_LE(again, 4);
  EXPECT_EQ(Save(memory), 0);
  // Images that are gone, and one that cannot be read.
  std::filesystem::remove_all(dir_ + "/image-000001");
  WriteFile(dir_ + "/image-000002/memory/index", "x");
  WriteFile(dir_ + "/image-000003/memory/index", "x");
  EXPECT_EQ(Save(memory), 4);
}

// An image that is none of a store has no hashes, and nothing need be hashed for it.
TEST_F(Unread, OnlyInStores) {
  auto writer = ImageWriter::Create(folder_ / "image");
  Region region;
  region.bytes = 2 * kChunkBytes;
  ASSERT_EQ(*(*writer)->AddRegion(region), 0u);
  EXPECT_FALSE((*writer)->keeps_gpu_hashes());
  const std::string zeros(kChunkBytes, '\0');
  EXPECT_FALSE((*writer)->Has(region, 0, GpuHashOf(zeros)));
  EXPECT_FALSE((*writer)->AddUnread(0, 0, GpuHashOf(zeros)));
  ASSERT_TRUE((*writer)->AddChunk(0, 0, zeros, nullptr).ok());
  ASSERT_TRUE((*writer)->AddChunk(0, 1, BytesOf(1), nullptr).ok());
  ASSERT_TRUE((*writer)->WriteLog(kSampleLog).ok());
  ASSERT_TRUE((*writer)->Commit(SampleInfo()).ok());
  const auto reader = ImageReader::Open(folder_ / "image");
  ASSERT_EQ((*reader)->index().chunks.size(), 1u);
  EXPECT_FALSE((*reader)->index().chunks[0].gpu_hash.has_value());
}

TEST(Store, IsListedWithWhatIsShared) {
  TestFolder folder;
  const std::string dir = folder / "store";
  EXPECT_TRUE(absl::IsNotFound(ListStore(dir).status()));
  Memory memory = FirstMemory();
  ASSERT_TRUE(Save(dir, memory, 5).ok());
  memory[0] = 100;
  memory[1] = 101;
  ASSERT_TRUE(Save(dir, memory, 5).ok());
  memory[0] = 102;
  ASSERT_TRUE(Save(dir, memory, 5).ok());
  absl::StatusOr<StoreListing> store = ListStore(dir);
  ASSERT_TRUE(store.ok()) << store.status();
  ASSERT_EQ(store->images.size(), 3u);
  const auto own = [&](size_t i) { return store->images[i].own_bytes / kChunkBytes; };
  EXPECT_EQ(own(0), 2u);
  EXPECT_EQ(own(1), 1u);
  EXPECT_EQ(own(2), 1u);
  EXPECT_EQ(store->images[0].sizes.total_bytes / kChunkBytes, kChunks);
  EXPECT_EQ(store->total_bytes / kChunkBytes, kChunks + 3);
  EXPECT_EQ(store->images[2].info.job_folder, "job");
  // A damaged one is listed as such.
  WriteFile(dir + "/image-000002/memory/index", "x");
  store = ListStore(dir);
  ASSERT_EQ(store->images.size(), 3u);
  EXPECT_TRUE(absl::IsDataLoss(store->images[1].status));
}

std::atomic<int64_t> g_room{0};

ssize_t FullDisk(int fd, const void* data, size_t bytes) {
  if (g_room <= 0) {
    errno = ENOSPC;
    return -1;
  }
  const size_t fits = size_t(std::min<int64_t>(g_room, int64_t(bytes)));
  g_room -= int64_t(fits);
  return write(fd, data, fits);
}

TEST(Store, AFullDiskAtAnyMoment) {
  TestFolder folder;
  const std::string dir = folder / "store";
  Memory first = FirstMemory();
  ASSERT_TRUE(Save(dir, first, 1).ok());
  const uint64_t before = DiskBytes(dir);
  Memory second = first;
  second[4] = 100;
  g_write_for_testing = &FullDisk;
  bool finished = false;
  int failures = 0;
  // Finely in the small files, coarsely in the chunk.
  constexpr int64_t kChunk = int64_t(kChunkBytes);
  for (int64_t room = 0; !finished; room = room < kChunk ? std::min(room + 200000, kChunk) : room + 97) {
    g_room = room;
    const absl::Status status = Save(dir, second, 1);
    finished = status.ok();
    if (finished) break;
    ++failures;
    ASSERT_TRUE(absl::IsResourceExhausted(status)) << status;
    ASSERT_THAT(Names(dir), ElementsAre("image-000001"));
    ASSERT_EQ(DiskBytes(dir), before);
  }
  g_write_for_testing = nullptr;
  EXPECT_GT(failures, 20);
  ExpectHolds(dir, second);
}

int g_steps_left = 0;
void CrashAtStep(const char*) {
  if (g_steps_left-- == 0) _exit(42);
}

TEST(Store, ACrashAtAnyStepLosesAndLeaksNothing) {
  TestFolder folder;
  const std::string base = folder / "base", dir = folder / "store";
  Memory memory = FirstMemory();
  ASSERT_TRUE(Save(base, memory, 2).ok());
  memory[0] = 100;
  ASSERT_TRUE(Save(base, memory, 2).ok());
  const Memory old = memory;
  Memory next = old;
  next[1] = 101;
  int step = 0, news = 0;
  for (;; ++step) {
    // With the same hard links.
    ASSERT_EQ(system(("rm -rf " + dir + " && cp -a " + base + " " + dir).c_str()), 0);
    const pid_t child = fork();
    if (child == 0) {
      g_steps_left = step;
      g_step_for_testing = &CrashAtStep;
      _exit(Save(dir, next, 2).ok() ? 0 : 1);
    }
    int result = 0;
    waitpid(child, &result, 0);
    ASSERT_TRUE(WIFEXITED(result));
    ASSERT_NE(WEXITSTATUS(result), 1);
    std::string error;
    const Memory found = Load(dir, &error);
    ASSERT_TRUE(found == old || found == next) << "step " << step << ": " << error;
    news += found == next;
    for (const std::string& path : ImagesIn(dir)) {
      Load(path, &error);
      EXPECT_EQ(error, "") << path << " at step " << step;
    }
    if (WEXITSTATUS(result) == 0) break;
    // The next checkpoint removes all that is left, and shares as if nothing had happened.
    ImageSizes sizes;
    memory = found;
    memory[2] = 102;
    ASSERT_TRUE(Save(dir, memory, 2, "job", &sizes).ok());
    EXPECT_EQ(sizes.linked_bytes, (kChunks - 1) * kChunkBytes);
    ASSERT_EQ(Names(dir).size(), 2u) << step;
    ASSERT_LE(DiskBytes(dir), (kChunks + 1) * kChunkBytes + 2 * kSlack) << "step " << step;
    ExpectHolds(dir, memory);
  }
  EXPECT_GE(step, 20);
  EXPECT_GE(news, 4);
}

void SaveWithFourTools() {
  TestFolder folder;
  const std::string dir = folder / "store";
  std::vector<pid_t> children;
  for (int tool = 0; tool < 4; ++tool) {
    const pid_t child = fork();
    if (child == 0) {
      int saved = 0;
      for (uint64_t i = 0; i < 100 && saved < 4; ++i) {
        Memory memory = FirstMemory();
        memory[0] = 100 + uint64_t(tool) * 10 + uint64_t(saved);
        const absl::Status status = Save(dir, memory, 2, "job" + std::to_string(tool % 2));
        if (status.ok()) {
          ++saved;
        } else if (!absl::IsUnavailable(status)) {
          fprintf(stderr, "%s\n", Message(status).c_str());
          _exit(1);
        } else {
          usleep(20000);
        }
      }
      _exit(saved == 4 ? 0 : 2);
    }
    children.push_back(child);
  }
  for (const pid_t child : children) {
    int result = 0;
    waitpid(child, &result, 0);
    EXPECT_EQ(result, 0);
  }
  const std::vector<std::string> images = ImagesIn(dir);
  EXPECT_EQ(images.size(), 4u);
  EXPECT_EQ(Names(dir).size(), 4u);
  for (const std::string& path : images) {
    std::string error;
    EXPECT_EQ(Load(path, &error).size(), kChunks) << error;
  }
  EXPECT_LE(DiskBytes(dir), (kChunks + 3) * kChunkBytes + 4 * kSlack);
}

TEST(Store, ToolsAtOnce) { SaveWithFourTools(); }

TEST(Store, ToolsOnHostsAtOnce) {
  const OtherHosts hosts;
  SaveWithFourTools();
}

TEST(Store, DataFilesDoNotGetMoreForEver) {
  TestFolder folder;
  const std::string dir = folder / "store";
  // Each image adds a file with one small chunk.
  for (size_t i = 0; i < 230; ++i) {
    auto store = ImageStore::Open(dir);
    ASSERT_TRUE(store.ok()) << store.status();
    WriterOptions options;
    options.writers = 1;
    auto writer = (*store)->Create(options);
    ASSERT_TRUE(writer.ok());
    Region region;
    region.bytes = 100;
    for (size_t at = 0; at <= i; ++at) {
      ASSERT_TRUE((*writer)->BeginRegion(region).ok());
      ASSERT_TRUE((*writer)->AddData(Noise(100, at + 1)).ok());
      ASSERT_TRUE((*writer)->EndRegion().ok());
    }
    ASSERT_TRUE((*writer)->WriteLog("log").ok());
    ASSERT_TRUE((*writer)->Commit(SampleInfo()).ok());
    ASSERT_TRUE((*store)->Prune(1).ok());
  }
  size_t files = 0;
  for (const std::string& name : Names(NewestImageIn(dir) + "/memory")) files += name != "index";
  EXPECT_LE(files, 201u);
  EXPECT_GT(files, 150u);
  ASSERT_TRUE(ReadAll(dir).ok());
}

}  // namespace
}  // namespace cuda_remote::ckptfmt
