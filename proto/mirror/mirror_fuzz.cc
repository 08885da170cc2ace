// SPDX-License-Identifier: Apache-2.0
// Fuzz target: runs of memory from any client.

#include "proto/mirror/mirror.h"
#include "tests/fuzz/seeds.h"

using namespace cuda_remote;  // NOLINT: a test program

namespace {

// The memory that is mirrored.
constexpr uint64_t kAddress = 0x10000, kBytes = 4096;

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view runs(reinterpret_cast<const char*>(data), size);
  std::string now(kBytes, 'm'), base = now;
  uint64_t count = 0;
  mirror::ForEachRun(runs, [&](uint64_t address, std::string_view bytes) {
    // A run lies in the input, and does not go round the end of all addresses.
    if (bytes.data() < runs.data() || bytes.data() + bytes.size() > runs.data() + runs.size()) __builtin_trap();
    if (bytes.size() > mirror::kMostRuns || address + bytes.size() < address) __builtin_trap();
    if (++count > runs.size() / 16) __builtin_trap();
    const uint64_t offset = address - kAddress;
    if (offset > kBytes || bytes.size() > kBytes - offset) return true;
    mirror::OverwriteRun(bytes.data(), bytes.size(), &now[offset], &base[offset]);
    if (now.compare(offset, bytes.size(), bytes) != 0) __builtin_trap();
    return true;
  });
  if (now != base) __builtin_trap();
  // What differs from the beginning, sent again, makes the same of it.
  std::string sent, other(kBytes, 'm'), other_base = other;
  uint64_t at = 0;
  mirror::CollectChanges(kAddress, now.data(), &base.assign(kBytes, 'm')[0], kBytes, size % 2 == 0, &at, &sent);
  const bool well_formed = mirror::ForEachRun(sent, [&](uint64_t address, std::string_view bytes) {
    return mirror::ApplyRun(bytes.data(), bytes.size(), &other[address - kAddress], &other_base[address - kAddress]);
  });
  if (!well_formed || other != now) __builtin_trap();
  return 0;
}

std::vector<std::string> FuzzSeeds() {
  std::vector<std::string> seeds(3);
  mirror::AppendRun(kAddress, "one run", 7, &seeds[0]);
  mirror::AppendRun(kAddress + 100, "here", 4, &seeds[1]);
  mirror::AppendRun(kAddress + kBytes - 8, "the end.", 8, &seeds[1]);
  mirror::AppendRun(~uint64_t{0} - 8, "too far away", 12, &seeds[2]);
  return seeds;
}
