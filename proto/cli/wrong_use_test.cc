// SPDX-License-Identifier: Apache-2.0
#include "proto/cli/wrong_use.h"

#include <gtest/gtest.h>

#include <fstream>
#include <map>
#include <string>
#include <vector>

namespace cuda_remote {
namespace {

// What a program with these options prints.
std::string Said(std::vector<std::string> arguments) {
  CLI::App app("A test.", "cr-test");
  app.failure_message(WrongUse);
  std::string job;
  int gpu = 0;
  app.set_config("--config");
  app.allow_config_extras(CLI::config_extras_mode::error);
  app.add_option("JOB", job)->required();
  app.add_option("--gpu", gpu)->check(CLI::Range(0, 255));
  app.add_option("--count", gpu);
  uint64_t size = 0;
  app.add_option("--pool", size)->transform(CLI::AsSizeValue(false));
  double time = 0;
  app.add_option("--every", time)
      ->transform(CLI::AsNumberWithUnit(std::map<std::string, double>{{"s", 1}, {"m", 60}, {"h", 3600}},
                                        CLI::AsNumberWithUnit::CASE_INSENSITIVE));
  std::vector<char*> argv = {const_cast<char*>("/usr/bin/cr-test")};
  for (std::string& argument : arguments) argv.push_back(argument.data());
  std::ostringstream out, err;
  try {
    app.parse(int(argv.size()), argv.data());
  } catch (const CLI::ParseError& error) {
    app.exit(error, out, err);
  }
  return err.str();
}

constexpr char kHelp[] = " (cr-test --help lists the options)\n";

TEST(WrongUse, NamesTheProgramAndTheMistake) {
  EXPECT_EQ(Said({}), std::string("cr-test: JOB is required") + kHelp);
  EXPECT_EQ(Said({"--gpus", "3", "train"}), std::string("cr-test: unknown option --gpus") + kHelp);
  EXPECT_EQ(Said({"train", "more"}), std::string("cr-test: unexpected argument more") + kHelp);
  EXPECT_EQ(Said({"train", "--gpu", "300"}), std::string("cr-test: --gpu: Value 300 not in range 0 to 255") + kHelp);
  EXPECT_EQ(Said({"train", "--count", "x"}), std::string("cr-test: wrong value: --count = x") + kHelp);
  EXPECT_EQ(Said({"train"}), "");
}

TEST(WrongUse, SaysHowAValueWithAUnitIsWritten) {
  EXPECT_EQ(Said({"train", "--pool", "3Q"}),
            std::string("cr-test: --pool: unknown unit \"q\"; a size is a number, or one "
                        "with KB, MB, GB or TB, as in 16GB") +
                kHelp);
  EXPECT_EQ(Said({"train", "--every", "10x"}),
            std::string("cr-test: --every: unknown unit \"x\"; it is one of h,m,s") + kHelp);
  EXPECT_EQ(Said({"train", "--pool", "3G", "--every", "10m"}), "");
}

TEST(WrongUse, AMisspeltOptionIsNamedBeforeAMissingArgument) {
  EXPECT_EQ(Said({"--gpus"}), std::string("cr-test: unknown option --gpus") + kHelp);
}

TEST(WrongUse, NamesWhatIsWrongInAConfigurationFile) {
  const std::string path = testing::TempDir() + "/wrong_use.conf";
  std::ofstream(path) << "bogus = 3\n";
  EXPECT_EQ(Said({"train", "--config", path}),
            std::string("cr-test: unknown option bogus in the configuration file") + kHelp);
  EXPECT_EQ(Said({"train", "--config", "/nowhere/x.conf"}),
            std::string("cr-test: cannot read the file /nowhere/x.conf") + kHelp);
}

}  // namespace
}  // namespace cuda_remote
