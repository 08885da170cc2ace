// SPDX-License-Identifier: Apache-2.0
#include "proto/driverabi/driver_settings.h"

#include <gtest/gtest.h>
#include <stdlib.h>

namespace cuda_remote::driverabi {
namespace {

TEST(DriverSettings, TheEnvironmentsGoThroughTheText) {
  ASSERT_EQ(setenv("CUDA_MODULE_LOADING", "EAGER", 1), 0);
  ASSERT_EQ(setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1", 1), 0);
  ASSERT_EQ(setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID; rm -r /", 1), 0);
  ASSERT_EQ(setenv("CUDA_CACHE_PATH", "/tmp", 1), 0);
  const std::string text = DriverSettingsText(OwnDriverSettings());
  EXPECT_EQ(text, "CUDA_DEVICE_MAX_CONNECTIONS=1 CUDA_MODULE_LOADING=EAGER");
  DriverSettings back;
  ASSERT_TRUE(ParseDriverSettings(text, &back));
  EXPECT_EQ(back, OwnDriverSettings());
  EXPECT_TRUE(HasDriverSetting("CUDA_MODULE_LOADING", "EAGER"));
  EXPECT_FALSE(HasDriverSetting("CUDA_MODULE_LOADING", "LAZY"));
  for (const char* name :
       {"CUDA_MODULE_LOADING", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_DEVICE_ORDER", "CUDA_CACHE_PATH"}) {
    unsetenv(name);
  }
  EXPECT_EQ(DriverSettingsText(OwnDriverSettings()), "");
  EXPECT_FALSE(HasDriverSetting("CUDA_MODULE_LOADING", "EAGER"));
  EXPECT_TRUE(HasDriverSetting("CUDA_MODULE_LOADING", "LAZY"));
  EXPECT_FALSE(HasDriverSetting("CUDA_AUTO_BOOST", ""));
  EXPECT_TRUE(ParseDriverSettings("", &back));
  EXPECT_TRUE(back.empty());
}

TEST(DriverSettings, NothingElseIsTakenFromAPeer) {
  DriverSettings settings;
  for (const char* text : {"LD_PRELOAD=x.so", "CUDA_CACHE_PATH=tmp", "CUDA_MODULE_LOADING", "CUDA_MODULE_LOADING=a/b",
                           "CUDA_MODULE_LOADING=EAGER CUDA_MODULE_LOADING=LAZY", " ", "CUDA_MODULE_LOADING=EAGER  ",
                           "CUDA_MODULE_LOADING=123456789012345678901234567890123"}) {
    EXPECT_FALSE(ParseDriverSettings(text, &settings)) << text;
  }
}

TEST(DriverSettings, WhatTheyMean) {
  EXPECT_TRUE(OrdersByBus({{"CUDA_DEVICE_ORDER", "PCI_BUS_ID"}}));
  EXPECT_FALSE(OrdersByBus({{"CUDA_DEVICE_ORDER", "FASTEST_FIRST"}}));
  EXPECT_FALSE(OrdersByBus({}));
  EXPECT_TRUE(LaunchesBlock({{"CUDA_LAUNCH_BLOCKING", "1"}}));
  EXPECT_FALSE(LaunchesBlock({{"CUDA_LAUNCH_BLOCKING", "0"}}));
  EXPECT_EQ(OrderByBus({"0000:E1:00.0", "0000:0F:00.0", "0000:10:00.0"}), (std::vector<int>{1, 2, 0}));
}

}  // namespace
}  // namespace cuda_remote::driverabi
