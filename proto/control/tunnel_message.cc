// SPDX-License-Identifier: Apache-2.0
#include "proto/control/tunnel_message.h"

#include <xxhash.h>

#include <algorithm>
#include <cstring>

#include "proto/codec/wire.h"

namespace cuda_remote::control {
namespace {

// Everything before the frames.
constexpr uint64_t kMaxHeadBytes = 64u << 10;
constexpr uint32_t kFramesTag = 6 << 3 | wire::kBytes;
// The checksum's field: one byte of tag, one of length, XXH3 with 64 bits of what follows, little-endian.
constexpr uint32_t kChecksumTag = 8 << 3 | wire::kBytes;
constexpr size_t kChecksumBytes = 8;
constexpr size_t kChecksumFieldBytes = 2 + kChecksumBytes;
static_assert(kChecksumTag < 0x80);

// Of several pieces, one after the other.
class Checksum {
 public:
  Checksum() { XXH3_64bits_reset(&state_); }
  void Add(const void* bytes, size_t count) { XXH3_64bits_update(&state_, bytes, count); }
  std::string Bytes() const {
    uint64_t value = XXH3_64bits_digest(&state_);
    std::string bytes(kChecksumBytes, 0);
    for (char& byte : bytes) {
      byte = char(value);
      value >>= 8;
    }
    return bytes;
  }

 private:
  XXH3_state_t state_;
};

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
  wire::PutBytes(&head, 1, message.open);
  wire::PutUint(&head, 2, message.acknowledged);
  wire::PutUint(&head, 3, message.second);
  wire::PutBytes(&head, 4, message.end);
  wire::PutUint(&head, 5, message.position);
  wire::PutBytes(&head, 7, message.lanes);
  const bool with_frames = frames && frames->size() != 0;
  if (with_frames) {
    wire::PutVarint(&head, kFramesTag);
    wire::PutVarint(&head, frames->size());
  }
  if (checked) {
    Checksum sum;
    sum.Add(head.data(), head.size());
    if (with_frames) sum.Add(frames->begin(), frames->size());
    std::string field;
    wire::PutBytes(&field, 8, sum.Bytes());
    head.insert(0, field);
  }
  const grpc::Slice slices[2] = {grpc::Slice(head), with_frames ? *frames : grpc::Slice()};
  return grpc::ByteBuffer(slices, with_frames ? 2 : 1);
}

Integrity CheckTunnelMessage(const grpc::ByteBuffer& buffer) {
  std::vector<grpc::Slice> slices;
  if (!buffer.Dump(&slices).ok()) return Integrity::kDamaged;
  std::string field;
  Checksum sum;
  for (const grpc::Slice& slice : slices) {
    const size_t of_field = std::min(slice.size(), kChecksumFieldBytes - field.size());
    field.append(reinterpret_cast<const char*>(slice.begin()), of_field);
    sum.Add(slice.begin() + of_field, slice.size() - of_field);
  }
  if (field.size() < kChecksumFieldBytes || uint8_t(field[0]) != kChecksumTag || field[1] != kChecksumBytes)
    return Integrity::kUnchecked;
  return field.compare(2, kChecksumBytes, sum.Bytes()) == 0 ? Integrity::kIntact : Integrity::kDamaged;
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
      case 1 << 3 | wire::kBytes:
        if (!cursor.Bytes(value, &message->open)) return false;
        break;
      case 2 << 3 | wire::kVarint:
        message->acknowledged = value;
        break;
      case 3 << 3 | wire::kVarint:
        message->second = value;
        break;
      case 4 << 3 | wire::kBytes:
        if (!cursor.Bytes(value, &message->end)) return false;
        break;
      case 5 << 3 | wire::kVarint:
        message->position = value;
        break;
      case 7 << 3 | wire::kBytes:
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

std::string EncodeTunnelOpen(const OpenMessage& open) {
  std::string out;
  wire::PutBytes(&out, 1, open.hello);
  wire::PutBytes(&out, 2, open.resume_token);
  wire::PutUint(&out, 3, open.reply_position);
  wire::PutUint(&out, 4, open.event_position);
  wire::PutUint(&out, 5, open.takes_lanes);
  wire::PutUint(&out, 6, open.lane_of);
  wire::PutUint(&out, 7, open.lane);
  return out;
}

bool DecodeTunnelOpen(std::string_view bytes, OpenMessage* open) {
  *open = OpenMessage();
  return wire::ReadMessage(bytes, [&](wire::Reader& reader) {
    switch (reader.field()) {
      case 1:
        return reader.Get(&open->hello);
      case 2:
        return reader.Get(&open->resume_token);
      case 3:
        return reader.Get(&open->reply_position);
      case 4:
        return reader.Get(&open->event_position);
      case 5:
        return reader.Get(&open->takes_lanes);
      case 6:
        return reader.Get(&open->lane_of);
      case 7:
        return reader.Get(&open->lane);
      default:
        return reader.Skip();
    }
  });
}

std::string EncodeTunnelOpened(const OpenedMessage& opened) {
  std::string out;
  wire::PutBytes(&out, 1, opened.welcome);
  wire::PutBytes(&out, 2, opened.resume_token);
  wire::PutUint(&out, 3, opened.request_position);
  wire::PutUint(&out, 4, opened.grace_seconds);
  wire::PutUint(&out, 5, opened.number);
  wire::PutUint(&out, 6, opened.lanes);
  return out;
}

bool DecodeTunnelOpened(std::string_view bytes, OpenedMessage* opened) {
  *opened = OpenedMessage();
  return wire::ReadMessage(bytes, [&](wire::Reader& reader) {
    switch (reader.field()) {
      case 1:
        return reader.Get(&opened->welcome);
      case 2:
        return reader.Get(&opened->resume_token);
      case 3:
        return reader.Get(&opened->request_position);
      case 4:
        return reader.Get(&opened->grace_seconds);
      case 5:
        return reader.Get(&opened->number);
      case 6:
        return reader.Get(&opened->lanes);
      default:
        return reader.Skip();
    }
  });
}

}  // namespace cuda_remote::control
