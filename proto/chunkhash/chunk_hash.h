// SPDX-License-Identifier: Apache-2.0
// The hash of a chunk of memory, by which copies are compared with what a GPU has: the GPU computes the same one at its
// memory's speed (HashMemory, server/worker/memory_hash.h). steps.h says what it is and what it promises.
#ifndef CUDA_REMOTE_PROTO_CHUNKHASH_CHUNK_HASH_H_
#define CUDA_REMOTE_PROTO_CHUNKHASH_CHUNK_HASH_H_

#include <cstddef>
#include <cstdint>

namespace cuda_remote {

struct ChunkHash {
  uint64_t low = 0, high = 0;
  bool operator==(const ChunkHash& other) const { return low == other.low && high == other.high; }
  bool operator!=(const ChunkHash& other) const { return !(*this == other); }
};

// Of any number of bytes, at any address. Memory that others write to meanwhile gives the hash of some of it.
ChunkHash HashChunk(const void* data, size_t bytes);

// The same of one row of 8 KiB in so many, the first one included: shows most changes for a fraction of the time.
ChunkHash HashRows(const void* data, size_t bytes, uint32_t every);

}  // namespace cuda_remote

#endif  // CUDA_REMOTE_PROTO_CHUNKHASH_CHUNK_HASH_H_
