// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/engine/criu/free_numbers.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <protozero/pbf_writer.hpp>
#include <vector>

namespace cuda_remote::checkpoint {
namespace {

constexpr int kLimit = 32768;

struct Process {
  uint32_t number = 0, group = 0, session = 0;
  std::vector<uint32_t> threads;
  bool packed = false;
};

// CRIU's pstree.img, made by hand.
std::string Tree(const std::vector<Process>& processes) {
  const uint32_t magic[2] = {0x54564319, 0x50273030};
  std::string image(reinterpret_cast<const char*>(magic), sizeof(magic));
  for (const Process& process : processes) {
    std::string entry;
    protozero::pbf_writer writer(entry);
    writer.add_uint32(1, process.number);
    writer.add_uint32(2, 1);
    writer.add_uint32(3, process.group);
    writer.add_uint32(4, process.session);
    if (process.packed) {
      writer.add_packed_uint32(5, process.threads.begin(), process.threads.end());
    } else {
      for (const uint32_t thread : process.threads) writer.add_uint32(5, thread);
    }
    const auto bytes = uint32_t(entry.size());
    image.append(reinterpret_cast<const char*>(&bytes), sizeof(bytes));
    image += entry;
  }
  return image;
}

// Whether `first`, and as many numbers as CRIU may use, are in none of these ranges.
void ExpectBetween(const std::vector<Process>& processes, int low, int high) {
  const absl::StatusOr<int> first = FreeNumber(Tree(processes), kLimit);
  ASSERT_TRUE(first.ok()) << first.status().message();
  EXPECT_GT(*first, low + int(processes.size())) << "no room for helpers";
  EXPECT_LE(*first, high - 100);
}

std::vector<uint32_t> Range(uint32_t first, uint32_t last) {
  std::vector<uint32_t> numbers;
  for (uint32_t number = first; number <= last; ++number) numbers.push_back(number);
  return numbers;
}

TEST(FreeNumbersTest, AreAboveThreadsGroupsAndSessions) {
  ExpectBetween({{5000, 5000, 5000, {5000}}}, 5000, kLimit);
  ExpectBetween({{5000, 5000, 5000, {5000, 5001, 6500}}}, 6500, kLimit);
  ExpectBetween({{5000, 5000, 5000, {5000, 6500}, true}}, 6500, kLimit);
  ExpectBetween({{5000, 5000, 5000, {5000}}, {5100, 6600, 5000, {5100}}}, 6600, kLimit);
  ExpectBetween({{5000, 5000, 5000, {5000}}, {5100, 5100, 6700, {5100}}}, 6700, kLimit);
  // A group and a session outside of the job.
  ExpectBetween({{5000, 0, 0, {5000}}}, 5000, kLimit);
  ExpectBetween({{20, 20, 20, Range(20, 40)}}, 40, kLimit);
}

TEST(FreeNumbersTest, AreBetweenTheNumbersOfAJobThatReachesTheEnd) {
  // They begin again at 300.
  std::vector<uint32_t> threads = Range(32000, kLimit - 1);
  for (const uint32_t thread : Range(300, 2000)) threads.push_back(thread);
  ExpectBetween({{32000, 32000, 32000, threads}}, 2000, 32000);
  // The largest gap.
  threads.push_back(12000);
  ExpectBetween({{32000, 32000, 32000, threads}}, 12000, 32000);
  threads.push_back(30000);
  threads.push_back(21000);
  ExpectBetween({{32000, 32000, 32000, threads}}, 2000, 12000);
  // None is used below.
  ExpectBetween({{32000, 32000, 32000, {32000}}}, 299, 32000);
  // From a machine with more numbers.
  ExpectBetween({{4000000, 4000000, 4000000, {4000000}}}, 299, kLimit);
  ExpectBetween({{400, 400, 400, {400, 4294967295}}}, 400, kLimit);
}

TEST(FreeNumbersTest, LeaveRoomForHelpers) {
  std::vector<Process> processes;
  for (const uint32_t number : Range(1000, 3000)) processes.push_back({number, number, number, {number}});
  ExpectBetween(processes, 3000, kLimit);
}

TEST(FreeNumbersTest, NoRoomIsSaid) {
  std::vector<uint32_t> threads;
  for (uint32_t number = 350; number < kLimit; number += 150) threads.push_back(number);
  const absl::StatusOr<int> first = FreeNumber(Tree({{350, 350, 350, threads}}), kLimit);
  EXPECT_EQ(first.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(first.status().message(),
            "the job's processes leave no 100 process numbers in a row free, which their restore needs: raise the "
            "sysctl kernel.pid_max, which is 32768 here");
}

TEST(FreeNumbersTest, DamagedImagesAreRefused) {
  const auto refused = [](const std::string& image) {
    const absl::StatusOr<int> first = FreeNumber(image, kLimit);
    return first.status().code() == absl::StatusCode::kDataLoss &&
           first.status().message() ==
               "cannot read from the image which numbers its processes have (pstree.img): the image is damaged; "
               "restart another one";
  };
  EXPECT_TRUE(refused(""));
  EXPECT_TRUE(refused(Tree({}))) << "no processes";
  EXPECT_TRUE(refused(Tree({{0, 5000, 5000, {5000}}}))) << "no number";
  const std::string good = Tree({{5000, 5000, 5000, {5000, 5001}, true}});
  for (size_t bytes = 0; bytes < good.size(); ++bytes) EXPECT_TRUE(refused(good.substr(0, bytes))) << bytes;
  for (const size_t at : {0, 4, 8}) {
    std::string other = good;
    other[at] = char(other[at] + 1);
    EXPECT_TRUE(refused(other)) << at;
  }
  // Whatever a byte is, there is an answer.
  for (size_t at = 0; at < good.size(); ++at) {
    for (int byte = 0; byte < 256; ++byte) {
      std::string other = good;
      other[at] = char(byte);
      const absl::StatusOr<int> first = FreeNumber(other, kLimit);
      EXPECT_TRUE(refused(other) || (*first >= 300 && *first < kLimit)) << at << ": " << byte;
    }
  }
}

TEST(FreeNumbersTest, AnImageWithoutTheFileIsRefused) {
  EXPECT_EQ(FreeNumberBeside("/nonexistent").status().code(), absl::StatusCode::kDataLoss);
}

}  // namespace
}  // namespace cuda_remote::checkpoint
