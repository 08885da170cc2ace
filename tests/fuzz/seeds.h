// SPDX-License-Identifier: Apache-2.0
// What a fuzz target gives to the driver besides libFuzzer's entry point.
#ifndef CUDA_REMOTE_TESTS_FUZZ_SEEDS_H_
#define CUDA_REMOTE_TESTS_FUZZ_SEEDS_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

// Well-formed inputs to start from.
std::vector<std::string> FuzzSeeds();

#endif  // CUDA_REMOTE_TESTS_FUZZ_SEEDS_H_
