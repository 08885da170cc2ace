// SPDX-License-Identifier: Apache-2.0
// What the hash of a chunk is, step by step: for the host's function (chunk_hash.cc) and for the GPU's kernel
// (server/worker/memory/hash_kernel.cu), which must give the same values for ever: images keep them.
//
// A chunk is words of 16 bytes, the last one filled up with zeros. Word i goes to lane i % kLanes, and each lane
// takes its words in order. The lanes' ends are mixed and added, and the sum is mixed with the chunk's length. A row is
// a word for each lane: lanes may leave rows out, all the same ones (HashRows), but never the last word if it is not
// full.
//
// For one word the step of a lane is a bijection of its 128 bits of state, so chunks that differ in one word of a lane
// never give that lane the same state. Otherwise two chunks of different contents, which were not chosen with the hash
// in mind, have the same hash with a probability of about 2^-128. It is no protection against somebody who wants that.
#ifndef CUDA_REMOTE_PROTO_CHUNKHASH_STEPS_H_
#define CUDA_REMOTE_PROTO_CHUNKHASH_STEPS_H_

#include <stdint.h>

#if defined(__CUDACC__)
#define CUDA_REMOTE_HASH_STEP __host__ __device__ inline
#else
#define CUDA_REMOTE_HASH_STEP inline
#endif

namespace cuda_remote::chunkhash {

enum : uint32_t { kLanes = 512 };

struct Pair {
  uint64_t a, b;
};

CUDA_REMOTE_HASH_STEP uint64_t Rotate(uint64_t x, int by) { return x << by | x >> (64 - by); }

CUDA_REMOTE_HASH_STEP uint64_t Scatter(uint64_t x) {
  x = (x ^ x >> 32) * 0xd6e8feb86659fd93;
  x = (x ^ x >> 32) * 0xd6e8feb86659fd93;
  return x ^ x >> 32;
}

CUDA_REMOTE_HASH_STEP Pair Begin(uint32_t lane) {
  return {0x243f6a8885a308d3 ^ lane * 0x9e3779b97f4a7c15, 0x13198a2e03707344 + lane * 0xc2b2ae3d27d4eb4f};
}

// One word: its first and its last 8 bytes.
CUDA_REMOTE_HASH_STEP void Step(Pair* state, uint64_t first, uint64_t last) {
  state->a = Rotate((state->a ^ first) * 0x9fb21c651e98df25, 29) + state->b;
  state->b = Rotate((state->b ^ last) * 0xa0761d6478bd642f, 31) + state->a;
}

// Mixes 128 bits, one to one.
CUDA_REMOTE_HASH_STEP Pair Mix(Pair state) {
  state.a = Scatter(state.a + state.b);
  state.b = Scatter(state.b + state.a);
  state.a = Scatter(state.a ^ Rotate(state.b, 32));
  state.b ^= Rotate(state.a, 23);
  return state;
}

// `sum`: of Mix of all lanes, each half by itself.
CUDA_REMOTE_HASH_STEP Pair End(Pair sum, uint64_t bytes) {
  return Mix({sum.a ^ bytes * 0x9e3779b97f4a7c15, sum.b + bytes});
}

}  // namespace cuda_remote::chunkhash

#endif  // CUDA_REMOTE_PROTO_CHUNKHASH_STEPS_H_
