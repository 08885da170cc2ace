// SPDX-License-Identifier: Apache-2.0
#include "proto/logging/log.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "proto/base/unique_fd.h"

namespace cuda_remote::logging {
namespace {

// A pipe that the log goes to.
class Log {
 public:
  explicit Log(const std::string& level, const std::string& pattern = "%n %l: %v") {
    int ends[2];
    EXPECT_EQ(pipe(ends), 0);
    for (int i = 0; i < 2; ++i) ends_[i].Reset(ends[i]);
    SetUp("test", pattern, level, ends[1]);
  }
  ~Log() { SetUp("test", "%v", "off", 2); }
  // What was written. At least one byte has been.
  std::string Read() {
    char text[65536];
    const ssize_t n = read(ends_[0].get(), text, sizeof(text));
    return n < 0 ? "" : std::string(text, size_t(n));
  }

 private:
  UniqueFd ends_[2];
};

TEST(Log, Lines) {
  Log log("trace");
  const std::string text = "text";
  Trace("{}", 1);
  Debug("{} {}", text, std::string_view("view"));
  Info("no arguments");
  Warn("{:.2f} s", 1.25);
  Error("{:#x}", 255u);
  Critical("{}{}", "literal", 'c');
  EXPECT_EQ(log.Read(),
            "test trace: 1\ntest debug: text view\ntest info: no arguments\ntest warning: 1.25 s\ntest error: 0xff\n"
            "test critical: literalc\n");
}

TEST(Log, Levels) {
  Log log("warn");
  EXPECT_FALSE(Enabled(Level::kInfo));
  EXPECT_TRUE(Enabled(Level::kWarn));
  Info("not written");
  Warn("written");
  SetLevel("info");
  Info("now written");
  SetLevel("off");
  EXPECT_FALSE(Enabled(Level::kCritical));
  Critical("not written");
  SetLevel("error");
  Warn("not written");
  Error("the last");
  EXPECT_EQ(log.Read(), "test warning: written\ntest info: now written\ntest error: the last\n");
}

TEST(Log, PatternWithPid) {
  Log log("info", "cr-test[%P] %l: %v");
  Info("ready");
  EXPECT_EQ(log.Read(), "cr-test[" + std::to_string(getpid()) + "] info: ready\n");
}

TEST(Log, WrongFormatThrowsNothing) {
  Log log("info");
  // Too few arguments. Not a literal: a newer language standard would refuse to compile it.
  Write(Level::kInfo, "{} {}", fmt::make_format_args("one"));
  EXPECT_EQ(log.Read().rfind("test error: a line of the log is lost: ", 0), 0u);
}

TEST(Log, ThreadsDoNotMixTheirLines) {
  Log log("info", "%v");
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([] {
      for (int line = 0; line < 100; ++line) Info("a line that is {} long", "always as");
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::string all;
  const std::string line = "a line that is always as long\n";
  while (all.size() < 400 * line.size()) all += log.Read();
  for (size_t at = 0; at < all.size(); at += line.size()) ASSERT_EQ(all.compare(at, line.size(), line), 0) << at;
}

}  // namespace
}  // namespace cuda_remote::logging
