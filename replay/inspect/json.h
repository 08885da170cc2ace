// Writes JSON text. Just what cr-inspect needs: the caller keeps objects and arrays balanced.
#ifndef CUDA_REMOTE_REPLAY_INSPECT_JSON_H_
#define CUDA_REMOTE_REPLAY_INSPECT_JSON_H_

#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>

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
    Quote(key);
    text_ += ':';
    fresh_ = true;
  }
  void Text(std::string_view value) {
    Separate();
    Quote(value);
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
  // Bytes that are no text (names are whatever the program made them) come out as \u00xx.
  void Quote(std::string_view value) {
    text_ += '"';
    for (const char c : value) {
      if (c == '"' || c == '\\') {
        text_ += '\\';
        text_ += c;
      } else if (uint8_t(c) < 0x20 || uint8_t(c) >= 0x7f) {
        char code[8];
        snprintf(code, sizeof(code), "\\u%04x", uint8_t(c));
        text_ += code;
      } else {
        text_ += c;
      }
    }
    text_ += '"';
  }

  std::string text_;
  bool fresh_ = true;
};

}  // namespace cuda_remote::replay::inspect

#endif  // CUDA_REMOTE_REPLAY_INSPECT_JSON_H_
