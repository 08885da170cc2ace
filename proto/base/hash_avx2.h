// SPDX-License-Identifier: Apache-2.0
// The hashes of hash.h for processors with AVX2. hash_avx2.cc is the one file that is compiled for them, so it includes
// nothing whose inline functions could end up in other files' stead. All return with the upper halves of the vector
// registers cleared.
#ifndef CUDA_REMOTE_PROTO_BASE_HASH_AVX2_H_
#define CUDA_REMOTE_PROTO_BASE_HASH_AVX2_H_

#include <stddef.h>
#include <stdint.h>

namespace cuda_remote::avx2 {

void Hash128(const void* bytes, size_t size, uint64_t* low, uint64_t* high);
void KeyedHash128(const void* bytes, size_t size, const void* secret, size_t secret_size, uint64_t* low,
                  uint64_t* high);
uint64_t Hash64(const void* bytes, size_t size);
// `state`: an XXH3_state_t, as any other vector width leaves and takes it.
void Update128(void* state, const void* bytes, size_t size);

}  // namespace cuda_remote::avx2

#endif  // CUDA_REMOTE_PROTO_BASE_HASH_AVX2_H_
