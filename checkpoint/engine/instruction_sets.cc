// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/engine/instruction_sets.h"

#include <algorithm>
#include <fstream>
#include <iterator>
#include <sstream>

namespace cuda_remote::checkpoint {
namespace {

// The kernel's names (arch/x86/include/asm/cpufeatures.h) of what ordinary programs can use. "avx512" and "amx" stand
// for all that begin so.
constexpr const char* kOfPrograms[] = {
    "3dnowprefetch", "abm",           "adx",     "aes",    "avx",      "avx2",       "avx_ifma",   "avx_ne_convert",
    "avx_vnni",      "avx_vnni_int8", "bmi1",    "bmi2",   "cldemote", "clflushopt", "clwb",       "clzero",
    "cmov",          "cmpccxadd",     "cx16",    "cx8",    "f16c",     "fma",        "fma4",       "fsgsbase",
    "fxsr",          "gfni",          "lahf_lm", "mmx",    "mmxext",   "movbe",      "movdir64b",  "movdiri",
    "pclmulqdq",     "pku",           "pni",     "popcnt", "rdpid",    "rdrand",     "rdseed",     "rdtscp",
    "rtm",           "serialize",     "sha512",  "sha_ni", "sm3",      "sm4",        "sse",        "sse2",
    "sse4_1",        "sse4_2",        "sse4a",   "ssse3",  "tbm",      "vaes",       "vpclmulqdq", "waitpkg",
    "xgetbv1",       "xop",           "xsave",   "xsavec", "xsaveopt",
};
constexpr const char* kFamilies[] = {"avx512", "amx_", "avx10"};

bool OfPrograms(const std::string& name) {
  return std::find(std::begin(kOfPrograms), std::end(kOfPrograms), name) != std::end(kOfPrograms) ||
         std::any_of(std::begin(kFamilies), std::end(kFamilies),
                     [&](const std::string& family) { return name.compare(0, family.size(), family) == 0; });
}

}  // namespace

std::set<std::string> ParseInstructionSets(std::istream& cpuinfo) {
  std::set<std::string> all;
  bool first = true;
  for (std::string line; std::getline(cpuinfo, line);) {
    if (line.compare(0, 5, "flags") != 0 || line.find_first_not_of(" \t", 5) != line.find(':')) continue;
    std::istringstream words(line.substr(line.find(':') + 1));
    std::set<std::string> names;
    for (std::string word; words >> word;) {
      if (OfPrograms(word)) names.insert(word);
    }
    if (!first) {
      std::set<std::string> both;
      std::set_intersection(all.begin(), all.end(), names.begin(), names.end(), std::inserter(both, both.end()));
      names = std::move(both);
    }
    all = std::move(names);
    first = false;
  }
  return all;
}

std::set<std::string> InstructionSetsHere() {
  std::ifstream cpuinfo("/proc/cpuinfo");
  return ParseInstructionSets(cpuinfo);
}

std::string MissingInstructionSets(const std::set<std::string>& saved, const std::set<std::string>& here) {
  std::string missing;
  for (const std::string& name : saved) {
    if (here.count(name) == 0) missing += (missing.empty() ? "" : ", ") + name;
  }
  return missing;
}

}  // namespace cuda_remote::checkpoint
