// SPDX-License-Identifier: Apache-2.0
// Writes JSON text. The caller keeps objects and arrays balanced; names and texts may hold any bytes.
//
// This header is part of the client library: no libprotobuf, no abseil. Numbers do not depend on the program's locale.
#ifndef CUDA_REMOTE_PROTO_CODEC_JSON_H_
#define CUDA_REMOTE_PROTO_CODEC_JSON_H_

#include <charconv>
#include <cmath>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>

#include "proto/base/text.h"
#include "proto/codec/text.h"

namespace cuda_remote {

class JsonWriter {
 public:
  // Of docs/json.md. Rises when a field changes its meaning or is no longer there, and not for new fields.
  static constexpr int kOutputVersion = 1;
  enum Style { kCompact, kSpaced };  // spaced: a blank after commas and colons
  explicit JsonWriter(Style style = kCompact) : spaced_(style == kSpaced) {}

  // The beginning of what a tool prints with --json: one object, whose fields docs/json.md lists.
  void BeginOutput() {
    Begin('{');
    Member("version", kOutputVersion);
  }
  void Begin(char bracket) {
    Separate();
    text_ += bracket;
    fresh_ = true;
  }
  void Begin(std::string_view key, char bracket) {
    Key(key);
    Begin(bracket);
  }
  void End(char bracket) {
    text_ += bracket;
    fresh_ = false;
  }
  // What comes next stands on a line of its own, `indent` blanks from its beginning.
  void Line(size_t indent = 0) {
    if (!fresh_) text_ += ',';
    text_ += '\n';
    text_.append(indent, ' ');
    fresh_ = true;
  }
  void Key(std::string_view key) {
    Separate();
    text_ += JsonQuoted(key);
    text_ += spaced_ ? ": " : ":";
    fresh_ = true;
  }

  // Values. A number above 2^53 is no number in JSON for most readers: addresses and handles are texts (Hex).
  void Value(std::string_view text) {
    Separate();
    text_ += JsonQuoted(text);
  }
  void Value(const std::string& text) { Value(std::string_view(text)); }
  void Value(const char* text) { Value(std::string_view(text)); }
  template <typename T, typename = std::enable_if_t<std::is_integral_v<T>>>
  void Value(T value) {
    Separate();
    if constexpr (std::is_same_v<T, bool>) {
      text_ += value ? "true" : "false";
    } else {
      text_ += std::to_string(value);
    }
  }
  void Hex(uint64_t value) { Value(cuda_remote::Hex(value)); }
  // JSON has no infinities: null.
  void Real(double value, int decimals) {
    Separate();
    char digits[400];  // the longest double has 309 digits before the point
    const auto end = std::to_chars(digits, digits + sizeof(digits), value, std::chars_format::fixed, decimals);
    if (!std::isfinite(value) || end.ec != std::errc()) {
      text_ += "null";
    } else {
      text_.append(digits, end.ptr);
    }
  }

  // `value` / 1000 with all of its digits.
  void Thousandths(uint64_t value) {
    Separate();
    const std::string rest = std::to_string(value % 1000);
    text_ += std::to_string(value / 1000) + '.' + std::string(3 - rest.size(), '0') + rest;
  }

  // A key and its value.
  template <typename T>
  void Member(std::string_view key, const T& value) {
    Key(key);
    Value(value);
  }
  // A key and its value, unless the value is 0, false or empty: a reader takes what is not there as unknown.
  template <typename T>
  void MemberIf(std::string_view key, const T& value) {
    if (value != T()) Member(key, value);
  }
  void HexMember(std::string_view key, uint64_t value) {
    Key(key);
    Hex(value);
  }
  void RealMember(std::string_view key, double value, int decimals) {
    Key(key);
    Real(value, decimals);
  }

  const std::string& text() const { return text_; }
  // For long files, written piece by piece: what there is so far, which is forgotten here.
  std::string Take() {
    std::string taken;
    taken.swap(text_);
    return taken;
  }

 private:
  void Separate() {
    if (!fresh_) text_ += spaced_ ? ", " : ",";
    fresh_ = false;
  }

  const bool spaced_;
  std::string text_;
  bool fresh_ = true;
};

}  // namespace cuda_remote

#endif  // CUDA_REMOTE_PROTO_CODEC_JSON_H_
