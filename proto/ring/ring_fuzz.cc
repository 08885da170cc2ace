// SPDX-License-Identifier: Apache-2.0
// Fuzz target: a hostile peer's control words and ring contents, and batches of frames. Nothing may leave the ring's
// memory.

#include <cstring>

#include "proto/ring/ring.h"
#include "tests/fuzz/seeds.h"

using namespace cuda_remote;        // NOLINT: a test program
using namespace cuda_remote::ring;  // NOLINT

namespace {

constexpr uint64_t kCapacity[kRingCount] = {kMinCapacity, kMinCapacity, kMinCapacity};

void Check(bool ok) {
  if (!ok) __builtin_trap();
}

std::string Frame(uint32_t message, uint32_t payload) {
  FrameHeader header;
  header.message_bytes = message;
  header.payload_bytes = payload;
  header.sequence = 1;
  std::string out(FrameBytes(message, payload), 'x');
  memcpy(&out[0], &header, sizeof(header));
  return out;
}

}  // namespace

// Input: head, tail (8 bytes each), then the ring's bytes from `head` on.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static RingMemory* const memory = (*RingMemory::Create(kCapacity)).release();
  uint64_t frames;
  const char* const text = reinterpret_cast<const char*>(data);
  if (WholeFrames(text, size, &frames)) Check(frames <= size / sizeof(FrameHeader));
  if (size < 16) return 0;
  uint64_t positions[2];
  memcpy(positions, data, 16);
  RingControl* const control = memory->control(kRequestRing);
  control->head.store(positions[0]);
  control->tail.store(positions[1]);
  const size_t bytes = std::min<size_t>(size - 16, kMinCapacity);
  char* const ring = memory->data(kRequestRing);
  memcpy(ring + (positions[0] & (kMinCapacity - 1)), data + 16, bytes);
  RingReader reader(memory, kRequestRing);
  FrameHeader header;
  const char* frame;
  for (int i = 0; i < 4096 && reader.Peek(&header, &frame) == RingStatus::kOk; ++i) {
    Check(SaneFrame(header));
    Check(frame >= ring && frame + FrameBytes(header.message_bytes, header.payload_bytes) <= ring + 2 * kMinCapacity);
    // As a consumer would: every byte of it can be read.
    volatile char last = frame[FrameBytes(header.message_bytes, header.payload_bytes) - 1];
    (void)last;
    reader.Pop(header);
  }
  control->head.store(positions[0]);
  control->tail.store(positions[1]);
  RingWriter writer(memory, kRequestRing);
  char* where;
  for (uint64_t want : {uint64_t{32}, uint64_t{4096}, kMinCapacity / 2, kMinCapacity, uint64_t{1} << 40}) {
    if (writer.Reserve(want, &where) != RingStatus::kOk) continue;
    Check(where >= ring && where + want <= ring + 2 * kMinCapacity);
    memset(where, 0, want);
  }
  return 0;
}

std::vector<std::string> FuzzSeeds() {
  std::vector<std::string> seeds;
  for (uint64_t head : {uint64_t{0}, kMinCapacity - 64, uint64_t{1} << 40}) {
    std::string frames;
    for (uint32_t n : {0u, 8u, 100u, 3000u}) frames += Frame(n, n * 2);
    const uint64_t tail = head + frames.size();
    seeds.push_back(std::string(reinterpret_cast<const char*>(&head), 8) +
                    std::string(reinterpret_cast<const char*>(&tail), 8) + frames);
    seeds.push_back(frames);
  }
  return seeds;
}
