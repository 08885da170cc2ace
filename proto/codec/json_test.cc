// SPDX-License-Identifier: Apache-2.0
#include "proto/codec/json.h"

#include <limits>

#include "gtest/gtest.h"

namespace cuda_remote {
namespace {

TEST(JsonWriter, SeparatesMembersAndElements) {
  JsonWriter json;
  json.Begin('{');
  json.Member("a", 1);
  json.Begin("b", '[');
  json.Value("x");
  json.Value(true);
  json.Begin('{');
  json.End('}');
  json.End(']');
  json.HexMember("c", 0xffffffffffffffff);
  json.Member("d", std::numeric_limits<int64_t>::min());
  json.End('}');
  EXPECT_EQ(json.text(), R"({"a":1,"b":["x",true,{}],"c":"0xffffffffffffffff","d":-9223372036854775808})");
}

TEST(JsonWriter, SpacedWithLines) {
  JsonWriter json(JsonWriter::kSpaced);
  json.Begin('{');
  json.Member("a", false);
  json.Begin("b", '[');
  for (int i = 0; i < 2; ++i) {
    json.Line(2);
    json.Value(i);
  }
  json.End(']');
  json.End('}');
  EXPECT_EQ(json.text(), "{\"a\": false, \"b\": [\n  0,\n  1]}");
}

// Names that somebody else chose stay inside their quotes, as keys and as values.
TEST(JsonWriter, HostileNames) {
  JsonWriter json;
  const std::string name("\",\"x\":\"\\\n\r\t\0\x1f\xff\xc3\x28\xed\xa0\x80", 19);
  json.Begin('{');
  json.Member(name, name);
  json.End('}');
  const std::string quoted = R"("\",\"x\":\"\\\u000a\u000d\u0009\u0000\u001f\u00ff\u00c3(\u00ed\u00a0\u0080")";
  EXPECT_EQ(json.text(), "{" + quoted + ":" + quoted + "}");
}

TEST(JsonWriter, Reals) {
  JsonWriter json;
  json.Begin('[');
  json.Real(0.1, 3);
  json.Real(-1234567.8916, 3);
  json.Real(std::numeric_limits<double>::infinity(), 3);
  json.Real(std::numeric_limits<double>::quiet_NaN(), 3);
  json.End(']');
  EXPECT_EQ(json.text(), "[0.100,-1234567.892,null,null]");
  json.Take();
  json.Real(std::numeric_limits<double>::max(), 6);
  EXPECT_EQ(json.text().size(), 1u + 309 + 7);
}

TEST(JsonWriter, Thousandths) {
  JsonWriter json;
  json.Begin('[');
  for (const uint64_t value : {uint64_t{0}, uint64_t{12}, uint64_t{123456}, ~uint64_t{0}}) json.Thousandths(value);
  json.End(']');
  EXPECT_EQ(json.text(), "[0.000,0.012,123.456,18446744073709551.615]");
}

TEST(JsonWriter, PiecesMakeOneText) {
  JsonWriter json;
  json.Begin('[');
  std::string all;
  for (int i = 0; i < 3; ++i) {
    json.Value(i);
    all += json.Take();
  }
  json.End(']');
  EXPECT_EQ(all + json.text(), "[0,1,2]");
}

}  // namespace
}  // namespace cuda_remote
