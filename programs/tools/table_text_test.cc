// SPDX-License-Identifier: Apache-2.0
#include "programs/tools/table_text.h"

#include <gtest/gtest.h>

namespace cuda_remote::client::tools {
namespace {

TEST(TableTest, ColumnsAreAsWideAsTheirLongestCell) {
  Table table({{"JOB", true}, {"PID"}, {"PROGRAM", true}});
  table.Add({"a-name-of-a-job-that-is-longer-than-others", "7", "train"});
  table.Add({"", "12345678901"}, "python3, session 4");
  table.Add({"gr\u00f6\u00dfe", "8", "x"});
  EXPECT_EQ(table.Text(),
            "JOB                                                 PID  PROGRAM\n"
            "a-name-of-a-job-that-is-longer-than-others            7  train\n"
            "                                            12345678901 python3, session 4\n"
            "gr\u00f6\u00dfe                                                 8  x\n");
}

TEST(TableTest, NothingScrollsOnATerminal) {
  const std::string text = "gr\u00f6\u00dfe and more\ntwo\nthree\nfour\n";
  EXPECT_EQ(FitToScreen(text, 0, 0), text);
  EXPECT_EQ(FitToScreen(text, 5, 6), "gr\u00f6\u00dfe \ntwo\nthree\nfour\n");
  EXPECT_EQ(FitToScreen(text, 4, 80), "gr\u00f6\u00dfe and more\ntwo\n... 2 more lines\n");
}

}  // namespace
}  // namespace cuda_remote::client::tools
