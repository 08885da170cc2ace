// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/engine/criu/passing.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
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

// A child waits in connect() for a listener whose queue is full, and stands still when its connection is made.
TEST(Passing, FindsConnectionsMadeInConnect) {
  const int listener = socket(AF_INET, SOCK_STREAM, 0), first = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  ASSERT_EQ(bind(listener, reinterpret_cast<sockaddr*>(&address), size), 0);
  ASSERT_EQ(listen(listener, 0), 0);  // one may wait
  ASSERT_EQ(getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size), 0);
  ASSERT_EQ(connect(first, reinterpret_cast<sockaddr*>(&address), size), 0);
  const pid_t child = fork();
  if (child == 0) {
    const int second = socket(AF_INET, SOCK_STREAM, 0);
    _exit(connect(second, reinterpret_cast<sockaddr*>(&address), size) == 0 ? 7 : 8);
  }
  const auto waits_in_connect = [&] {
    std::ifstream in("/proc/" + std::to_string(child) + "/syscall");
    long number = -1;
    return in >> number && number == SYS_connect;
  };
  while (!waits_in_connect()) usleep(1000);
  EXPECT_THAT(MadeInConnect({child}), testing::IsEmpty());  // it is not made
  kill(child, SIGSTOP);
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, WUNTRACED), child);
  ASSERT_TRUE(WIFSTOPPED(status));
  EXPECT_THAT(MadeInConnect({child}), testing::IsEmpty());
  ASSERT_GE(accept(listener, nullptr, nullptr), 0);
  // Its kernel asks again after a second, and after two more.
  std::vector<std::string> found;
  for (int tries = 0; tries < 3000 && found.empty(); ++tries) {
    usleep(10000);
    found = MadeInConnect({child});
  }
  EXPECT_THAT(found,
              testing::ElementsAre(testing::HasSubstr("-> 127.0.0.1:" + std::to_string(ntohs(address.sin_port)))));
  kill(child, SIGCONT);
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(WEXITSTATUS(status), 7) << "the call succeeds";
  close(first);
  close(listener);
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
