// SPDX-License-Identifier: Apache-2.0
#include "server/worker/memory/mapping_places.h"

#include <dlfcn.h>
#include <errno.h>
#include <gtest/gtest.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <thread>
#include <vector>

namespace cuda_remote::server {
namespace {

constexpr uint64_t kPage = 4096, kMegabyte = 1 << 20;
constexpr int kOwn = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, kReadWrite = PROT_READ | PROT_WRITE;
// Elsewhere than those of the program's own mmap.
constexpr AddressRange kFew = {0x2a0000000000, 16 * kMegabyte}, kFewReservations = {0x2a1000000000, 16 * kMegabyte};

bool Within(const void* address, AddressRange range) {
  return reinterpret_cast<uint64_t>(address) - range.begin < range.bytes;
}

void* At(uint64_t address) { return reinterpret_cast<void*>(address); }

TEST(MappingPlaces, WhatIsUnmappedIsUsedAgain) {
  MappingPlaces places(kFew, kFewReservations);
  void* const first = places.Map(nullptr, 3 * kPage, kReadWrite, kOwn, -1, 0);
  EXPECT_EQ(first, At(kFew.begin));
  EXPECT_EQ(places.Map(nullptr, 1, kReadWrite, kOwn, -1, 0), At(kFew.begin + 3 * kPage));
  memset(first, 1, 3 * kPage);
  // A part of a mapping, and more than is mapped.
  EXPECT_EQ(places.Unmap(At(kFew.begin + kPage), kPage), 0);
  EXPECT_EQ(places.Map(nullptr, kPage, kReadWrite, kOwn, -1, 0), At(kFew.begin + kPage));
  EXPECT_EQ(places.Unmap(At(kFew.begin), kMegabyte), 0);
  EXPECT_EQ(places.Map(nullptr, 4 * kMegabyte, kReadWrite, kOwn, -1, 0), first);
  EXPECT_EQ(places.Unmap(first, 4 * kMegabyte), 0);
}

TEST(MappingPlaces, ReservationsHavePlacesOfTheirOwn) {
  MappingPlaces places(kFew, kFewReservations);
  // As a driver makes a block with an alignment: more than it needs, and the rest goes.
  void* const more = places.Map(nullptr, 4 * kMegabyte - kPage, PROT_NONE, kOwn, -1, 0);
  EXPECT_EQ(more, At(kFewReservations.begin));
  EXPECT_EQ(places.Unmap(At(kFewReservations.begin + 2 * kMegabyte), 2 * kMegabyte - kPage), 0);
  EXPECT_EQ(places.Map(nullptr, kPage, kReadWrite, kOwn, -1, 0), At(kFew.begin));
  void* const next = places.Map(nullptr, 4 * kMegabyte - kPage, PROT_NONE, kOwn, -1, 0);
  EXPECT_EQ(next, At(kFewReservations.begin + 2 * kMegabyte));
  // What is mapped over a reservation is a part of it.
  EXPECT_EQ(places.Map(more, kMegabyte, kReadWrite, kOwn | MAP_FIXED, -1, 0), more);
  EXPECT_EQ(places.Unmap(more, 2 * kMegabyte), 0);
  EXPECT_EQ(places.Map(nullptr, kPage, PROT_NONE, kOwn, -1, 0), more);
  places.Unmap(At(kFewReservations.begin), kFewReservations.bytes);
  places.Unmap(At(kFew.begin), kFew.bytes);
}

TEST(MappingPlaces, LongMappingsCanHaveLargePages) {
  MappingPlaces places(kFew, kFewReservations);
  EXPECT_EQ(places.Map(nullptr, kPage, kReadWrite, kOwn, -1, 0), At(kFew.begin));
  EXPECT_EQ(places.Map(nullptr, 2 * kMegabyte, kReadWrite, kOwn, -1, 0), At(kFew.begin + 2 * kMegabyte));
  EXPECT_EQ(places.Map(nullptr, kPage, kReadWrite, kOwn, -1, 0), At(kFew.begin + kPage));
  places.Unmap(At(kFew.begin), kFew.bytes);
}

TEST(MappingPlaces, TheKernelPlacesWhatDoesNotFit) {
  MappingPlaces places(kFew, kFewReservations);
  void* const all = places.Map(nullptr, kFew.bytes, kReadWrite, kOwn, -1, 0);
  ASSERT_EQ(all, At(kFew.begin));
  errno = 0;
  void* const more = places.Map(nullptr, kPage, kReadWrite, kOwn, -1, 0);
  ASSERT_NE(more, MAP_FAILED);
  EXPECT_EQ(errno, 0);
  EXPECT_FALSE(Within(more, kFew));
  EXPECT_EQ(places.Unmap(more, kPage), 0);
  EXPECT_EQ(places.Unmap(all, kFew.bytes), 0);
  EXPECT_EQ(places.Map(nullptr, kPage, kReadWrite, kOwn, -1, 0), all);
  places.Unmap(all, kPage);
}

TEST(MappingPlaces, WhoeverChoosesTheAddressGetsIt) {
  MappingPlaces places(kFew, kFewReservations);
  // Inside of the range too, and then it is in nobody's way.
  void* const hinted = At(kFew.begin);
  ASSERT_EQ(places.Map(hinted, kPage, kReadWrite, kOwn, -1, 0), hinted);
  void* const fixed = At(kFew.begin + 2 * kPage);
  ASSERT_EQ(places.Map(fixed, kPage, kReadWrite, kOwn | MAP_FIXED, -1, 0), fixed);
  EXPECT_EQ(places.Map(fixed, kPage, kReadWrite, kOwn | MAP_FIXED_NOREPLACE, -1, 0), MAP_FAILED);
  EXPECT_EQ(errno, EEXIST);
  strcpy(static_cast<char*>(fixed), "mine");
  errno = 0;
  for (int i = 0; i < 8; ++i) {
    void* const got = places.Map(nullptr, kPage, kReadWrite, kOwn, -1, 0);
    EXPECT_TRUE(Within(got, kFew));
    memset(got, 7, kPage);
  }
  EXPECT_EQ(errno, 0);
  EXPECT_STREQ(static_cast<char*>(fixed), "mine");
  void* const low = places.Map(nullptr, kPage, kReadWrite, kOwn | MAP_32BIT, -1, 0);
  EXPECT_LT(reinterpret_cast<uint64_t>(low), uint64_t{1} << 32);
  places.Unmap(low, kPage);
  places.Unmap(At(kFew.begin), kFew.bytes);
}

TEST(MappingPlaces, ErrorsAreTheKernels) {
  MappingPlaces places(kFew, kFewReservations);
  EXPECT_EQ(places.Map(nullptr, 0, kReadWrite, kOwn, -1, 0), MAP_FAILED);
  EXPECT_EQ(errno, EINVAL);
  EXPECT_EQ(places.Map(nullptr, kPage, kReadWrite, MAP_PRIVATE, -1, 0), MAP_FAILED);
  EXPECT_EQ(errno, EBADF);
  EXPECT_EQ(places.Map(nullptr, ~size_t{0}, kReadWrite, kOwn, -1, 0), MAP_FAILED);
  EXPECT_EQ(errno, ENOMEM);
  EXPECT_EQ(places.Unmap(At(kFew.begin + 1), kPage), -1);
  EXPECT_EQ(errno, EINVAL);
  // The failed ones hold no addresses.
  void* const all = places.Map(nullptr, kFew.bytes, kReadWrite, kOwn, -1, 0);
  EXPECT_EQ(all, At(kFew.begin));
  places.Unmap(all, kFew.bytes);
}

// The last test: from then on this program's own mmap does it.
TEST(MappingPlaces, ZTheProgramsMmapDoesIt) {
  const auto try_one = [] {
    void* const memory = mmap(nullptr, 4 * kMegabyte, kReadWrite, kOwn, -1, 0);
    const bool apart = Within(memory, kMappingPlaces);
    memset(memory, 1, 4 * kMegabyte);
    munmap(memory, 4 * kMegabyte);
    return apart;
  };
  EXPECT_FALSE(try_one());
  KeepMappingsApart();
  EXPECT_TRUE(try_one());
  // What libraries find under the name, and how they call it.
  const auto found = reinterpret_cast<void* (*)(void*, size_t, int, int, int, off64_t)>(dlsym(RTLD_DEFAULT, "mmap64"));
  void* const reserved = found(nullptr, 2 * kMegabyte, PROT_NONE, kOwn, -1, 0);
  EXPECT_TRUE(Within(reserved, kReservationPlaces));
  EXPECT_EQ(reinterpret_cast<int (*)(void*, size_t)>(dlsym(RTLD_DEFAULT, "munmap"))(reserved, 2 * kMegabyte), 0);
  EXPECT_EQ(mmap(nullptr, kPage, PROT_NONE, kOwn, -1, 0), reserved);
  FILE* const file = tmpfile();
  ASSERT_EQ(ftruncate(fileno(file), kPage), 0);
  EXPECT_TRUE(Within(mmap(nullptr, kPage, kReadWrite, MAP_SHARED, fileno(file), 0), kMappingPlaces));
  fclose(file);

  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&try_one] {
      for (int i = 0; i < 50; ++i) EXPECT_TRUE(try_one());
    });
  }
  // A child may come while another thread is in mmap.
  for (int i = 0; i < 20; ++i) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(20);
      _exit(try_one() ? 0 : 1);
    }
    int status = -1;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace cuda_remote::server
