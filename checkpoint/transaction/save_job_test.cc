// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/transaction/save_job.h"

#include <errno.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <string.h>

#include <string>

#include "absl/status/status.h"

namespace cuda_remote::checkpoint {
namespace {

using testing::HasSubstr;
using testing::Not;

constexpr char kInside[] = "/proc/self/fd/11", kImage[] = "/data/train.image";

std::string Told(const std::string& message) {
  const absl::Status told = OfImage(absl::ResourceExhaustedError(message), kInside, kImage, uint64_t{3} << 30, "/tmp");
  EXPECT_EQ(told.code(), absl::StatusCode::kResourceExhausted);
  return std::string(told.message());
}

TEST(OfImageTest, AFullDiskNamesTheImageAndTheRoom) {
  for (const int error : {ENOSPC, EDQUOT}) {
    const std::string told = Told(std::string("cannot write ") + kInside + "/pages-1.img: " + strerror(error));
    EXPECT_THAT(told, HasSubstr("cannot write /data/train.image/client/pages-1.img: "));
    EXPECT_THAT(told, Not(HasSubstr("/proc/self/fd")));
    EXPECT_THAT(told, HasSubstr("The image /data/train.image needs up to 3.0 GiB, and /tmp has "));
    EXPECT_THAT(told, HasSubstr(" free"));
  }
}

TEST(OfImageTest, OtherFailuresNameTheImageOnly) {
  EXPECT_EQ(Told(std::string("CRIU: cannot open ") + kInside + ": " + strerror(EACCES)),
            std::string("CRIU: cannot open /data/train.image/client: ") + strerror(EACCES));
  EXPECT_EQ(OfImage(absl::CancelledError("interrupted"), "", kImage, 0, "/tmp"), absl::CancelledError("interrupted"));
}

}  // namespace
}  // namespace cuda_remote::checkpoint
