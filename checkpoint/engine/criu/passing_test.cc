// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/engine/criu/passing.h"

#include <gtest/gtest.h>

#include <protozero/pbf_writer.hpp>
#include <sstream>

#include "checkpoint/engine/criu/criu_image.h"

namespace cuda_remote::checkpoint {
namespace {

// As the kernel has them: one that listens, with two that wait; one that is made; those of processes in any state; and
// of none, one for each state.
constexpr char kTable[] =
    "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
    "   0: 3300630A:1BBC 00000000:0000 0A 00000000:00000002 00:00000000 00000000     0        0 100 1 0 100 0 0 10 0\n"
    "   1: 3300630A:1BBD 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 101 1 0 100 0 0 10 0\n"
    "   2: 3300630A:1BBC 3400630A:A028 03 00000000:00000000 01:00000019 00000000     0        0 0 1 0\n"
    "   3: 3300630A:1BBC 3400630A:A029 04 00000005:00000000 01:00000019 00000000     0        0 102 1 0 20 4 30 10 -1\n"
    "   4: 3300630A:1BBC 3400630A:A02A 01 00000005:00000000 01:00000019 00000000     0        0 0 1 0 20 4 30 10 -1\n"
    "   5: 3300630A:1BBC 3400630A:A02B 04 0000001F:00000000 01:00000019 00000000     0        0 0 1 0 20 4 30 10 -1\n"
    "   6: 3300630A:1BBC 3400630A:A02C 05 00000000:00000000 02:00000019 00000000     0        0 0 1 0 20 4 30 10 -1\n"
    "   7: 3300630A:1BBC 3400630A:A02D 06 00000000:00000000 03:00000019 00000000     0        0 0 3 0\n"
    "   8: 3300630A:1BBC 3400630A:A02E 09 00000001:00000000 01:00000019 00000000     0        0 0 1 0 20 4 30 10 -1\n"
    "   9: 3300630A:1BBC 3400630A:A02F 0B 00000001:00000000 01:00000019 00000000     0        0 0 1 0 20 4 30 10 -1\n"
    "  10: 3300630A:1BBC\n";

TEST(Passing, FindsConnectionsOfNoProcess) {
  std::istringstream lines(kTable);
  const std::vector<std::string> found = ParsePassing(lines);
  ASSERT_EQ(found.size(), 5u);
  EXPECT_EQ(found[0], "the program has not accepted a connection at 10.99.0.51:7100");
  EXPECT_EQ(found[1], "the connection 10.99.0.51:7100 -> 10.99.0.52:41000 is being made");
  EXPECT_EQ(
      found[2],
      "the program has closed the connection 10.99.0.51:7100 -> 10.99.0.52:41003, and the other end has not taken "
      "the last 31 bytes yet");
  EXPECT_NE(found[3].find(":41006"), std::string::npos);
  EXPECT_NE(found[4].find(":41007"), std::string::npos);
}

// A core-*.img of a process in this state (TASK_ALIVE: 1, TASK_DEAD: 2, TASK_STOPPED: 3).
std::string Core(uint32_t state) {
  std::string task, core;
  protozero::pbf_writer writes_task(task), writes_core(core);
  writes_task.add_uint32(1, state);
  writes_task.add_uint32(2, 3);
  writes_core.add_uint32(1, 3);
  writes_core.add_message(3, task);
  const uint32_t head[] = {0x54564319, 0x55053847, uint32_t(core.size())};
  return std::string(reinterpret_cast<const char*>(head), sizeof(head)) + core;
}

TEST(Passing, HasStoppedProcessesRunAgain) {
  std::string image = Core(3);
  ASSERT_TRUE(LetRun(&image));
  EXPECT_EQ(image, Core(1));
  for (const uint32_t other : {1u, 2u}) {
    image = Core(other);
    ASSERT_TRUE(LetRun(&image));
    EXPECT_EQ(image, Core(other));
  }
  // Nothing that is damaged is more than refused.
  for (size_t bytes = 0; bytes < image.size(); ++bytes) {
    std::string part = image.substr(0, bytes);
    LetRun(&part);
  }
  std::string other = "not an image";
  EXPECT_FALSE(LetRun(&other));
}

}  // namespace
}  // namespace cuda_remote::checkpoint
