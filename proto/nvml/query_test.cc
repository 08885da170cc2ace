// SPDX-License-Identifier: Apache-2.0
#include "proto/nvml/query.h"

#include <gtest/gtest.h>
#include <string.h>

#include <random>
#include <set>

#include "proto/codec/wire.h"

namespace cuda_remote::nvml {
namespace {

TEST(Query, QuestionAndAnswerComeBack) {
  Question question;
  question.pid = 4711;
  question.gpu = -1;
  question.call = kFieldValues;
  question.device = 3;
  question.a = 7;
  question.b = 0xffffffff;
  question.input = std::string("\0\1\2\3", 4);
  std::string bytes;
  EncodeQuestion(question, &bytes);
  Question got;
  ASSERT_TRUE(DecodeQuestion(bytes, &got));
  EXPECT_EQ(got.wire_version, kWireVersion);
  EXPECT_EQ(got.pid, 4711u);
  EXPECT_EQ(got.gpu, -1);
  EXPECT_EQ(got.call, question.call);
  EXPECT_EQ(got.device, 3u);
  EXPECT_EQ(got.a, 7u);
  EXPECT_EQ(got.b, 0xffffffffu);
  EXPECT_EQ(got.input, question.input);

  Answer answer;
  answer.result = kGpuIsLost;
  answer.output = std::string(1000, 'x');
  answer.error = "why";
  bytes.clear();
  EncodeAnswer(answer, &bytes);
  Answer back;
  ASSERT_TRUE(DecodeAnswer(bytes, &back));
  EXPECT_EQ(back.result, kGpuIsLost);
  EXPECT_EQ(back.output, answer.output);
  EXPECT_EQ(back.error, "why");
}

TEST(Query, WhatIsBeyondTheLimitsIsRefused) {
  Question question, got;
  std::string bytes;
  EncodeQuestion(question, &bytes);
  EXPECT_FALSE(DecodeQuestion(bytes, &got)) << "no call";
  question.call = std::string(kMaxNameBytes + 1, 'n');
  bytes.clear();
  EncodeQuestion(question, &bytes);
  EXPECT_FALSE(DecodeQuestion(bytes, &got)) << "long name";
  question.call = kCount;
  question.input = std::string(kMaxInputBytes + 1, 'n');
  bytes.clear();
  EncodeQuestion(question, &bytes);
  EXPECT_FALSE(DecodeQuestion(bytes, &got)) << "long input";
  Answer answer, back;
  answer.output = std::string(kMaxOutputBytes + 1, 'n');
  bytes.clear();
  EncodeAnswer(answer, &bytes);
  EXPECT_FALSE(DecodeAnswer(bytes, &back)) << "long output";
}

TEST(Query, RandomBytesDoNoHarm) {
  std::mt19937_64 random(1);
  for (int round = 0; round < 20000; ++round) {
    std::string bytes(random() % 64, 0);
    for (char& c : bytes) c = char(random());
    Question question;
    Answer answer;
    DecodeQuestion(bytes, &question);
    DecodeAnswer(bytes, &answer);
    EXPECT_LE(question.input.size(), kMaxInputBytes);
    EXPECT_LE(answer.output.size(), kMaxOutputBytes);
  }
}

TEST(Calls, AreWellFormed) {
  std::set<std::string> names;
  int count = 0;
  for (const Call* call = AllCalls(); call->name; ++call, ++count) {
    EXPECT_TRUE(names.insert(call->name).second) << call->name << " twice";
    EXPECT_EQ(strncmp(call->name, "nvml", 4), 0) << call->name;
    EXPECT_LE(strlen(call->name), kMaxNameBytes);
    EXPECT_EQ(FindCall(call->name), call);
    // A device, the inputs and the results must fit into six registers.
    int arguments = (call->system ? 0 : 1) + call->inputs;
    for (const uint16_t bytes : call->bytes) arguments += bytes != 0;
    EXPECT_LE(arguments, 6) << call->name;
    if (call->shape == Call::kText) {
      EXPECT_EQ(call->output_bytes(), 0u) << call->name;
    } else {
      const bool check_only = strcmp(call->name, "nvmlDeviceValidateInforom") == 0;
      EXPECT_EQ(call->output_bytes() == 0, check_only) << call->name;
    }
  }
  EXPECT_GT(count, 100);
  EXPECT_EQ(FindCall("nvmlDeviceSetComputeMode"), nullptr);
  EXPECT_EQ(FindCall(""), nullptr);
}

TEST(Calls, KnowTheirStructVersions) {
  const Call* const fabric = FindCall("nvmlDeviceGetGpuFabricInfoV");
  ASSERT_NE(fabric, nullptr);
  // The documented version words: size | version << 24.
  EXPECT_EQ(fabric->StructBytes(0x02000024), 36u);
  EXPECT_EQ(fabric->StructBytes(0x03000028), 40u);
  EXPECT_EQ(fabric->StructBytes(0x01000024), 0u);
  EXPECT_EQ(fabric->StructBytes(0x02000028), 0u);
  EXPECT_EQ(fabric->StructBytes(2), 0u);
  EXPECT_EQ(FindCall("nvmlDeviceGetMemoryInfo_v2")->StructBytes(0x02000028), 40u);
  EXPECT_EQ(FindCall("nvmlDeviceGetTemperatureV")->StructBytes(0x0100000c), 12u);
}

}  // namespace
}  // namespace cuda_remote::nvml
