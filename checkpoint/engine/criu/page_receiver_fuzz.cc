// SPDX-License-Identifier: Apache-2.0
// Fuzz target: what a CRIU with a user's rights sends as the memory of processes.

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <filesystem>

#include "checkpoint/engine/criu/page_receiver.h"
#include "checkpoint/engine/criu/pages_socket.h"
#include "tests/fuzz/seeds.h"

using namespace cuda_remote::checkpoint;  // NOLINT: a test program

namespace {

// Of any process, memory without end would be much to write.
absl::Status Read(int process, uint64_t address, char* to, size_t bytes) {
  constexpr uint64_t kEnd = 8 << 20;
  if (address >= kEnd || bytes > kEnd - address) return absl::OutOfRangeError("not there");
  memset(to, process, bytes);
  return absl::OkStatus();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  char folder[] = "/tmp/page-receiver-fuzz-XXXXXX";
  if (!mkdtemp(folder)) abort();
  const int fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  {
    PageReceiver receiver(1);
    absl::StatusOr<cuda_remote::UniqueFd> criu = receiver.Begin(fd, Read);
    if (!criu.ok()) abort();
    while (size > 0) {
      const ssize_t sent = send(criu->get(), data, size, MSG_NOSIGNAL);
      if (sent <= 0) break;
      data += sent;
      size -= size_t(sent);
    }
    criu->Close();
    // Nothing is complete without an answer, which nobody has taken.
    const bool received = receiver.Received().ok();
    if (receiver.Finish().ok() && !received) __builtin_trap();
  }
  close(fd);
  std::filesystem::remove_all(folder);
  return 0;
}

std::vector<std::string> FuzzSeeds() {
  std::vector<std::string> seeds;
  for (const bool wide : {false, true}) {
    std::string seed;
    const auto word = [&](uint64_t value, size_t bytes) { seed.append(reinterpret_cast<const char*>(&value), bytes); };
    const auto message = [&](uint32_t command, uint64_t pages, uint64_t address, uint64_t target) {
      word(command, 4);
      word(wide ? 0 : pages, 4);
      if (wide) word(pages, 8);
      word(address, 8);
      word(target, 8);
    };
    message(4, 0, 0, 17 << 8 | 1);
    const HiddenPages hidden{kHidden, 17, 0x8000, 3};
    seed.append(reinterpret_cast<const char*>(&hidden), sizeof(hidden));
    message(4 << 16 | 6, 1, 0x10000, 17 << 8 | 1);
    seed.append(4096, 'x');
    message(6, 9, 0x20000, 17 << 8 | 1);
    message(4, 0, 0, 5 << 8 | 2);
    message(0x1024, 0, 0, 0);
    seeds.push_back(seed);
  }
  return seeds;
}
