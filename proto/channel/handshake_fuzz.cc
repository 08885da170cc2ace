// SPDX-License-Identifier: Apache-2.0
// Fuzz target: packets of a session socket, and shared memory that a hostile server offers.

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <utility>

#include "proto/base/unique_fd.h"
#include "proto/channel/handshake.h"
#include "proto/ring/memory.h"
#include "tests/fuzz/seeds.h"

using namespace cuda_remote;  // NOLINT: a test program

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  PacketType type;
  std::string_view body;
  if (!ParsePacket(bytes, &type, &body)) body = bytes;
  Hello hello;
  Welcome welcome;
  uint64_t tag;
  std::string reason;
  // What decodes once must decode again to the same after being encoded.
  if (DecodeHello(body, &hello)) {
    std::string again;
    EncodeHello(hello, &again);
    Hello other;
    if (!DecodeHello(again, &other) || other.program != hello.program || other.gpu != hello.gpu) __builtin_trap();
  }
  if (DecodeWelcome(body, &welcome)) {
    std::string again;
    EncodeWelcome(welcome, &again);
    Welcome other;
    if (!DecodeWelcome(again, &other) || other.session != welcome.session) __builtin_trap();
  }
  DecodeTag(body, &tag);
  DecodeEnd(body, &reason);
  if (size >= 64 && size % 16 == 0) {
    // A memory file with this header; most do not pass, and the ones that do must be usable.
    UniqueFd fd(memfd_create("fuzz", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    if (fd.ok()) {
      const off_t length = ring::kPageBytes + 3 * off_t(ring::kMinCapacity);
      if (ftruncate(fd.get(), length) == 0 && pwrite(fd.get(), data, std::min<size_t>(size, 512), 0) > 0) {
        if (size % 32 == 0) fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW);
        const auto memory = ring::RingMemory::Map(std::move(fd));
        if (memory.ok()) {
          for (int i = 0; i < ring::kRingCount; ++i) {
            const auto index = ring::RingIndex(i);
            (*memory)->data(index)[2 * (*memory)->capacity(index) - 1] = 1;
          }
        } else if (memory.status().message().empty()) {
          __builtin_trap();
        }
      }
    }
  }
  return 0;
}

std::vector<std::string> FuzzSeeds() {
  std::vector<std::string> seeds;
  Hello hello;
  hello.pid = 1234;
  hello.program = "/usr/bin/python3";
  hello.job = "job";
  std::string body;
  EncodeHello(hello, &body);
  const auto packet = [&](uint32_t type) {
    const uint32_t head[2] = {kPacketMagic, type};
    seeds.push_back(std::string(reinterpret_cast<const char*>(head), 8) + body);
    seeds.push_back(body);
    body.clear();
  };
  packet(1);
  Welcome welcome;
  welcome.session = 77;
  welcome.server = "gpu7";
  welcome.error = "no";
  EncodeWelcome(welcome, &body);
  packet(2);
  EncodeTag(5, &body);
  packet(3);
  EncodeEnd("why", &body);
  packet(4);
  struct {
    uint64_t magic = ring::kMemoryMagic;
    uint32_t version = ring::kMemoryVersion, header_bytes = ring::kPageBytes;
    uint64_t capacity[3] = {ring::kMinCapacity, ring::kMinCapacity, ring::kMinCapacity};
    uint64_t pad[3] = {};
  } header;
  static_assert(sizeof(header) == 64);
  seeds.push_back(std::string(reinterpret_cast<const char*>(&header), sizeof(header)));
  return seeds;
}
