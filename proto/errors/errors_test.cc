// SPDX-License-Identifier: Apache-2.0
// A Status as abseil's, the macros with both kinds, and what ErrnoStatus and Annotate add.
#include <errno.h>
#include <gtest/gtest.h>

#include "proto/base/status.h"
#include "proto/base/status_macros.h"
#include "proto/errors/absl_status.h"
#include "proto/errors/annotate.h"

namespace cuda_remote {
namespace {

Status Fails(bool fails) { return fails ? Error("it failed") : OkStatus(); }

absl::StatusOr<int> DoubledByAbsl(absl::StatusOr<int> number) {
  CR_ASSIGN_OR_RETURN(const int once, std::move(number));
  CR_RETURN_IF_ERROR(ToAbsl(Fails(once < 0)));
  return 2 * once;
}

TEST(AbslStatusTest, SentenceStaysTheSame) {
  EXPECT_TRUE(ToAbsl(OkStatus()).ok());
  EXPECT_EQ(ToAbsl(Error("it failed")), absl::UnknownError("it failed"));
  EXPECT_EQ(*ToAbsl(StatusOr<int>(3)), 3);
  EXPECT_EQ(ToAbsl(StatusOr<int>(Error("none"))).status(), absl::UnknownError("none"));
}

TEST(AbslStatusTest, ErrnoIsAFailureEvenIfItIsZero) {
  errno = ENOENT;
  EXPECT_EQ(ErrnoStatus("cannot read X"), absl::NotFoundError("cannot read X: No such file or directory"));
  EXPECT_EQ(ErrnoStatus("cannot write X", 0), absl::UnknownError("cannot write X: Success"));
}

TEST(AbslStatusTest, MacrosWorkWithBoth) {
  EXPECT_EQ(*DoubledByAbsl(4), 8);
  EXPECT_EQ(DoubledByAbsl(-1).status().message(), "it failed");
  EXPECT_EQ(DoubledByAbsl(absl::NotFoundError("gone")).status(), absl::NotFoundError("gone"));
}

TEST(AnnotateTest, KeepsTheCode) {
  EXPECT_EQ(Annotate("rank 1: ", absl::NotFoundError("gone")), absl::NotFoundError("rank 1: gone"));
  EXPECT_EQ(Annotate("rank 1: ", absl::AbortedError("")), absl::AbortedError("rank 1: "));
  EXPECT_TRUE(Annotate("rank 1: ", absl::OkStatus()).ok());
}

TEST(AnnotateTest, AddsBehind) {
  EXPECT_EQ(AnnotateBehind(absl::NotFoundError("gone"), " (--job-dir)"), absl::NotFoundError("gone (--job-dir)"));
  EXPECT_TRUE(AnnotateBehind(absl::OkStatus(), " (--job-dir)").ok());
}

TEST(AnnotateTest, NamesOneOfSeveral) {
  EXPECT_EQ(AnnotateOneOf(2, "rank 1", absl::NotFoundError("gone")), absl::NotFoundError("rank 1: gone"));
  EXPECT_EQ(AnnotateOneOf(1, "rank 1", absl::NotFoundError("gone")), absl::NotFoundError("gone"));
  EXPECT_TRUE(AnnotateOneOf(2, "rank 1", absl::OkStatus()).ok());
}

}  // namespace
}  // namespace cuda_remote
