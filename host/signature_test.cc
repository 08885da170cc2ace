// SPDX-License-Identifier: Apache-2.0
// Where the key of images is in memory, and where it is not.

#include "host/signature.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <openssl/crypto.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>

#include "proto/base/mappings.h"

namespace cuda_remote::host {
namespace {

constexpr size_t kBytes = 64;
// The key is only in the file, and where Key has it: in this program, its bytes are changed.
constexpr unsigned char kMask = 0xa5;

unsigned char Masked(size_t i) { return static_cast<unsigned char>((i * 37 + 11) ^ kMask); }

// How often the key is in the memory of this process that can be written.
int CountKeys() {
  int found = 0;
  ForEachMapping("/proc/self", [&](const Mapping& mapping) {
    if (mapping.name == "[vvar]" || mapping.name == "[vsyscall]" || !mapping.writable) return true;
    const auto* const begin = reinterpret_cast<const volatile unsigned char*>(mapping.begin);
    for (size_t at = 0; at + kBytes <= mapping.end - mapping.begin; ++at) {
      size_t same = 0;
      while (same < kBytes && (begin[at + same] ^ kMask) == Masked(same)) ++same;
      found += same == kBytes;
    }
    return true;
  });
  return found;
}

TEST(Key, ChildrenDoNotHaveIt) {
  char path[] = "/tmp/signature-test-XXXXXX";
  const int file = mkstemp(path);
  ASSERT_GE(file, 0);
  for (size_t i = 0; i < kBytes; ++i) {
    const unsigned char byte = Masked(i) ^ kMask;
    ASSERT_EQ(write(file, &byte, 1), 1);
  }
  close(file);
  Key key;
  const absl::Status loaded = key.Load(path);
  unlink(path);
  ASSERT_EQ(loaded, absl::OkStatus());
  const std::string code = key.CodeOf("text");
  EXPECT_TRUE(key.HasMade(code, "text"));
  EXPECT_EQ(CountKeys(), 1) << "the key is somewhere else, too";
  const auto in_child = [] {
    const pid_t child = fork();
    if (child == 0) _exit(CountKeys());
    int status = 0;
    EXPECT_EQ(waitpid(child, &status, 0), child);
    return WEXITSTATUS(status);
  };
  EXPECT_EQ(in_child(), 1);  // a worker of cr-hostd needs it
  ASSERT_EQ(key.HideFromChildren(), absl::OkStatus());
  EXPECT_EQ(in_child(), 0);
  EXPECT_EQ(key.CodeOf("text"), code);
}

}  // namespace
}  // namespace cuda_remote::host
