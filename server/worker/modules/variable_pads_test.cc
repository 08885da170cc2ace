// SPDX-License-Identifier: Apache-2.0
#include "server/worker/modules/variable_pads.h"

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

// Blocks of all contexts: address -> bytes.
std::map<uint64_t, uint64_t> g_blocks;

// A driver's way to place a context's variables: in blocks, by a policy; large ones have blocks of their own.
struct Space {
  static constexpr uint64_t kBase = 0x7ffd00000000, kBlock = 2 << 20;
  struct Hole {
    uint64_t at, bytes;
  };
  Policy policy = Policy::kFirstFit;
  std::map<uint64_t, uint64_t> taken;  // address -> bytes
  std::vector<Hole> holes;             // oldest first

  static uint64_t RoundUp(uint64_t bytes) { return (bytes + 255) / 256 * 256; }
  static uint64_t NewBlock(uint64_t bytes) {
    uint64_t at = kBase;
    for (const auto& [address, size] : g_blocks) {
      if (address - at >= bytes) break;
      at = address + size;
    }
    g_blocks[at] = bytes;
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
      g_blocks.erase(at);
      return;
    }
    const uint64_t block = std::prev(g_blocks.upper_bound(at))->first;
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
      g_blocks.erase(block);
    } else {
      holes.push_back(hole);
    }
  }
};
std::vector<Space> g_spaces(1);  // by context
uint64_t g_context = 0;          // the current one
Space& Current() { return g_spaces[g_context]; }

DriverTable Table() {
  DriverTable table = {};
  table.cuModuleLoadData = [](CUmodule* module, const void* image) {
    const std::string_view cubin(static_cast<const char*>(image), g_cubin.size());
    std::vector<replay::DataSymbol> symbols;
    if (!replay::CubinSymbols(cubin, &symbols).ok() || symbols.size() != 1) return CUDA_ERROR_INVALID_IMAGE;
    *module = reinterpret_cast<CUmodule>(Current().Take(symbols[0].size));
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
    EXPECT_EQ(Current().taken.count(reinterpret_cast<uint64_t>(module)), 1u) << "another context is current";
    Current().Give(reinterpret_cast<uint64_t>(module));
    return CUDA_SUCCESS;
  };
  table.cuModuleGetGlobal_v2 = [](CUdeviceptr* address, size_t* bytes, CUmodule module, const char*) {
    *address = reinterpret_cast<uint64_t>(module);
    *bytes = Current().taken[*address];
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
  static void Clear(size_t contexts = 1) {
    g_blocks.clear();
    g_spaces.assign(contexts, Space());
    for (Space& space : g_spaces) space.policy = GetParam();
    g_context = 0;
  }
  // Of a module's parts, constants first: how long they are, and where. 0: there is none.
  using Parts = std::vector<uint64_t>;
  static Parts Take(const Parts& bytes) {
    Parts at;
    for (const uint64_t part : bytes) at.push_back(part != 0 ? Current().Take(part) : 0);
    return at;
  }
  static void Give(const Parts& at) {
    for (const uint64_t part : at) {
      if (part != 0) Current().Give(part);
    }
  }
  // Loads a library in a replay that must end up at `wanted`, which is by context. Where it does.
  using Places = std::map<uint64_t, Parts>;
  static Places TakeIn(const Places& contexts, const Parts& bytes) {
    Places places;
    for (const auto& [context, parts] : contexts) {
      g_context = context;
      places[context] = Take(bytes);
    }
    return places;
  }
  static void Give(const Places& places) {
    for (const auto& [context, parts] : places) {
      g_context = context;
      Give(parts);
    }
  }
  Places Replay(const Parts& bytes, const Places& wanted) {
    Places at = TakeIn(wanted, bytes);
    const auto places = [&] {
      VariablePlaces now{true, {}};
      for (const auto& [context, parts] : at) {
        VariablePlace place{context, {}};
        for (size_t i = 0; i < parts.size(); ++i) place.parts.push_back({parts[i], bytes[i] - (i == 0 ? hidden_ : 0)});
        now.contexts.push_back(place);
      }
      return now;
    };
    std::vector<VariablePlace> goals;
    for (const auto& [context, parts] : wanted) {
      VariablePlace goal{context, {}};
      for (const uint64_t part : parts) goal.parts.push_back({part, 0});
      goals.push_back(goal);
    }
    MoveVariablesTo(
        table_, places(), goals, [](uint64_t context) { g_context = context; }, [&] { Give(at); },
        [&] {
          at = TakeIn(wanted, bytes);
          return places();
        });
    return at;
  }
  // The same in one context.
  Parts Replay(const Parts& bytes, const Parts& wanted) { return Replay(bytes, Places{{0, wanted}}).at(0); }
  // A random history, and the replay of what is alive at its end. How many modules could not be put back.
  int Missed(unsigned seed, bool with_constants, unsigned most_variables);
  // The same in several contexts: libraries, modules, and blocks of the driver's own.
  int MissedIn(size_t contexts, unsigned seed);
  uint64_t hidden_ = 0;  // bytes of each module's constants that have no names
  const DriverTable table_ = Table();
};

TEST_P(VariablePadsTest, TakesThePlaceOfWhatIsGone) {
  Current().Take(64);
  const uint64_t gone = Current().Take(5000);
  const uint64_t after = Current().Take(300);
  const uint64_t large = Current().Take(3 << 20);
  const uint64_t larger = Current().Take(5 << 20);
  Current().Give(gone);
  Current().Give(large);
  const uint64_t in_hole = Current().Take(100);
  const std::vector<std::pair<uint64_t, uint64_t>> log = {
      {Space::kBase, 64}, {after, 300}, {larger, 5 << 20}, {in_hole, 100}};
  Clear();
  for (const auto& [wanted, bytes] : log) EXPECT_EQ(Replay({0, bytes}, {0, wanted}), Parts({0, wanted}));
  EXPECT_EQ(Current().taken.size(), log.size());  // no pads are left
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
  EXPECT_EQ(Current().taken.size(), parts);  // no pads are left
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
  const uint64_t hole = Current().Take(64);
  const uint64_t between = Current().Take(32);
  Current().Give(hole);
  const Parts bytes = {0, 0x88200, 640, 128};
  const Parts at = Take(bytes);
  ASSERT_EQ(at[3], hole);
  ASSERT_GT(at[1], between);
  Clear();
  EXPECT_EQ(Replay({32}, {between}), Parts({between}));
  EXPECT_EQ(Replay(bytes, at), at);
}

TEST_P(VariablePadsTest, GivesUpWhereItCannotBe) {
  Current().Take(1000);
  EXPECT_NE(Replay({0, 100}, {0, Space::kBase - 4096})[1], 0u);
  EXPECT_EQ(Current().taken.size(), 2u);
}

// In the original run, one context or both had something of their own in front of the library's variables. Then a
// second library, which is placed behind the first one.
TEST_P(VariablePadsTest, LibraryInSeveralContexts) {
  const Parts bytes = {0, 1000, 300};
  for (const std::vector<bool>& before : {std::vector<bool>{true, false}, {false, true}, {true, true}}) {
    // A piece in one of the context's own blocks, or a block that the driver takes for itself.
    for (const uint64_t gone : {uint64_t{5000}, uint64_t{3} << 20}) {
      const Places both = {{0, {}}, {1, {}}};
      Clear(2);
      for (g_context = 0; g_context < 2; ++g_context) {
        if (before[g_context]) Take({gone});
      }
      const Places first = TakeIn(both, bytes), second = TakeIn(both, bytes);
      Clear(2);
      EXPECT_EQ(Replay(bytes, first), first) << before[0] << before[1] << " " << gone;
      EXPECT_EQ(Replay(bytes, second), second) << before[0] << before[1] << " " << gone;
      for (const Space& space : g_spaces) EXPECT_EQ(space.taken.size(), 4u);  // no pads are left
    }
  }
}

// Only a load shows that there is more to the constants than the names tell; all contexts are arranged once more then.
TEST_P(VariablePadsTest, LibraryWithHiddenConstants) {
  if (GetParam() == Policy::kLastFit) return;  // no holes suit the bytes that have names
  const Parts bytes = {1500, 300};
  hidden_ = 900;
  Clear(2);
  Take({5000});
  g_context = 1;
  Take({700});
  const Places at = TakeIn({{0, {}}, {1, {}}}, bytes);
  Clear(2);
  EXPECT_EQ(Replay(bytes, at), at);
  for (const Space& space : g_spaces) EXPECT_EQ(space.taken.size(), 2u);  // no pads are left
}

// A place that is right must be kept when the library is loaded again: in the second context, its hole is the oldest of
// its length only at the first load.
TEST_P(VariablePadsTest, LibraryKeepsThePlacesThatAreRight) {
  const Parts bytes = {0, 256};
  const auto load_others = [](bool all) {
    Clear(2);
    Take({256});
    if (all) Take({5000});
    g_context = 1;
    const uint64_t first = Current().Take(256);
    Take({256});
    const uint64_t second = Current().Take(256);
    Take({256});
    Give(Parts{first, second});
  };
  load_others(true);
  const Places at = TakeIn({{0, {}}, {1, {}}}, bytes);
  load_others(false);
  EXPECT_EQ(Replay(bytes, at), at);
}

int VariablePadsTest::MissedIn(size_t contexts, unsigned seed) {
  Clear(contexts);
  srand(seed);
  Places all;
  for (uint64_t context = 0; context < contexts; ++context) all[context] = {};
  struct Loaded {
    Parts bytes;
    Places at;
  };
  std::vector<Loaded> alive;  // in the order of loading
  for (int i = 0; i < 60; ++i) {
    if (rand() % 20 == 0) {
      Space::NewBlock(Space::kBlock);  // the driver's own, which no replay repeats
    } else if (rand() % 3 == 0 && !alive.empty()) {
      const size_t which = size_t(rand()) % alive.size();
      Give(alive[which].at);
      alive.erase(alive.begin() + long(which));
    } else {
      const uint64_t context = uint64_t(rand()) % contexts;
      Parts bytes = {0};
      for (int left = 1 + rand() % 2; left > 0; --left) {
        bytes.push_back(1 + uint64_t(rand()) % (rand() % 4 == 0 ? 200000 : 1000));
      }
      alive.push_back({bytes, TakeIn(rand() % 2 == 0 ? all : Places{{context, {}}}, bytes)});
    }
  }
  Clear(contexts);
  size_t parts = 0, left = 0;
  int missed = 0;
  for (const Loaded& one : alive) {
    parts += one.at.size() * (one.bytes.size() - 1);
    if (Replay(one.bytes, one.at) != one.at) ++missed;
  }
  for (const Space& space : g_spaces) left += space.taken.size();
  EXPECT_EQ(left, parts);  // no pads are left
  return missed;
}

TEST_P(VariablePadsTest, HistoriesInSeveralContexts) {
  for (const size_t contexts : {2, 4}) {
    int whole = 0;
    for (unsigned seed = 1; seed <= 30; ++seed) whole += MissedIn(contexts, seed) == 0;
    EXPECT_GE(whole, 29) << contexts << " contexts";
  }
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
