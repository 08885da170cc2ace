// SPDX-License-Identifier: Apache-2.0
// Tests of writing and reading images, and of everything that may be wrong with their files.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include "absl/strings/match.h"
#include "ckptfmt/file.h"
#include "ckptfmt/index.h"
#include "ckptfmt/manifest.h"
#include "ckptfmt/testing.h"

namespace cuda_remote::ckptfmt {
namespace {

using testing::HasSubstr;

std::string Message(const absl::Status& status) { return std::string(status.message()); }

std::vector<std::string> FilesOf(const std::string& dir) {
  std::vector<std::string> files;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(dir)) {
    if (entry.is_regular_file()) files.push_back(entry.path().string());
  }
  std::sort(files.begin(), files.end());
  return files;
}

void ExpectIsSample(const std::string& dir) {
  auto reader = ImageReader::Open(dir);
  ASSERT_TRUE(reader.ok()) << reader.status();
  ASSERT_TRUE((*reader)->Verify().ok());
  const auto samples = SampleRegions();
  ASSERT_EQ((*reader)->regions().size(), samples.size());
  for (size_t i = 0; i < samples.size(); ++i) {
    const Region& region = (*reader)->regions()[i];
    const Region& expected = samples[i].region;
    EXPECT_EQ(region.kind, expected.kind);
    EXPECT_EQ(region.address, expected.address);
    EXPECT_EQ(region.bytes, expected.bytes);
    EXPECT_EQ(region.object, expected.object);
    EXPECT_EQ(region.symbol, expected.symbol);
    EXPECT_EQ(region.context, expected.context);
    EXPECT_EQ(region.device, expected.device);
    EXPECT_EQ(region.module_index, expected.module_index);
    EXPECT_EQ(region.flags, expected.flags);
    std::string bytes;
    ASSERT_TRUE((*reader)
                    ->ReadRegion(i,
                                 [&](uint64_t offset, std::string_view chunk, bool zero) {
                                   EXPECT_EQ(offset, bytes.size());
                                   EXPECT_EQ(zero, chunk.find_first_not_of('\0') == std::string_view::npos);
                                   bytes += chunk;
                                   return absl::OkStatus();
                                 })
                    .ok());
    EXPECT_TRUE(bytes == samples[i].bytes) << "region " << i;
  }
  EXPECT_EQ(*(*reader)->ReadLog(), kSampleLog);
  EXPECT_EQ(ReadFile((*reader)->client_dir() + "/pages-1.img"), Noise(3000000, 9));
  const ImageInfo expected = SampleInfo();
  const ImageInfo& info = (*reader)->info();
  EXPECT_EQ(info.product_version, expected.product_version);
  EXPECT_EQ(info.created_unix_ms, expected.created_unix_ms);
  EXPECT_EQ(info.host, expected.host);
  EXPECT_EQ(info.job, expected.job);
  EXPECT_EQ(info.program, expected.program);
  EXPECT_EQ(info.pid, expected.pid);
  EXPECT_EQ(info.job_folder, expected.job_folder);
  ASSERT_EQ(info.processes.size(), 1u);
  const ProcessInfo &process = info.processes[0], &wanted = expected.processes[0];
  EXPECT_EQ(process.pid, wanted.pid);
  EXPECT_EQ(process.program, wanted.program);
  EXPECT_EQ(process.server, wanted.server);
  EXPECT_EQ(process.driver_version, wanted.driver_version);
  ASSERT_EQ(process.devices.size(), 1u);
  EXPECT_EQ(process.devices[0].name, wanted.devices[0].name);
  EXPECT_EQ(process.devices[0].uuid, wanted.devices[0].uuid);
  EXPECT_EQ(process.devices[0].compute_major, 9);
  EXPECT_EQ(process.devices[0].total_memory, wanted.devices[0].total_memory);
  EXPECT_EQ(process.devices[0].pci_bus_id, wanted.devices[0].pci_bus_id);
  EXPECT_EQ(process.next_sequence, wanted.next_sequence);
  EXPECT_EQ(process.session, wanted.session);
  EXPECT_TRUE(process.shared_memory);
  EXPECT_EQ(process.driver_settings, wanted.driver_settings);
  EXPECT_EQ(process.log_records, 3u);
  EXPECT_EQ(info.engine, "criu");
  EXPECT_EQ(info.client_info, expected.client_info);
  EXPECT_EQ(info.needs.kernel, expected.needs.kernel);
  EXPECT_EQ(info.needs.engine_version, expected.needs.engine_version);
  ASSERT_EQ(info.needs.files.size(), expected.needs.files.size());
  for (size_t i = 0; i < info.needs.files.size(); ++i) {
    const NeededFile& read = info.needs.files[i];
    const NeededFile& file = expected.needs.files[i];
    EXPECT_EQ(read.path, file.path);
    EXPECT_EQ(read.bytes, file.bytes);
    EXPECT_EQ(read.build_id, file.build_id);
    EXPECT_EQ(read.kept, file.kept);
    EXPECT_EQ(read.written, file.written);
  }
}

TEST(Image, WritesAndReads) {
  TestFolder folder;
  ASSERT_TRUE(WriteSample(folder / "image").ok());
  ExpectIsSample(folder / "image");
  ExpectIsSample(folder / "image/");
  EXPECT_FALSE(std::filesystem::exists(folder / "image.partial"));
  struct stat facts;
  ASSERT_EQ(stat((folder / "image").c_str(), &facts), 0);
  EXPECT_EQ(facts.st_mode & 077, 0u) << "a process's memory is nobody else's business";
}

TEST(Image, CompressedAndInManyDataFiles) {
  TestFolder folder;
  WriterOptions options;
  options.zstd_level = 1;
  options.data_file_bytes = kChunkBytes;
  ASSERT_TRUE(WriteSample(folder / "image", false, options).ok());
  ExpectIsSample(folder / "image");
  EXPECT_TRUE(std::filesystem::exists(folder / "image/memory/data-00001"));
}

TEST(Image, SeveralWriters) {
  TestFolder folder;
  for (int level : {0, 1}) {
    WriterOptions options;
    options.writers = 4;
    options.zstd_level = level;
    auto writer = ImageWriter::Create(folder / "image", options);
    ASSERT_TRUE(writer.ok()) << writer.status();
    constexpr size_t kRegions = 50;
    for (size_t i = 0; i < kRegions; ++i) {
      Region region;
      region.address = i + 1;
      region.bytes = (i + 1) * 100001;
      ASSERT_TRUE((*writer)->BeginRegion(region).ok());
      ASSERT_TRUE((*writer)->AddData(Noise(region.bytes, i)).ok());
      ASSERT_TRUE((*writer)->EndRegion().ok());
    }
    ASSERT_TRUE((*writer)->WriteLog("log").ok());
    ASSERT_TRUE((*writer)->Commit(SampleInfo()).ok());
    std::vector<std::string> regions;
    ASSERT_TRUE(ReadAll(folder / "image", &regions).ok());
    ASSERT_EQ(regions.size(), kRegions);
    for (size_t i = 0; i < kRegions; ++i) EXPECT_TRUE(regions[i] == Noise((i + 1) * 100001, i)) << i;
    EXPECT_EQ((*writer)->sizes().stored_bytes, (*ImageReader::Open(folder / "image"))->sizes().stored_bytes);
  }
}

TEST(Image, ZerosAndEqualChunksAreNotStored) {
  TestFolder folder;
  ASSERT_TRUE(WriteSample(folder / "image").ok());
  auto reader = ImageReader::Open(folder / "image");
  ASSERT_TRUE(reader.ok());
  const ImageSizes& sizes = (*reader)->sizes();
  EXPECT_EQ(sizes.region_bytes, 1000 + 5000 + 5 * kChunkBytes + 12345 + 3000);
  EXPECT_EQ(sizes.zero_bytes, 5000 + kChunkBytes);
  EXPECT_EQ(sizes.shared_bytes, 2 * kChunkBytes);
  EXPECT_EQ(sizes.stored_bytes, 1000 + 2 * kChunkBytes + 12345 + 3000);
  EXPECT_EQ(sizes.client_bytes, 3000004u);
  uint64_t total = 0;
  for (const std::string& file : FilesOf(folder / "image")) total += std::filesystem::file_size(file);
  EXPECT_EQ(sizes.total_bytes, total);
  const auto chunks = (*reader)->ChunksOf(3);
  ASSERT_EQ(chunks.size(), 5u);
  EXPECT_TRUE(chunks[1].zero);
  EXPECT_EQ(chunks[0].hash, chunks[2].hash);
  EXPECT_EQ(chunks[4].bytes, 12345u);
}

TEST(Image, ProgressReachesItsEnd) {
  TestFolder folder;
  auto writer = ImageWriter::Create(folder / "image");
  ASSERT_TRUE(writer.ok()) << writer.status();
  ASSERT_TRUE(FillSample(**writer).ok());
  uint64_t last = 0, all = 0;
  const Progress progress = [&](uint64_t done, uint64_t total) {
    EXPECT_GE(done, last);
    EXPECT_LE(done, total);
    last = done;
    all = total;
  };
  ASSERT_TRUE((*writer)->Commit(SampleInfo(), progress).ok());
  EXPECT_EQ(last, all);
  EXPECT_EQ(all, 3000004u);
  last = 0;
  auto reader = ImageReader::Open(folder / "image");
  ASSERT_TRUE((*reader)->Verify(progress).ok());
  EXPECT_EQ(last, all);
  EXPECT_GT(all, 3000004u);
}

TEST(Image, AnyFlippedBitIsFoundWithItsFile) {
  TestFolder folder;
  ASSERT_TRUE(WriteSample(folder / "image").ok());
  for (const std::string& file : FilesOf(folder / "image")) {
    SCOPED_TRACE(file);
    const std::string good = ReadFile(file);
    const size_t step = std::max<size_t>(1, good.size() / 10);
    for (size_t at = 0; at < good.size(); at += step) {
      std::string bad = good;
      bad[at] ^= char(1 << at % 8);
      WriteFile(file, bad);
      const absl::Status status = ReadAll(folder / "image");
      ASSERT_FALSE(status.ok()) << "at " << at;
      ASSERT_TRUE(absl::IsDataLoss(status)) << status;
      ASSERT_THAT(Message(status), HasSubstr(file));
    }
    WriteFile(file, good);
  }
  ExpectIsSample(folder / "image");
}

TEST(Image, EveryBitOfTheSmallFilesCounts) {
  TestFolder folder;
  ASSERT_TRUE(WriteSample(folder / "image", /*small=*/true).ok());
  const std::string manifest = ReadFile(folder / "image/manifest.pb");
  const std::string index = ReadFile(folder / "image/memory/index");
  ImageInfo info;
  std::vector<FileRecord> files;
  ASSERT_TRUE(DecodeManifest(manifest, "manifest", &info, &files).ok());
  for (size_t bit = 0; bit < manifest.size() * 8; ++bit) {
    std::string bad = manifest;
    bad[bit / 8] ^= char(1 << bit % 8);
    ASSERT_TRUE(absl::IsDataLoss(DecodeManifest(bad, "manifest", &info, &files))) << "bit " << bit;
  }
  ASSERT_TRUE(DecodeIndex(index, "index").ok());
  for (size_t bit = 0; bit < index.size() * 8; ++bit) {
    std::string bad = index;
    bad[bit / 8] ^= char(1 << bit % 8);
    ASSERT_TRUE(absl::IsDataLoss(DecodeIndex(bad, "index").status())) << "bit " << bit;
  }
}

TEST(Image, DamageIsToldWithItsOffset) {
  TestFolder folder;
  ASSERT_TRUE(WriteSample(folder / "image").ok());
  const std::string file = folder / "image/client/pages-1.img";
  std::string bytes = ReadFile(file);
  bytes[2500000] ^= 1;
  WriteFile(file, bytes);
  auto reader = ImageReader::Open(folder / "image");
  ASSERT_TRUE(reader.ok());
  EXPECT_THAT(Message((*reader)->Verify()), HasSubstr("from offset 2097152"));
  // A read finds damage too that came after Verify.
  const std::string data = folder / "image/memory/data-00000";
  bytes = ReadFile(data);
  bytes[1500] ^= 1;
  WriteFile(data, bytes);
  const auto use = [](uint64_t, std::string_view, bool) { return absl::OkStatus(); };
  EXPECT_TRUE((*reader)->ReadRegion(0, use).ok());
  const absl::Status status = (*reader)->ReadRegion(3, use);
  EXPECT_TRUE(absl::IsDataLoss(status)) << status;
  EXPECT_THAT(Message(status), HasSubstr("data-00000"));
}

TEST(Image, AnyTruncationIsFound) {
  TestFolder folder;
  ASSERT_TRUE(WriteSample(folder / "image", /*small=*/true).ok());
  for (const std::string& file : FilesOf(folder / "image")) {
    SCOPED_TRACE(file);
    const std::string good = ReadFile(file);
    for (size_t size = 0; size < good.size(); size += std::max<size_t>(1, good.size() / 50)) {
      WriteFile(file, good.substr(0, size));
      const absl::Status status = ReadAll(folder / "image");
      ASSERT_TRUE(absl::IsDataLoss(status)) << status;
      ASSERT_THAT(Message(status), HasSubstr(file));
    }
    WriteFile(file, good + "x");
    ASSERT_TRUE(absl::IsDataLoss(ReadAll(folder / "image")));
    WriteFile(file, good);
  }
  ASSERT_TRUE(ReadAll(folder / "image").ok());
}

TEST(Image, MissingFiles) {
  TestFolder folder;
  ASSERT_TRUE(WriteSample(folder / "image", /*small=*/true).ok());
  for (const std::string& file : FilesOf(folder / "image")) {
    const std::string good = ReadFile(file);
    std::filesystem::remove(file);
    const absl::Status status = ImageReader::Open(folder / "image").status();
    ASSERT_FALSE(status.ok()) << file;
    EXPECT_THAT(Message(status), HasSubstr(std::filesystem::path(file).filename().string()));
    // A link to the same bytes is not the file either: an image is not to lead anywhere else.
    WriteFile(folder / "elsewhere", good);
    std::filesystem::create_symlink(folder / "elsewhere", file);
    EXPECT_FALSE(ReadAll(folder / "image").ok()) << file;
    std::filesystem::remove(file);
    std::filesystem::create_directory(file);
    EXPECT_FALSE(ReadAll(folder / "image").ok()) << file;
    std::filesystem::remove(file);
    WriteFile(file, good);
  }
  EXPECT_TRUE(absl::IsNotFound(ImageReader::Open(folder / "nothing").status()));
  EXPECT_TRUE(absl::IsNotFound(ImageReader::Open(folder.path()).status()));
}

TEST(Image, OtherVersionsAreRefusedByNumber) {
  TestFolder folder;
  ASSERT_TRUE(WriteSample(folder / "image", /*small=*/true).ok());
  const std::string path = folder / "image/manifest.pb", written = ReadFile(path);
  ASSERT_EQ(written.substr(5, 2), "\x10\x03");
  for (const int version : {1, 2, 9}) {
    // As a program of that version would write it: field 2 is the version, and the checksum covers it.
    std::string bytes = written;
    bytes[6] = char(version);
    ImageInfo info;
    std::vector<FileRecord> files;
    EXPECT_TRUE(absl::IsDataLoss(DecodeManifest(bytes, "m", &info, &files))) << "only the version was changed";
    size_t start = bytes.find('\x1a') + 1;
    while (bytes[start++] & 0x80) {
    }
    const std::string manifest = bytes.substr(start, bytes.size() - start - 18);
    std::string covered("CRFM\0\0\0\0", 8);
    covered[4] = char(version);
    bytes.replace(bytes.size() - 16, 16, ToBytes(HashOf(covered + manifest)));
    WriteFile(path, bytes);
    const absl::Status status = ImageReader::Open(folder / "image").status();
    EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
    EXPECT_THAT(Message(status), HasSubstr("the image has format version " + std::to_string(version) + ","));
    EXPECT_THAT(Message(status),
                HasSubstr(version > int(kFormatVersion) ? "or a newer one" : "before cuda-remote 0.9.0"));
  }
}

TEST(Image, SeveralProcesses) {
  TestFolder folder;
  auto writer = ImageWriter::Create(folder / "image", OneWriter());
  ASSERT_TRUE(writer.ok());
  ImageInfo info = SampleInfo();
  info.processes.assign(3, info.processes[0]);
  for (uint32_t i = 0; i < 3; ++i) {
    info.processes[i].pid = 10 + i;
    Region region;
    region.process = i;
    region.bytes = 3;
    ASSERT_TRUE((*writer)->BeginRegion(region).ok());
    ASSERT_TRUE((*writer)->AddData(std::string(3, char('a' + i))).ok());
    ASSERT_TRUE((*writer)->EndRegion().ok());
    ASSERT_TRUE((*writer)->WriteLog("log " + std::to_string(i)).ok());
  }
  ASSERT_TRUE((*writer)->Commit(info).ok());
  auto reader = ImageReader::Open(folder / "image");
  ASSERT_TRUE(reader.ok()) << reader.status();
  ASSERT_TRUE((*reader)->Verify().ok());
  ASSERT_EQ((*reader)->info().processes.size(), 3u);
  for (uint32_t i = 0; i < 3; ++i) {
    EXPECT_EQ((*reader)->info().processes[i].pid, 10 + i);
    EXPECT_EQ((*reader)->regions()[i].process, i);
    EXPECT_EQ(*(*reader)->ReadLog(i), "log " + std::to_string(i));
  }
  EXPECT_EQ((*reader)->sizes().log_bytes, 15u);
}

// Ranks of a job often hold the same parameters.
TEST(Image, EqualChunksOfSeveralProcessesAreStoredOnce) {
  TestFolder folder;
  auto writer = ImageWriter::Create(folder / "image", OneWriter());
  ASSERT_TRUE(writer.ok());
  ImageInfo info = SampleInfo();
  info.processes.assign(2, info.processes[0]);
  const std::string zeros(kChunkBytes, '\0'), same = Noise(kChunkBytes, 11);
  for (uint32_t i = 0; i < 2; ++i) {
    info.processes[i].pid = 10 + i;
    // Elsewhere, and behind something of its own.
    const std::string memory = Noise(kChunkBytes, 20 + i) + (i == 0 ? same + zeros : zeros + same);
    Region region;
    region.process = i;
    region.address = uint64_t{0x10000000} << i;
    region.bytes = memory.size();
    ASSERT_TRUE((*writer)->BeginRegion(region).ok());
    ASSERT_TRUE((*writer)->AddData(memory).ok());
    ASSERT_TRUE((*writer)->EndRegion().ok());
    ASSERT_TRUE((*writer)->WriteLog("log").ok());
  }
  ASSERT_TRUE((*writer)->Commit(info).ok());
  auto reader = ImageReader::Open(folder / "image");
  ASSERT_TRUE(reader.ok()) << reader.status();
  ASSERT_TRUE((*reader)->Verify().ok());
  const ImageSizes& sizes = (*reader)->sizes();
  EXPECT_EQ(sizes.region_bytes, 6 * kChunkBytes);
  EXPECT_EQ(sizes.zero_bytes, 2 * kChunkBytes);
  EXPECT_EQ(sizes.shared_bytes, kChunkBytes);
  EXPECT_EQ(sizes.stored_bytes, 3 * kChunkBytes);
  std::string chunk(kChunkBytes, '?');
  for (size_t i = 0; i < 2; ++i) {
    bool zero = true;
    ASSERT_TRUE((*reader)->ReadChunk(i, i == 0 ? 1 : 2, &chunk[0], &zero).ok());
    EXPECT_TRUE(!zero && chunk == same);
  }
}

TEST(Image, ProcessesAndLogsGoTogether) {
  TestFolder folder;
  auto writer = ImageWriter::Create(folder / "none", OneWriter());
  ASSERT_TRUE(writer.ok());
  ImageInfo info = SampleInfo();
  info.processes.clear();
  ASSERT_TRUE((*writer)->Commit(info).ok()) << "a job without CUDA";
  EXPECT_TRUE((*ImageReader::Open(folder / "none"))->info().processes.empty());

  writer = ImageWriter::Create(folder / "one", OneWriter());
  ASSERT_TRUE((*writer)->WriteLog("log").ok());
  info.processes.resize(2);
  EXPECT_FALSE((*writer)->Commit(info).ok());
  writer->reset();

  writer = ImageWriter::Create(folder / "stray", OneWriter());
  ASSERT_TRUE((*writer)->WriteLog("log").ok());
  Region region;
  region.process = 1;
  ASSERT_TRUE((*writer)->BeginRegion(region).ok());
  ASSERT_TRUE((*writer)->EndRegion().ok());
  info.processes.resize(1);
  ASSERT_TRUE((*writer)->Commit(info).ok());
  EXPECT_TRUE(absl::IsDataLoss(ImageReader::Open(folder / "stray").status()));
}

TEST(Image, NamesNeedNotBeUtf8) {
  TestFolder folder;
  const std::string latin = "\xe9t\xe9";
  ImageInfo info = SampleInfo();
  info.host = info.job = info.program = info.job_folder = latin;
  info.client_info["criu"] = latin;
  info.processes[0].program = info.processes[0].server = info.processes[0].driver_settings = latin;
  info.needs.files[0].path = "/data/" + latin;
  Region region;
  region.bytes = 1;
  region.symbol = latin;
  auto writer = ImageWriter::Create(folder / latin, OneWriter());
  ASSERT_TRUE(writer.ok()) << writer.status();
  ASSERT_TRUE((*writer)->BeginRegion(region).ok());
  ASSERT_TRUE((*writer)->AddData("x").ok());
  ASSERT_TRUE((*writer)->EndRegion().ok());
  ASSERT_TRUE((*writer)->WriteLog(kSampleLog).ok());
  WriteFile((*writer)->client_dir() + "/" + latin, "text");
  ASSERT_TRUE((*writer)->Commit(info).ok());

  const absl::Status status = ReadAll(folder / latin);
  ASSERT_TRUE(status.ok()) << status;
  auto reader = ImageReader::Open(folder / latin);
  const ImageInfo& found = (*reader)->info();
  EXPECT_EQ(found.host, latin);
  EXPECT_EQ(found.job, latin);
  EXPECT_EQ(found.program, latin);
  EXPECT_EQ(found.job_folder, latin);
  EXPECT_EQ(found.client_info, info.client_info);
  EXPECT_EQ(found.processes[0].program, latin);
  EXPECT_EQ(found.needs.files[0].path, "/data/" + latin);
  EXPECT_EQ((*reader)->regions()[0].symbol, latin);
  EXPECT_EQ((*reader)->files()[0].path, "client/" + latin);
}

TEST(Image, HostilePathsInTheManifest) {
  for (const char* path :
       {"/etc/passwd", "client/../../x", "client//x", "other", "client/./x", "", "manifest.pb", "memory", "client/"}) {
    FileRecord file;
    file.path = path;
    const std::string bytes = EncodeManifest(SampleInfo(), {file});
    ImageInfo info;
    std::vector<FileRecord> files;
    EXPECT_TRUE(absl::IsDataLoss(DecodeManifest(bytes, "m", &info, &files))) << path;
  }
}

TEST(Writer, MisuseIsAnErrorAndLeavesNothing) {
  TestFolder folder;
  const std::string dir = folder / "image";
  const auto begun = [&] {
    auto writer = ImageWriter::Create(dir);
    EXPECT_TRUE(writer.ok()) << writer.status();
    return *std::move(writer);
  };
  Region region;
  region.bytes = 10;
  {
    auto writer = begun();
    EXPECT_FALSE(writer->AddData("x").ok());
    EXPECT_FALSE(writer->WriteLog("log").ok()) << "after an error there is no going on";
  }
  {
    auto writer = begun();
    EXPECT_TRUE(writer->BeginRegion(region).ok());
    EXPECT_TRUE(writer->AddData("12345").ok());
    EXPECT_FALSE(writer->EndRegion().ok());
    EXPECT_FALSE(writer->Commit(SampleInfo()).ok());
  }
  {
    auto writer = begun();
    EXPECT_TRUE(writer->BeginRegion(region).ok());
    EXPECT_FALSE(writer->AddData("12345678901").ok());
  }
  {
    auto writer = begun();
    EXPECT_FALSE(writer->Commit(SampleInfo()).ok()) << "no log";
  }
  {
    auto writer = begun();
    EXPECT_TRUE(writer->WriteLog("log").ok());
    EXPECT_EQ(symlink("/etc/passwd", (writer->client_dir() + "/link").c_str()), 0);
    const absl::Status status = writer->Commit(SampleInfo());
    EXPECT_THAT(Message(status), HasSubstr("client/link"));
  }
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

}  // namespace
}  // namespace cuda_remote::ckptfmt
