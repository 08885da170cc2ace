// SPDX-License-Identifier: Apache-2.0
#include "server/worker/variable_pads.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "replay/modimg/modimg.h"

namespace cuda_remote::server {
namespace {

std::string g_cubin;

// kDriver is what 580 does on an H200 (variable_pads.h).
enum class Policy { kFirstFit, kBestFit, kLastFit, kDriver };

// A driver's way to place variables: in blocks, by a policy; large ones have blocks of their own.
struct Space {
  static constexpr uint64_t kBase = 0x7ffd00000000, kBlock = 2 << 20;
  struct Hole {
    uint64_t at, bytes;
  };
  Policy policy = Policy::kFirstFit;
  std::map<uint64_t, uint64_t> taken;   // address -> bytes
  std::map<uint64_t, uint64_t> blocks;  // address -> bytes
  std::vector<Hole> holes;              // oldest first

  static uint64_t RoundUp(uint64_t bytes) { return (bytes + 255) / 256 * 256; }
  uint64_t NewBlock(uint64_t bytes) {
    uint64_t at = kBase;
    for (const auto& [address, size] : blocks) {
      if (address - at >= bytes) break;
      at = address + size;
    }
    blocks[at] = bytes;
    return at;
  }
  bool Better(const Hole& a, const Hole& b) const {
    if (policy == Policy::kFirstFit) return a.at < b.at;
    if (policy == Policy::kLastFit) return a.at > b.at;
    if (a.bytes != b.bytes) return a.bytes < b.bytes;
    return policy == Policy::kBestFit && a.at < b.at;
  }
  uint64_t Take(uint64_t bytes) {
    bytes = RoundUp(bytes);
    if (bytes > kBlock) {
      const uint64_t at = NewBlock((bytes + kBlock - 1) / kBlock * kBlock);
      taken[at] = bytes;
      return at;
    }
    const auto choose = [&] {
      size_t chosen = holes.size();
      for (size_t i = 0; i < holes.size(); ++i) {
        if (holes[i].bytes >= bytes && (chosen == holes.size() || Better(holes[i], holes[chosen]))) chosen = i;
      }
      return chosen;
    };
    size_t chosen = choose();
    if (chosen == holes.size()) holes.push_back({NewBlock(kBlock), kBlock});
    const Hole hole = holes[chosen];
    holes.erase(holes.begin() + long(chosen));
    if (hole.bytes > bytes) holes.push_back({hole.at + bytes, hole.bytes - bytes});
    taken[hole.at] = bytes;
    return hole.at;
  }
  void Give(uint64_t at) {
    Hole hole{at, taken[at]};
    taken.erase(at);
    if (hole.bytes > kBlock) {
      blocks.erase(at);
      return;
    }
    const uint64_t block = std::prev(blocks.upper_bound(at))->first;
    for (auto it = holes.begin(); it != holes.end();) {
      const bool same_block = it->at >= block && it->at < block + kBlock;
      if (same_block && it->at + it->bytes == hole.at) {
        hole = {it->at, it->bytes + hole.bytes};
      } else if (same_block && hole.at + hole.bytes == it->at) {
        hole.bytes += it->bytes;
      } else {
        ++it;
        continue;
      }
      holes.erase(it);
      it = holes.begin();
    }
    if (hole.bytes == kBlock) {
      blocks.erase(block);
    } else {
      holes.push_back(hole);
    }
  }
};
Space g_space;
int g_loads = 0;

DriverTable Table() {
  DriverTable table = {};
  table.cuModuleLoadData = [](CUmodule* module, const void* image) {
    ++g_loads;
    const std::string_view cubin(static_cast<const char*>(image), g_cubin.size());
    std::vector<replay::DataSymbol> symbols;
    if (!replay::CubinSymbols(cubin, &symbols).ok() || symbols.size() != 1) return CUDA_ERROR_INVALID_IMAGE;
    *module = reinterpret_cast<CUmodule>(g_space.Take(symbols[0].size));
    return CUDA_SUCCESS;
  };
  // The driver's linker makes the cubin that pads are made from.
  table.cuLinkCreate_v2 = [](unsigned, CUjit_option*, void**, CUlinkState*) { return CUDA_SUCCESS; };
  table.cuLinkAddData_v2 = [](CUlinkState, CUjitInputType, void*, size_t, const char*, unsigned, CUjit_option*,
                              void**) { return CUDA_SUCCESS; };
  table.cuLinkComplete = [](CUlinkState, void** image, size_t* bytes) {
    *image = &g_cubin[0];
    *bytes = g_cubin.size();
    return CUDA_SUCCESS;
  };
  table.cuLinkDestroy = [](CUlinkState) { return CUDA_SUCCESS; };
  table.cuModuleUnload = [](CUmodule module) {
    g_space.Give(reinterpret_cast<uint64_t>(module));
    return CUDA_SUCCESS;
  };
  table.cuModuleGetGlobal_v2 = [](CUdeviceptr* address, size_t* bytes, CUmodule module, const char*) {
    *address = reinterpret_cast<uint64_t>(module);
    *bytes = g_space.taken[*address];
    return CUDA_SUCCESS;
  };
  table.cuCtxGetDevice = [](CUdevice* device) {
    *device = 0;
    return CUDA_SUCCESS;
  };
  return table;
}

class VariablePadsTest : public testing::TestWithParam<Policy> {
 protected:
  void SetUp() override { Clear(); }
  void Clear() {
    g_space = Space();
    g_space.policy = GetParam();
    g_loads = 0;
  }
  // Of a module's parts, constants first: how long they are, and where. 0: there is none.
  using Parts = std::vector<uint64_t>;
  static Parts Take(const Parts& bytes) {
    Parts at;
    for (const uint64_t part : bytes) at.push_back(part != 0 ? g_space.Take(part) : 0);
    return at;
  }
  static void Give(const Parts& at) {
    for (const uint64_t part : at) {
      if (part != 0) g_space.Give(part);
    }
  }
  // Loads a module in a replay that must end up at `wanted`. Where it does.
  Parts Replay(const Parts& bytes, const Parts& wanted) {
    Parts at = Take(bytes);
    const auto place = [&] {
      VariablePlace now{true, {}};
      for (size_t i = 0; i < at.size(); ++i) now.parts.push_back({at[i], bytes[i]});
      return now;
    };
    VariablePlace goal;
    for (const uint64_t part : wanted) goal.parts.push_back({part, 0});
    MoveVariablesTo(
        table_, place(), goal, [&] { Give(at); },
        [&] {
          at = Take(bytes);
          return place();
        });
    return at;
  }
  // A random history, and the replay of what is alive at its end. How many modules could not be put back.
  int Missed(unsigned seed, bool with_constants, unsigned most_variables);
  const DriverTable table_ = Table();
};

TEST_P(VariablePadsTest, TakesThePlaceOfWhatIsGone) {
  g_space.Take(64);
  const uint64_t gone = g_space.Take(5000);
  const uint64_t after = g_space.Take(300);
  const uint64_t large = g_space.Take(3 << 20);
  const uint64_t larger = g_space.Take(5 << 20);
  g_space.Give(gone);
  g_space.Give(large);
  const uint64_t in_hole = g_space.Take(100);
  const std::vector<std::pair<uint64_t, uint64_t>> log = {
      {Space::kBase, 64}, {after, 300}, {larger, 5 << 20}, {in_hole, 100}};
  Clear();
  for (const auto& [wanted, bytes] : log) EXPECT_EQ(Replay({0, bytes}, {0, wanted}), Parts({0, wanted}));
  EXPECT_EQ(g_space.taken.size(), log.size());  // no pads are left
}

int VariablePadsTest::Missed(unsigned seed, bool with_constants, unsigned most_variables) {
  Clear();
  srand(seed);
  struct Module {
    Parts bytes, at;
  };
  std::vector<Module> alive;  // in the order of loading
  for (int i = 0; i < 60; ++i) {
    if (rand() % 3 == 0 && !alive.empty()) {
      const size_t which = size_t(rand()) % alive.size();
      Give(alive[which].at);
      alive.erase(alive.begin() + long(which));
    } else {
      Parts bytes = {with_constants && rand() % 3 == 0 ? 1 + uint64_t(rand()) % 3000 : 0};
      const bool alone = bytes[0] != 0 && rand() % 4 == 0;  // constants alone
      for (unsigned left = alone ? 0 : 1 + unsigned(rand()) % most_variables; left > 0; --left) {
        bytes.push_back(1 + uint64_t(rand()) % (rand() % 4 == 0 ? 200000 : 1000));
      }
      alive.push_back({bytes, Take(bytes)});
    }
  }
  Clear();
  size_t parts = 0;
  int missed = 0;
  for (const Module& module : alive) {
    parts += size_t(std::count_if(module.bytes.begin(), module.bytes.end(), [](uint64_t bytes) { return bytes != 0; }));
    if (Replay(module.bytes, module.at) != module.at) ++missed;
  }
  EXPECT_EQ(g_space.taken.size(), parts);  // no pads are left
  return missed;
}

TEST_P(VariablePadsTest, AnyHistory) {
  for (unsigned seed = 1; seed <= 100; ++seed) EXPECT_EQ(Missed(seed, false, 1), 0) << "seed " << seed;
}

// A module with several parts has as many places to come to at once.
TEST_P(VariablePadsTest, HistoriesWithConstants) {
  int whole = 0;
  for (unsigned seed = 1; seed <= 100; ++seed) whole += Missed(seed, true, 1) == 0;
  EXPECT_GE(whole, GetParam() == Policy::kDriver ? 99 : 90);
}

TEST_P(VariablePadsTest, HistoriesWithSeveralVariables) {
  int whole = 0;
  for (unsigned seed = 1; seed <= 100; ++seed) whole += Missed(seed, true, 4) == 0;
  EXPECT_GE(whole, GetParam() == Policy::kDriver ? 95 : 90);
}

// As XLA leaves it: a small variable fills a hole that is older than its module, and the others lie behind what was
// there.
TEST_P(VariablePadsTest, PartsFarFromEachOther) {
  if (GetParam() != Policy::kDriver) return;
  const uint64_t hole = g_space.Take(64);
  const uint64_t between = g_space.Take(32);
  g_space.Give(hole);
  const Parts bytes = {0, 0x88200, 640, 128};
  const Parts at = Take(bytes);
  ASSERT_EQ(at[3], hole);
  ASSERT_GT(at[1], between);
  Clear();
  EXPECT_EQ(Replay({32}, {between}), Parts({between}));
  EXPECT_EQ(Replay(bytes, at), at);
}

TEST_P(VariablePadsTest, GivesUpWhereItCannotBe) {
  g_space.Take(1000);
  EXPECT_NE(Replay({0, 100}, {0, Space::kBase - 4096})[1], 0u);
  EXPECT_EQ(g_space.taken.size(), 2u);
}

INSTANTIATE_TEST_SUITE_P(Policies, VariablePadsTest,
                         testing::Values(Policy::kFirstFit, Policy::kBestFit, Policy::kLastFit, Policy::kDriver));

TEST(SetPadSize, ChangesWhatSaysTheSize) {
  ASSERT_FALSE(g_cubin.empty());
  std::string pad = g_cubin;
  ASSERT_TRUE(SetPadSize(&pad, 70000));
  EXPECT_EQ(pad.size(), g_cubin.size());
  std::vector<replay::DataSymbol> symbols;
  ASSERT_EQ(replay::CubinSymbols(pad, &symbols).message(), "");
  ASSERT_EQ(symbols.size(), 1u);
  EXPECT_EQ(symbols[0].name, "cuda_remote_pad");
  EXPECT_EQ(symbols[0].size, 70000u);
  ASSERT_TRUE(SetPadSize(&pad, 256));
  EXPECT_EQ(pad, g_cubin);
}

TEST(SetPadSize, LeavesWhatItDoesNotKnow) {
  for (size_t length = 0; length < g_cubin.size(); length += 7) {
    std::string part = g_cubin.substr(0, length);
    if (SetPadSize(&part, 512)) continue;
    EXPECT_EQ(part, g_cubin.substr(0, length));
  }
  std::string text = ".version 6.3";
  EXPECT_FALSE(SetPadSize(&text, 512));
}

}  // namespace
}  // namespace cuda_remote::server

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  if (argc > 1) {
    std::ifstream file(argv[1], std::ios::binary);
    cuda_remote::server::g_cubin.assign(std::istreambuf_iterator<char>(file), {});
  }
  return RUN_ALL_TESTS();
}
