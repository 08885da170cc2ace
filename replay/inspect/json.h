// Writes JSON text. Just what cr-inspect needs: the caller keeps objects and arrays balanced.
#ifndef CUDA_REMOTE_REPLAY_INSPECT_JSON_H_
#define CUDA_REMOTE_REPLAY_INSPECT_JSON_H_

#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>

#include "proto/codec/text.h"

namespace cuda_remote::replay::inspect {

class Json {
 public:
  void Begin(char bracket) {
    Separate();
    text_ += bracket;
    fresh_ = true;
  }
  void End(char bracket) {
    text_ += bracket;
    fresh_ = false;
  }
  void Key(std::string_view key) {
    Separate();
    text_ += JsonQuoted(key);
    text_ += ':';
    fresh_ = true;
  }
  void Text(std::string_view value) {
    Separate();
    text_ += JsonQuoted(value);
  }
  void Number(uint64_t value) {
    Separate();
    text_ += std::to_string(value);
  }
  void Signed(int64_t value) {
    Separate();
    text_ += std::to_string(value);
  }
  void Bool(bool value) {
    Separate();
    text_ += value ? "true" : "false";
  }
  // A number above 2^53 is no number in JSON for most readers: addresses and handles are texts.
  void Hex(uint64_t value) {
    char text[24];
    snprintf(text, sizeof(text), "0x%llx", static_cast<unsigned long long>(value));
    Text(text);
  }

  const std::string& text() const { return text_; }

 private:
  void Separate() {
    if (!fresh_) text_ += ',';
    fresh_ = false;
  }

  std::string text_;
  bool fresh_ = true;
};

}  // namespace cuda_remote::replay::inspect

#endif  // CUDA_REMOTE_REPLAY_INSPECT_JSON_H_
