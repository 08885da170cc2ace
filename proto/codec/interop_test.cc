// SPDX-License-Identifier: Apache-2.0
// Our codec against libprotobuf: for every message of proto/calls, what libprotobuf writes we read, and what we write
// libprotobuf reads, with the same contents; and no bytes, however broken, do any harm.
#include <google/protobuf/descriptor.h>
#include <google/protobuf/descriptor.pb.h>
#include <google/protobuf/dynamic_message.h>
#include <google/protobuf/util/message_differencer.h>
#include <gtest/gtest.h>

#include <fstream>
#include <memory>
#include <random>
#include <string>

#include "proto/codec/interop.h"
#include "proto/codec/operations.gen.h"
#include "proto/codec/stream.gen.h"
#include "proto/codec/wire.h"

namespace cuda_remote::wire {
namespace {

namespace pb = google::protobuf;
using Field = pb::FieldDescriptor;

class InteropTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::ifstream file("proto/codec/calls.descriptors", std::ios::binary);
    pb::FileDescriptorSet set;
    ASSERT_TRUE(set.ParseFromIstream(&file));
    for (const pb::FileDescriptorProto& proto : set.file()) ASSERT_NE(pool_.BuildFile(proto), nullptr) << proto.name();
  }

  const pb::Descriptor* Find(const std::string& name) {
    return pool_.FindMessageTypeByName("cuda_remote.calls." + name);
  }

  uint64_t Number() {
    switch (random_() % 4) {
      case 0: return 0;
      case 1: return random_() % 256;
      case 2: return ~uint64_t(0);
      default: return random_();
    }
  }

  std::string Bytes(bool text) {
    std::string out(random_() % 40, '\0');
    for (char& c : out) c = text ? char('a' + random_() % 26) : char(random_());
    return out;
  }

  // Fills about two thirds of the fields with anything that fits.
  void Fill(pb::Message* message, int depth) {
    const pb::Reflection* r = message->GetReflection();
    for (int i = 0; i < message->GetDescriptor()->field_count(); ++i) {
      const Field* f = message->GetDescriptor()->field(i);
      if (random_() % 3 == 0) continue;
      const int times = f->is_repeated() ? int(random_() % 5) : 1;
      for (int t = 0; t < times; ++t) {
#define PUT(type, value) f->is_repeated() ? r->Add##type(message, f, value) : r->Set##type(message, f, value)
        switch (f->cpp_type()) {
          case Field::CPPTYPE_BOOL: PUT(Bool, random_() % 2); break;
          case Field::CPPTYPE_INT32: PUT(Int32, int32_t(Number())); break;
          case Field::CPPTYPE_INT64: PUT(Int64, int64_t(Number())); break;
          case Field::CPPTYPE_UINT32: PUT(UInt32, uint32_t(Number())); break;
          case Field::CPPTYPE_UINT64: PUT(UInt64, Number()); break;
          case Field::CPPTYPE_FLOAT: PUT(Float, float(int32_t(random_())) / 7); break;
          case Field::CPPTYPE_DOUBLE: PUT(Double, double(int64_t(random_())) / 7); break;
          case Field::CPPTYPE_STRING: PUT(String, Bytes(f->type() == Field::TYPE_STRING)); break;
          case Field::CPPTYPE_MESSAGE:
            if (depth < 3) Fill(f->is_repeated() ? r->AddMessage(message, f) : r->MutableMessage(message, f), depth + 1);
            // To the codec an empty one is none.
            if (!f->is_repeated() && r->GetMessage(*message, f).ByteSizeLong() == 0) r->ClearField(message, f);
            break;
          default: FAIL() << "a field type that no message should have";
        }
#undef PUT
      }
    }
  }

  pb::DescriptorPool pool_;
  pb::DynamicMessageFactory factory_;
  std::mt19937_64 random_{20240611};
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
      EXPECT_TRUE(pb::util::MessageDifferencer::Equals(*message, *back))
          << kMessages[i].name << "\n" << message->DebugString() << "\nbecame\n" << back->DebugString();
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
      std::string bad = good + Bytes(false);
      for (int flips = 0; flips < 3 && !bad.empty(); ++flips) bad[random_() % bad.size()] ^= char(1 << random_() % 8);
      ignored.clear();
      kMessages[i].round_trip(bad, &ignored);
    }
  }
}

TEST(WireTest, RefusesWhatIsMalformed) {
  cuStreamCreate_Request m;
  EXPECT_TRUE(m.Decode(""));
  EXPECT_FALSE(m.Decode(std::string("\x08", 1)));                        // tag without value
  EXPECT_FALSE(m.Decode(std::string("\x08\xff\xff\xff\xff\xff\xff\xff\xff\xff\x7f", 11)));  // varint of more than 64 bits
  EXPECT_FALSE(m.Decode(std::string("\x10\xff\xff\xff\xff\x1f", 6)));    // more than 32 bits for a uint32
  EXPECT_FALSE(m.Decode(std::string("\x0a\x01\x00", 3)));                // wrong wire type for field 1
  EXPECT_FALSE(m.Decode(std::string("\x00\x00", 2)));                    // field number 0
  EXPECT_FALSE(m.Decode(std::string("\x7b\x7c", 2)));                    // a group
  EXPECT_FALSE(m.Decode(std::string("\x7a\x05\x00", 3)));                // unknown field longer than the message
  EXPECT_TRUE(m.Decode(std::string("\x7a\x01\x00\x10\x07", 5)));         // unknown field skipped
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
