// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/gpu/moved_code.h"

#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

namespace cuda_remote::checkpoint {
namespace {

constexpr uint64_t kModule = 0x20, kContext = 0x10, kOtherContext = 0x11;
constexpr uint64_t kA = 0x7ffddf7ac200, kB = 0x7ffddf7aeb00, kC = 0x7ffddf7b0000, kD = 0x7ffddf7c0000;

ckptfmt::Region Variable(const std::string& name, uint64_t context = kContext) {
  ckptfmt::Region region;
  region.kind = ckptfmt::RegionKind::kModuleSymbol;
  region.object = kModule;
  region.context = context;
  region.symbol = name;
  return region;
}

std::string Bytes(const std::vector<uint64_t>& words) {
  return {reinterpret_cast<const char*>(words.data()), words.size() * sizeof(uint64_t)};
}

std::vector<uint64_t> Words(const std::string& bytes) {
  std::vector<uint64_t> words(bytes.size() / sizeof(uint64_t));
  std::memcpy(words.data(), bytes.data(), words.size() * sizeof(uint64_t));
  return words;
}

class MovedCodeTest : public testing::Test {
 protected:
  // What becomes of these words of a region; empty if they are refused.
  std::vector<uint64_t> After(const ckptfmt::Region& region, const std::vector<uint64_t>& words, uint64_t offset = 0) {
    std::string bytes = Bytes(words);
    const absl::Status status = moved_.Translate(region, offset, bytes.data(), bytes.size());
    error_ = std::string(status.message());
    return status.ok() ? Words(bytes) : std::vector<uint64_t>();
  }

  MovedCode moved_;
  std::string error_;
};

TEST_F(MovedCodeTest, NothingMoved) {
  moved_.Add(kModule, kContext, "table", {{0, kA, kA}, {8, kB, kB}});
  EXPECT_TRUE(moved_.empty());
  EXPECT_EQ(After(ckptfmt::Region(), {kA, kB}), (std::vector<uint64_t>{kA, kB}));
}

// Two functions that have changed places: a word is translated once.
TEST_F(MovedCodeTest, TablesAreTranslated) {
  moved_.Add(kModule, kContext, "table", {{0, kA, kB}, {8, kB, kA}, {24, kC, kC}});
  EXPECT_FALSE(moved_.empty());
  EXPECT_EQ(After(Variable("table"), {kA, kB, 7, kC}), (std::vector<uint64_t>{kB, kA, 7, kC}));
  // Entries that the program has exchanged, or taken out.
  EXPECT_EQ(After(Variable("table"), {kB, kB, 7, 0}), (std::vector<uint64_t>{kA, kA, 7, 0}));
  // A piece that does not begin where the variable does.
  EXPECT_EQ(After(Variable("table"), {kB, 7}, 8), (std::vector<uint64_t>{kA, 7}));
}

TEST_F(MovedCodeTest, OtherPlacesAreRefused) {
  moved_.Add(kModule, kContext, "table", {{0, kA, kD}, {8, kB, kB}});
  ckptfmt::Region memory;
  memory.address = 0x1000;
  EXPECT_EQ(After(memory, {1, 2, 3}), (std::vector<uint64_t>{1, 2, 3}));
  EXPECT_EQ(After(memory, {kB, kD}), (std::vector<uint64_t>{kB, kD})) << "nothing of these lies elsewhere";
  EXPECT_TRUE(After(memory, {1, kA}).empty());
  EXPECT_EQ(error_,
            "GPU memory at 0x1008 holds the address of a GPU function that lies elsewhere on this server than "
            "before (one of those in the variable table)");
  // Another variable, another word of the same one, and the same variable in another context.
  EXPECT_TRUE(After(Variable("other"), {kA}).empty());
  EXPECT_NE(error_.find("the variable other at its byte 0"), std::string::npos) << error_;
  EXPECT_TRUE(After(Variable("table"), {kA, kB, kA}).empty());
  EXPECT_NE(error_.find("the variable table at its byte 16"), std::string::npos) << error_;
  EXPECT_TRUE(After(Variable("table", kOtherContext), {kA}).empty());
  // Where it does not begin at a multiple of eight.
  std::string bytes = "abc" + Bytes({kA}) + "defgh";
  EXPECT_FALSE(moved_.Translate(memory, 0, bytes.data(), bytes.size()).ok());
}

// The same address is another function in another context.
TEST_F(MovedCodeTest, EachContextHasItsOwn) {
  moved_.Add(kModule, kContext, "table", {{0, kA, kC}});
  moved_.Add(kModule, kOtherContext, "table", {{0, kA, kD}});
  EXPECT_EQ(After(Variable("table"), {kA}), std::vector<uint64_t>{kC});
  EXPECT_EQ(After(Variable("table", kOtherContext), {kA}), std::vector<uint64_t>{kD});
}

}  // namespace
}  // namespace cuda_remote::checkpoint
