// SPDX-License-Identifier: Apache-2.0
// What a person sees, on a terminal and in a file.
#include "proto/cli/progress.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <pty.h>
#include <stdlib.h>
#include <unistd.h>

#include <string>

#include "proto/base/clock.h"
#include "proto/base/unique_fd.h"

namespace cuda_remote::cli {
namespace {

// Standard error is the given descriptor for the time of a test; takes it over.
class ErrorsTo {
 public:
  explicit ErrorsTo(int fd) : before_(dup(2)) {
    dup2(fd, 2);
    close(fd);
  }
  ~ErrorsTo() { dup2(before_.get(), 2); }

 private:
  const UniqueFd before_;
};

// What can be read there now.
std::string Shown(int fd) {
  std::string text;
  pollfd ready = {fd, POLLIN, 0};
  char part[1024];
  while (poll(&ready, 1, 100) > 0 && (ready.revents & POLLIN) != 0) {
    const ssize_t bytes = read(fd, part, sizeof(part));
    if (bytes <= 0) break;
    text.append(part, size_t(bytes));
  }
  return text;
}

TEST(ProgressTest, ATerminalHasABarWithRateAndTimeLeft) {
  bool soon = false;
  int terminal, program;
  ASSERT_EQ(openpty(&terminal, &program, nullptr, nullptr, nullptr), 0);
  {
    const ErrorsTo errors(program);
    Progress progress("saving GPU memory", false);
    progress.Update(1, uint64_t{1} << 30);  // too early to say anything
    usleep(200000);
    const Moment shown = Now();
    progress.Update(uint64_t{512} << 20, uint64_t{1} << 30);
    progress.Update(uint64_t{600} << 20, uint64_t{1} << 30);  // too soon again, unless the machine stood still here
    soon = SecondsSince(shown) < 0.1;
    progress.Update(uint64_t{1} << 30, uint64_t{1} << 30);
  }
  const std::string text = Shown(terminal);
  close(terminal);
  const std::string half(15, '#'), rest(15, '.'), full(30, '#');
  EXPECT_NE(text.find("\rsaving GPU memory [" + half + rest + "] 512 MiB of 1.0 GiB, "), std::string::npos) << text;
  EXPECT_NE(text.find("/s, 0 s left \x1b[K"), std::string::npos) << text;
  EXPECT_NE(text.find("[" + full + "] 1.0 GiB of 1.0 GiB, "), std::string::npos) << text;
  EXPECT_TRUE(!soon || text.find("600 MiB") == std::string::npos) << text;
  // Standard error of this process has the terminal's end of line.
  EXPECT_EQ(text.substr(text.size() - 2), "\r\n");
}

TEST(ProgressTest, TheTimeLeftIsThatOfTheRateSoFar) {
  double seconds = 0;
  int terminal, program;
  ASSERT_EQ(openpty(&terminal, &program, nullptr, nullptr, nullptr), 0);
  {
    const ErrorsTo errors(program);
    const Moment begun = Now();
    Progress progress("loading", false);
    usleep(250000);
    progress.Update(1 << 20, 41 << 20);  // 40 times as much is left: 10 s, or more on a busy machine
    seconds = SecondsSince(begun);
  }
  const std::string text = Shown(terminal);
  close(terminal);
  const size_t at = text.find("/s, ");
  ASSERT_NE(at, std::string::npos) << text;
  const int left = atoi(text.c_str() + at + 4);
  EXPECT_GE(left, 10) << text;
  EXPECT_LE(left, 40 * seconds + 1) << text;
}

TEST(ProgressTest, AFileGetsNothingOfAShortStepAndQuietNothingAtAll) {
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  {
    const ErrorsTo errors(ends[1]);
    Progress progress("saving", false), quiet("saving", true);
    usleep(150000);
    progress.Update(1, 2);
    quiet.Update(1, 2);
  }
  EXPECT_EQ(Shown(ends[0]), "");
  close(ends[0]);
}

}  // namespace
}  // namespace cuda_remote::cli
