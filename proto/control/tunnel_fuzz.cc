// SPDX-License-Identifier: Apache-2.0
// Fuzz target: tunnel messages, cut into slices at arbitrary places as a network delivers them.

#include <algorithm>
#include <cstring>

#include "proto/control/control.pb.h"
#include "proto/control/tunnel_message.h"
#include "tests/fuzz/seeds.h"

using namespace cuda_remote::control;  // NOLINT: a test program

namespace {
void Check(bool ok) {
  if (!ok) __builtin_trap();
}
}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  // The first byte says how long the slices are.
  if (size == 0) return 0;
  const size_t step = data[0] + 1;
  std::vector<grpc::Slice> slices;
  for (size_t at = 1; at < size; at += step) slices.emplace_back(data + at, std::min(step, size - at));
  const grpc::ByteBuffer buffer(slices.data(), slices.size());
  TunnelMessage message;
  ReceivedFrames frames;
  // A checksum is the same wherever the slices are cut, and one changed bit is noticed.
  if (!slices.empty() && CheckTunnelMessage(buffer) == Integrity::kIntact) {
    std::string whole(reinterpret_cast<const char*>(data) + 1, size - 1);
    const grpc::Slice one(whole);
    Check(CheckTunnelMessage(grpc::ByteBuffer(&one, 1)) == Integrity::kIntact);
    whole[(data[0] * 257u) % whole.size()] ^= char(1 << (data[0] & 7));
    const grpc::Slice other(whole);
    Check(CheckTunnelMessage(grpc::ByteBuffer(&other, 1)) != Integrity::kIntact);
  }
  if (!slices.empty() && DecodeTunnelMessage(buffer, &message, &frames)) {
    Check(frames.size() < size);
    if (frames.size() > 0) {
      std::string copy(frames.size(), 0);
      frames.CopyTo(0, &copy[0]);
      // The frames are the end of the message.
      Check(memcmp(copy.data(), data + size - copy.size(), copy.size()) == 0);
      frames.CopyTo(frames.size() / 2, &copy[0]);
    }
    // What was understood is written and understood again.
    const grpc::Slice none;
    TunnelMessage again;
    ReceivedFrames no_frames;
    Check(DecodeTunnelMessage(EncodeTunnelMessage(message, &none), &again, &no_frames));
    Check(again.open == message.open && again.end == message.end && again.position == message.position);
  }
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  TunnelOpen open;
  TunnelOpened opened;
  open.ParseFromArray(bytes.data(), int(bytes.size()));
  opened.ParseFromArray(bytes.data(), int(bytes.size()));
  return 0;
}

std::vector<std::string> FuzzSeeds() {
  std::vector<std::string> seeds;
  const auto add = [&](const TunnelMessage& message, const std::string& frames) {
    const grpc::Slice slice(frames);
    for (const bool checked : {false, true}) {
      std::vector<grpc::Slice> slices;
      (void)EncodeTunnelMessage(message, frames.empty() ? nullptr : &slice, checked).Dump(&slices);
      for (char step : {0, 6, 127}) {
        std::string seed(1, step);
        for (const grpc::Slice& part : slices) seed.append(reinterpret_cast<const char*>(part.begin()), part.size());
        seeds.push_back(seed);
      }
    }
  };
  TunnelMessage message;
  TunnelOpen open;
  open.set_hello("hello");
  open.set_resume_token("0123456789abcdef");
  open.set_reply_position(1 << 20);
  message.open = open.SerializeAsString();
  add(message, "");
  seeds.push_back(message.open);
  message = TunnelMessage();
  message.acknowledged = 4096;
  message.second = 2;
  message.position = uint64_t{1} << 33;
  add(message, std::string(200, 'f'));
  message.end = "the end";
  add(message, "");
  return seeds;
}
