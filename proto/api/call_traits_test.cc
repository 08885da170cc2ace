// SPDX-License-Identifier: Apache-2.0
// The table of facts about requests: lookup by any number, and the rules that no single row can break.
#include <string>

#include "gtest/gtest.h"
#include "proto/api/call_ids.gen.h"
#include "proto/api/call_names.gen.h"
#include "proto/api/call_traits.gen.h"

namespace cuda_remote {
namespace {

bool IsDefault(const CallTraits& traits) {
  const CallTraits none;
  return traits.work == none.work && traits.completes == none.completes && traits.capture == none.capture &&
         traits.events == none.events && traits.sharing == none.sharing && traits.key_field == 0 && traits.flags == 0;
}

// A client may send any number.
TEST(CallTraits, UnknownNumbersGetWhatIsSafe) {
  for (const uint32_t call : {0u, 1u, 0x7fffu, kFirstOperation - 1, kFirstOperation, kFirstOperation + 0x1000,
                              kFirstOperation + uint32_t(kOpHostFunc - kFirstOperation), 0x80000000u, 0xffffffffu}) {
    EXPECT_TRUE(IsDefault(TraitsOf(call))) << call;
  }
  for (uint32_t call = 0; call < kFirstOperation + 0x200; ++call) {
    if (std::string(CallIdName(call)) == "?") {
      EXPECT_TRUE(IsDefault(TraitsOf(call))) << call;
    }
  }
}

TEST(CallTraits, RowsStandAtTheirNumbers) {
  EXPECT_EQ(TraitsOf(kCall_cuStreamSynchronize).work, Work::kWaits);
  EXPECT_EQ(TraitsOf(kCall_cuStreamSynchronize).completes, Completes::kWorkAndErrors);
  EXPECT_EQ(TraitsOf(kCall_cuEventElapsedTime_v2).work, Work::kAsks);
  EXPECT_EQ(TraitsOf(kOpMemFree).completes, Completes::kWork);
  EXPECT_EQ(TraitsOf(kCall_cuStreamBeginCaptureToGraph).capture, Capture::kBegins);
  EXPECT_EQ(TraitsOf(kOpGraphNames).capture, Capture::kRecorded);
  EXPECT_EQ(TraitsOf(kCall_cuGraphLaunch).events, Events::kRecordsAny);
  EXPECT_EQ(TraitsOf(kCall_cuMemPoolImportPointer).sharing, Sharing::kOpens);
  EXPECT_EQ(TraitsOf(kCall_cuMemPoolImportPointer).key_field, 2);
  EXPECT_TRUE(TraitsOf(kCall_cuEventDestroy_v2).Has(kNotUrgent));
  EXPECT_TRUE(TraitsOf(kCall_cuStreamEndCapture).Has(kNotReplayable));
  EXPECT_TRUE(TraitsOf(kCall_cuGraphLaunch).Has(kLaunchesKernels));
  EXPECT_FALSE(TraitsOf(kCall_cuLaunchKernel).Has(kLaunchesKernels));
  EXPECT_TRUE(TraitsOf(kCall_cuGraphLaunch).Has(kMemoryOfAnyGpu));
  EXPECT_TRUE(TraitsOf(kCall_cuStreamBatchMemOp_v2).Has(kMemoryOfAnyGpu));
  EXPECT_FALSE(TraitsOf(kCall_cuLaunchKernel).Has(kMemoryOfAnyGpu));
  EXPECT_TRUE(TraitsOf(kCall_cuLaunchKernel).Has(kFollowsFlushes));
  EXPECT_TRUE(TraitsOf(kOpManagedFlush).Has(kFollowsFlushes));
  EXPECT_TRUE(TraitsOf(kCall_cuStreamSynchronize).Has(kFollowsFlushes));
  EXPECT_FALSE(TraitsOf(kCall_cuGraphLaunch).Has(kFollowsFlushes));
  EXPECT_TRUE(TraitsOf(kOpMirrorRead).Has(kMovesSharedMemory));
  EXPECT_FALSE(TraitsOf(kOpHostFuncDone).Has(kMovesSharedMemory));
  EXPECT_FALSE(TraitsOf(kCall_cuStreamEndCapture).Has(kReplyMayDiffer));
}

TEST(CallTraits, FactsAgree) {
  for (uint32_t call = 0; call < kFirstOperation + 0x200; ++call) {
    const CallTraits& traits = TraitsOf(call);
    // What only waits or asks neither orders events nor is part of a capture.
    if (traits.only_asks()) {
      EXPECT_EQ(traits.events, Events::kNoEvents) << CallIdName(call);
      EXPECT_NE(traits.capture, Capture::kRecorded) << CallIdName(call);
    }
    if (traits.work == Work::kWaits) {
      EXPECT_EQ(traits.completes, Completes::kWorkAndErrors) << CallIdName(call);
    }
    EXPECT_EQ(traits.sharing != Sharing::kNotShared, traits.key_field != 0) << CallIdName(call);
  }
}

}  // namespace
}  // namespace cuda_remote
