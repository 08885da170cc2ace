// SPDX-License-Identifier: Apache-2.0
#include "host/sent_pages.h"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <string>

namespace cuda_remote::host {
namespace {

std::string PageOf(int value) {
  std::string page(kPageBytes, char(value));
  page[0] = char(value >> 8);
  return page;
}

SentPages::Page Make(int contents, uint32_t file, uint32_t number) {
  return SentPages::Describe(PageOf(contents), file, uint64_t(number) * kPageBytes);
}

TEST(SentPages, FindsByContents) {
  SentPages pages;
  pages.Add(Make(7, 3, 5));
  EXPECT_EQ(pages.last().number, 5u);
  pages.Add(Make(2, 1, 0));
  pages.Sort();
  const SentPages::Page* const found = pages.Find(Make(7, 9, 99), nullptr);
  ASSERT_NE(found, nullptr);
  EXPECT_EQ(found->file, 3u);
  EXPECT_EQ(found->number, 5u);
  EXPECT_EQ(pages.Find(Make(8, 3, 5), nullptr), nullptr);
  EXPECT_EQ(SentPages().Find(Make(7, 3, 5), nullptr), nullptr);
}

// Pieces that lie one behind the other are one piece of a message.
TEST(SentPages, PrefersThePageBehindTheLastOne) {
  SentPages pages;
  for (uint32_t number : {0, 1, 2, 3}) {
    pages.Add(Make(0, 1, number));
    pages.Add(Make(0, 2, number));
  }
  pages.Add(Make(1, 2, 4));
  pages.Sort();
  const SentPages::Page wanted = Make(0, 0, 0);
  const SentPages::Page* last = pages.Find(wanted, nullptr);
  ASSERT_NE(last, nullptr);
  EXPECT_EQ(last->number, 0u);
  for (uint32_t number : {1, 2, 3}) {
    const SentPages::Page* const next = pages.Find(wanted, last);
    ASSERT_NE(next, nullptr);
    EXPECT_EQ(next->file, last->file);
    EXPECT_EQ(next->number, number);
    last = next;
  }
  // The file ends here, or has something else: any page of these contents.
  const SentPages::Page* const another = pages.Find(wanted, last);
  ASSERT_NE(another, nullptr);
  EXPECT_EQ(another->hash, wanted.hash);
}

TEST(SentPages, TakesOverOnlyTheFilesThatAreKept) {
  SentPages before, now;
  for (uint32_t file : {1, 2, 3}) before.Add(Make(int(file), file, 0));
  now.Add(Make(4, 4, 0));
  now.AddFilesOf(before, {1, 3});
  now.Sort();
  for (const int contents : {1, 3, 4}) EXPECT_NE(now.Find(Make(contents, 0, 0), nullptr), nullptr) << contents;
  EXPECT_EQ(now.Find(Make(2, 0, 0), nullptr), nullptr);
}

// Against a map: whatever is found has these contents and was added, and what was added is found.
TEST(SentPages, RandomPages) {
  std::mt19937 random(20);
  for (int round = 0; round < 50; ++round) {
    SentPages pages;
    std::map<std::pair<uint32_t, uint32_t>, int> added;
    const int contents = 1 + int(random() % 300);
    for (int i = 0; i < 400; ++i) {
      const std::pair<uint32_t, uint32_t> place(1 + random() % 5, random() % 200);
      const int value = int(random() % unsigned(contents));
      if (added.emplace(place, value).second) pages.Add(Make(value, place.first, place.second));
    }
    pages.Sort();
    const SentPages::Page* last = nullptr;
    for (int i = 0; i < 400; ++i) {
      const int value = int(random() % 400);
      const SentPages::Page* const found = pages.Find(Make(value, 0, 0), last);
      bool there = false;
      for (const auto& [place, one] : added) there = there || one == value;
      ASSERT_EQ(found != nullptr, there);
      if (found) {
        const auto at = added.find({found->file, found->number});
        ASSERT_NE(at, added.end());
        ASSERT_EQ(at->second, value);
        if (last) {
          const auto next = added.find({last->file, last->number + 1});
          if (next != added.end() && next->second == value) {
            EXPECT_EQ(found->number, last->number + 1);
            EXPECT_EQ(found->file, last->file);
          }
        }
      }
      last = found;
    }
  }
}

}  // namespace
}  // namespace cuda_remote::host
