// SPDX-License-Identifier: Apache-2.0
#include "ckptfmt/compression_choice.h"

#include <gtest/gtest.h>

namespace cuda_remote::ckptfmt {
namespace {

constexpr uint64_t kMiB = 1 << 20;

// How many of the next 100 chunks are compressed. `seconds`: for each MiB; `ratio`: what a chunk shrinks to.
int CompressedOf100(CompressionChoice* choice, double seconds, double ratio) {
  int compressed = 0;
  for (int i = 0; i < 100; ++i) {
    if (!choice->Next()) continue;
    ++compressed;
    choice->Compressed(kMiB, uint64_t(ratio * kMiB), seconds);
  }
  return compressed;
}

TEST(CompressionChoice, NobodyWaits) {
  CompressionChoice choice;
  EXPECT_EQ(CompressedOf100(&choice, 1e-4, 0.1), 0) << "nothing is known of the disk";
  choice.Waited(kMiB, 0);
  EXPECT_EQ(CompressedOf100(&choice, 1e-4, 0.1), 0);
}

TEST(CompressionChoice, TheDiskIsSlow) {
  CompressionChoice choice;
  choice.Waited(kMiB, 5e-3);  // 200 MB/s
  EXPECT_EQ(CompressedOf100(&choice, 1e-3, 0.5), 100);
  // Bytes that do not shrink are only looked at now and then, and when they do again, it is seen.
  EXPECT_LT(CompressedOf100(&choice, 1e-3, 1.0), 10);
  EXPECT_LT(CompressedOf100(&choice, 1e-3, 1.0), 5);
  CompressedOf100(&choice, 1e-3, 0.2);
  CompressedOf100(&choice, 1e-3, 0.2);
  EXPECT_EQ(CompressedOf100(&choice, 1e-3, 0.2), 100);
}

TEST(CompressionChoice, ProcessorsAreSlower) {
  CompressionChoice choice;
  choice.Waited(kMiB, 1e-3);
  // Half of the bytes less to wait for is less than what it takes.
  EXPECT_LT(CompressedOf100(&choice, 1e-3, 0.5), 6);
  EXPECT_GT(CompressedOf100(&choice, 1e-4, 0.5), 0);
}

TEST(CompressionChoice, TheDiskBecomesFast) {
  CompressionChoice choice;
  choice.Waited(kMiB, 5e-3);
  EXPECT_EQ(CompressedOf100(&choice, 1e-3, 0.5), 100);
  for (int i = 0; i < 100; ++i) choice.Waited(kMiB, 0);
  EXPECT_EQ(CompressedOf100(&choice, 1e-3, 0.5), 0);
}

}  // namespace
}  // namespace cuda_remote::ckptfmt
