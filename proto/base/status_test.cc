// SPDX-License-Identifier: Apache-2.0
// Errors: what a status holds, and how functions hand it on.
#include "proto/base/status.h"

#include <errno.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>

#include "proto/base/status_macros.h"

namespace cuda_remote {
namespace {

TEST(StatusTest, SuccessHasNoSentence) {
  EXPECT_TRUE(OkStatus().ok());
  EXPECT_EQ(OkStatus().message(), "");
}

TEST(StatusTest, FailureHasItsSentence) {
  const Status status = Error("the ring is full");
  EXPECT_FALSE(status.ok());
  EXPECT_EQ(status.message(), "the ring is full");
  EXPECT_FALSE(Error("").ok());
}

TEST(StatusTest, ErrnoIsSaid) {
  errno = ENOENT;
  EXPECT_EQ(ErrnoError("cannot read /nothing").message(), "cannot read /nothing: No such file or directory");
}

TEST(StatusOrTest, HoldsValueOrFailure) {
  StatusOr<std::unique_ptr<int>> value(std::make_unique<int>(7));
  ASSERT_TRUE(value.ok());
  EXPECT_TRUE(value.status().ok());
  EXPECT_EQ(**value, 7);
  const std::unique_ptr<int> taken = *std::move(value);
  EXPECT_EQ(*taken, 7);
  const StatusOr<std::unique_ptr<int>> none(Error("none left"));
  EXPECT_FALSE(none.ok());
  EXPECT_EQ(none.status().message(), "none left");
}

Status Fails(bool fails) { return fails ? Error("it failed") : OkStatus(); }

Status HandsOn(bool fails, bool* went_on) {
  CR_RETURN_IF_ERROR(Fails(fails));
  *went_on = true;
  return OkStatus();
}

StatusOr<int> Doubled(StatusOr<int> number) {
  CR_ASSIGN_OR_RETURN(const int once, std::move(number));
  CR_ASSIGN_OR_RETURN(const int twice, StatusOr<int>(2 * once));
  return twice;
}

TEST(StatusMacrosTest, FailureReturns) {
  bool went_on = false;
  EXPECT_EQ(HandsOn(true, &went_on).message(), "it failed");
  EXPECT_FALSE(went_on);
  EXPECT_TRUE(HandsOn(false, &went_on).ok());
  EXPECT_TRUE(went_on);
}

TEST(StatusMacrosTest, ValuesAreTakenAndFailuresReturn) {
  const StatusOr<int> doubled = Doubled(21);
  ASSERT_TRUE(doubled.ok());
  EXPECT_EQ(*doubled, 42);
  EXPECT_EQ(Doubled(Error("no number")).status().message(), "no number");
}

}  // namespace
}  // namespace cuda_remote
