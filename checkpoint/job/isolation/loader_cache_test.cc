// SPDX-License-Identifier: Apache-2.0
// Copies of the loader's cache, read by the system's own ldconfig.

#include "checkpoint/job/isolation/loader_cache.h"

#include <gtest/gtest.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <iterator>

namespace cuda_remote::checkpoint {
namespace {

std::string Read(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

// What ldconfig -p says of a cache.
std::string Shown(const std::string& bytes) {
  char name[] = "/tmp/loader-cache-XXXXXX";
  close(mkstemp(name));
  std::ofstream(name, std::ios::binary) << bytes;
  FILE* const pipe = popen((std::string("/sbin/ldconfig -p -C ") + name).c_str(), "r");
  std::string text;
  char buffer[4096];
  for (size_t got; (got = fread(buffer, 1, sizeof(buffer), pipe)) > 0;) text.append(buffer, got);
  EXPECT_EQ(pclose(pipe), 0) << text;
  unlink(name);
  return text;
}

size_t Lines(const std::string& text) { return size_t(std::count(text.begin(), text.end(), '\n')); }

TEST(LoaderCache, ReadsWhatLdconfigShows) {
  const std::string bytes = Read("/etc/ld.so.cache");
  std::vector<CachedLibrary> libraries;
  ASSERT_TRUE(ReadLoaderCache(bytes, &libraries));
  const std::string shown = Shown(bytes);
  ASSERT_FALSE(libraries.empty());
  for (const CachedLibrary& library : libraries) {
    EXPECT_NE(shown.find("\t" + library.name + " ("), std::string::npos) << library.name;
    EXPECT_NE(shown.find(" => " + library.path + "\n"), std::string::npos) << library.path;
  }
}

TEST(LoaderCache, HasWhatWasAddedAndAllElse) {
  const std::string bytes = Read("/etc/ld.so.cache");
  const std::vector<CachedLibrary> more = {{"libcuda-remote-test.so.1", "/job/lib/libcuda-remote-test.so.1"},
                                           {"libcuda-remote-test.so", "/job/lib/libcuda-remote-test.so"},
                                           {"aaa.so", "/job/lib/aaa.so"},
                                           {"zzz.so.10", "/job/lib/zzz.so.10"}};
  std::string result;
  ASSERT_TRUE(AddToLoaderCache(bytes, more, &result));
  const std::string before = Shown(bytes), after = Shown(result);
  EXPECT_EQ(Lines(after), Lines(before) + more.size());
  for (const CachedLibrary& library : more) {
    EXPECT_NE(after.find("\t" + library.name + " (libc6,x86-64) => " + library.path + "\n"), std::string::npos)
        << after;
  }
  std::vector<CachedLibrary> old_ones, new_ones;
  ASSERT_TRUE(ReadLoaderCache(bytes, &old_ones) && ReadLoaderCache(result, &new_ones));
  for (const CachedLibrary& old : old_ones) {
    EXPECT_TRUE(std::any_of(new_ones.begin(), new_ones.end(), [&](const CachedLibrary& library) {
      return library.name == old.name && library.path == old.path;
    })) << old.name;
  }
  // Once more, into what was made.
  std::string again;
  ASSERT_TRUE(AddToLoaderCache(result, {{"libcuda-remote-test.so.1", "/other/first.so"}}, &again));
  ASSERT_TRUE(ReadLoaderCache(again, &new_ones));
  const auto first = std::find_if(new_ones.begin(), new_ones.end(), [](const CachedLibrary& library) {
    return library.name == "libcuda-remote-test.so.1";
  });
  ASSERT_NE(first, new_ones.end());
  EXPECT_EQ(first->path, "/other/first.so");
}

TEST(LoaderCache, OtherFilesAreRefused) {
  std::vector<CachedLibrary> libraries;
  std::string result;
  const std::string bytes = Read("/etc/ld.so.cache");
  for (const std::string& bad : {std::string(), std::string("text"), std::string("ld.so-1.7.0"), bytes.substr(0, 30)}) {
    EXPECT_FALSE(ReadLoaderCache(bad, &libraries));
    EXPECT_FALSE(AddToLoaderCache(bad, {{"a", "b"}}, &result));
  }
  for (size_t length = 0; length < bytes.size(); length += 97) {
    // Must not read beyond the end (address sanitizer).
    const std::string cut = bytes.substr(0, length);
    ReadLoaderCache(cut, &libraries);
    AddToLoaderCache(cut, {{"a", "b"}}, &result);
  }
}

}  // namespace
}  // namespace cuda_remote::checkpoint
