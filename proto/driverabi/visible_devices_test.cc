// SPDX-License-Identifier: Apache-2.0
#include "proto/driverabi/visible_devices.h"

#include <gtest/gtest.h>

namespace cuda_remote::driverabi {
namespace {

using List = std::vector<int>;

const std::vector<std::string> kUuids = {
    std::string("\x00\x11\x22\x33\x44\x55\x66\x77\x88\x99\xaa\xbb\xcc\xdd\xee\x00", 16),
    std::string("\x00\x11\x22\x33\x44\x55\x66\x77\x88\x99\xaa\xbb\xcc\xdd\xee\x01", 16),
    std::string("\xab\x11\x22\x33\x44\x55\x66\x77\x88\x99\xaa\xbb\xcc\xdd\xee\x02", 16),
};

TEST(VisibleDevices, OrdinalsInTheirOrder) {
  EXPECT_EQ(VisibleDevices("0,1,2", kUuids), (List{0, 1, 2}));
  EXPECT_EQ(VisibleDevices("2,0", kUuids), (List{2, 0}));
  EXPECT_EQ(VisibleDevices(" 1 , 2", kUuids), (List{1, 2}));
  EXPECT_EQ(VisibleDevices("1gpu,2", kUuids), (List{1, 2}));
}

TEST(VisibleDevices, EndsBeforeWhatIsNoDevice) {
  EXPECT_EQ(VisibleDevices("0,2,-1,1", kUuids), (List{0, 2}));
  EXPECT_EQ(VisibleDevices("1,3,0", kUuids), (List{1}));
  EXPECT_EQ(VisibleDevices("1,,0", kUuids), (List{1}));
  EXPECT_EQ(VisibleDevices("", kUuids), List{});
  EXPECT_EQ(VisibleDevices("-1", kUuids), List{});
  EXPECT_EQ(VisibleDevices("none", kUuids), List{});
  EXPECT_EQ(VisibleDevices("99999999999999999999", kUuids), List{});
  EXPECT_EQ(VisibleDevices("0", {}), List{});
}

TEST(VisibleDevices, TwiceIsNothing) {
  EXPECT_EQ(VisibleDevices("0,1,0", kUuids), List{});
  EXPECT_EQ(VisibleDevices("GPU-ab,2", kUuids), List{});
  bool twice = false;
  EXPECT_EQ(VisibleDevices("1,1", kUuids, &twice), List{});
  EXPECT_TRUE(twice);
  EXPECT_EQ(VisibleDevices("1,7,1", kUuids, &twice), (List{1})) << "ends before";
  EXPECT_FALSE(twice);
}

TEST(VisibleDevices, Uuids) {
  EXPECT_EQ(VisibleDevices("GPU-ab112233-4455-6677-8899-aabbccddee02", kUuids), (List{2}));
  EXPECT_EQ(VisibleDevices("GPU-AB11,GPU-00112233-4455-6677-8899-aabbccddee01", kUuids), (List{2, 1}));
  EXPECT_EQ(VisibleDevices("MIG-ab11", kUuids), (List{2}));
  EXPECT_EQ(VisibleDevices("GPU-0011", kUuids), List{}) << "which of the two";
  EXPECT_EQ(VisibleDevices("GPU-", kUuids), List{});
  EXPECT_EQ(VisibleDevices("GPU-cd", kUuids), List{});
  EXPECT_EQ(VisibleDevices("1,GPU-ab", kUuids), (List{1, 2}));
}

}  // namespace
}  // namespace cuda_remote::driverabi
