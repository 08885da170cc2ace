#include "proto/codec/printable.h"

#include <cstdint>

namespace cuda_remote {
namespace {

// Bytes of the well-formed character that `text` begins with; 0: none (Unicode 15, table 3-7).
size_t CharacterBytes(std::string_view text) {
  const auto at = [text](size_t i) { return uint8_t(text[i]); };
  const uint8_t first = at(0);
  if (first < 0x80) return 1;
  if (first < 0xc2 || first > 0xf4) return 0;
  const size_t bytes = first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
  if (text.size() < bytes) return 0;
  // The second byte's range keeps out longer forms than needed, surrogates, and what is beyond the last character.
  const uint8_t low = first == 0xe0 ? 0xa0 : first == 0xf0 ? 0x90 : 0x80;
  const uint8_t high = first == 0xed ? 0x9f : first == 0xf4 ? 0x8f : 0xbf;
  if (at(1) < low || at(1) > high) return 0;
  for (size_t i = 2; i < bytes; ++i) {
    if (at(i) < 0x80 || at(i) > 0xbf) return 0;
  }
  return bytes;
}

}  // namespace

std::string Printable(std::string_view text) {
  std::string out;
  while (!text.empty()) {
    const size_t bytes = CharacterBytes(text);
    const uint8_t first = uint8_t(text[0]);
    // The control characters are those below the space, 0x7f, and U+0080 to U+009f.
    const bool control = first < 0x20 || first == 0x7f || (first == 0xc2 && bytes == 2 && uint8_t(text[1]) < 0xa0);
    if (bytes == 0 || control) {
      out += '?';
    } else {
      out += text.substr(0, bytes);
    }
    text.remove_prefix(bytes == 0 ? 1 : bytes);
  }
  return out;
}

}  // namespace cuda_remote
