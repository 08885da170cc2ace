#include "proto/codec/wire.h"

namespace cuda_remote::wire {

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
