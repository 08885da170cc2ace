// SPDX-License-Identifier: Apache-2.0
// Reading and writing the protobuf wire format, for generated code and the few hand-written messages.
//
// The messages are those of proto/calls; interop_test compares with libprotobuf, message by message. protozero would
// do the same job but reports malformed input by exceptions, which the client library must not throw. Everything here
// is append-only writing into a std::string and bounds-checked reading from bytes that may be hostile. Nothing throws:
// a malformed message makes the reader return false for ever.
//
// This header is part of the client library: no libprotobuf, no abseil, no logging.
#ifndef CUDA_REMOTE_PROTO_CODEC_WIRE_H_
#define CUDA_REMOTE_PROTO_CODEC_WIRE_H_

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

namespace cuda_remote::wire {

// Wire types of the protobuf encoding.
enum WireType : uint32_t { kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5 };

// ------------------------------------------------------------------------------------------------------------- writing

inline void PutVarint(std::string* out, uint64_t value) {
  char buffer[10];
  size_t length = 0;
  while (value >= 0x80) {
    buffer[length++] = char(value | 0x80);
    value >>= 7;
  }
  buffer[length++] = char(value);
  out->append(buffer, length);
}
inline void PutTag(std::string* out, uint32_t field, WireType type) { PutVarint(out, uint64_t(field) << 3 | type); }

// A scalar field; zero is the default and is not written.
inline void PutUint(std::string* out, uint32_t field, uint64_t value) {
  if (value == 0) return;
  PutTag(out, field, kVarint);
  PutVarint(out, value);
}
inline void PutInt(std::string* out, uint32_t field, int64_t value) { PutUint(out, field, uint64_t(value)); }
inline void PutFloat(std::string* out, uint32_t field, float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if (bits == 0) return;
  PutTag(out, field, kFixed32);
  out->append(reinterpret_cast<const char*>(&bits), 4);
}
inline void PutDouble(std::string* out, uint32_t field, double value) {
  uint64_t bits;
  std::memcpy(&bits, &value, 8);
  if (bits == 0) return;
  PutTag(out, field, kFixed64);
  out->append(reinterpret_cast<const char*>(&bits), 8);
}
// A length-delimited field, written even if it is empty.
inline void PutBytesAlways(std::string* out, uint32_t field, std::string_view value) {
  PutTag(out, field, kBytes);
  PutVarint(out, value.size());
  out->append(value.data(), value.size());
}
inline void PutBytes(std::string* out, uint32_t field, std::string_view value) {
  if (!value.empty()) PutBytesAlways(out, field, value);
}
// A packed repeated integer field.
template <typename T>
void PutPacked(std::string* out, uint32_t field, const std::vector<T>& values) {
  if (values.empty()) return;
  std::string packed;
  packed.reserve(values.size());
  for (T value : values) PutVarint(&packed, uint64_t(int64_t(value)));
  PutBytesAlways(out, field, packed);
}
inline void PutPackedUnsigned(std::string* out, uint32_t field, const std::vector<uint64_t>& values) {
  if (values.empty()) return;
  std::string packed;
  for (uint64_t value : values) PutVarint(&packed, value);
  PutBytesAlways(out, field, packed);
}
void PutPackedDouble(std::string* out, uint32_t field, const std::vector<double>& values);

// ------------------------------------------------------------------------------------------------------------- reading

// Reads the varint at `at`; returns what is behind it, null if it is longer than it may be or does not end before
// `end`.
const char* ReadVarint(const char* at, const char* end, uint64_t* value);

// Walks over the fields of one message. Not thread-safe; the bytes must outlive it and every view taken from it.
class Reader {
 public:
  explicit Reader(std::string_view message) : at_(message.data()), end_(message.data() + message.size()) {}

  // Goes on to the next field. False at the end of the message, and if it is malformed; ok() tells which.
  bool Next() {
    if (at_ == end_ || !ok_) return false;
    uint64_t key;
    if (!Varint(&key)) return false;
    field_ = uint32_t(key >> 3);
    type_ = uint32_t(key & 7);
    if (field_ == 0 || key >> 3 > 0x1fffffff) return Fail();
    return true;
  }
  bool ok() const { return ok_; }
  uint32_t field() const { return field_; }

  // Each reads the present field and returns whether it has the right wire type and a value in range.
  bool Get(bool* value) {
    uint64_t raw;
    if (!GetVarint(&raw)) return false;
    *value = raw != 0;
    return true;
  }
  bool Get(uint32_t* value) {
    uint64_t raw;
    if (!GetVarint(&raw)) return false;
    if (raw > UINT32_MAX) return Fail();
    *value = uint32_t(raw);
    return true;
  }
  bool Get(int32_t* value) {
    uint64_t raw;
    if (!GetVarint(&raw)) return false;
    if (int64_t(raw) > INT32_MAX || int64_t(raw) < INT32_MIN) return Fail();
    *value = int32_t(raw);
    return true;
  }
  bool Get(uint64_t* value) { return GetVarint(value); }
  bool Get(int64_t* value) {
    uint64_t raw;
    if (!GetVarint(&raw)) return false;
    *value = int64_t(raw);
    return true;
  }
  bool Get(float* value);
  bool Get(double* value);
  bool Get(std::string_view* value);
  // A copy; false also if there are more than `most` bytes.
  bool Get(std::string* value, size_t most = SIZE_MAX) {
    std::string_view view;
    if (!Get(&view) || view.size() > most) return false;
    value->assign(view);
    return true;
  }
  // Repeated integers, packed or one at a time.
  bool Add(std::vector<uint32_t>* values);
  bool Add(std::vector<int32_t>* values);
  bool Add(std::vector<uint64_t>* values);
  bool Add(std::vector<double>* values);
  bool Add(std::vector<std::string_view>* values) {
    std::string_view value;
    if (!Get(&value)) return false;
    values->push_back(value);
    return true;
  }
  // Skips a field that this version does not know.
  bool Skip();

 private:
  bool Fail() {
    ok_ = false;
    return false;
  }
  bool Varint(uint64_t* value) {
    if (at_ != end_ && uint8_t(*at_) < 0x80) {
      *value = uint8_t(*at_++);
      return true;
    }
    const char* const behind = ReadVarint(at_, end_, value);
    if (!behind) return Fail();
    at_ = behind;
    return true;
  }
  bool GetVarint(uint64_t* value) { return type_ == kVarint ? Varint(value) : Fail(); }
  template <typename T>
  bool AddIntegers(std::vector<T>* values);

  const char* at_;
  const char* end_;
  uint32_t field_ = 0;
  uint32_t type_ = 0;
  bool ok_ = true;
};

// Reads a whole message: calls `field`, as bool(Reader&), on each field, which takes the value or skips it and returns
// what Get, Add or Skip did. False if the message is malformed, or a call has returned false; what was taken until then
// stays.
template <typename OnField>
bool ReadMessage(std::string_view message, OnField field) {
  Reader reader(message);
  while (reader.Next()) {
    if (!field(reader)) return false;
  }
  return reader.ok();
}

// The bytes of an object, as the wire carries plain structs and arrays.
template <typename T>
std::string_view BytesOf(const T& value) {
  return {reinterpret_cast<const char*>(&value), sizeof(T)};
}

}  // namespace cuda_remote::wire

#endif  // CUDA_REMOTE_PROTO_CODEC_WIRE_H_
