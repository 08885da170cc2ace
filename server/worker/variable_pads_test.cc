#include "server/worker/variable_pads.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <cstring>
#include <map>
#include <string>
#include <vector>

namespace cuda_remote::server {
namespace {

// A driver that places variables first-fit, as NVIDIA's does.
struct FirstFit {
  static constexpr uint64_t kBase = 0x7ffd00000000;
  std::map<uint64_t, uint64_t> taken;  // address -> bytes

  uint64_t Take(uint64_t bytes) {
    bytes = (bytes + 255) / 256 * 256;
    uint64_t at = kBase;
    for (const auto& [address, size] : taken) {
      if (address - at >= bytes) break;
      at = address + size;
    }
    taken[at] = bytes;
    return at;
  }
};
FirstFit g_space;
int g_loads = 0;

DriverTable Table() {
  DriverTable table = {};
  table.cuCtxGetCurrent = [](CUcontext* context) { return *context = nullptr, CUDA_SUCCESS; };
  table.cuModuleLoadData = [](CUmodule* module, const void* image) {
    ++g_loads;
    unsigned long long bytes = 0;
    const char* const size = strchr(static_cast<const char*>(image), '[');
    if (size == nullptr || sscanf(size, "[%llu]", &bytes) != 1) return CUDA_ERROR_INVALID_PTX;
    *module = reinterpret_cast<CUmodule>(g_space.Take(bytes));
    return CUDA_SUCCESS;
  };
  table.cuModuleUnload = [](CUmodule module) {
    return g_space.taken.erase(reinterpret_cast<uint64_t>(module)) == 1 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
  };
  table.cuModuleGetGlobal_v2 = [](CUdeviceptr* address, size_t* bytes, CUmodule module, const char*) {
    *address = reinterpret_cast<uint64_t>(module);
    *bytes = g_space.taken[*address];
    return CUDA_SUCCESS;
  };
  return table;
}

class VariablePadsTest : public testing::Test {
 protected:
  void SetUp() override {
    g_space = FirstFit();
    g_loads = 0;
  }
  // Loads a module in a replay that must end up at `wanted`; where it does.
  uint64_t Replay(VariablePads* pads, uint64_t bytes, uint64_t wanted) {
    uint64_t at = g_space.Take(bytes);
    if (at == wanted) return at;
    return pads->Move(
        at, wanted, [&] { g_space.taken.erase(at); }, [&] { return at = g_space.Take(bytes); });
  }
  const DriverTable table_ = Table();
};

TEST_F(VariablePadsTest, TakesThePlaceOfWhatIsGone) {
  g_space.Take(64);
  const uint64_t gone = g_space.Take(5000);
  const uint64_t after = g_space.Take(300);
  const uint64_t last = g_space.Take(3 << 20);
  g_space.taken.erase(gone);
  const uint64_t in_hole = g_space.Take(100);
  const std::vector<std::pair<uint64_t, uint64_t>> log = {
      {FirstFit::kBase, 64}, {after, 300}, {last, 3 << 20}, {in_hole, 100}};
  SetUp();
  VariablePads pads(table_);
  for (const auto& [wanted, bytes] : log) EXPECT_EQ(Replay(&pads, bytes, wanted), wanted);
}

TEST_F(VariablePadsTest, AnyHistory) {
  for (unsigned seed = 1; seed <= 200; ++seed) {
    SetUp();
    srand(seed);
    std::vector<std::pair<uint64_t, uint64_t>> alive;  // in the order of loading
    for (int i = 0; i < 60; ++i) {
      if (rand() % 3 == 0 && !alive.empty()) {
        const size_t which = size_t(rand()) % alive.size();
        g_space.taken.erase(alive[which].first);
        alive.erase(alive.begin() + long(which));
      } else {
        const uint64_t bytes = 1 + uint64_t(rand()) % (rand() % 4 == 0 ? 100000 : 1000);
        alive.emplace_back(g_space.Take(bytes), bytes);
      }
    }
    g_space = FirstFit();
    g_loads = 0;
    VariablePads pads(table_);
    for (const auto& [wanted, bytes] : alive) ASSERT_EQ(Replay(&pads, bytes, wanted), wanted) << "seed " << seed;
    EXPECT_LT(g_loads, 2000);
  }
}

TEST_F(VariablePadsTest, GivesUpWhereItCannotBe) {
  VariablePads pads(table_);
  g_space.Take(1000);
  // Below everything, with no pad there.
  const uint64_t at = Replay(&pads, 100, FirstFit::kBase - 4096);
  EXPECT_EQ(at, FirstFit::kBase + 1024);
  EXPECT_EQ(g_space.taken.size(), 2u);
}

}  // namespace
}  // namespace cuda_remote::server
