// SPDX-License-Identifier: Apache-2.0
// Reads an image of every format version that was ever released, as it was written then.
#include <gtest/gtest.h>

#include "ckptfmt/testing.h"

namespace cuda_remote::ckptfmt {
namespace {

class Golden : public testing::TestWithParam<uint32_t> {};

TEST_P(Golden, IsReadAsItWasWritten) {
  const std::string golden = "ckptfmt/golden/v" + std::to_string(GetParam());
  // A copy: the reader refuses links, and the build's folder is made of them.
  TestFolder folder;
  const std::string dir = folder / "image";
  std::filesystem::create_directories(dir);
  for (const auto& entry : std::filesystem::recursive_directory_iterator(golden)) {
    if (entry.is_directory()) continue;
    const std::filesystem::path to = dir / entry.path().lexically_relative(golden);
    std::filesystem::create_directories(to.parent_path());
    WriteFile(to.string(), ReadFile(entry.path().string()));
  }
  std::vector<std::string> regions;
  const absl::Status status = ReadAll(dir, &regions);
  ASSERT_TRUE(status.ok()) << status;
  const auto samples = SampleRegions(/*small=*/true);
  ASSERT_EQ(regions.size(), samples.size());
  auto reader = ImageReader::Open(dir);
  for (size_t i = 0; i < samples.size(); ++i) {
    EXPECT_EQ(regions[i], samples[i].bytes);
    EXPECT_EQ((*reader)->regions()[i].symbol, samples[i].region.symbol);
    EXPECT_EQ((*reader)->regions()[i].address, samples[i].region.address);
  }
  EXPECT_EQ(*(*reader)->ReadLog(), kSampleLog);
  EXPECT_EQ((*reader)->sizes().log_bytes, strlen(kSampleLog));
  const ImageInfo& info = (*reader)->info();
  EXPECT_EQ(info.format_version, GetParam());
  EXPECT_EQ(info.created_unix_ms, 1700000000123);
  ASSERT_EQ(info.processes.size(), 1u);
  const ProcessInfo &process = info.processes[0], wanted = SampleInfo().processes[0];
  EXPECT_EQ(process.pid, wanted.pid);
  EXPECT_EQ(process.server, wanted.server);
  EXPECT_EQ(process.driver_version, wanted.driver_version);
  EXPECT_EQ(process.next_sequence, wanted.next_sequence);
  EXPECT_EQ(process.session, wanted.session);
  EXPECT_EQ(process.driver_settings, wanted.driver_settings);
  EXPECT_EQ(process.log_records, wanted.log_records);
  ASSERT_EQ(process.devices.size(), 1u);
  EXPECT_EQ(process.devices[0].uuid, wanted.devices[0].uuid);
  EXPECT_EQ((*reader)->info().client_info, SampleInfo().client_info);
  EXPECT_EQ(ReadFile((*reader)->client_dir() + "/sub/core.img"), "core");
}

INSTANTIATE_TEST_SUITE_P(Versions, Golden, testing::Range(kFirstFormatVersion, kFormatVersion + 1));

}  // namespace
}  // namespace cuda_remote::ckptfmt
