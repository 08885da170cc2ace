// SPDX-License-Identifier: Apache-2.0
#include "proto/control/tunnel_message.h"

#include <algorithm>
#include <cstring>

#include "proto/base/hash.h"
#include "proto/codec/wire.h"
#include "proto/control/control.pb.h"
#include "proto/control/message_check.h"

namespace cuda_remote::control {
namespace {

// Everything before the frames.
constexpr uint64_t kMaxHeadBytes = 64u << 10;
// The two messages share the numbers of their fields.
constexpr uint32_t kOpen = TunnelUp::kOpenFieldNumber;
constexpr uint32_t kAcknowledged = TunnelUp::kReplyAcknowledgedFieldNumber;
constexpr uint32_t kSecond = TunnelUp::kEventAcknowledgedFieldNumber;
constexpr uint32_t kEnd = TunnelUp::kCloseFieldNumber;
constexpr uint32_t kPosition = TunnelUp::kPositionFieldNumber;
constexpr uint32_t kFrames = TunnelUp::kFramesFieldNumber;
constexpr uint32_t kLanes = TunnelUp::kLanesFieldNumber;
constexpr uint32_t kChecksum = TunnelUp::kChecksumFieldNumber;
static_assert(kOpen == TunnelDown::kOpenedFieldNumber);
static_assert(kAcknowledged == TunnelDown::kRequestAcknowledgedFieldNumber);
static_assert(kSecond == TunnelDown::kRingFieldNumber);
static_assert(kEnd == TunnelDown::kEndFieldNumber);
static_assert(kPosition == TunnelDown::kPositionFieldNumber);
static_assert(kFrames == TunnelDown::kFramesFieldNumber);
static_assert(kLanes == TunnelDown::kLanesFieldNumber);
static_assert(kChecksum == TunnelDown::kChecksumFieldNumber);
constexpr uint32_t kFramesTag = kFrames << 3 | wire::kBytes;
// The checksum's field: one byte of tag, one of length, XXH3 with 64 bits of what follows, little-endian.
constexpr uint32_t kChecksumTag = kChecksum << 3 | wire::kBytes;
constexpr size_t kChecksumBytes = 8;
constexpr size_t kChecksumFieldBytes = 2 + kChecksumBytes;
static_assert(kChecksumTag < 0x80);

// Reads bytes that lie in several slices.
class Cursor {
 public:
  explicit Cursor(const std::vector<grpc::Slice>& slices) : slices_(slices) {
    for (const grpc::Slice& slice : slices) left_ += slice.size();
    SkipEmpty();
  }
  uint64_t left() const { return left_; }
  size_t slice() const { return slice_; }
  size_t offset() const { return offset_; }

  bool Byte(uint8_t* out) {
    if (left_ == 0) return false;
    *out = slices_[slice_].begin()[offset_];
    Advance(1);
    return true;
  }
  bool Varint(uint64_t* out) {
    *out = 0;
    for (int shift = 0; shift < 64; shift += 7) {
      uint8_t byte;
      if (!Byte(&byte) || (shift == 63 && byte > 1)) return false;
      *out |= uint64_t(byte & 0x7f) << shift;
      if (byte < 0x80) return true;
    }
    return false;
  }
  bool Bytes(uint64_t count, std::string* out) {
    if (count > left_ || count > kMaxHeadBytes) return false;
    out->clear();
    while (count > 0) {
      const size_t here = size_t(std::min<uint64_t>(count, slices_[slice_].size() - offset_));
      out->append(reinterpret_cast<const char*>(slices_[slice_].begin()) + offset_, here);
      Advance(here);
      count -= here;
    }
    return true;
  }

 private:
  void Advance(size_t count) {
    offset_ += count;
    left_ -= count;
    SkipEmpty();
  }
  void SkipEmpty() {
    while (slice_ < slices_.size() && offset_ == slices_[slice_].size()) {
      ++slice_;
      offset_ = 0;
    }
  }
  const std::vector<grpc::Slice>& slices_;
  size_t slice_ = 0;
  size_t offset_ = 0;
  uint64_t left_ = 0;
};

}  // namespace

grpc::ByteBuffer EncodeTunnelMessage(const TunnelMessage& message, const grpc::Slice* frames, bool checked) {
  std::string head;
  wire::PutBytes(&head, kOpen, message.open);
  wire::PutUint(&head, kAcknowledged, message.acknowledged);
  wire::PutUint(&head, kSecond, message.second);
  wire::PutBytes(&head, kEnd, message.end);
  wire::PutUint(&head, kPosition, message.position);
  wire::PutBytes(&head, kLanes, message.lanes);
  const bool with_frames = frames && frames->size() != 0;
  if (with_frames) {
    wire::PutVarint(&head, kFramesTag);
    wire::PutVarint(&head, frames->size());
  }
  if (checked) {
    Hasher sum;
    sum.Add(head);
    if (with_frames) sum.Add({reinterpret_cast<const char*>(frames->begin()), frames->size()});
    std::string field;
    wire::PutBytes(&field, kChecksum, ChecksumBytes(sum.Get64()));
    head.insert(0, field);
  }
  const grpc::Slice slices[2] = {grpc::Slice(head), with_frames ? *frames : grpc::Slice()};
  return grpc::ByteBuffer(slices, with_frames ? 2 : 1);
}

Integrity CheckTunnelMessage(const grpc::ByteBuffer& buffer) {
  std::vector<grpc::Slice> slices;
  if (!buffer.Dump(&slices).ok()) return Integrity::kDamaged;
  std::string field;
  Hasher sum;
  for (const grpc::Slice& slice : slices) {
    const size_t of_field = std::min(slice.size(), kChecksumFieldBytes - field.size());
    field.append(reinterpret_cast<const char*>(slice.begin()), of_field);
    sum.Add({reinterpret_cast<const char*>(slice.begin()) + of_field, slice.size() - of_field});
  }
  if (field.size() < kChecksumFieldBytes || uint8_t(field[0]) != kChecksumTag || field[1] != kChecksumBytes)
    return Integrity::kUnchecked;
  return field.compare(2, kChecksumBytes, ChecksumBytes(sum.Get64())) == 0 ? Integrity::kIntact : Integrity::kDamaged;
}

bool DecodeTunnelMessage(const grpc::ByteBuffer& buffer, TunnelMessage* message, ReceivedFrames* frames) {
  *message = TunnelMessage();
  frames->size_ = 0;
  if (!buffer.Dump(&frames->slices_).ok()) return false;
  Cursor cursor(frames->slices_);
  std::string skipped;
  while (cursor.left() > 0) {
    uint64_t tag, value;
    if (!cursor.Varint(&tag) || !cursor.Varint(&value)) return false;
    if (tag == kFramesTag) {
      // The last field; what is in front of it is small.
      if (value != cursor.left() || value > kMaxBatchBytes) return false;
      frames->first_ = cursor.slice();
      frames->offset_ = cursor.offset();
      frames->size_ = value;
      return true;
    }
    switch (tag) {
      case kOpen << 3 | wire::kBytes:
        if (!cursor.Bytes(value, &message->open)) return false;
        break;
      case kAcknowledged << 3 | wire::kVarint:
        message->acknowledged = value;
        break;
      case kSecond << 3 | wire::kVarint:
        message->second = value;
        break;
      case kEnd << 3 | wire::kBytes:
        if (!cursor.Bytes(value, &message->end)) return false;
        break;
      case kPosition << 3 | wire::kVarint:
        message->position = value;
        break;
      case kLanes << 3 | wire::kBytes:
        if (!cursor.Bytes(value, &message->lanes)) return false;
        break;
      default:
        // A field of a newer release: integers and bytes can be skipped.
        if (tag >> 3 == 0) return false;
        if ((tag & 7) == wire::kBytes) {
          if (!cursor.Bytes(value, &skipped)) return false;
        } else if ((tag & 7) != wire::kVarint) {
          return false;
        }
    }
  }
  return true;
}

void ReceivedFrames::CopyTo(uint64_t from, char* out) const {
  uint64_t left = size_ - from;
  size_t slice = first_;
  uint64_t skip = offset_ + from;
  while (left > 0) {
    const uint64_t here = slices_[slice].size();
    if (skip >= here) {
      skip -= here;
    } else {
      const size_t count = size_t(std::min(left, here - skip));
      memcpy(out, slices_[slice].begin() + skip, count);
      out += count;
      left -= count;
      skip = 0;
    }
    ++slice;
  }
}

}  // namespace cuda_remote::control
