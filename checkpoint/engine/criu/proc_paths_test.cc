// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/engine/criu/proc_paths.h"

#include <gtest/gtest.h>

namespace cuda_remote::checkpoint {
namespace {

TEST(ProcPaths, WhatARestoreMakesLateIsGone) {
  for (const char* const path : {"/proc/57/task/58", "/proc/57/task/58/comm", "/proc/57/task/58/fdinfo/3",
                                 "/proc/57/fdinfo/3", "/proc/57/task/57/fd/3", "/proc/57/map_files/7f00-7f01"}) {
    EXPECT_TRUE(IsGoneInRestore(path)) << path;
  }
}

TEST(ProcPaths, WhatAProcessHasFromTheBeginIsThere) {
  for (const char* const path :
       {"/proc/57", "/proc/57/status", "/proc/57/task", "/proc/57/task/57", "/proc/57/task/57/comm", "/proc/57/fd",
        "/proc/57/fdinfo", "/proc/57/net/dev", "/proc/meminfo", "/proc/sys/kernel/pid_max", "/proc/task/58", "/proc/",
        "/home/proc/57/task/58", "/proc/57x/task/58", ""}) {
    EXPECT_FALSE(IsGoneInRestore(path)) << path;
  }
}

}  // namespace
}  // namespace cuda_remote::checkpoint
