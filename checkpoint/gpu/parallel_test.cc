// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/gpu/parallel.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>

namespace cuda_remote::checkpoint {
namespace {

TEST(AllAtOnce, AllRunBesideEachOther) {
  for (const size_t count : {0, 1, 2, 9}) {
    std::atomic<size_t> inside{0}, all{0};
    EXPECT_EQ(AllAtOnce(count,
                        [&](size_t index) {
                          all += index;
                          ++inside;
                          while (inside < count) usleep(100);
                        }),
              absl::OkStatus());
    EXPECT_EQ(inside, count);
    EXPECT_EQ(all, count == 0 ? 0 : count * (count - 1) / 2);
  }
}

TEST(AllAtOnce, NoneRunsIfThereAreTooFewThreads) {
  const pid_t child = fork();
  if (child == 0) {
    // Root gets any number of them.
    const rlimit none{0, 0};
    if (geteuid() == 0 && setresuid(65534, 65534, 65534) != 0) _exit(3);
    if (setrlimit(RLIMIT_NPROC, &none) != 0) _exit(4);
    std::atomic<int> calls{0};
    const absl::Status status = AllAtOnce(3, [&](size_t) { ++calls; });
    const bool named = status.message().find("ulimit -u") != std::string_view::npos;
    _exit(!status.ok() && named && calls == 0 ? 0 : 5);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

}  // namespace
}  // namespace cuda_remote::checkpoint
