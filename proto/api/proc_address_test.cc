// SPDX-License-Identifier: Apache-2.0
#define __CUDA_API_VERSION_INTERNAL  // no macros over the symbols' names
#include <cuda.h>
#include <cudaProfiler.h>
#include <gtest/gtest.h>

#include <cstring>
#include <string>

#include "proto/api/entry_points.gen.h"

namespace cuda_remote {
namespace {

// The real table, with the symbols' names in place of addresses.
#define ENTRY(name, since, per_thread, symbol) {name, since, per_thread != 0, const_cast<char*>(#symbol)},
const ProcEntry kTable[] = {CUDA_REMOTE_PROC_ADDRESSES(ENTRY)};
constexpr size_t kEntries = sizeof kTable / sizeof *kTable;

struct Answer {
  CUresult result;
  std::string symbol;
  CUdriverProcAddressQueryResult status;
};

Answer Ask(const char* name, int version, uint64_t flags = 0) {
  void* address = nullptr;
  CUdriverProcAddressQueryResult status = CU_GET_PROC_ADDRESS_SUCCESS;
  const CUresult result = FindProc(kTable, kEntries, name, version, flags, 13000, &address, &status);
  return {result, address != nullptr ? static_cast<const char*>(address) : "", status};
}

constexpr uint64_t kPerThread = CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM;

TEST(ProcAddressTest, TableIsSorted) {
  for (size_t i = 1; i < kEntries; ++i) {
    const int order = std::strcmp(kTable[i - 1].name, kTable[i].name);
    EXPECT_LE(order, 0) << kTable[i].name;
    if (order == 0) {
      EXPECT_GE(kTable[i - 1].since, kTable[i].since) << kTable[i].name;
    }
  }
}

TEST(ProcAddressTest, PicksTheNewestVersionThatIsOldEnough) {
  EXPECT_EQ(Ask("cuMemAlloc", 13000).symbol, "cuMemAlloc_v2");
  EXPECT_EQ(Ask("cuMemAlloc", 3020).symbol, "cuMemAlloc_v2");
  EXPECT_EQ(Ask("cuMemAlloc", 3010).symbol, "cuMemAlloc");
  EXPECT_EQ(Ask("cuCtxCreate", 13000).symbol, "cuCtxCreate_v4");
  EXPECT_EQ(Ask("cuCtxCreate", 12040).symbol, "cuCtxCreate_v3");
  EXPECT_EQ(Ask("cuCtxCreate", 11030).symbol, "cuCtxCreate_v2");
  EXPECT_EQ(Ask("cuStreamGetCaptureInfo", 11030).symbol, "cuStreamGetCaptureInfo_v2");
  EXPECT_EQ(Ask("cuGetProcAddress", 11030).symbol, "cuGetProcAddress");
  EXPECT_EQ(Ask("cuGetProcAddress", 12000).symbol, "cuGetProcAddress_v2");
}

TEST(ProcAddressTest, PerThreadVariants) {
  EXPECT_EQ(Ask("cuLaunchKernel", 13000, kPerThread).symbol, "cuLaunchKernel_ptsz");
  EXPECT_EQ(Ask("cuLaunchKernel", 13000, CU_GET_PROC_ADDRESS_LEGACY_STREAM).symbol, "cuLaunchKernel");
  EXPECT_EQ(Ask("cuMemcpyHtoD", 13000, kPerThread).symbol, "cuMemcpyHtoD_v2_ptds");
  EXPECT_EQ(Ask("cuMemAlloc", 13000, kPerThread).symbol, "cuMemAlloc_v2");  // has none
  EXPECT_EQ(Ask("cuStreamGetCaptureInfo", 12030, kPerThread).symbol, "cuStreamGetCaptureInfo_v3_ptsz");
  const Answer early = Ask("cuLaunchKernel", 6000, kPerThread);  // the variants came with 7.0
  EXPECT_EQ(early.symbol, "");
  EXPECT_EQ(early.status, CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT);
  EXPECT_EQ(Ask("cuLaunchKernel", 13000, 3).symbol, "cuLaunchKernel_ptsz");
}

TEST(ProcAddressTest, SaysWhyThereIsNone) {
  const Answer unknown = Ask("cuNoSuchCall", 13000);
  EXPECT_EQ(unknown.result, CUDA_SUCCESS);  // as the driver answers since 12.0
  EXPECT_EQ(unknown.status, CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND);
  EXPECT_EQ(unknown.symbol, "");
  EXPECT_EQ(Ask("cuMemAlloc_v2", 13000).status, CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND);  // not a base name
  const Answer early = Ask("cuLibraryLoadData", 11080);
  EXPECT_EQ(early.status, CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT);
  EXPECT_EQ(early.symbol, "");
  EXPECT_EQ(Ask("cuInit", 13010).result, CUDA_ERROR_INVALID_VALUE);  // newer than the driver
  EXPECT_EQ(Ask("cuInit", 13000, 8).result, CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(Ask(nullptr, 13000).result, CUDA_ERROR_INVALID_VALUE);
}

TEST(ProcAddressTest, FirstVersionOfTheCall) {
  void* address = &address;
  EXPECT_EQ(FindProcFirstVersion(kTable, kEntries, "cuNoSuchCall", 13000, 0, 13000, &address), CUDA_ERROR_NOT_FOUND);
  EXPECT_EQ(address, &address);
  EXPECT_EQ(FindProcFirstVersion(kTable, kEntries, "cuInit", 13000, 0, 13000, &address), CUDA_SUCCESS);
  EXPECT_STREQ(static_cast<char*>(address), "cuInit");
  EXPECT_EQ(FindProcFirstVersion(kTable, kEntries, "cuInit", 13000, 0, 13000, nullptr), CUDA_ERROR_INVALID_VALUE);
}

}  // namespace
}  // namespace cuda_remote
