// SPDX-License-Identifier: Apache-2.0
#include "proto/cli/help.h"

#include <gtest/gtest.h>

#include <map>
#include <string>
#include <vector>

namespace cuda_remote {
namespace {

// What a program with some options prints for `argument`.
std::string Printed(const char* argument, const std::string& usage = "") {
  CLI::App app("Tests something.", "cr-test");
  SetUpProgram(&app, usage);
  app.footer("\nExamples:\n  cr-test train\n\n");
  std::string job, other, server, level = "info", driver;
  int gpu = 0, count = 3, hidden = 0;
  double every = 0;
  std::vector<std::string> users, when = {"early"};
  bool restrict = true, quiet = false;
  app.add_option("JOB", job, "which job")->required();
  app.add_option("OTHER", other, "another one");
  app.add_option("--server", server,
                 "the GPU server, whose description is longer than one line of the text and is therefore wrapped")
      ->type_name("ADDR")
      ->required();
  app.add_option("--gpu", gpu, "the only GPU (default: all)")->check(CLI::Range(0, 255));
  app.add_option("-n,--count", count, "how many")->capture_default_str()->check(CLI::NonNegativeNumber);
  app.add_option("--every", every, "again after this time")
      ->type_name("TIME")
      ->transform(CLI::AsNumberWithUnit(std::map<std::string, double>{{"s", 1}}));
  app.add_option("--a-rather-long-option", driver, "driver library")->envname("TEST_DRIVER");
  app.add_option("--log-level", level, "what to write")->capture_default_str()->check(CLI::IsMember({"debug", "info"}));
  app.add_option("--when", when, "when to do it")
      ->delimiter(',')
      ->check(CLI::IsMember({"early", "late"}))
      ->type_name("WHEN,...");
  app.add_option("--users", users, "who")->delimiter(',')->type_name("USER,...");
  app.add_option("--hidden", hidden, "not shown")->group("");
  app.add_flag("!--unrestricted", restrict, "no restriction");
  app.add_flag("-q,--quiet", quiet, "print errors only");
  std::vector<char*> argv = {const_cast<char*>("/usr/bin/cr-test"), const_cast<char*>(argument)};
  std::ostringstream out, err;
  try {
    app.parse(int(argv.size()), argv.data());
  } catch (const CLI::ParseError& error) {
    EXPECT_EQ(app.exit(error, out, err), 0);
  }
  EXPECT_EQ(err.str(), "");
  return out.str();
}

TEST(Help, HasAWordForEachValueAndTheRestBehindTheDescription) {
  EXPECT_EQ(Printed("--help"), R"(Tests something.
Usage: cr-test [OPTIONS] JOB [OTHER]

Positionals:
  JOB                     which job
  OTHER                   another one

Options:
  -h,--help               print this text
  --version               print the version
  --server ADDR           the GPU server, whose description is longer than one line of the text and is therefore
                          wrapped (required)
  --gpu N                 the only GPU (default: all; 0 to 255)
  -n,--count N            how many (default: 3)
  --every TIME            again after this time
  --a-rather-long-option TEXT
                          driver library (or $TEST_DRIVER)
  --log-level debug|info  what to write (default: info)
  --when WHEN,...         when to do it
  --users USER,...        who
  --unrestricted          no restriction
  -q,--quiet              print errors only

Examples:
  cr-test train
)");
}

TEST(Help, HasAUsageOfTheProgramsOwn) {
  const std::string text = Printed("--help", "[OPTIONS] PROGRAM");
  EXPECT_NE(text.find("Tests something.\nUsage: cr-test [OPTIONS] PROGRAM\n\nPositionals:\n"), std::string::npos)
      << text;
}

TEST(Help, VersionNamesTheProgram) { EXPECT_EQ(Printed("--version"), VersionLine("cr-test") + "\n"); }

}  // namespace
}  // namespace cuda_remote
