// SPDX-License-Identifier: Apache-2.0
// The search for a module's code addresses, with a driver that places code as code_pads.h says.
#include "server/worker/modules/code_pads.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <string>
#include <vector>

namespace cuda_remote::server {
namespace {

constexpr uint64_t kBlock = 2 << 20;

// Pieces in blocks: the shortest hole that is long enough, of several the one that came to be first.
class Space {
 public:
  uint64_t Take(uint64_t text) {
    const uint64_t bytes = (text + 0x880 + 0xff) / 0x100 * 0x100;
    auto best = Best(bytes);
    if (best == holes_.end()) {
      // Each further block lies below the last one, with something else in between; where one was, one comes again.
      uint64_t at = kFirst;
      while (blocks_.count(at) != 0) at -= 6 * kBlock;
      blocks_[at] = (bytes + kBlock - 1) / kBlock * kBlock;
      holes_.push_back({at, blocks_[at]});
      best = Best(bytes);
    }
    const uint64_t at = best->first;
    best->first += bytes;
    best->second -= bytes;
    if (best->second == 0) holes_.erase(best);
    pieces_[at] = bytes;
    return at;
  }
  void Give(uint64_t at) {
    std::pair<uint64_t, uint64_t> freed{at, pieces_.at(at)};
    pieces_.erase(at);
    for (auto hole = holes_.begin(); hole != holes_.end();) {
      const bool joins = hole->first + hole->second == freed.first || freed.first + freed.second == hole->first;
      if (joins && hole->first / kBlock == freed.first / kBlock) {
        freed = {std::min(freed.first, hole->first), freed.second + hole->second};
        hole = holes_.erase(hole);
      } else {
        ++hole;
      }
    }
    const auto block = blocks_.find(freed.first);
    if (block != blocks_.end() && block->second == freed.second) {
      blocks_.erase(block);
    } else {
      holes_.push_back(freed);
    }
  }

 private:
  std::vector<std::pair<uint64_t, uint64_t>>::iterator Best(uint64_t bytes) {
    auto best = holes_.end();
    for (auto hole = holes_.begin(); hole != holes_.end(); ++hole) {
      if (hole->second >= bytes && (best == holes_.end() || hole->second < best->second)) best = hole;
    }
    return best;
  }
  std::vector<std::pair<uint64_t, uint64_t>> holes_;
  std::map<uint64_t, uint64_t> pieces_;
  static constexpr uint64_t kFirst = 0x7ffddf600000;
  std::map<uint64_t, uint64_t> blocks_;  // their lengths
};

Space* g_space = nullptr;
std::map<CUmodule, uint64_t> g_pads;  // instructions; then where their kernels lie
std::map<CUmodule, uint64_t> g_placed;
uintptr_t g_next = 1;

CUresult CUDAAPI LoadData(CUmodule* module, const void* image) {
  const std::string text(static_cast<const char*>(image));
  *module = reinterpret_cast<CUmodule>(g_next++);
  g_pads[*module] = uint64_t(std::count(text.begin(), text.end(), ';'));
  return CUDA_SUCCESS;
}
CUresult CUDAAPI GetFunction(CUfunction* function, CUmodule module, const char*) {
  *function = reinterpret_cast<CUfunction>(module);
  if (g_placed.count(module) == 0) g_placed[module] = g_space->Take((g_pads.at(module) * 16 + 0x7f) / 0x80 * 0x80);
  return CUDA_SUCCESS;
}
CUresult CUDAAPI Unload(CUmodule module) {
  if (g_placed.count(module) != 0) g_space->Give(g_placed[module]);
  g_placed.erase(module);
  g_pads.erase(module);
  return CUDA_SUCCESS;
}

class CodePadsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    driver_.cuModuleLoadData = LoadData;
    driver_.cuModuleGetFunction = GetFunction;
    driver_.cuModuleUnload = Unload;
    g_space = &replay_;
    g_pads.clear();
    g_placed.clear();
  }
  CodeWords Load(Space* space, const std::vector<uint64_t>& functions) {
    CodeWords words;
    for (const uint64_t text : functions) words.push_back(space->Take(text));
    return words;
  }
  // Loads a module in the replay and has it moved.
  CodeWords Replay(const std::vector<uint64_t>& functions, const CodeWords& wanted) {
    CodeWords now = Load(&replay_, functions);
    const auto reload = [&](const std::function<void()>& between) {
      for (const uint64_t at : now) replay_.Give(at);
      between();
      return now = Load(&replay_, functions);
    };
    const size_t before = g_pads.size();
    std::vector<CUmodule> pads;
    if (now != wanted) now = MoveCodeTo(driver_, now, wanted, reload, &pads);
    EXPECT_EQ(pads.size(), g_pads.size() - before);  // no other one is left
    return now;
  }
  DriverTable driver_ = {};
  Space first_, replay_;
};

const std::vector<uint64_t> kModule = {0x400, 0x100, 0x2080, 0x100, 0xbc80};

TEST_F(CodePadsTest, StaysWhereItIsRight) {
  const CodeWords wanted = Load(&first_, kModule);
  EXPECT_EQ(Replay(kModule, wanted), wanted);
  EXPECT_TRUE(g_pads.empty());
}

TEST_F(CodePadsTest, KernelsThatWereUsedBefore) {
  for (const uint64_t text : {0x680u, 0x1000u, 0x280u, 0x780u, 0x3b080u}) {
    Space first;
    replay_ = Space();
    g_pads.clear();
    g_placed.clear();
    first.Take(0x280);
    first.Take(text);
    const CodeWords wanted = Load(&first, kModule);
    EXPECT_EQ(Replay(kModule, wanted), wanted) << std::hex << text;
  }
}

TEST_F(CodePadsTest, OneModuleAfterTheOther) {
  std::vector<CodeWords> wanted;
  for (int i = 0; i < 6; ++i) {
    for (int k = 0; k <= i % 3; ++k) first_.Take(uint64_t(0x100 + 0x380 * k + 0x80 * i));
    wanted.push_back(Load(&first_, kModule));
  }
  for (const CodeWords& one : wanted) EXPECT_EQ(Replay(kModule, one), one);
}

// Its functions do not fit into the block any more, other ones than without what came before.
TEST_F(CodePadsTest, OverTheEndOfABlock) {
  std::vector<uint64_t> large;
  for (int i = 0; i < 150; ++i) large.push_back(i % 7 == 3 ? 0x100 : 0x8000 + uint64_t(i) * 0x180);
  first_.Take(0x80000);
  first_.Take(0x680);
  const CodeWords wanted = Load(&first_, large);
  replay_.Take(0x80000);
  EXPECT_EQ(Replay(large, wanted), wanted);
}

// Blocks that were full before.
TEST_F(CodePadsTest, BlocksFurtherOn) {
  for (int i = 0; i < 90; ++i) first_.Take(0x10000);
  const CodeWords wanted = Load(&first_, kModule);
  EXPECT_EQ(Replay(kModule, wanted), wanted);
}

// A place in front of which there is no room for a pad: found out, and no pad is left.
TEST_F(CodePadsTest, GivesUp) {
  CodeWords wanted = Load(&first_, kModule);
  for (uint64_t& address : wanted) address -= 0x100;
  EXPECT_NE(Replay(kModule, wanted), wanted);
  EXPECT_TRUE(g_pads.empty());
  wanted[0] += 0x40000000;
  EXPECT_NE(Replay(kModule, wanted), wanted);
}

TEST(DescribeDistances, MostFrequentFirst) {
  EXPECT_EQ(DescribeDistances({0x1000, 0x2000, 0x3000, 0x4000, 0x5000}, {0x1000, 0x2200, 0x2f00, 0x3f00, 0x4f00}),
            "4 of 5 by 0x100 (3), -0x200 (1)");
  EXPECT_EQ(DescribeDistances({0x1000}, {0x1000, 0x2000}), "1 instead of 2");
}

}  // namespace
}  // namespace cuda_remote::server
