// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/gpu/placement.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace cuda_remote::checkpoint {
namespace {

using ::testing::HasSubstr;

const Place kJobs = {"gpu1:7070", {}};

std::vector<PlacedProcess> Processes(const std::vector<int>& ranks) {
  std::vector<PlacedProcess> processes;
  for (size_t i = 0; i < ranks.size(); ++i) {
    processes.push_back({uint32_t(100 + i), ranks[i], "app (PID " + std::to_string(1000 + i) + ")"});
  }
  return processes;
}

// The places, or the error as the only one.
std::vector<Place> Placed(const std::vector<std::string>& words, const std::vector<int>& ranks) {
  const auto rules = ParsePlacement(words);
  if (!rules.ok()) return {{std::string(rules.status().message()), {}}};
  const auto places = PlaceProcesses(*rules, kJobs, Processes(ranks));
  if (!places.ok()) return {{std::string(places.status().message()), {}}};
  return *places;
}

TEST(Placement, ServersAndGpus) {
  const struct {
    const char* text;
    Place place;
  } kinds[] = {
      {"gpu8:7070", {"gpu8:7070", {}}},
      {"gpu8:7070:1", {"gpu8:7070", {1}}},
      {"gpu8:7070:3,0", {"gpu8:7070", {3, 0}}},
      {"[::1]:7070", {"[::1]:7070", {}}},
      {"[::1]:7070:2", {"[::1]:7070", {2}}},
      {"unix:/run/gpu", {"unix:/run/gpu", {}}},
      {"unix:/run/gpu:0,1", {"unix:/run/gpu", {0, 1}}},
      {"unix:/run/a:b", {"unix:/run/a:b", {}}},
      {":1", {"gpu1:7070", {1}}},
  };
  for (const auto& kind : kinds) {
    const std::vector<Place> places = Placed({std::string("0=") + kind.text}, {0});
    EXPECT_EQ(places[0], kind.place) << kind.text << " became " << ToText(places[0]);
  }
}

TEST(Placement, WhatIsNotUnderstoodIsShown) {
  for (const char* word : {"", "0", "0=", "=gpu8:7070", "a=gpu8:7070", "0=gpu8", "0=unix:", "3-1=gpu8:7070",
                           "0-=gpu8:7070", "pid:=gpu8:7070", "pid:1-2=gpu8:7070", "0=:", "0=:1,", "0=:1,1", "0=:256",
                           "0=gpu8:7070:", "0=gpu8:7070:1,,2", "99999999999=gpu8:7070"}) {
    EXPECT_THAT(Placed({word}, {0})[0].server, HasSubstr("--map " + std::string(word) + " is not understood")) << word;
  }
}

TEST(Placement, RanksOfTheLauncher) {
  const std::vector<Place> places = Placed({"0-1=gpu8:7070", "3=gpu9:7070:1"}, {3, 1, -1, 0, 2});
  EXPECT_EQ(places[0], (Place{"gpu9:7070", {1}}));
  EXPECT_EQ(places[1], (Place{"gpu8:7070", {}}));
  EXPECT_EQ(places[2], kJobs);
  EXPECT_EQ(places[3], (Place{"gpu8:7070", {}}));
  EXPECT_EQ(places[4], kJobs);
}

TEST(Placement, WithoutRanksProcessesAreCounted) {
  const std::vector<Place> places = Placed({"1=gpu8:7070"}, {-1, -1, -1});
  EXPECT_EQ(places[0], kJobs);
  EXPECT_EQ(places[1], (Place{"gpu8:7070", {}}));
  EXPECT_EQ(places[2], kJobs);
}

TEST(Placement, WithoutRanksTheOrderOfTheListDoesNotCount) {
  const auto rules = ParsePlacement({"0=gpu8:7070", "2=gpu9:7070"});
  ASSERT_TRUE(rules.ok()) << rules.status();
  const std::vector<PlacedProcess> processes = {{30, -1, "app"}, {10, -1, "app"}, {20, -1, "app"}};
  const auto places = PlaceProcesses(*rules, kJobs, processes);
  ASSERT_TRUE(places.ok()) << places.status();
  EXPECT_THAT(*places, testing::ElementsAre(Place{"gpu9:7070", {}}, Place{"gpu8:7070", {}}, kJobs));
}

TEST(Placement, ByProcessNumber) {
  const std::vector<Place> places = Placed({"pid:101=gpu8:7070", "0=:3"}, {1, -1, 0});
  EXPECT_EQ(places[0], kJobs);
  EXPECT_EQ(places[1], (Place{"gpu8:7070", {}}));
  EXPECT_EQ(places[2], (Place{"gpu1:7070", {3}}));
}

TEST(Placement, WhoIsNotThereIsNamedWithThoseWhoAre) {
  const std::string error = Placed({"0-4=gpu8:7070"}, {0, 1, -1})[0].server;
  EXPECT_THAT(error, HasSubstr("--map 0-4=gpu8:7070: there is no rank 2"));
  EXPECT_THAT(error, HasSubstr("rank 1: app (PID 1001), pid:101"));
  EXPECT_THAT(error, HasSubstr("without a rank: app (PID 1002), pid:102"));
  EXPECT_THAT(Placed({"pid:7=gpu8:7070"}, {0})[0].server, HasSubstr("there is no process 7"));
  EXPECT_THAT(Placed({"0=gpu8:7070"}, {})[0].server, HasSubstr("the job has no process with CUDA"));
}

TEST(Placement, TwoPlacesForOneAreRefused) {
  EXPECT_THAT(Placed({"0-1=gpu8:7070", "pid:101=gpu9:7070"}, {0, 1})[0].server,
              HasSubstr("--map 0-1=gpu8:7070 and --map pid:101=gpu9:7070 both place app (PID 1001)"));
}

}  // namespace
}  // namespace cuda_remote::checkpoint
