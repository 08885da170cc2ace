// SPDX-License-Identifier: Apache-2.0
// Fields one after another, without numbers: integers as 8 little-endian bytes, texts as an integer and the bytes.
//
// The messages between a process's agent and the tools have this form (proto/agent/agent.proto). Generated code reads
// and writes it; the bytes may be hostile. Nothing throws but std::bad_alloc.
//
// This header is part of the client library: no libprotobuf, no abseil, no logging.
#ifndef CUDA_REMOTE_PROTO_CODEC_IN_ORDER_H_
#define CUDA_REMOTE_PROTO_CODEC_IN_ORDER_H_

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

namespace cuda_remote::wire {

// Appends fields to a text. Not thread-safe.
class FieldWriter {
 public:
  explicit FieldWriter(std::string* out) : out_(out) {}
  void Number(uint64_t value) { out_->append(reinterpret_cast<const char*>(&value), sizeof(value)); }
  void Text(std::string_view value) {
    Number(value.size());
    out_->append(value);
  }

 private:
  std::string* const out_;
};

// Reads them. Not thread-safe; the bytes must outlive it.
class FieldReader {
 public:
  explicit FieldReader(std::string_view in) : in_(in) {}

  // Each reads the next field; false if there is none, or its value is out of range.
  bool Get(uint64_t* value) {
    if (in_.size() < sizeof(*value)) return false;
    std::memcpy(value, in_.data(), sizeof(*value));
    in_.remove_prefix(sizeof(*value));
    return true;
  }
  bool Get(uint32_t* value) {
    uint64_t raw;
    if (!Get(&raw) || raw > UINT32_MAX) return false;
    *value = uint32_t(raw);
    return true;
  }
  bool Get(bool* value) {
    uint64_t raw;
    if (!Get(&raw)) return false;
    *value = raw != 0;
    return true;
  }
  bool Get(std::string* value, size_t most = SIZE_MAX) {
    uint64_t size;
    if (!Get(&size) || size > in_.size() || size > most) return false;
    value->assign(in_.substr(0, size));
    in_.remove_prefix(size);
    return true;
  }
  // Nothing is left.
  bool done() const { return in_.empty(); }

 private:
  std::string_view in_;
};

}  // namespace cuda_remote::wire

#endif  // CUDA_REMOTE_PROTO_CODEC_IN_ORDER_H_
