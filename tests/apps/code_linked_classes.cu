// SPDX-License-Identifier: Apache-2.0
// The second unit of each module of code_linked; see code_linked_kernels.cu.
#include "tests/apps/code_linked_classes.h"

#define SCRAMBLE(x, which) Scramble(x, APP_MODULE, which, Rounds(APP_MODULE, which))

__device__ uint32_t Adder::Apply(uint32_t x) const { return SCRAMBLE(x + seed_, kAdder); }
__device__ uint32_t Turner::Apply(uint32_t x) const { return SCRAMBLE(x ^ seed_, kTurner); }
__device__ uint32_t Pair::Apply(uint32_t x) const { return SCRAMBLE(x - seed_, kPairLeft); }
__device__ uint32_t Pair::Other(uint32_t x) const { return SCRAMBLE(x * (2 * seed_ + 1), kPairRight); }
__device__ uint32_t Chain::Apply(uint32_t x) const {
  return SCRAMBLE(second_->Other(first_->Apply(x)) + seed_, kChain);
}

__device__ uint32_t Plain::Once(uint32_t x) { return SCRAMBLE(x + seed, kMember); }
__device__ uint32_t Plain::Again(uint32_t x) { return SCRAMBLE(x ^ seed, kMember + 1); }

__device__ uint32_t Outer0(uint32_t x) { return SCRAMBLE(x, 0); }
__device__ uint32_t Outer1(uint32_t x) { return SCRAMBLE(x, 1); }
