// SPDX-License-Identifier: Apache-2.0
// Pieces of a checkpoint on the software GPU: they go when they have been read, when nobody reads them, and where the
// job needs the memory.

#include "server/worker/memory/snapshot_memory.h"

#include <cuda.h>
#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "server/driver/driver_table.h"
#include "server/worker/memory/side_work.h"

namespace cuda_remote::server {
namespace {

constexpr uint64_t kMiB = 1 << 20;

class SnapshotMemoryTest : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    setenv("SOFTGPU_MEMORY", "1G", 1);
    driver_ = *LoadDriver("softgpu/libsoftgpu.so");
    GuardUnmapping(&driver_);
    SnapshotMemory::Get().GiveWayIn(&driver_);
    ASSERT_EQ(driver_.cuInit(0), CUDA_SUCCESS);
    CUcontext context = nullptr;
    ASSERT_EQ(driver_.cuCtxCreate_v2(&context, 0, 0), CUDA_SUCCESS);
  }

  SnapshotMemory& snapshots() { return SnapshotMemory::Get(); }
  uint64_t Take(uint64_t bytes) {
    uint64_t address = 0;
    result_ = snapshots().Allocate(0, bytes, &address);
    return result_ == CUDA_SUCCESS ? address : 0;
  }
  CUresult Fill(uint64_t address, const std::string& bytes) {
    return snapshots().Fill(address, bytes.size(),
                            [&] { return driver_.cuMemcpyHtoD_v2(address, bytes.data(), bytes.size()); });
  }
  std::string Read(uint64_t address, size_t bytes, bool* from_host = nullptr) {
    std::string out(bytes, 0);
    bool copied = false;
    result_ = snapshots().Read(
        address, bytes, &out[0], [&] { return driver_.cuMemcpyDtoH_v2(&out[0], address, bytes); }, &copied);
    if (from_host != nullptr) *from_host = copied;
    return result_ == CUDA_SUCCESS ? out : "";
  }
  // Physical memory, as the job's allocations take it; false if there is none.
  bool TakeForJob(uint64_t bytes) {
    CUmemAllocationProp prop = {};
    prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    CUmemGenericAllocationHandle handle = 0;
    if (driver_.cuMemCreate(&handle, bytes, &prop, 0) != CUDA_SUCCESS) return false;
    job_.push_back(handle);
    return true;
  }
  void TearDown() override {
    for (const CUmemGenericAllocationHandle handle : job_) driver_.cuMemRelease(handle);
    EXPECT_EQ(snapshots().bytes_on(0), 0u);
  }

  static DriverTable driver_;
  CUresult result_ = CUDA_SUCCESS;
  std::vector<CUmemGenericAllocationHandle> job_;
};
DriverTable SnapshotMemoryTest::driver_;

TEST_F(SnapshotMemoryTest, GoesWhenAllHasBeenRead) {
  const uint64_t first = Take(3 * kMiB), second = Take(kMiB);
  ASSERT_NE(first, 0u);
  ASSERT_NE(second, 0u);
  EXPECT_GE(first, driverabi::kSnapshotBase);
  EXPECT_EQ(snapshots().bytes_on(0), 6 * kMiB);
  const std::string a(kMiB, 'a'), b(2 * kMiB, 'b');
  ASSERT_EQ(Fill(first, a), CUDA_SUCCESS);
  ASSERT_EQ(Fill(first + kMiB, b), CUDA_SUCCESS);
  EXPECT_EQ(Fill(second + 2 * kMiB, "x"), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(Read(first + kMiB, b.size()), b);
  snapshots().WasRead(first + kMiB, b.size());
  EXPECT_EQ(Read(first, a.size()), a);
  snapshots().WasRead(first, a.size());
  int device = -1;
  EXPECT_FALSE(snapshots().Owns(first, 1, &device));
  EXPECT_EQ(Read(first, 1), "");
  EXPECT_TRUE(snapshots().Owns(second, kMiB, &device));
  EXPECT_EQ(device, 0);
  EXPECT_TRUE(snapshots().Free(second));
  EXPECT_FALSE(snapshots().Free(second));
}

TEST_F(SnapshotMemoryTest, LeavesAReserve) {
  EXPECT_EQ(Take(900 * kMiB), 0u);
  EXPECT_EQ(result_, CUDA_ERROR_OUT_OF_MEMORY);
  const uint64_t most = Take(700 * kMiB);
  ASSERT_NE(most, 0u);
  EXPECT_EQ(Take(100 * kMiB), 0u);
  EXPECT_TRUE(snapshots().Free(most));
}

TEST_F(SnapshotMemoryTest, GivesWayToTheJob) {
  const uint64_t piece = Take(400 * kMiB), other = Take(100 * kMiB);
  ASSERT_NE(piece, 0u);
  std::string bytes(kMiB, 0);
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = char(i * 7 + i / 300);
  ASSERT_EQ(Fill(piece + 77 * kMiB, bytes), CUDA_SUCCESS);
  ASSERT_EQ(Fill(other, "other"), CUDA_SUCCESS);
  // Fits beside the pieces, and does not.
  ASSERT_TRUE(TakeForJob(400 * kMiB));
  EXPECT_EQ(snapshots().bytes_on(0), 500 * kMiB);
  ASSERT_TRUE(TakeForJob(500 * kMiB));
  EXPECT_EQ(snapshots().bytes_on(0), 0u);
  EXPECT_FALSE(TakeForJob(500 * kMiB));
  bool from_host = false;
  EXPECT_EQ(Read(piece + 77 * kMiB, bytes.size(), &from_host), bytes);
  EXPECT_TRUE(from_host);
  EXPECT_EQ(Read(other, 5), "other");
  EXPECT_EQ(Fill(other, "again"), CUDA_ERROR_OUT_OF_MEMORY);
  snapshots().WasRead(piece + 77 * kMiB, bytes.size());
  EXPECT_TRUE(snapshots().Free(other));
  int device;
  EXPECT_FALSE(snapshots().Owns(piece, 1, &device));
}

TEST_F(SnapshotMemoryTest, GoesWhenNobodyReads) {
  snapshots().SetPatience(std::chrono::milliseconds(500));
  const uint64_t piece = Take(kMiB);
  ASSERT_NE(piece, 0u);
  ASSERT_EQ(Fill(piece, "what"), CUDA_SUCCESS);
  for (int i = 0; i < 100 && snapshots().bytes_on(0) != 0; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  EXPECT_EQ(snapshots().bytes_on(0), 0u);
  EXPECT_EQ(Read(piece, 4), "");
  snapshots().SetPatience(std::chrono::seconds(60));
}

}  // namespace
}  // namespace cuda_remote::server
