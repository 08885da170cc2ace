// SPDX-License-Identifier: Apache-2.0
// The generated codecs of small messages against libprotobuf, and their limits.
#include <gtest/gtest.h>

#include "proto/channel/handshake.gen.h"
#include "proto/codec/testing/random_messages.h"
#include "proto/nvml/query.gen.h"

namespace cuda_remote {
namespace {

TEST(SmallMessages, Handshake) {
  wire::MessageFile file("proto/channel/handshake.descriptors");
  wire::CompareWithLibprotobuf<Hello>(&file, "cuda_remote.Hello", &EncodeHello, &DecodeHello);
  wire::CompareWithLibprotobuf<Welcome>(&file, "cuda_remote.Welcome", &EncodeWelcome, &DecodeWelcome);
  wire::CompareWithLibprotobuf<Tag>(&file, "cuda_remote.Tag", &EncodeTag, &DecodeTag);
  wire::CompareWithLibprotobuf<End>(&file, "cuda_remote.End", &EncodeEnd, &DecodeEnd);
}

TEST(SmallMessages, Questions) {
  wire::MessageFile file("proto/nvml/query.descriptors");
  wire::CompareWithLibprotobuf<nvml::Question>(&file, "cuda_remote.nvml.Question", &nvml::EncodeQuestion,
                                               &nvml::DecodeQuestion, "call");
  wire::CompareWithLibprotobuf<nvml::Answer>(&file, "cuda_remote.nvml.Answer", &nvml::EncodeAnswer,
                                             &nvml::DecodeAnswer);
}

TEST(SmallMessages, WhatIsNotInTheBytesIsZero) {
  // Though a new struct begins with other values.
  Hello hello;
  EXPECT_EQ(hello.wire_version, kWireVersion);
  EXPECT_EQ(hello.gpu, -1);
  ASSERT_TRUE(DecodeHello("", &hello));
  EXPECT_EQ(hello.wire_version, 0u);
  EXPECT_EQ(hello.gpu, 0);
  nvml::Answer answer;
  EXPECT_EQ(answer.result, nvml::kUnknownError);
  ASSERT_TRUE(nvml::DecodeAnswer("", &answer));
  EXPECT_EQ(answer.result, nvml::kSuccess);
}

TEST(SmallMessages, ATextThatIsTooLongIsCutByTheSenderAndRefusedByTheReceiver) {
  Welcome welcome, got;
  welcome.error = std::string(kMaxHandshakeString + 5, 'e');
  std::string bytes;
  EncodeWelcome(welcome, &bytes);
  ASSERT_TRUE(DecodeWelcome(bytes, &got));
  EXPECT_EQ(got.error, std::string(kMaxHandshakeString, 'e'));
  bytes.clear();
  wire::PutBytes(&bytes, 5, welcome.error);
  EXPECT_FALSE(DecodeWelcome(bytes, &got));
}

TEST(SmallMessages, OnlyKnownNumbersArePacketTypes) {
  EXPECT_TRUE(IsPacketType(1));
  EXPECT_TRUE(IsPacketType(9));
  EXPECT_TRUE(IsPacketType(23));
  for (const uint32_t number : {0u, 10u, 15u, 24u, 0xffffffffu}) EXPECT_FALSE(IsPacketType(number)) << number;
}

}  // namespace
}  // namespace cuda_remote
