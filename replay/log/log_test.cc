// SPDX-License-Identifier: Apache-2.0
// Tests of the replay log.
#include "replay/log/log.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <iterator>
#include <random>
#include <set>

#include "proto/base/testing/value_of.h"
#include "replay/log/log.pb.h"

namespace cuda_remote::replay {
namespace {

FrameHeader Frame(uint32_t call, uint32_t context = 0) {
  FrameHeader header;
  header.call = call;
  header.context_or_result = context;
  header.sequence = 99;
  header.flags = kFlagNoReply;
  return header;
}

const ObjectKey kContext{Kind::kContext, 0x10};
const ObjectKey kModule{Kind::kModule, 0x20};
const ObjectKey kFunction{Kind::kFunction, 0x30};
const ObjectKey kStream{Kind::kStream, 0x40};

Log Sample() {
  Log log;
  log.Create(kContext, {}, Frame(1), "context", "reply", std::nullopt);
  log.Create(kModule, {kContext}, Frame(2, 1), "module", "", log.AddImage(std::string(1000, 'i')));
  log.Create(kFunction, {kModule, kContext}, Frame(3, 1), "function", "", std::nullopt);
  log.Create(kStream, {kContext}, Frame(4, 1), "stream", "", std::nullopt);
  log.Modify(kFunction, 8, Frame(5, 1), "carveout");
  log.Modify(kFunction, 9, Frame(5, 1), "shared", {kStream});
  return log;
}

std::vector<std::string> Messages(const Log& log) {
  std::vector<std::string> messages;
  for (const Record* record : log.InOrder()) messages.push_back(record->message);
  return messages;
}

TEST(Log, KeepsRecordsInOrder) {
  const Log log = Sample();
  EXPECT_EQ(Messages(log), (std::vector<std::string>{"context", "module", "function", "stream", "carveout", "shared"}));
  EXPECT_EQ(log.records(), 6u);
  const Record* context = log.Find(kContext);
  ASSERT_NE(context, nullptr);
  EXPECT_EQ(context->reply, "reply");
  EXPECT_EQ(context->header.flags, 0u);
  EXPECT_EQ(context->header.sequence, 0u);
  EXPECT_EQ(context->header.message_bytes, 7u);
  ASSERT_TRUE(log.Find(kModule)->image.has_value());
  EXPECT_EQ(*log.FindImage(*log.Find(kModule)->image), std::string(1000, 'i'));
}

TEST(Log, AMessageIsReplaced) {
  Log log = Sample(), longer;
  const size_t before = log.bytes();
  EXPECT_TRUE(log.SetMessage(kModule, "module and places"));
  EXPECT_GE(log.bytes(), before + strlen(" and places"));
  EXPECT_EQ(Messages(log)[1], "module and places");
  EXPECT_EQ(log.Find(kModule)->header.message_bytes, 17u);
  EXPECT_TRUE(log.Find(kModule)->image.has_value());
  std::string bytes;
  log.Serialize(&bytes);
  longer = ValueOf(Log::Parse(bytes));
  EXPECT_EQ(Messages(longer), Messages(log));
  EXPECT_FALSE(log.SetMessage({Kind::kModule, 99}, "none"));
  log.Destroy(kContext);
  EXPECT_FALSE(log.SetMessage(kModule, "gone"));
  EXPECT_EQ(log.records(), 0u);
}

TEST(Log, AMessageOfASettingIsReplaced) {
  Log log = Sample();
  const size_t before = log.bytes();
  const std::string text(100, 'c');
  EXPECT_TRUE(log.SetSettingMessage(kFunction, 5, 8, text));
  EXPECT_GT(log.bytes(), before);
  EXPECT_EQ(Messages(log)[4], text) << "in its old place";
  EXPECT_EQ(log.FindSetting(kFunction, 5, 8)->header.message_bytes, text.size());
  EXPECT_FALSE(log.SetSettingMessage(kFunction, 5, 10, "another key"));
  EXPECT_FALSE(log.SetSettingMessage({Kind::kFunction, 99}, 5, 8, "another object"));
  log.Destroy(kContext);
  EXPECT_FALSE(log.SetSettingMessage(kFunction, 5, 8, "gone"));
  EXPECT_EQ(log.records(), 0u);
}

TEST(Log, TheLastWriterWins) {
  Log log = Sample();
  log.Modify(kFunction, 8, Frame(5, 1), "carveout 2");
  log.Modify(kFunction, 8, Frame(6, 1), "another call");
  EXPECT_EQ(Messages(log), (std::vector<std::string>{"context", "module", "function", "stream", "shared", "carveout 2",
                                                     "another call"}));
}

TEST(Log, DescendantsGoWithTheirAncestor) {
  Log log = Sample();
  std::vector<ObjectKey> gone = log.Destroy(kModule);
  ASSERT_EQ(gone.size(), 2u);
  EXPECT_EQ(gone[0], kModule);
  EXPECT_EQ(gone[1], kFunction);
  EXPECT_EQ(Messages(log), (std::vector<std::string>{"context", "stream"}));
  EXPECT_EQ(log.images(), 0u);
  EXPECT_TRUE(log.Destroy(kModule).empty());
  log.Destroy(kContext);
  EXPECT_EQ(log.records(), 0u);
  EXPECT_EQ(log.bytes(), 0u);
}

TEST(Log, ASettingGoesWithWhatItNeeds) {
  Log log = Sample();
  EXPECT_EQ(log.Destroy(kStream).size(), 1u);
  EXPECT_EQ(Messages(log), (std::vector<std::string>{"context", "module", "function", "carveout"}));
}

// Unlike others: a graph that has lost a setting is not the graph that was.
TEST(Log, AGraphGoesWithASettingThatItLoses) {
  Log log = Sample();
  const ObjectKey graph{Kind::kGraph, 0x50}, node{Kind::kGraphNode, 0x60};
  log.Create(graph, {}, Frame(7), "graph", "", std::nullopt);
  log.Create(node, {graph}, Frame(8), "node", "", std::nullopt);
  log.Modify(node, 0, Frame(9), "params", {kFunction});
  EXPECT_EQ(log.records(), 9u);
  const std::vector<ObjectKey> gone = log.Destroy(kModule);
  EXPECT_EQ(gone, (std::vector<ObjectKey>{kModule, kFunction, node}));
  EXPECT_EQ(log.Find(node), nullptr);
  EXPECT_NE(log.Find(graph), nullptr);
}

TEST(Log, FindsOneSetting) {
  const Log log = Sample();
  ASSERT_NE(log.FindSetting(kFunction, 5, 8), nullptr);
  EXPECT_EQ(log.FindSetting(kFunction, 5, 8)->message, "carveout");
  EXPECT_EQ(log.FindSetting(kFunction, 6, 8), nullptr);
  EXPECT_EQ(log.FindSetting(kFunction, 5, 7), nullptr);
  EXPECT_EQ(log.FindSetting({Kind::kFunction, 0x999}, 5, 8), nullptr);
}

TEST(Log, FindsAllSettingsOfACall) {
  Log log = Sample();
  log.Modify(kFunction, 0, Frame(5), "first");
  log.Modify(kFunction, ~uint64_t(0), Frame(5), "last");
  log.Modify(kFunction, 0, Frame(4), "another call");
  log.Modify(kFunction, 0, Frame(6), "another call");
  std::set<std::string> messages;
  for (const Record& record : log.SettingsOf(kFunction, 5)) messages.insert(record.message);
  EXPECT_EQ(messages, (std::set<std::string>{"shared", "carveout", "first", "last"}));
  EXPECT_TRUE(log.SettingsOf(kFunction, 7).empty());
  EXPECT_TRUE(log.SettingsOf({Kind::kFunction, 0x999}, 5).empty());
}

TEST(Log, ForgetsOneSetting) {
  Log log = Sample();
  const uint64_t before = log.last_order();
  log.ForgetSetting(kFunction, 5, 8);
  log.ForgetSetting(kFunction, 5, 8);
  log.ForgetSetting(kModule, 5, 8);
  EXPECT_EQ(Messages(log), (std::vector<std::string>{"context", "module", "function", "stream", "shared"}));
  EXPECT_EQ(log.last_order(), before);
}

TEST(Log, DependentsGoAndTheObjectStays) {
  Log log = Sample();
  log.Modify(kContext, 0, Frame(7), "limit");
  std::set<uint64_t> gone;
  for (const ObjectKey& key : log.DestroyDependents(kContext)) gone.insert(key.id);
  EXPECT_EQ(gone, (std::set<uint64_t>{kModule.id, kFunction.id, kStream.id}));
  EXPECT_EQ(Messages(log), (std::vector<std::string>{"context", "limit"}));
  EXPECT_TRUE(log.DestroyDependents(kContext).empty());
  EXPECT_TRUE(log.DestroyDependents(kStream).empty());
}

TEST(Log, NeedsNoRecordOfWhatIsDependedOn) {
  Log log;
  log.Create(kFunction, {kModule}, Frame(3), "function", "", std::nullopt);
  log.Create(kStream, {kModule, kFunction, kFunction}, Frame(3), "stream", "", std::nullopt);
  EXPECT_EQ(log.records(), 2u);
  std::vector<ObjectKey> gone = log.Destroy(kModule);
  EXPECT_EQ(gone.size(), 3u);
  EXPECT_EQ(log.bytes(), 0u);
}

TEST(Log, SettingsOfAnObjectWithoutRecord) {
  Log log;
  log.Modify(kContext, 1, Frame(3), "a");
  log.Modify(kContext, 1, Frame(3), "b", {kStream});
  EXPECT_EQ(Messages(log), (std::vector<std::string>{"b"}));
  log.Destroy(kStream);
  EXPECT_EQ(log.records(), 0u);
  EXPECT_EQ(log.bytes(), 0u);
}

TEST(Log, MakingTheSameAgainChangesNothing) {
  Log log = Sample();
  log.Create(kModule, {kContext}, Frame(2, 1), "module", "", log.AddImage(std::string(1000, 'i')));
  EXPECT_EQ(log.records(), 6u);
  log.Create(kModule, {kContext}, Frame(2, 1), "other", "", log.AddImage(std::string(1000, 'i')));
  EXPECT_EQ(Messages(log), (std::vector<std::string>{"context", "stream", "other"}));
  EXPECT_EQ(log.images(), 1u);
  log.Create(kModule, {kContext}, Frame(2, 1), "other", "", log.AddImage("new image"));
  EXPECT_EQ(log.images(), 1u);
  log.Destroy(kContext);
  EXPECT_EQ(log.bytes(), 0u);
}

TEST(Log, ImagesAreKeptOnceAndGoWithTheirLastUser) {
  Log log;
  const std::string image(5000, 'x');
  for (uint64_t i = 1; i <= 10; ++i) {
    log.Create({Kind::kModule, i << 4}, {}, Frame(2), "module", "", log.AddImage(image));
  }
  EXPECT_EQ(log.images(), 1u);
  const size_t full = log.bytes();
  EXPECT_LT(full, 10000u + 10 * 1000);
  for (uint64_t i = 1; i < 10; ++i) log.Destroy({Kind::kModule, i << 4});
  EXPECT_EQ(log.images(), 1u);
  log.Destroy({Kind::kModule, 10 << 4});
  EXPECT_EQ(log.images(), 0u);
  // A load that failed leaves an image without a user until the next one.
  log.AddImage("abandoned");
  log.AddImage("also abandoned");
  EXPECT_EQ(log.images(), 1u);
  std::string bytes;
  log.Serialize(&bytes);
  Log again = ValueOf(Log::Parse(bytes));
  EXPECT_EQ(again.images(), 0u);
}

// What most of a log is goes before the rest of it.
TEST(Log, ImagesGoBeforeTheRest) {
  Log log = Sample();
  const std::string large(5003, 'x');
  log.Create({Kind::kModule, 0x1000}, {kContext}, Frame(2, 1), "module", "", log.AddImage(large));
  const Images first = log.AllImages();
  std::string images;
  ASSERT_TRUE(WriteImages(first, [&images](std::string_view bytes) {
    images += bytes;
    return true;
  }));
  const Images read = ValueOf(ParseImages(images));
  ASSERT_EQ(read.size(), first.size());
  for (const auto& [hash, bytes] : first) EXPECT_EQ(*read.at(hash), *bytes);
  // Meanwhile one image goes and another one comes.
  log.Destroy({Kind::kModule, 0x1000});
  log.Create({Kind::kModule, 0x2000}, {kContext}, Frame(2, 1), "module", "", log.AddImage("another image"));
  std::set<Hash128> known;
  for (const auto& [hash, bytes] : first) known.insert(hash);
  std::string all, rest, again;
  log.Serialize(&all);
  log.Serialize(&rest, known);
  EXPECT_EQ(rest.find("the image"), std::string::npos);
  EXPECT_NE(rest.find("another image"), std::string::npos);
  Log parsed;
  EXPECT_FALSE(Log::Parse(rest).ok());
  parsed = ValueOf(Log::Parse(rest, read));
  EXPECT_EQ(parsed.bytes(), log.bytes());
  parsed.Serialize(&again);
  EXPECT_EQ(again, all);
  // The reader of a damaged list keeps what it had.
  for (size_t i = 0; i < images.size(); i += i < 200 ? 1 : 97) {
    std::string damaged = images;
    damaged[i] ^= 4;
    EXPECT_FALSE(ParseImages(damaged).ok()) << i;
    const StatusOr<Images> start = ParseImages(images.substr(0, i));
    EXPECT_FALSE(start.ok() && start->size() == first.size()) << i;
  }
  EXPECT_FALSE(ParseImages(images + images).ok());
  EXPECT_FALSE(WriteImages(first, [](std::string_view) { return false; }));
}

TEST(Log, AMillionObjectsLeaveItFlat) {
  Log log = Sample();
  const size_t before = log.bytes();
  size_t most = 0;
  for (uint64_t i = 1; i <= 1000000; ++i) {
    const ObjectKey event{Kind::kEvent, 0x100 + (i << 4)};
    log.Create(event, {kContext}, Frame(8, 1), "event", "", std::nullopt);
    log.Modify(event, 1, Frame(9, 1), "setting", {kStream});
    most = std::max(most, log.bytes());
    log.Destroy(event);
  }
  EXPECT_EQ(log.bytes(), before);
  EXPECT_LT(most, before + 4096);
  EXPECT_EQ(log.records(), 6u);
}

TEST(Log, OneOfVeryManyIsForgottenAtOnce) {
  Log log = Sample();
  std::vector<ObjectKey> events;
  for (uint64_t i = 1; i <= 200000; ++i) {
    events.push_back({Kind::kEvent, 0x100 + (i << 4)});
    log.Create(events.back(), {kContext}, Frame(8, 1), "event", "", std::nullopt);
  }
  std::shuffle(events.begin(), events.end(), std::mt19937(1));
  for (const ObjectKey& event : events) log.Destroy(event);  // quadratic work would take hours
  EXPECT_EQ(log.records(), 6u);
}

TEST(Log, WritesAndReads) {
  const Log log = Sample();
  std::string bytes = "before";
  log.Serialize(&bytes);
  bytes.erase(0, 6);
  Log again = ValueOf(Log::Parse(bytes));
  EXPECT_EQ(Messages(again), Messages(log));
  EXPECT_EQ(again.records(), log.records());
  std::string bytes2;
  again.Serialize(&bytes2);
  EXPECT_EQ(bytes, bytes2);
  // It goes on as the first would have.
  again.Create({Kind::kEvent, 0x50}, {kStream}, Frame(8), "event", "", std::nullopt);
  EXPECT_EQ(Messages(again).back(), "event");
  EXPECT_EQ(again.Destroy(kContext).size(), 5u);
  EXPECT_EQ(again.bytes(), 0u);
}

TEST(Log, AnEmptyLogIsALog) {
  std::string bytes;
  Log().Serialize(&bytes);
  EXPECT_EQ(ValueOf(Log::Parse(bytes)).records(), 0u);
}

TEST(Log, AnyDamageIsFound) {
  std::string bytes;
  Sample().Serialize(&bytes);
  for (size_t i = 0; i < bytes.size(); ++i) {
    for (int bit = 0; bit < 8; ++bit) {
      std::string damaged = bytes;
      damaged[i] ^= char(1 << bit);
      ASSERT_NE(Log::Parse(damaged).status().message(), "") << "byte " << i << " bit " << bit;
    }
    ASSERT_FALSE(Log::Parse(bytes.substr(0, i)).ok()) << "cut at " << i;
  }
  ASSERT_FALSE(Log::Parse(bytes + '\0').ok());
}

TEST(Log, OtherVersionsAreRefusedByNumber) {
  std::string bytes;
  Sample().Serialize(&bytes);
  for (const char version : {1, 3}) {
    bytes[8] = version;
    const std::string error = Log::Parse(bytes).status().message();
    EXPECT_NE(error.find("version " + std::to_string(version)), std::string::npos) << error;
  }
}

// The header at `at` of a log, whose length comes first; moves `at` behind it.
template <typename Message>
Message HeaderAt(const std::string& bytes, size_t* at) {
  uint32_t size = 0;
  memcpy(&size, &bytes[*at], sizeof(size));
  Message message;
  EXPECT_TRUE(message.ParseFromString(bytes.substr(*at + sizeof(size), size)));
  EXPECT_EQ(message.SerializeAsString(), bytes.substr(*at + sizeof(size), size)) << "as libprotobuf writes it";
  *at = (*at + sizeof(size) + size + 7) / 8 * 8;
  return message;
}

TEST(Log, HeadersAreThoseOfTheProtoFile) {
  const Log log = Sample();
  std::string bytes;
  log.Serialize(&bytes);
  size_t at = 12;
  const LogHeader header = HeaderAt<LogHeader>(bytes, &at);
  EXPECT_EQ(header.images(), log.images());
  EXPECT_EQ(header.records(), log.records());
  EXPECT_EQ(header.bytes(), bytes.size());
  for (const auto& [hash, image] : log.AllImages()) {
    const ImageHeader one = HeaderAt<ImageHeader>(bytes, &at);
    EXPECT_EQ(one.bytes(), image->size());
    EXPECT_EQ(memcmp(one.hash().data(), &hash.low, 8), 0);
    EXPECT_EQ(memcmp(one.hash().data() + 8, &hash.high, 8), 0);
    EXPECT_EQ(bytes.substr(at, image->size()), *image);
    at = (at + image->size() + 7) / 8 * 8;
  }
  uint64_t last = 0;
  for (const Record* record : log.InOrder()) {
    const RecordHeader one = HeaderAt<RecordHeader>(bytes, &at);
    EXPECT_EQ(one.kind(), uint32_t(record->object.kind));
    EXPECT_EQ(one.id(), record->object.id);
    EXPECT_EQ(one.modifies(), record->modifies);
    EXPECT_EQ(one.key(), record->key);
    EXPECT_EQ(one.order(), record->order);
    EXPECT_GT(one.order(), last);
    last = one.order();
    EXPECT_EQ(one.image().empty(), !record->image);
    ASSERT_EQ(size_t(one.dependencies_size()), record->depends_on.size());
    for (size_t i = 0; i < record->depends_on.size(); ++i) {
      EXPECT_EQ(one.dependencies(int(i)).kind(), uint32_t(record->depends_on[i].kind));
      EXPECT_EQ(one.dependencies(int(i)).id(), record->depends_on[i].id);
    }
    EXPECT_EQ(one.call(), record->header.call);
    EXPECT_EQ(one.context(), record->header.context_or_result);
    EXPECT_EQ(one.message_bytes(), record->message.size());
    EXPECT_EQ(one.reply_bytes(), record->reply.size());
    EXPECT_EQ(bytes.substr(at, record->message.size()), record->message);
    at = (at + record->message.size() + 7) / 8 * 8;
    EXPECT_EQ(bytes.substr(at, record->reply.size()), record->reply);
    at = (at + record->reply.size() + 7) / 8 * 8;
  }
  EXPECT_GT(header.next_order(), last);
  EXPECT_EQ(at + 16, bytes.size());
}

// Gives bytes that were changed the right trailer.
std::string Sealed(std::string bytes) {
  const Hash128 hash = HashOf(bytes.substr(0, bytes.size() - 16));
  memcpy(&bytes[bytes.size() - 16], &hash.low, 8);
  memcpy(&bytes[bytes.size() - 8], &hash.high, 8);
  return bytes;
}

TEST(Log, HeadersHaveOneForm) {
  std::string bytes;
  Sample().Serialize(&bytes);
  ASSERT_EQ(Sealed(bytes), bytes);
  // Any change of a header is either damage, or another log.
  size_t parsed = 0;
  for (size_t i = 8; i + 16 < bytes.size(); ++i) {
    for (int bit = 0; bit < 8; ++bit) {
      std::string changed = bytes;
      changed[i] ^= char(1 << bit);
      changed = Sealed(changed);
      const StatusOr<Log> log = Log::Parse(changed);
      if (!log.ok()) continue;
      std::string again;
      log->Serialize(&again);
      ASSERT_EQ(again, changed) << "byte " << i << " bit " << bit;
      ++parsed;
    }
  }
  EXPECT_GT(parsed, 0u) << "messages may hold anything";
}

TEST(Log, AnImageIsReplaced) {
  Log log;
  const ObjectKey one{Kind::kModule, 1}, two{Kind::kModule, 2};
  log.Create(one, {}, FrameHeader(), "", "", log.AddImage("first"));
  log.Create(two, {}, FrameHeader(), "", "", log.AddImage("first"));
  const size_t bytes = log.bytes();
  EXPECT_TRUE(log.SetImage(one, "second one"));
  EXPECT_EQ(*log.FindImage(*log.Find(one)->image), "second one");
  EXPECT_EQ(*log.FindImage(*log.Find(two)->image), "first");
  EXPECT_TRUE(log.SetImage(two, "second one"));
  EXPECT_EQ(log.images(), 1u);
  EXPECT_TRUE(log.SetImage(two, "second one"));
  EXPECT_TRUE(log.SetImage(one, "first"));
  EXPECT_TRUE(log.SetImage(two, "first"));
  EXPECT_EQ(log.bytes(), bytes);
  EXPECT_FALSE(log.SetImage({Kind::kModule, 3}, "none"));
  log.Destroy(one);
  log.Destroy(two);
  EXPECT_EQ(log.bytes(), 0u);
}

}  // namespace
}  // namespace cuda_remote::replay
