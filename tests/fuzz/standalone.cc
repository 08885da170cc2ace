// SPDX-License-Identifier: Apache-2.0
// Driver for fuzz targets where libFuzzer is not: gives the target every seed, then mutations of seeds, for a bounded
// time.
//
// Usage: TARGET [--seconds N] [--seed N] [FILE ...]     FILEs: run just these inputs
//
// When an input crashes the target, the seed number printed at the start repeats the run.

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <random>
#include <string>

#include "tests/fuzz/seeds.h"

namespace {

using Random = std::mt19937_64;

std::string Mutate(const std::vector<std::string>& seeds, Random& random) {
  std::string input = seeds.empty() ? "" : seeds[random() % seeds.size()];
  for (int changes = int(random() % 6) + 1; changes > 0; --changes) {
    const size_t at = input.empty() ? 0 : random() % input.size();
    switch (random() % 8) {
      case 0:
        if (!input.empty()) input[at] = char(random());
        break;
      case 1:
        if (!input.empty()) input[at] ^= char(1 << random() % 8);
        break;
      case 2:
        input.resize(at);
        break;
      case 3:
        input.insert(at, std::string(random() % 16, char(random())));
        break;
      case 4:
        input.erase(at, random() % 16);
        break;
      case 5: {
        // Numbers that are limits of something.
        static const uint64_t kLimits[] = {0,
                                           1,
                                           7,
                                           8,
                                           0x7f,
                                           0x80,
                                           0xff,
                                           0xffff,
                                           0x100000,
                                           0x100001,
                                           0x7fffffff,
                                           0xffffffff,
                                           uint64_t{1} << 32,
                                           uint64_t{1} << 63,
                                           UINT64_MAX,
                                           UINT64_MAX - 7};
        const uint64_t value = kLimits[random() % (sizeof(kLimits) / sizeof(kLimits[0]))];
        const size_t bytes = size_t{1} << random() % 4;
        if (at + bytes <= input.size()) memcpy(&input[at], &value, bytes);
        break;
      }
      case 6:
        if (!seeds.empty()) {
          const std::string& other = seeds[random() % seeds.size()];
          const size_t from = other.empty() ? 0 : random() % other.size();
          input.insert(at, other.substr(from, random() % 256));
        }
        break;
      case 7:
        if (!input.empty()) input.insert(at, input.substr(random() % input.size(), random() % 64));
        break;
    }
    if (input.size() > (1u << 20)) input.resize(1u << 20);
  }
  return input;
}

void Run(const std::string& input) {
  LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(input.data()), input.size());
}

}  // namespace

int main(int argc, char** argv) {
  double seconds = 5;
  uint64_t seed = uint64_t(std::chrono::system_clock::now().time_since_epoch().count());
  bool files = false;
  for (int i = 1; i < argc; ++i) {
    if (!strcmp(argv[i], "--seconds") && i + 1 < argc) {
      seconds = atof(argv[++i]);
    } else if (!strcmp(argv[i], "--seed") && i + 1 < argc) {
      seed = strtoull(argv[++i], nullptr, 0);
    } else {
      std::ifstream in(argv[i], std::ios::binary);
      Run(std::string(std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()));
      files = true;
    }
  }
  if (files) return 0;
  printf("--seed %llu\n", static_cast<unsigned long long>(seed));
  fflush(stdout);
  const std::vector<std::string> seeds = FuzzSeeds();
  Run("");
  for (const std::string& input : seeds) Run(input);
  Random random(seed);
  uint64_t runs = 0;
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  while (std::chrono::steady_clock::now() < end) {
    for (int i = 0; i < 64; ++i) Run(Mutate(seeds, random));
    runs += 64;
  }
  printf("%llu inputs\n", static_cast<unsigned long long>(runs));
  return 0;
}
