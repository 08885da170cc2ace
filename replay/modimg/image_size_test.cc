// SPDX-License-Identifier: Apache-2.0
// Tests of LocateImage, with images made by hand; image_test.cc has the compiler's.
#include "replay/modimg/image_size.h"

#include <gtest/gtest.h>

#include <cstring>

#include "replay/modimg/format.h"

namespace cuda_remote::replay {
namespace {

size_t SizeOf(const void* image) {
  const StatusOr<std::string_view> found = LocateImage(image);
  return found.ok() ? found->size() : 0;
}

std::string ErrorOf(const void* image) {
  const StatusOr<std::string_view> found = LocateImage(image);
  EXPECT_FALSE(found.ok());
  return found.status().message();
}

TEST(LocateImage, Ptx) {
  EXPECT_EQ(SizeOf(".version 8.0\n"), 14u);
  EXPECT_EQ(SizeOf("\n\n // a comment\n/* and **/ .version 8.0"), 40u);
  EXPECT_EQ(SizeOf(""), 0u);
  EXPECT_EQ(SizeOf("/"), 0u);
  EXPECT_EQ(SizeOf("/*"), 0u);
  EXPECT_EQ(SizeOf("//"), 0u);
  EXPECT_EQ(SizeOf("hello world"), 0u);
  EXPECT_NE(ErrorOf("BC\xc0\xde bitcode").find("42 43 c0 de"), std::string::npos);
  EXPECT_EQ(SizeOf(nullptr), 0u);
}

TEST(LocateImage, FatbinAndWrapper) {
  std::string bytes(16, '\0');
  format::FatbinHeader header{format::kFatbinMagic, 1, 16, 1000};
  memcpy(&bytes[0], &header, sizeof(header));
  EXPECT_EQ(SizeOf(bytes.data()), 1016u);
  format::FatbinWrapper wrapper{format::kWrapperMagic, 1, bytes.data(), nullptr};
  for (uint32_t version : {1u, 2u}) {
    wrapper.version = version;
    const StatusOr<std::string_view> found = LocateImage(&wrapper);
    ASSERT_TRUE(found.ok()) << found.status().message();
    EXPECT_EQ(found->data(), bytes.data());
    EXPECT_EQ(found->size(), 1016u);
  }
  wrapper.version = 3;
  EXPECT_NE(ErrorOf(&wrapper).find("version 3"), std::string::npos);
  wrapper = {format::kWrapperMagic, 1, nullptr, nullptr};
  EXPECT_EQ(SizeOf(&wrapper), 0u);
  wrapper.data = ".version";
  EXPECT_EQ(SizeOf(&wrapper), 0u);
  header.body_bytes = UINT64_MAX;
  memcpy(&bytes[0], &header, sizeof(header));
  EXPECT_EQ(SizeOf(bytes.data()), 0u);
}

TEST(LocateImage, ElfEndsWhereItsPartsEnd) {
  format::ElfHeader header{};
  memcpy(header.ident, format::kElfMagic, 4);
  header.ident[4] = 2;
  header.ident[5] = 1;
  header.machine = format::kElfMachineCuda;
  header.section_offset = 64;
  header.section_entry_bytes = sizeof(format::ElfSection);
  header.section_count = 3;
  format::ElfSection sections[3]{};
  sections[0].offset = sections[0].bytes = 1 << 20;
  sections[1].type = 1;
  sections[1].offset = 300;
  sections[1].bytes = 77;
  sections[2].type = format::kSectionNoBits;
  sections[2].offset = 300;
  sections[2].bytes = 1 << 20;
  std::string bytes(1000, '\0');
  const auto write = [&] {
    memcpy(&bytes[0], &header, sizeof(header));
    memcpy(&bytes[64], sections, sizeof(sections));
  };
  write();
  EXPECT_EQ(SizeOf(bytes.data()), 377u);
  // Segments behind the sections.
  header.program_offset = 400;
  header.program_count = 1;
  header.program_entry_bytes = sizeof(format::ElfSegment);
  write();
  EXPECT_EQ(SizeOf(bytes.data()), 456u);
  sections[1].bytes = UINT64_MAX - 100;
  write();
  EXPECT_EQ(SizeOf(bytes.data()), 0u);
  sections[1].bytes = 77;
  header.machine = 62;
  write();
  EXPECT_NE(ErrorOf(bytes.data()).find("machine 62"), std::string::npos);
}

}  // namespace
}  // namespace cuda_remote::replay
