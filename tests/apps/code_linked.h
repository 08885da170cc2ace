// SPDX-License-Identifier: Apache-2.0
// What the modules of code_linked and its host have in common: what each function computes, and classes with virtual
// functions. Every module has these classes with its own number, compiled in two units that are linked.
#ifndef CUDA_REMOTE_TESTS_APPS_CODE_LINKED_H_
#define CUDA_REMOTE_TESTS_APPS_CODE_LINKED_H_

#include <stdint.h>

#ifdef __CUDACC__
#define APP_BOTH __host__ __device__
#else
#define APP_BOTH
#endif

// Functions in tables, objects, and what a kernel calls: thread i of Run calls target i.
enum : int {
  kFunctions = 4,
  kObjects = 4,
  kOfTable = kObjects,                 // by a __device__ variable
  kOfFixed = kOfTable + kFunctions,    // by a __constant__ variable
  kOfHidden = kOfFixed + kFunctions,   // by a static __device__ variable
  kOfInner = kOfHidden + kFunctions,   // by a static variable of a function
  kOfMembers = kOfInner + kFunctions,  // by pointers to member functions, which a __device__ variable holds
  kOfPointers = kOfMembers + 2,        // by addresses in GPU memory
  kTargets = kOfPointers + kFunctions,
};

// Each object may take this much memory.
constexpr int kObjectBytes = 64;

// What function `which` of module `number` makes of x. Nothing that a compiler could shorten, and of another length for
// each function: `rounds` is constant where it is compiled for a GPU.
APP_BOTH inline uint32_t Scramble(uint32_t x, uint32_t number, uint32_t which, int rounds) {
#pragma unroll
  for (int i = 0; i < rounds; ++i) {
    x ^= x >> (7 + i % 9);
    x = x * (0x2c1b3c6du + 2 * (97 * number + 13 * which + uint32_t(i))) + which;
  }
  return x;
}
APP_BOTH constexpr int Rounds(int number, int which) { return 6 + 4 * number + 5 * which; }
APP_BOTH constexpr int LateRounds(int number) { return 200 + 30 * number; }

// Numbers of functions beside those of the tables, 0 to 3.
enum : uint32_t { kAdder = 10, kTurner, kPairLeft, kPairRight, kChain, kMember, kLate = 20 };

#endif  // CUDA_REMOTE_TESTS_APPS_CODE_LINKED_H_
