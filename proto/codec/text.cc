// SPDX-License-Identifier: Apache-2.0
#include "proto/codec/text.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>

#include "proto/base/text.h"

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

// Calls `take(character, well_formed)` for each character, and for each byte that is part of none.
template <typename Take>
void EachCharacter(std::string_view text, Take take) {
  while (!text.empty()) {
    const size_t bytes = CharacterBytes(text);
    const std::string_view character = text.substr(0, bytes == 0 ? 1 : bytes);
    take(character, bytes != 0);
    text.remove_prefix(character.size());
  }
}

// The control characters are those below the space, 0x7f, and U+0080 to U+009f.
bool IsControl(std::string_view character) {
  const uint8_t first = uint8_t(character[0]);
  return first < 0x20 || first == 0x7f || (first == 0xc2 && character.size() == 2 && uint8_t(character[1]) < 0xa0);
}

}  // namespace

std::string Printable(std::string_view text) {
  std::string out;
  EachCharacter(text, [&out](std::string_view character, bool well_formed) {
    out += well_formed && !IsControl(character) ? character : "?";
  });
  return out;
}

std::string JsonQuoted(std::string_view text) {
  std::string out = "\"";
  EachCharacter(text, [&out](std::string_view character, bool well_formed) {
    if (character == "\"" || character == "\\") {
      out += '\\';
      out += character;
    } else if (!well_formed || (character.size() == 1 && IsControl(character))) {
      char code[8];
      snprintf(code, sizeof(code), "\\u%04x", uint8_t(character[0]));
      out += code;
    } else {
      out += character;
    }
  });
  return out + '"';
}

std::string PathToUtf8(std::string_view path) {
  std::string out;
  EachCharacter(path, [&out](std::string_view character, bool well_formed) {
    if (well_formed) {
      out += character;
      return;
    }
    out += '\0';
    out += HexBytes(character);
  });
  return out;
}

std::string PathFromUtf8(std::string_view text) {
  std::string out;
  while (!text.empty()) {
    const size_t end = std::min(text.find('\0'), text.size());
    out += text.substr(0, end);
    text.remove_prefix(end);
    if (text.empty()) break;
    const std::string_view digits = text.substr(1, 2);
    // What PathToUtf8 never writes is left out.
    if (std::string byte; BytesOfHex(digits, &byte) && byte != std::string(1, '\0')) out += byte;
    text.remove_prefix(1 + digits.size());
  }
  return out;
}

}  // namespace cuda_remote
