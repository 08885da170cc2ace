// SPDX-License-Identifier: Apache-2.0
// Fuzz target: a replay log from a damaged or hostile image. The checksum is made right first, or nothing but it would
// be tested.

#include <cstring>
#include <string>

#include "replay/log/log.h"
#include "tests/fuzz/seeds.h"

using namespace cuda_remote;          // NOLINT: a test program
using namespace cuda_remote::replay;  // NOLINT

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::string bytes(reinterpret_cast<const char*>(data), size);
  if (Log::Parse(bytes).ok()) __builtin_trap();  // a seed without its trailer never parses
  const uint64_t total = bytes.size() + sizeof(Hash128);
  uint32_t header = 0;
  if (bytes.size() >= 48) {
    memcpy(&header, &bytes[12], sizeof(header));
    // In the header's last bytes.
    const size_t at = 16 + size_t(header) - sizeof(total);
    if (at >= 12 && at <= bytes.size() - sizeof(total)) memcpy(&bytes[at], &total, sizeof(total));
  }
  const Hash128 hash = HashOf(bytes);
  bytes.append(reinterpret_cast<const char*>(&hash), sizeof(hash));
  if (const auto images = ParseImages(bytes.substr(0, bytes.size() - sizeof(hash))); images.ok()) {
    std::string same;
    WriteImages(*images, [&same](std::string_view piece) {
      same += piece;
      return true;
    });
    if (same.size() + sizeof(hash) != bytes.size()) __builtin_trap();
  }
  StatusOr<Log> parsed = Log::Parse(bytes);
  if (!parsed.ok()) return 0;
  Log log = *std::move(parsed);
  // What parses must be what is written.
  std::string again;
  log.Serialize(&again);
  if (again != bytes) __builtin_trap();
  while (!log.InOrder().empty()) {
    const ObjectKey object = log.InOrder().front()->object;
    log.DestroyDependents(object);
    log.Destroy(object);
  }
  if (log.records() != 0 || log.images() != 0 || log.bytes() != 0) __builtin_trap();
  return 0;
}

std::vector<std::string> FuzzSeeds() {
  Log log;
  FrameHeader header;
  header.call = 17;
  header.context_or_result = 3;
  log.Create({Kind::kContext, 16}, {}, header, "message", "reply", std::nullopt);
  std::vector<std::string> seeds(1);
  log.Serialize(&seeds.back());
  log.Create({Kind::kModule, 32}, {{Kind::kContext, 16}}, header, "m", "", log.AddImage("the image"));
  log.Modify({Kind::kModule, 32}, 5, header, "setting", {{Kind::kContext, 16}, {Kind::kStream, 48}});
  seeds.emplace_back();
  log.Serialize(&seeds.back());
  for (std::string& seed : seeds) seed.resize(seed.size() - sizeof(Hash128));
  return seeds;
}
