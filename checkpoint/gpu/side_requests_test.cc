// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/gpu/side_requests.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

namespace cuda_remote::checkpoint {
namespace {

// A server with these answers, one after another.
class Answers final : public SideRequests {
 public:
  explicit Answers(std::vector<agent::SideAnswer> answers) : answers_(std::move(answers)) {}
  bool shared_memory() const override { return false; }
  absl::StatusOr<uint64_t> Begin(const agent::SideRequest& request) override {
    wire::OpListBlocks_Request asked;
    EXPECT_TRUE(asked.Decode(request.message));
    after.push_back(asked.after);
    return after.size();
  }
  absl::StatusOr<agent::SideAnswer> Wait(uint64_t number) override {
    if (number > answers_.size()) return absl::UnavailableError("gone");
    return answers_[number - 1];
  }

  std::vector<uint64_t> after;  // what was asked

 private:
  const std::vector<agent::SideAnswer> answers_;
};

agent::SideAnswer Piece(std::vector<uint64_t> addresses, uint64_t next) {
  wire::OpListBlocks_Reply reply;
  for (const uint64_t address : addresses) {
    wire::Block block;
    block.address = address;
    reply.blocks.push_back(block);
  }
  reply.next = next;
  agent::SideAnswer answer;
  reply.Encode(&answer.message);
  return answer;
}

struct Asked {
  absl::Status status;
  std::vector<uint64_t> addresses;
  uint32_t refused = 0;
};

Asked Ask(Answers* answers, size_t most = 100) {
  Asked asked;
  const auto take = [&](const wire::OpListBlocks_Reply& list) {
    for (const wire::Block& block : list.blocks) asked.addresses.push_back(block.address);
    return asked.addresses.size() < most;
  };
  asked.status = AskForPieces<wire::OpListBlocks_Reply>(answers, wire::OpListBlocks_Request{}, "list its memory", take,
                                                        &asked.refused);
  return asked;
}

constexpr char kMalformed[] = "the GPU server's answer is malformed: it is of another version";

TEST(AskForPieces, AsksBehindEachPieceUntilTheLast) {
  Answers answers({Piece({1, 2}, 2), Piece({}, 7), Piece({9}, 0), Piece({10}, 0)});
  const Asked asked = Ask(&answers);
  EXPECT_TRUE(asked.status.ok()) << asked.status.message();
  EXPECT_EQ(asked.addresses, (std::vector<uint64_t>{1, 2, 9}));
  EXPECT_EQ(answers.after, (std::vector<uint64_t>{0, 2, 7}));
}

TEST(AskForPieces, StopsWhereTheCallerHasEnough) {
  Answers answers({Piece({1, 2}, 2), Piece({3}, 3)});
  const Asked asked = Ask(&answers, 2);
  EXPECT_TRUE(asked.status.ok()) << asked.status.message();
  EXPECT_EQ(answers.after.size(), 1u);
}

TEST(AskForPieces, AListThatGoesBackIsMalformed) {
  Answers answers({Piece({1, 2}, 2), Piece({1, 2}, 2)});
  const Asked asked = Ask(&answers);
  EXPECT_EQ(asked.status.code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(asked.status.message(), kMalformed);
  agent::SideAnswer nonsense;
  nonsense.message = "\xff\xff\xff";
  Answers unreadable({nonsense});
  EXPECT_EQ(Ask(&unreadable).status.message(), kMalformed);
}

TEST(AskForPieces, SaysWhatTheServerRefusesAndThatItIsGone) {
  agent::SideAnswer refusal;
  refusal.result = 801;
  Answers refuses({Piece({1}, 1), refusal});
  const Asked refused = Ask(&refuses);
  EXPECT_EQ(refused.status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(refused.refused, 801u);
  EXPECT_EQ(refused.status.message().find("the GPU server could not list its memory: CUDA_ERROR_NOT_SUPPORTED"), 0u)
      << refused.status.message();
  Answers gone({Piece({1}, 1)});
  const Asked lost = Ask(&gone);
  EXPECT_EQ(lost.status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(lost.refused, 0u);
  EXPECT_EQ(lost.status.message(), "gone");
}

}  // namespace
}  // namespace cuda_remote::checkpoint
