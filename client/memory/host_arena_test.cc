// SPDX-License-Identifier: Apache-2.0
#include "client/memory/host_arena.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>

namespace cuda_remote::client {
namespace {

off_t FileSize(int fd) {
  struct stat facts;
  return fstat(fd, &facts) == 0 ? facts.st_size : -1;
}

TEST(HostArenaTest, MemoryIsZeroedWritableAndInTheArena) {
  HostArena arena;
  char* memory = static_cast<char*>(arena.Allocate(10000));
  ASSERT_NE(memory, nullptr);
  EXPECT_TRUE(HostArena::Contains(reinterpret_cast<uint64_t>(memory)));
  for (int i = 0; i < 10000; ++i) ASSERT_EQ(memory[i], 0);
  memset(memory, 7, 10000);
  arena.Free(memory, 10000);
}

// The limit is the program's, and natively pinned memory is no file: the signal would end a program that knows of none.
TEST(HostArenaTest, TheLimitOfFileSizesIsAFailureAndNoSignal) {
  HostArena arena;
  void* const small = arena.Allocate(1 << 20);
  ASSERT_NE(small, nullptr);
  rlimit before;
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const rlimit few{4 << 20, before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &few), 0);
  EXPECT_EQ(arena.Allocate(4 << 20), nullptr);
  void* const fits = arena.Allocate(3 << 20);
  EXPECT_NE(fits, nullptr);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  sigset_t pending;
  sigpending(&pending);
  EXPECT_FALSE(sigismember(&pending, SIGXFSZ));
  arena.Free(fits, 3 << 20);
  arena.Free(small, 1 << 20);
}

// What makes sharing work: the same bytes are in the file, at the offset that the address says.
TEST(HostArenaTest, AnotherMappingOfTheFileSeesTheBytes) {
  HostArena arena;
  void* first = arena.Allocate(4096);
  char* memory = static_cast<char*>(arena.Allocate(4096));
  ASSERT_NE(memory, nullptr);
  strcpy(memory, "pinned");
  const uint64_t offset = HostArena::OffsetOf(reinterpret_cast<uint64_t>(memory));
  void* other = mmap(nullptr, 4096, PROT_READ, MAP_SHARED, arena.fd(), off_t(offset));
  ASSERT_NE(other, MAP_FAILED);
  EXPECT_STREQ(static_cast<char*>(other), "pinned");
  munmap(other, 4096);
  arena.Free(memory, 4096);
  arena.Free(first, 4096);
}

TEST(HostArenaTest, FreedPiecesAreReusedZeroedAndJoined) {
  HostArena arena;
  char* a = static_cast<char*>(arena.Allocate(4096));
  char* b = static_cast<char*>(arena.Allocate(4096));
  char* c = static_cast<char*>(arena.Allocate(4096));
  ASSERT_TRUE(a && b && c);
  memset(a, 1, 4096);
  memset(b, 1, 4096);
  arena.Free(a, 4096);
  arena.Free(b, 4096);
  char* joined = static_cast<char*>(arena.Allocate(8192));
  EXPECT_EQ(joined, a);
  for (int i = 0; i < 8192; ++i) ASSERT_EQ(joined[i], 0);
  arena.Free(joined, 8192);
  arena.Free(c, 4096);
  EXPECT_EQ(FileSize(arena.fd()), 0) << "everything is free, so the file must be empty";
}

TEST(HostArenaTest, RefusesNothingAndTooMuch) {
  HostArena arena;
  EXPECT_EQ(arena.Allocate(0), nullptr);
  EXPECT_EQ(arena.Allocate(HostArena::kMaxBytes + 1), nullptr);
}

// The server would pin it, and the kernel end a process to find the pages.
TEST(HostArenaTest, MoreThanTheMachineHasIsRefused) {
  HostArena arena;
  const size_t machine = size_t(sysconf(_SC_PHYS_PAGES)) * size_t(sysconf(_SC_PAGESIZE));
  EXPECT_EQ(arena.Allocate(machine + 1), nullptr);
  EXPECT_EQ(arena.Allocate(size_t{1} << 62), nullptr);
  void* const memory = arena.Allocate(size_t{64} << 20);
  EXPECT_NE(memory, nullptr);
  arena.Free(memory, size_t{64} << 20);
}

}  // namespace
}  // namespace cuda_remote::client
