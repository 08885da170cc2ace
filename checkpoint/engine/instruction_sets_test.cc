// SPDX-License-Identifier: Apache-2.0
// Which words of /proc/cpuinfo are instruction sets, and which are missing.

#include "checkpoint/engine/instruction_sets.h"

#include <gtest/gtest.h>

#include <sstream>

namespace cuda_remote::checkpoint {
namespace {

using Names = std::set<std::string>;

Names Parse(const std::string& text) {
  std::istringstream in(text);
  return ParseInstructionSets(in);
}

TEST(InstructionSetsTest, ThoseThatProgramsUse) {
  EXPECT_EQ(Parse("processor\t: 0\nflags\t\t: fpu sse2 pti constant_tsc avx512_vnni hypervisor amx_tile\n"
                  "vmx flags\t: sse4_1\nbugs\t\t: avx\n"),
            (Names{"amx_tile", "avx512_vnni", "sse2"}));
  EXPECT_EQ(Parse(""), Names());
  EXPECT_EQ(Parse("flags"), Names());
}

TEST(InstructionSetsTest, ThoseOfAllProcessors) {
  EXPECT_EQ(Parse("flags : sse2 avx2 avx512f\n\nflags : avx2 sse2\n"), (Names{"avx2", "sse2"}));
}

TEST(InstructionSetsTest, MissingOnesAreNamed) {
  EXPECT_EQ(MissingInstructionSets({"avx2", "avx512bw", "avx512f"}, {"avx2", "fma"}), "avx512bw, avx512f");
  EXPECT_EQ(MissingInstructionSets({"avx2"}, {"avx2", "fma"}), "");
}

TEST(InstructionSetsTest, ThisMachineHasSome) {
  const Names here = InstructionSetsHere();
  EXPECT_EQ(here.count("sse2"), 1u);
  EXPECT_EQ(MissingInstructionSets(here, here), "");
}

}  // namespace
}  // namespace cuda_remote::checkpoint
