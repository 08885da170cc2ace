// SPDX-License-Identifier: Apache-2.0
// Our codec against libprotobuf: for every message of proto/calls, what libprotobuf writes we read, and what we write
// libprotobuf reads, with the same contents; and no bytes, however broken, do any harm.
#include "proto/codec/interop.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/descriptor.pb.h>
#include <google/protobuf/dynamic_message.h>
#include <google/protobuf/util/message_differencer.h>
#include <gtest/gtest.h>

#include <fstream>
#include <memory>
#include <string>

#include "proto/codec/operations.gen.h"
#include "proto/codec/stream.gen.h"
#include "proto/codec/testing/random_messages.h"
#include "proto/codec/wire.h"

namespace cuda_remote::wire {
namespace {

namespace pb = google::protobuf;

class InteropTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::ifstream file("proto/codec/calls.descriptors", std::ios::binary);
    pb::FileDescriptorSet set;
    ASSERT_TRUE(set.ParseFromIstream(&file));
    for (const pb::FileDescriptorProto& proto : set.file()) ASSERT_NE(pool_.BuildFile(proto), nullptr) << proto.name();
  }

  void Fill(pb::Message* message, int depth) {
    ASSERT_TRUE(random_.Fill(message, depth)) << message->GetTypeName() << ": a field type that no message should have";
  }

  const pb::Descriptor* Find(const std::string& name) {
    return pool_.FindMessageTypeByName("cuda_remote.calls." + name);
  }

  pb::DescriptorPool pool_;
  pb::DynamicMessageFactory factory_;
  RandomMessages random_{20240611};
};

TEST_F(InteropTest, EveryMessageHasItsDefinition) {
  ASSERT_GT(kMessageCount, 400u);
  for (size_t i = 0; i < kMessageCount; ++i) EXPECT_NE(Find(kMessages[i].name), nullptr) << kMessages[i].name;
}

TEST_F(InteropTest, RoundTripsWithLibprotobuf) {
  for (size_t i = 0; i < kMessageCount; ++i) {
    const pb::Descriptor* descriptor = Find(kMessages[i].name);
    ASSERT_NE(descriptor, nullptr) << kMessages[i].name;
    for (int round = 0; round < 8; ++round) {
      std::unique_ptr<pb::Message> message(factory_.GetPrototype(descriptor)->New());
      Fill(message.get(), 0);
      const std::string theirs = message->SerializeAsString();
      std::string ours;
      ASSERT_TRUE(kMessages[i].round_trip(theirs, &ours)) << kMessages[i].name << "\n" << message->DebugString();
      std::unique_ptr<pb::Message> back(factory_.GetPrototype(descriptor)->New());
      ASSERT_TRUE(back->ParseFromString(ours)) << kMessages[i].name;
      EXPECT_TRUE(pb::util::MessageDifferencer::Equals(*message, *back)) << kMessages[i].name << "\n"
                                                                         << message->DebugString() << "\nbecame\n"
                                                                         << back->DebugString();
    }
  }
}

TEST_F(InteropTest, BrokenBytesDoNoHarm) {
  for (size_t i = 0; i < kMessageCount; ++i) {
    std::unique_ptr<pb::Message> message(factory_.GetPrototype(Find(kMessages[i].name))->New());
    Fill(message.get(), 0);
    const std::string good = message->SerializeAsString();
    std::string ignored;
    for (size_t length = 0; length < good.size(); ++length) kMessages[i].round_trip(good.substr(0, length), &ignored);
    for (int round = 0; round < 20; ++round) {
      std::string bad = good + random_.Bytes(false);
      for (int flips = 0; flips < 3 && !bad.empty(); ++flips)
        bad[random_.Below(bad.size())] ^= char(1 << random_.Below(8));
      ignored.clear();
      kMessages[i].round_trip(bad, &ignored);
    }
  }
}

TEST(WireTest, RefusesWhatIsMalformed) {
  cuStreamCreate_Request m;
  EXPECT_TRUE(m.Decode(""));
  EXPECT_FALSE(m.Decode(std::string("\x08", 1)));  // tag without value
  EXPECT_FALSE(
      m.Decode(std::string("\x08\xff\xff\xff\xff\xff\xff\xff\xff\xff\x7f", 11)));  // varint of more than 64 bits
  EXPECT_FALSE(m.Decode(std::string("\x10\xff\xff\xff\xff\x1f", 6)));              // more than 32 bits for a uint32
  EXPECT_FALSE(m.Decode(std::string("\x0a\x01\x00", 3)));                          // wrong wire type for field 1
  EXPECT_FALSE(m.Decode(std::string("\x00\x00", 2)));                              // field number 0
  EXPECT_FALSE(m.Decode(std::string("\x7b\x7c", 2)));                              // a group
  EXPECT_FALSE(m.Decode(std::string("\x7a\x05\x00", 3)));         // unknown field longer than the message
  EXPECT_TRUE(m.Decode(std::string("\x7a\x01\x00\x10\x07", 5)));  // unknown field skipped
  EXPECT_EQ(m.Flags, 7u);
}

TEST(WireTest, NestedMessagesAreBounded) {
  OpSessionInfo_Reply m;
  EXPECT_FALSE(m.Decode(std::string("\x12\x05\x0a\x10\x41\x41\x41", 7)));  // inner string longer than the inner message
}

TEST(WireTest, DefaultsTakeNoBytes) {
  std::string out;
  cuStreamCreate_Request{}.Encode(&out);
  EXPECT_TRUE(out.empty());
}

}  // namespace
}  // namespace cuda_remote::wire
