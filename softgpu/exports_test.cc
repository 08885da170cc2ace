// SPDX-License-Identifier: Apache-2.0
// The library exports the driver's names and nothing else, and needs nothing of the machine but the C library.
#define __CUDA_API_VERSION_INTERNAL  // no macros over the exported names
#include <cuda.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <set>
#include <sstream>
#include <string>

#include "proto/api/entry_points.gen.h"

namespace {

constexpr char kLibrary[] = "softgpu/libsoftgpu.so";

std::string Output(const std::string& command) {
  std::string text;
  FILE* pipe = popen(command.c_str(), "r");
  if (pipe == nullptr) return text;
  char buffer[4096];
  while (size_t n = fread(buffer, 1, sizeof buffer, pipe)) text.append(buffer, n);
  pclose(pipe);
  return text;
}

TEST(Exports, AreTheDriversNames) {
  std::set<std::string> wanted;
#define NAME(symbol, type, parameters, arguments) wanted.insert(#symbol);
  CUDA_REMOTE_ENTRY_POINTS(NAME)
#undef NAME
#define NAME(symbol) wanted.insert(#symbol);
  CUDA_REMOTE_UNDOCUMENTED_ENTRY_POINTS(NAME)
#undef NAME
  std::set<std::string> exported;
  std::istringstream lines(Output(std::string("nm -D --defined-only --format=posix ") + kLibrary));
  for (std::string line; std::getline(lines, line);) exported.insert(line.substr(0, line.find_first_of(" @")));
  EXPECT_GT(exported.size(), 600u);
  EXPECT_EQ(wanted, exported);
}

TEST(Exports, NeedOnlyTheCLibrary) {
  std::istringstream lines(Output(std::string("readelf -dW ") + kLibrary));
  bool soname = false;
  for (std::string line; std::getline(lines, line);) {
    soname = soname || (line.find("SONAME") != std::string::npos && line.find("[libcuda.so.1]") != std::string::npos);
    if (line.find("NEEDED") == std::string::npos) continue;
    bool c_library = false;
    for (const char* name :
         {"[libc.", "[libm.", "[libpthread.", "[libdl.", "[ld-linux", "[libtsan", "[libasan", "[libubsan"}) {
      c_library = c_library || line.find(name) != std::string::npos;
    }
    EXPECT_TRUE(c_library) << line;
  }
  EXPECT_TRUE(soname);
}

}  // namespace
