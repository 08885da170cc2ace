// SPDX-License-Identifier: Apache-2.0
// What an image needs of a machine, compared with real files and ELF programs.

#include "ckptfmt/needs.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "ckptfmt/testing.h"
#include "proto/base/proc.h"

namespace cuda_remote::ckptfmt {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

TEST(BuildId, IsTheNoteThatToolsShow) {
  TestFolder folder;
  const std::string id = BuildIdOf("/proc/self/exe");
  ASSERT_GE(id.size(), 8u) << "this program is linked with a build id";
  // As file(1) and readelf read it: the note is in the file, whoever looks.
  const std::string out = folder / "notes";
  ASSERT_EQ(system(("readelf -n " + ReadLink("/proc/self/exe") + " > " + out).c_str()), 0);
  EXPECT_THAT(ReadFile(out), HasSubstr(PrintBuildId(id)));
}

TEST(BuildId, OfWhatIsNoProgram) {
  TestFolder folder;
  EXPECT_EQ(BuildIdOf(folder / "none"), "");
  EXPECT_EQ(BuildIdOf("/"), "");
  WriteFile(folder / "text", "not a program");
  EXPECT_EQ(BuildIdOf(folder / "text"), "");
  // Cut anywhere, and with bytes changed at its beginning: no crash, and nothing that is not there.
  const std::string whole = ReadFile(ReadLink("/proc/self/exe"));
  const std::string id = BuildIdOf(ReadLink("/proc/self/exe"));
  for (size_t size = 0; size < 4096; size += 61) {
    WriteFile(folder / "cut", whole.substr(0, size));
    const std::string cut = BuildIdOf(folder / "cut");
    EXPECT_TRUE(cut.empty() || cut == id);
    std::string changed = whole.substr(0, 4096);
    changed[size] = char(~changed[size]);
    WriteFile(folder / "cut", changed);
    BuildIdOf(folder / "cut");
  }
}

TEST(Needs, AMachineThatHasAll) {
  TestFolder folder;
  WriteFile(folder / "data", "12345");
  WriteFile(folder / "log", "longer than before");
  Needs needs;
  needs.files = {{ReadLink("/proc/self/exe"), 1, BuildIdOf(ReadLink("/proc/self/exe")), "", false},
                 {folder / "data", 5, "", "", false},
                 {folder / "log", 3, "", "", true},
                 {"/not/here/libcuda-remote.so", 5, "id", "client/kept/libcuda-remote.so", false}};
  EXPECT_THAT(MissingHere(needs), IsEmpty());
}

TEST(Needs, WhatIsMissingOrAnotherIsNamed) {
  TestFolder folder;
  WriteFile(folder / "data", "123");
  WriteFile(folder / "library", "not one");
  Needs needs;
  needs.files = {{folder / "none", 1, "", "", false},
                 {folder / "data", 5, "", "", false},
                 {folder / "library", 7, "\x12\xab", "", false},
                 {ReadLink("/proc/self/exe"), 1, "\x12\xab", "", false}};
  EXPECT_THAT(MissingHere(needs),
              ElementsAre(HasSubstr("none is not on this machine"), HasSubstr("data has changed: 3 bytes, 5"),
                          HasSubstr("build id none, the image needs 12ab"),
                          HasSubstr(PrintBuildId(BuildIdOf(ReadLink("/proc/self/exe"))) + ", the image needs 12ab")));
}

TEST(Needs, AnotherFileMayBeSeenInThePlaceOfOne) {
  Needs needs;
  needs.files = {{"/not/here", 1, BuildIdOf(ReadLink("/proc/self/exe")), "", false}};
  EXPECT_THAT(MissingHere(needs, [](const std::string&) { return ReadLink("/proc/self/exe"); }), IsEmpty());
}

}  // namespace
}  // namespace cuda_remote::ckptfmt
