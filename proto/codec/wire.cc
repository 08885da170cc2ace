// SPDX-License-Identifier: Apache-2.0
#include "proto/codec/wire.h"

namespace cuda_remote::wire {

const char* ReadVarint(const char* at, const char* end, uint64_t* value) {
  if (end - at >= 8) {
    // Those that end within eight bytes, as handles do, without a loop: eight groups of seven bits.
    uint64_t word;
    std::memcpy(&word, at, 8);
    const uint64_t stops = ~word & 0x8080808080808080;
    if (stops != 0) {
      word &= stops ^ (stops - 1);  // up to the first byte that is the last one
      word &= 0x7f7f7f7f7f7f7f7f;
      word = (word & 0x007f007f007f007f) | (word & 0x7f007f007f007f00) >> 1;
      word = (word & 0x00003fff00003fff) | (word & 0x3fff00003fff0000) >> 2;
      *value = (word & 0x0fffffff) | (word & 0x0fffffff00000000) >> 4;
      return at + (__builtin_ctzll(stops) + 1) / 8;
    }
  }
  uint64_t result = 0;
  for (int shift = 0; shift < 64; shift += 7) {
    if (at == end) return nullptr;
    const uint8_t byte = uint8_t(*at++);
    if (shift == 63 && byte > 1) return nullptr;
    result |= uint64_t(byte & 0x7f) << shift;
    if (byte < 0x80) {
      *value = result;
      return at;
    }
  }
  return nullptr;
}

void PutPackedDouble(std::string* out, uint32_t field, const std::vector<double>& values) {
  if (values.empty()) return;
  PutBytesAlways(out, field, {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(double)});
}

bool Reader::Get(float* value) {
  if (type_ != kFixed32 || end_ - at_ < 4) return Fail();
  std::memcpy(value, at_, 4);
  at_ += 4;
  return true;
}

bool Reader::Get(double* value) {
  if (type_ != kFixed64 || end_ - at_ < 8) return Fail();
  std::memcpy(value, at_, 8);
  at_ += 8;
  return true;
}

bool Reader::Get(std::string_view* value) {
  uint64_t length;
  if (type_ != kBytes) return Fail();
  if (!Varint(&length)) return false;
  if (length > uint64_t(end_ - at_)) return Fail();
  *value = {at_, size_t(length)};
  at_ += length;
  return true;
}

template <typename T>
bool Reader::AddIntegers(std::vector<T>* values) {
  if (type_ != kBytes) {
    T value;
    if (!Get(&value)) return false;
    values->push_back(value);
    return true;
  }
  std::string_view packed;
  if (!Get(&packed)) return false;
  Reader inner(packed);
  inner.type_ = kVarint;
  while (inner.at_ != inner.end_) {
    T value;
    if (!inner.Get(&value)) return Fail();
    values->push_back(value);
  }
  return true;
}

bool Reader::Add(std::vector<uint32_t>* values) { return AddIntegers(values); }
bool Reader::Add(std::vector<int32_t>* values) { return AddIntegers(values); }
bool Reader::Add(std::vector<uint64_t>* values) { return AddIntegers(values); }

bool Reader::Add(std::vector<double>* values) {
  if (type_ != kBytes) {
    double value;
    if (!Get(&value)) return false;
    values->push_back(value);
    return true;
  }
  std::string_view packed;
  if (!Get(&packed)) return false;
  if (packed.size() % sizeof(double) != 0) return Fail();
  for (size_t at = 0; at < packed.size(); at += sizeof(double)) {
    double value;
    std::memcpy(&value, packed.data() + at, sizeof value);
    values->push_back(value);
  }
  return true;
}

bool Reader::Skip() {
  uint64_t ignored;
  std::string_view bytes;
  switch (type_) {
    case kVarint:
      return Varint(&ignored);
    case kFixed64:
      if (end_ - at_ < 8) return Fail();
      at_ += 8;
      return true;
    case kBytes:
      return Get(&bytes);
    case kFixed32:
      if (end_ - at_ < 4) return Fail();
      at_ += 4;
      return true;
    default:
      return Fail();  // groups are not part of proto3
  }
}

}  // namespace cuda_remote::wire
