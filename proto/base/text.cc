// SPDX-License-Identifier: Apache-2.0
#include "proto/base/text.h"

#include <stdio.h>

#include <algorithm>

namespace cuda_remote {
namespace {

constexpr char kDigits[] = "0123456789abcdef";

// -1: no hexadecimal digit.
int ValueOf(char digit) {
  if (digit >= '0' && digit <= '9') return digit - '0';
  if (digit >= 'a' && digit <= 'f') return digit - 'a' + 10;
  if (digit >= 'A' && digit <= 'F') return digit - 'A' + 10;
  return -1;
}

}  // namespace

std::string Hex(uint64_t number) {
  char text[16];
  size_t at = sizeof(text);
  do {
    text[--at] = kDigits[number & 15];
    number >>= 4;
  } while (number != 0);
  return "0x" + std::string(text + at, sizeof(text) - at);
}

std::string HexBytes(std::string_view bytes, std::string_view between) {
  std::string text;
  for (const char byte : bytes) {
    if (!text.empty()) text += between;
    text += kDigits[uint8_t(byte) >> 4];
    text += kDigits[uint8_t(byte) & 15];
  }
  return text;
}

bool BytesOfHex(std::string_view digits, std::string* bytes) {
  if (digits.size() % 2 != 0) return false;
  std::string found;
  for (size_t i = 0; i < digits.size(); i += 2) {
    const int high = ValueOf(digits[i]), low = ValueOf(digits[i + 1]);
    if (high < 0 || low < 0) return false;
    found += char(high << 4 | low);
  }
  *bytes = std::move(found);
  return true;
}

std::string UuidName(std::string_view uuid) {
  std::string name = "GPU";
  size_t at = 0;
  for (const size_t bytes : {4, 2, 2, 2, 6}) {
    name += "-" + HexBytes(uuid.substr(std::min(at, uuid.size()), bytes));
    at += bytes;
  }
  return name;
}

std::string ByteText(double bytes) {
  static constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  int unit = 0;
  while (bytes >= 1000 && unit < 5) {
    bytes /= 1024;
    ++unit;
  }
  char text[32];
  snprintf(text, sizeof(text), bytes < 10 && unit > 0 ? "%.1f %s" : "%.0f %s", bytes, kUnits[unit]);
  return text;
}

std::string AgeText(int64_t milliseconds) {
  constexpr int64_t kMinute = 60, kHour = 3600, kDay = 86400;
  const int64_t seconds = std::max<int64_t>(milliseconds, 0) / 1000;
  if (seconds < 2 * kMinute) return std::to_string(seconds) + " s";
  if (seconds < 2 * kHour) return std::to_string(seconds / kMinute) + " min";
  if (seconds < 2 * kDay) return std::to_string(seconds / kHour) + " h";
  return std::to_string(seconds / kDay) + " days";
}

}  // namespace cuda_remote
