// SPDX-License-Identifier: Apache-2.0
#include "proto/codec/text.h"

#include <algorithm>

#include "gtest/gtest.h"

namespace cuda_remote {
namespace {

TEST(Printable, LeavesWellFormedTextAlone) {
  for (const char* text : {"", "/usr/bin/python3 train.py", "/home/jos\xc3\xa9/\xe8\xae\xad\xe7\xbb\x83",
                           "\xf0\x9f\x9a\x80", "\xf4\x8f\xbf\xbf"}) {
    EXPECT_EQ(Printable(text), text);
  }
}

TEST(Printable, ReplacesControlCharacters) {
  EXPECT_EQ(Printable("a\x1b[2Jb\nc\td\x7f"), "a?[2Jb?c?d?");
  EXPECT_EQ(Printable(std::string_view("a\0b", 3)), "a?b");
  EXPECT_EQ(Printable("\xc2\x9b"
                      "2J"),
            "?2J");
  EXPECT_EQ(Printable("\xc2\xa0"), "\xc2\xa0");
}

TEST(Printable, ReplacesWhatIsNoUtf8ByteByByte) {
  EXPECT_EQ(Printable("jos\xe9"), "jos?");
  EXPECT_EQ(Printable("\xe9t\xe9"), "?t?");
  EXPECT_EQ(Printable("\xc0\xaf"), "??");            // longer than needed
  EXPECT_EQ(Printable("\xe0\x80\xaf"), "???");       // likewise
  EXPECT_EQ(Printable("\xed\xa0\x80"), "???");       // a surrogate
  EXPECT_EQ(Printable("\xf4\x90\x80\x80"), "????");  // beyond the last one
  EXPECT_EQ(Printable("\xf0\x9f\x9a"), "???");       // cut
  EXPECT_EQ(Printable("\xe8\xae"
                      "a\xff"),
            "??a?");
}

TEST(JsonQuoted, IsAJsonString) {
  EXPECT_EQ(JsonQuoted(""), "\"\"");
  EXPECT_EQ(JsonQuoted("say \"hi\" \\ jos\xc3\xa9"), "\"say \\\"hi\\\" \\\\ jos\xc3\xa9\"");
  EXPECT_EQ(JsonQuoted("a\nb\x1b\x7f"), "\"a\\u000ab\\u001b\\u007f\"");
  EXPECT_EQ(JsonQuoted("jos\xe9"), "\"jos\\u00e9\"");
}

TEST(PathToUtf8, ComesBackAsItWas) {
  for (const std::string path : {"", "/data/jos\xc3\xa9", "/data/\xe9t\xe9", "\xff", "\xe8\xae", "\xed\xa0\x80/a"}) {
    const std::string text = PathToUtf8(path);
    std::string characters = text;
    characters.erase(std::remove(characters.begin(), characters.end(), '\0'), characters.end());
    EXPECT_EQ(Printable(characters), characters) << "not UTF-8: " << path;
    EXPECT_EQ(PathFromUtf8(text), path);
  }
  EXPECT_EQ(PathToUtf8("/data/jos\xc3\xa9"), "/data/jos\xc3\xa9");
  EXPECT_EQ(PathToUtf8("t\xe9"), std::string_view("t\0"
                                                  "e9",
                                                  4));
}

TEST(PathFromUtf8, IsSafeWithWhatIsNoPath) {
  EXPECT_EQ(PathFromUtf8(std::string_view("a\0", 2)), "a");
  EXPECT_EQ(PathFromUtf8(std::string_view("a\0"
                                          "f",
                                          3)),
            "a");
  EXPECT_EQ(PathFromUtf8(std::string_view("a\0zzb", 5)), "ab");
  EXPECT_EQ(PathFromUtf8(std::string_view("a\0"
                                          "00b",
                                          5)),
            "ab");
}

}  // namespace
}  // namespace cuda_remote
