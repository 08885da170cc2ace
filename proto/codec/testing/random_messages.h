// SPDX-License-Identifier: Apache-2.0
// Messages with random contents, and the comparison of a codec with libprotobuf. For tests.
#ifndef CUDA_REMOTE_PROTO_CODEC_TESTING_RANDOM_MESSAGES_H_
#define CUDA_REMOTE_PROTO_CODEC_TESTING_RANDOM_MESSAGES_H_

#include <google/protobuf/descriptor.h>
#include <google/protobuf/descriptor.pb.h>
#include <google/protobuf/dynamic_message.h>
#include <google/protobuf/message.h>
#include <google/protobuf/util/message_differencer.h>
#include <gtest/gtest.h>

#include <fstream>
#include <memory>
#include <random>
#include <string>
#include <string_view>

#include "proto/codec/wire.h"

namespace cuda_remote::wire {

class RandomMessages {
 public:
  explicit RandomMessages(uint64_t seed) : random_(seed) {}

  uint64_t Below(uint64_t limit) { return random_() % limit; }
  uint64_t Number() {
    switch (random_() % 4) {
      case 0:
        return 0;
      case 1:
        return random_() % 256;
      case 2:
        return ~uint64_t(0);
      default:
        return random_();
    }
  }
  std::string Bytes(bool text) {
    std::string out(random_() % 40, '\0');
    for (char& c : out) c = text ? char('a' + random_() % 26) : char(random_());
    return out;
  }

  // Fills about two thirds of the fields with anything that fits. False if there is a field of a type that no message
  // should have.
  bool Fill(google::protobuf::Message* message, int depth) {
    using Field = google::protobuf::FieldDescriptor;
    const google::protobuf::Reflection* r = message->GetReflection();
    for (int i = 0; i < message->GetDescriptor()->field_count(); ++i) {
      const Field* f = message->GetDescriptor()->field(i);
      if (random_() % 3 == 0) continue;
      const int times = f->is_repeated() ? int(random_() % 5) : 1;
      for (int t = 0; t < times; ++t) {
#define PUT(type, value) f->is_repeated() ? r->Add##type(message, f, value) : r->Set##type(message, f, value)
        switch (f->cpp_type()) {
          case Field::CPPTYPE_BOOL:
            PUT(Bool, random_() % 2);
            break;
          case Field::CPPTYPE_INT32:
            PUT(Int32, int32_t(Number()));
            break;
          case Field::CPPTYPE_INT64:
            PUT(Int64, int64_t(Number()));
            break;
          case Field::CPPTYPE_UINT32:
            PUT(UInt32, uint32_t(Number()));
            break;
          case Field::CPPTYPE_UINT64:
            PUT(UInt64, Number());
            break;
          case Field::CPPTYPE_FLOAT:
            PUT(Float, float(int32_t(random_())) / 7);
            break;
          case Field::CPPTYPE_DOUBLE:
            PUT(Double, double(int64_t(random_())) / 7);
            break;
          case Field::CPPTYPE_STRING:
            PUT(String, Bytes(f->type() == Field::TYPE_STRING));
            break;
          case Field::CPPTYPE_MESSAGE:
            if (depth < 3 &&
                !Fill(f->is_repeated() ? r->AddMessage(message, f) : r->MutableMessage(message, f), depth + 1)) {
              return false;
            }
            // To the codec an empty one is none.
            if (!f->is_repeated() && r->GetMessage(*message, f).ByteSizeLong() == 0) r->ClearField(message, f);
            break;
          default:
            return false;
        }
#undef PUT
      }
    }
    return true;
  }

 private:
  std::mt19937_64 random_;
};

// The messages of one .proto file, as protoc described them in `descriptors`.
class MessageFile {
 public:
  explicit MessageFile(const std::string& descriptors) {
    std::ifstream file(descriptors, std::ios::binary);
    google::protobuf::FileDescriptorSet set;
    EXPECT_TRUE(set.ParseFromIstream(&file)) << descriptors;
    for (const auto& one : set.file()) EXPECT_NE(pool_.BuildFile(one), nullptr) << one.name();
  }

  std::unique_ptr<google::protobuf::Message> New(const std::string& name) {
    const google::protobuf::Descriptor* const type = pool_.FindMessageTypeByName(name);
    EXPECT_NE(type, nullptr) << name;
    return std::unique_ptr<google::protobuf::Message>(factory_.GetPrototype(type)->New());
  }

 private:
  google::protobuf::DescriptorPool pool_;
  google::protobuf::DynamicMessageFactory factory_;
};

// Compares the codec of the struct T with libprotobuf's of the message `name`: what libprotobuf writes the codec reads,
// and the other way round, with the same contents. Cut or damaged bytes are refused by both or by none; a field of
// another wire type is refused, and a field that nobody knows is skipped. `needed`: a text that may not be empty.
template <typename T>
void CompareWithLibprotobuf(MessageFile* file, const std::string& name, void (*encode)(const T&, std::string*),
                            bool (*decode)(std::string_view, T*), const std::string& needed = "") {
  SCOPED_TRACE(name);
  RandomMessages random(20261123);
  for (int round = 0; round < 300; ++round) {
    const auto message = file->New(name), back = file->New(name);
    ASSERT_TRUE(random.Fill(message.get(), 0));
    if (!needed.empty()) {
      message->GetReflection()->SetString(message.get(), message->GetDescriptor()->FindFieldByName(needed), "needed");
    }
    const std::string theirs = message->SerializeAsString();
    T ours;
    ASSERT_TRUE(decode(theirs, &ours)) << message->DebugString();
    std::string bytes;
    encode(ours, &bytes);
    ASSERT_TRUE(back->ParseFromString(bytes));
    EXPECT_TRUE(google::protobuf::util::MessageDifferencer::Equals(*message, *back))
        << message->DebugString() << "\nbecame\n"
        << back->DebugString();
    std::string unknown = theirs;
    PutUint(&unknown, 1000, 5);
    PutBytes(&unknown, 1001, "of a newer release");
    T same;
    ASSERT_TRUE(decode(unknown, &same));
    std::string again;
    encode(same, &again);
    EXPECT_EQ(again, bytes);
    if (!needed.empty()) continue;
    for (size_t length = 0; length < theirs.size(); ++length) {
      const std::string cut = theirs.substr(0, length);
      EXPECT_EQ(decode(cut, &same), back->ParseFromString(cut)) << "cut to " << length << " bytes";
    }
    for (int i = 0; i < message->GetDescriptor()->field_count(); ++i) {
      const auto* const field = message->GetDescriptor()->field(i);
      const auto number = uint32_t(field->number());
      std::string wrong = theirs;
      if (field->cpp_type() == google::protobuf::FieldDescriptor::CPPTYPE_STRING ||
          field->cpp_type() == google::protobuf::FieldDescriptor::CPPTYPE_MESSAGE) {
        PutUint(&wrong, number, 7);
      } else {
        PutFloat(&wrong, number, 7);
      }
      EXPECT_FALSE(decode(wrong, &same)) << field->name() << " with another wire type";
    }
  }
}

}  // namespace cuda_remote::wire

#endif  // CUDA_REMOTE_PROTO_CODEC_TESTING_RANDOM_MESSAGES_H_
