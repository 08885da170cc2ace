// SPDX-License-Identifier: Apache-2.0
// What nvcc makes of testdata/groups.cu: warps, blocks, cooperative groups, atomics.
#include <atomic>
#include <chrono>
#include <thread>

#include "softgpu/ptx/test_device.h"
#include "softgpu/ptx/test_file.h"

namespace cuda_remote::softgpu::ptx {
namespace {

class Groups : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override { ASSERT_TRUE(device_.Load(ReadTestFile(GetParam()))); }
  TestDevice device_;
};
INSTANTIATE_TEST_SUITE_P(Builds, Groups, ::testing::Values("groups_75.ptx", "groups_90.ptx", "groups_debug.ptx"));

TEST_P(Groups, SharedMemoryReduction) {
  const int n = 100000;
  auto* in = device_.Array<int>(n);
  auto* out = device_.Array<int>(1);
  int64_t expected = 0;
  for (int i = 0; i < n; ++i) expected += in[i] = i % 97 - 11;
  device_.options.dynamic_shared_bytes = 256 * 4;
  device_.options.host_threads = 4;
  const auto result = device_.Run("block_sum", {50}, {256}, in, out, n);
  ASSERT_TRUE(result.ok()) << result.message;
  EXPECT_EQ(expected, out[0]);
  EXPECT_GT(result.instructions, uint64_t(n));
}

TEST_P(Groups, DynamicSharedMemoryIsChecked) {
  auto* in = device_.Array<int>(64);
  auto* out = device_.Array<int>(1);
  device_.options.dynamic_shared_bytes = 32 * 4;
  EXPECT_EQ(Fault::kIllegalAddress, device_.Run("block_sum", {1}, {64}, in, out, 64).fault);
  device_.options.dynamic_shared_bytes = 1 << 20;
  EXPECT_EQ(Fault::kInvalidLaunch, device_.Run("block_sum", {1}, {64}, in, out, 64).fault);
}

TEST_P(Groups, WarpOperations) {
  auto* out = device_.Array<unsigned>(20 * 64);
  const auto result = device_.Run("warp_ops", {1}, {64}, out);
  ASSERT_TRUE(result.ok()) << result.message;
  auto value = [](unsigned lane) { return lane * lane + 1; };
  unsigned xors = 0, thirds = 0;
  for (unsigned i = 0; i < 32; ++i) {
    xors ^= value(i);
    if (i % 3 == 0) thirds |= 1u << i;
  }
  for (unsigned t = 0; t < 64; ++t) {
    const unsigned lane = t % 32;
    const unsigned* o = out + 20 * t;
    EXPECT_EQ(value(5), o[0]);
    EXPECT_EQ(value(lane < 3 ? lane : lane - 3), o[1]);
    EXPECT_EQ(value(lane + 4 > 31 ? lane : lane + 4), o[2]);
    EXPECT_EQ(value(lane ^ 9), o[3]);
    EXPECT_EQ(value((lane & ~7u) | ((lane + 1) & 7)), o[4]);
    EXPECT_EQ(thirds, o[5]);
    EXPECT_EQ(0u, o[6]);
    EXPECT_EQ(1u, o[7]);
    EXPECT_EQ(lane < 8 ? (lane < 7 ? value(lane + 1) : o[8]) : 0xaaaaaa00u, o[8]);
    EXPECT_EQ(0xfu << (lane & ~3u), o[9]);
    EXPECT_EQ(~0u, o[10]);
    EXPECT_EQ(1u, o[11]);
    EXPECT_EQ(lane & 1 ? 0xaaaaaaaau : 0x55555556u, o[12]);
    EXPECT_EQ(496u, o[13]);
    EXPECT_EQ(496u, o[14]);
    EXPECT_EQ(unsigned(-9), o[15]);
    EXPECT_EQ(xors, o[16]);
    EXPECT_EQ(2u, o[17]);
    EXPECT_EQ(1u, o[18]);
    EXPECT_EQ(0u, o[19]);
  }
}

TEST_P(Groups, CooperativeGroups) {
  auto* out = device_.Array<int>(4 * 96);
  const auto result = device_.Run("cooperative", {1}, {96}, out);
  ASSERT_TRUE(result.ok()) << result.message;
  for (int t = 0; t < 96; ++t) {
    const int base = t / 16 * 16;
    int sum = 0, scan = 0, size = 0, rank = 0;
    for (int i = base; i < base + 16; ++i) {
      sum += i;
      if (i <= t) scan += i;
    }
    for (int i = t / 32 * 32; i < t / 32 * 32 + 32; ++i) {
      if (i % 3 != 0) continue;
      ++size;
      if (i < t) ++rank;
    }
    EXPECT_EQ(sum, out[4 * t]);
    EXPECT_EQ(scan, out[4 * t + 1]);
    EXPECT_EQ(t % 3 == 0 ? size * 100 + rank : -1, out[4 * t + 2]);
    EXPECT_EQ(t / 16, out[4 * t + 3]);
  }
}

TEST_P(Groups, GridSync) {
  for (const uint32_t host_threads : {1u, 3u}) {
    const int n = 6 * 64;
    auto* data = device_.Array<int>(n);
    for (int i = 0; i < n; ++i) data[i] = i;
    device_.options.cooperative = true;
    device_.options.host_threads = host_threads;
    const auto result = device_.Run("grid_sync", {6}, {64}, data, 5);
    ASSERT_TRUE(result.ok()) << result.message;
    for (int i = 0; i < n; ++i) ASSERT_EQ((i + 5) % n + 5, data[i]);
  }
}

TEST_P(Groups, Atomics) {
  auto* i = device_.Array<int>(8);
  auto* u = device_.Array<unsigned>(8);
  auto* l = device_.Array<unsigned long long>(4);
  auto* f = device_.Array<float>(1);
  auto* d = device_.Array<double>(1);
  u[0] = ~0u;
  device_.options.host_threads = 4;
  const int n = 40 * 128;
  const auto result = device_.Run("atomics", {40}, {128}, i, u, l, f, d);
  ASSERT_TRUE(result.ok()) << result.message;
  const int sum = n * (n - 1) / 2;
  unsigned xors = 0;
  for (int t = 0; t < n; ++t) xors ^= unsigned(t);
  EXPECT_EQ(sum, i[0]);
  EXPECT_EQ(-sum, i[1]);
  EXPECT_EQ(1 - n, i[2]);
  EXPECT_EQ(n - 1, i[3]);
  EXPECT_EQ(n, i[4]);
  EXPECT_EQ(0u, u[0]);
  EXPECT_EQ(~0u, u[1]);
  EXPECT_EQ(xors, u[2]);
  EXPECT_EQ(unsigned(n % 10), u[3]);
  EXPECT_EQ(0u, u[4]);
  EXPECT_EQ(77u, u[5]);
  EXPECT_EQ(unsigned(2 * n), u[6]);
  EXPECT_EQ(uint64_t(sum), l[0]);
  EXPECT_EQ(uint64_t(n - 1) << 33, l[1]);
  EXPECT_EQ(uint64_t(int64_t(1 - n)), l[2]);
  EXPECT_EQ(float(n), f[0]);
  EXPECT_EQ(n * 0.5, d[0]);
}

TEST_P(Groups, SpinLock) {
  auto* lock = device_.Array<int>(1);
  auto* value = device_.Array<int>(1);
  device_.options.host_threads = 3;
  const auto result = device_.Run("spin_lock", {8}, {96}, lock, value);
  ASSERT_TRUE(result.ok()) << result.message;
  EXPECT_EQ(8 * 96, value[0]);
}

TEST_P(Groups, ASpinningKernelCanBeCancelled) {
  auto* lock = device_.Array<int>(1);
  auto* value = device_.Array<int>(1);
  lock[0] = 1;  // nobody will open it
  std::atomic<bool> cancel{false};
  device_.options.cancel = &cancel;
  std::thread watcher([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    cancel = true;
  });
  EXPECT_EQ(Fault::kCancelled, device_.Run("spin_lock", {3}, {64}, lock, value).fault);
  watcher.join();
}

TEST_P(Groups, NamedBarriersAndEarlyExit) {
  auto* out = device_.Array<int>(32);
  auto result = device_.Run("named_barriers", {1}, {64}, out);
  ASSERT_TRUE(result.ok()) << result.message;
  for (int lane = 0; lane < 32; ++lane) EXPECT_EQ(4500 + 10 * (31 - lane), out[lane]);
  auto* count = device_.Array<int>(1);
  result = device_.Run("early_exit", {1}, {100}, count);
  ASSERT_TRUE(result.ok()) << result.message;
  EXPECT_EQ(80, count[0]);
}

}  // namespace
}  // namespace cuda_remote::softgpu::ptx
