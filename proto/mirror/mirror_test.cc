// SPDX-License-Identifier: Apache-2.0
#include "proto/mirror/mirror.h"

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

namespace cuda_remote::mirror {
namespace {

constexpr uint64_t kAddress = 0x200000001000;

// One side of a mirror.
struct Side {
  explicit Side(size_t bytes) : now(bytes, '\0'), base(bytes, '\0') {}
  std::string now, base;
  bool lost = false;  // what was changed here

  std::string Changes(bool exact) {
    std::string all;
    uint64_t at = 0;
    for (bool done = false; !done;) {
      std::string runs;
      done = CollectChanges(kAddress, now.data(), &base[0], now.size(), exact, &at, &runs);
      EXPECT_LE(runs.size(), kMostRuns);
      EXPECT_TRUE(done || !runs.empty());
      all += runs;
    }
    EXPECT_EQ(now, base);
    return all;
  }
  bool Apply(const std::string& runs) {
    return ForEachRun(runs, [this](uint64_t address, std::string_view bytes) {
      const uint64_t offset = address - kAddress;
      if (offset > now.size() || bytes.size() > now.size() - offset) return false;
      lost |= !ApplyRun(bytes.data(), bytes.size(), &now[offset], &base[offset]);
      return true;
    });
  }
};

TEST(MirrorTest, NothingChangedIsNothingSent) {
  Side side(10000);
  EXPECT_EQ(side.Changes(true), "");
}

TEST(MirrorTest, RandomChangesArriveEitherWay) {
  std::mt19937 random(7);
  for (const bool exact : {false, true}) {
    Side a(3 << 20), b(3 << 20);
    for (int round = 0; round < 12; ++round) {
      for (int i = 0; i < 200; ++i) {
        const size_t at = random() % a.now.size(), length = random() % (round == 5 ? 300000 : 40);
        for (size_t k = at; k < std::min(at + length, a.now.size()); ++k) a.now[k] = char(random());
      }
      ASSERT_TRUE(b.Apply(a.Changes(exact)));
      ASSERT_EQ(a.now, b.now);
      ASSERT_EQ(a.base, b.base);
      std::swap(a, b);
    }
  }
}

TEST(MirrorTest, TheFirstDifferenceInMuchMemory) {
  std::mt19937 random(3);
  const uint64_t bytes = (40 << 20) + 123;
  std::string now(bytes, 'n'), base = now;
  for (const int helpers : {0, 1, 3}) {
    EXPECT_EQ(FirstDifference(now.data(), base.data(), 0, bytes, helpers), bytes);
    for (int round = 0; round < 8; ++round) {
      // Several, of which the first one counts.
      const uint64_t places[] = {random() % bytes, random() % bytes, bytes - 1};
      for (const uint64_t place : places) base[place] = 'b';
      const uint64_t first = std::min(places[0], places[1]), second = std::max(places[0], places[1]);
      EXPECT_EQ(FirstDifference(now.data(), base.data(), 0, bytes, helpers), first);
      EXPECT_EQ(FirstDifference(now.data(), base.data(), first + 1, bytes, helpers), second);
      EXPECT_EQ(FirstDifference(now.data(), base.data(), second + 1, bytes, helpers), bytes - 1);
      for (const uint64_t place : places) base[place] = 'n';
    }
  }
}

TEST(MirrorTest, BothSidesMayChangeBytesOfOneBlockAtOnce) {
  Side a(4096), b(4096);
  for (size_t i = 0; i < 4096; i += 2) a.now[i] = 'a';
  for (size_t i = 1; i < 4096; i += 2) b.now[i] = 'b';
  const std::string from_a = a.Changes(true);
  ASSERT_TRUE(b.Apply(from_a));
  ASSERT_TRUE(a.Apply(b.Changes(true)));
  EXPECT_EQ(a.now, b.now);
  EXPECT_EQ(a.now.substr(0, 4), "abab");
}

TEST(MirrorTest, AnAnswerThatTellsOldBytesDoesNotUndoAChange) {
  Side a(64), b(64);
  b.now[0] = b.now[8] = 'x';
  const std::string from_b = b.Changes(false);  // the bytes between are sent along
  a.now[4] = 'n';                               // changed here, not told yet
  ASSERT_TRUE(a.Apply(from_b));
  EXPECT_EQ(a.now[4], 'n');
  ASSERT_TRUE(b.Apply(a.Changes(true)));
  EXPECT_EQ(b.now[4], 'n');
}

TEST(MirrorTest, TheReceiverKnowsWhetherItsOwnChangeIsLost) {
  Side a(64), b(64);
  a.now[4] = 'a';
  b.now[5] = b.now[6] = 'b';
  ASSERT_TRUE(a.Apply(b.Changes(false)));
  EXPECT_FALSE(a.lost);  // other bytes
  b.now[4] = 'a';
  ASSERT_TRUE(a.Apply(b.Changes(false)));
  EXPECT_FALSE(a.lost);  // the same change
  a.now[6] = 'a';
  b.now[6] = 'c';
  ASSERT_TRUE(a.Apply(b.Changes(false)));
  EXPECT_TRUE(a.lost);
  EXPECT_EQ(a.now[6], 'c');
}

TEST(MirrorTest, WhoOverwritesKnowsWhatIsLost) {
  std::string now = "abcdefgh", base = "abcdefgh";
  EXPECT_TRUE(OverwriteRun("ABC", 3, &now[0], &base[0]));
  EXPECT_EQ(now, "ABCdefgh");
  EXPECT_EQ(base, now);
  now = "xBCdefgh";
  EXPECT_TRUE(OverwriteRun("xB", 2, &now[0], &base[0]));  // the same change
  EXPECT_TRUE(OverwriteRun("D", 1, &now[3], &base[3]));   // other bytes
  now[4] = 'y';
  EXPECT_FALSE(OverwriteRun("1E2", 3, &now[3], &base[3]));
  EXPECT_EQ(now, "xBC1E2gh");
  EXPECT_EQ(base, now);
}

TEST(MirrorTest, FewEqualBytesGoAlongAndManyDoNot) {
  Side side(1000);
  side.now[0] = side.now[10] = side.now[500] = 1;
  EXPECT_EQ(side.Changes(false).size(), (16u + 16) + (16u + 8));
  side.now[0] = side.now[10] = 2;
  EXPECT_EQ(side.Changes(true).size(), 2 * (16u + 8));
}

TEST(MirrorTest, MalformedRunsAreRefused) {
  Side side(64);
  const auto run = [](uint64_t address, uint64_t length, size_t bytes) {
    std::string text(16 + bytes, 'z');
    memcpy(&text[0], &address, 8);
    memcpy(&text[8], &length, 8);
    return text;
  };
  EXPECT_TRUE(side.Apply(run(kAddress, 8, 8)));
  EXPECT_FALSE(side.Apply(run(kAddress, 9, 9)));   // not padded
  EXPECT_FALSE(side.Apply(run(kAddress, 16, 8)));  // cut off
  EXPECT_FALSE(side.Apply(run(kAddress, ~uint64_t{0}, 8)));
  EXPECT_FALSE(side.Apply(run(~uint64_t{0} - 3, 8, 8)));  // wraps around
  EXPECT_FALSE(side.Apply(run(kAddress + 60, 8, 8)));     // refused by the user
  EXPECT_FALSE(side.Apply("short"));
}

}  // namespace
}  // namespace cuda_remote::mirror
