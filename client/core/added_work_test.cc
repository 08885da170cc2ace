// SPDX-License-Identifier: Apache-2.0
#include "client/core/added_work.h"

#include <gtest/gtest.h>

namespace cuda_remote::client {
namespace {

const uint64_t kContext = MakeHandle(Kind::kContext, 1, 1), kOther = MakeHandle(Kind::kContext, 2, 1);
const uint64_t kStream = MakeHandle(Kind::kStream, 5, 1);

TEST(AddedWork, IsForgottenOnceItsStreamIsIdle) {
  AddedWork work;
  EXPECT_FALSE(work.In(kContext));
  work.Add(kStream, kContext);
  work.Add(kStream, kContext);
  EXPECT_TRUE(work.In(kContext));
  EXPECT_FALSE(work.In(kOther));
  work.KeepBusy({kStream, kOther});
  EXPECT_TRUE(work.In(kContext));
  work.KeepBusy({kOther});
  EXPECT_FALSE(work.In(kContext));
}

TEST(AddedWork, DefaultStreamsCountAsTheirContext) {
  AddedWork work;
  work.Add(0, kContext);
  work.Add(1, kOther);
  work.KeepBusy({kOther});
  EXPECT_FALSE(work.In(kContext));
  EXPECT_TRUE(work.In(kOther));
  work.Clear();
  EXPECT_FALSE(work.In(kOther));
}

}  // namespace
}  // namespace cuda_remote::client
