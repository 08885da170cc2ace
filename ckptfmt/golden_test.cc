// Reads an image of every format version that was ever released, as it was written then.
#include <gtest/gtest.h>

#include "ckptfmt/testing.h"

namespace cuda_remote::ckptfmt {
namespace {

TEST(Golden, Version1) {
  // A copy: the reader refuses links, and the build's folder is made of them.
  TestFolder folder;
  const std::string dir = folder / "image";
  std::filesystem::create_directories(dir);
  for (const auto& entry : std::filesystem::recursive_directory_iterator("ckptfmt/golden/v1")) {
    if (entry.is_directory()) continue;
    const std::filesystem::path to = dir / entry.path().lexically_relative("ckptfmt/golden/v1");
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
  EXPECT_EQ((*reader)->info().created_unix_ms, 1700000000123);
  EXPECT_EQ((*reader)->info().client_info, SampleInfo().client_info);
  EXPECT_EQ(ReadFile((*reader)->client_dir() + "/sub/core.img"), "core");
}

}  // namespace
}  // namespace cuda_remote::ckptfmt
