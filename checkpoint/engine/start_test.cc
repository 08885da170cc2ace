// SPDX-License-Identifier: Apache-2.0
// What an engine adds to a job's plan (SnapshotEngine::PrepareStart) is what the started program has of its own. Starts
// real processes, as root.
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/engine/engines.h"
#include "checkpoint/engine/testing/fake_engine.h"
#include "checkpoint/job/isolation/isolate.h"

namespace cuda_remote::checkpoint {
namespace {

// What a program sees of its surroundings.
struct Seen {
  std::string ipc, ptys, filters;
};

constexpr char kLook[] =
    "readlink /proc/self/ns/ipc; stat -c %d /dev/pts; sed -n s/^Seccomp_filters://p /proc/self/status";

Seen Parse(std::istream& lines) {
  Seen seen;
  std::getline(lines, seen.ipc);
  std::getline(lines, seen.ptys);
  std::getline(lines, seen.filters);
  return seen;
}

Seen Outside() {
  const std::string path = std::string(getenv("TEST_TMPDIR")) + "/outside";
  EXPECT_EQ(system(("{ " + std::string(kLook) + "; } > " + path).c_str()), 0);
  std::ifstream lines(path);
  return Parse(lines);
}

Seen InJobOf(SnapshotEngine* engine) {
  const std::string path = std::string(getenv("TEST_TMPDIR")) + "/inside";
  Plan plan;
  plan.command = {"/bin/sh", "-c", "{ " + std::string(kLook) + "; } > " + path};
  plan.environment = {"PATH=/usr/bin:/bin"};
  const absl::Status prepared = engine->PrepareStart(&plan);
  EXPECT_TRUE(prepared.ok()) << prepared.message();
  int code = 0;
  const absl::StatusOr<Isolated> isolated = StartIsolated(plan, &code);
  EXPECT_TRUE(isolated.ok()) << isolated.status().message();
  if (!isolated.ok()) return {};
  WaitForwarding(isolated->init, true);
  int status = -1;
  EXPECT_TRUE(ProgramStatus(*isolated, &status));
  EXPECT_EQ(status, 0);
  std::ifstream lines(path);
  return Parse(lines);
}

TEST(Start, AJobHasOfItsOwnWhatTheEngineNeeds) {
  const Seen outside = Outside(), inside = InJobOf(NewEngine().get());
  EXPECT_NE(outside.ipc, "");
  EXPECT_NE(inside.ipc, outside.ipc);
  EXPECT_NE(inside.ptys, outside.ptys);
  EXPECT_NE(inside.filters, outside.filters) << "nothing keeps it from io_uring";
}

TEST(Start, AnEngineThatNeedsNothingGetsNothing) {
  FakeEngine engine([](const std::string&) { return true; });
  const Seen outside = Outside(), inside = InJobOf(&engine);
  EXPECT_EQ(inside.ipc, outside.ipc);
  EXPECT_EQ(inside.ptys, outside.ptys);
  EXPECT_EQ(inside.filters, outside.filters);
  ASSERT_EQ(engine.prepared().size(), 1u);
  EXPECT_EQ(engine.prepared()[0].command[0], "/bin/sh");
}

}  // namespace
}  // namespace cuda_remote::checkpoint

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  cuda_remote::checkpoint::BlockForwardedSignals();
  return RUN_ALL_TESTS();
}
