// SPDX-License-Identifier: Apache-2.0
#include "server/worker/memory/registered_pages.h"

#include <gtest/gtest.h>
#include <sys/auxv.h>
#include <unistd.h>

#include "proto/driverabi/job_addresses.h"

namespace cuda_remote::server {
namespace {

constexpr uint64_t kPage = 4096;
constexpr uint64_t kPlace = 0x700000000000;  // where programs have their mappings

TEST(RegisteredPages, LieWhereProgramsHaveMemoryAndNothingElseIs) {
  EXPECT_TRUE(RegisteredPages::MayLieAt(kPlace, uint64_t{64} << 30));
  EXPECT_TRUE(RegisteredPages::MayLieAt(0x10000000, kPage)) << "the heap of a program at fixed addresses";
  EXPECT_TRUE(RegisteredPages::MayLieAt(0x7ffbfffff000, kPage));
  EXPECT_FALSE(RegisteredPages::MayLieAt(0, kPage));
  EXPECT_FALSE(RegisteredPages::MayLieAt(0x7ffc00000000, kPage)) << "libraries and stacks";
  EXPECT_FALSE(RegisteredPages::MayLieAt(0x7ffbfffff000, 2 * kPage));
  EXPECT_FALSE(RegisteredPages::MayLieAt(uint64_t{1} << 47, kPage));
  EXPECT_FALSE(RegisteredPages::MayLieAt(kPlace, ~uint64_t{0} - kPlace)) << "wraps around";
  for (const uint64_t begin : {driverabi::kArenaBase, driverabi::kHostBase, driverabi::kManagedBase,
                               driverabi::kReservationBase, driverabi::kSnapshotBase}) {
    EXPECT_FALSE(RegisteredPages::MayLieAt(begin, kPage)) << std::hex << begin;
  }
  EXPECT_FALSE(RegisteredPages::MayLieAt(0x240000000000, kPage)) << "mapping_places.h";
  const uint64_t code = getauxval(AT_ENTRY) & ~(kPage - 1);
  EXPECT_FALSE(RegisteredPages::MayLieAt(code, kPage));
  EXPECT_FALSE(RegisteredPages::MayLieAt(code - kPage, 8 * kPage));
  const auto heap = reinterpret_cast<uint64_t>(sbrk(0)) & ~(kPage - 1);
  EXPECT_FALSE(RegisteredPages::MayLieAt(heap, kPage)) << "it grows";
}

TEST(RegisteredPages, HoldARegistrationOnSeveralPieces) {
  RegisteredPages pages;
  bool own = true;
  EXPECT_FALSE(pages.Hold(kPlace, 1, &own));
  pages.Add(kPlace, 2 * kPage, false);
  pages.Add(kPlace + 2 * kPage, kPage, false);
  pages.Add(kPlace + 3 * kPage, kPage, true);
  pages.Add(kPlace + 5 * kPage, kPage, true);
  EXPECT_TRUE(pages.Hold(kPlace + 100, 3 * kPage - 100, &own));
  EXPECT_FALSE(own);
  EXPECT_FALSE(pages.Hold(kPlace + 100, 3 * kPage - 99, &own)) << "two kinds";
  EXPECT_TRUE(pages.Hold(kPlace + 3 * kPage + 5, 10, &own));
  EXPECT_TRUE(own);
  EXPECT_FALSE(pages.Hold(kPlace + 3 * kPage, kPage + 1, &own)) << "a gap";
  EXPECT_FALSE(pages.Hold(kPlace - 1, 2, &own));
}

TEST(RegisteredPages, AnyPagesCanBeTaken) {
  RegisteredPages pages;
  pages.Add(kPlace, 4 * kPage, false);
  pages.Add(kPlace + 4 * kPage, 4 * kPage, true);
  uint64_t own = 77;
  EXPECT_TRUE(pages.Take(kPlace + 8 * kPage, kPage, &own).empty());
  EXPECT_EQ(own, 0u);
  const auto taken = pages.Take(kPlace + 3 * kPage, 3 * kPage, &own);
  ASSERT_EQ(taken.size(), 2u);
  EXPECT_EQ(taken[0].address, kPlace + 3 * kPage);
  EXPECT_EQ(taken[0].bytes, kPage);
  EXPECT_EQ(taken[1].address, kPlace + 4 * kPage);
  EXPECT_EQ(taken[1].bytes, 2 * kPage);
  EXPECT_EQ(own, 2 * kPage);
  bool is_own = false;
  EXPECT_TRUE(pages.Hold(kPlace, 3 * kPage, &is_own));
  EXPECT_FALSE(pages.Hold(kPlace, 3 * kPage + 1, &is_own));
  EXPECT_TRUE(pages.Hold(kPlace + 6 * kPage, 2 * kPage, &is_own));
  EXPECT_TRUE(is_own);
  EXPECT_EQ(pages.Take(kPlace - kPage, 20 * kPage, &own).size(), 2u);
  EXPECT_EQ(own, 2 * kPage);
  EXPECT_FALSE(pages.Hold(kPlace, 1, &is_own));
}

}  // namespace
}  // namespace cuda_remote::server
