// SPDX-License-Identifier: Apache-2.0
// memory/index: which regions an image holds, and where the chunks of each are. FORMAT.md is the specification.
#ifndef CUDA_REMOTE_CKPTFMT_INDEX_H_
#define CUDA_REMOTE_CKPTFMT_INDEX_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ckptfmt/types.h"
#include "proto/base/hash.h"

namespace cuda_remote::ckptfmt {

enum class Encoding : uint32_t { kRaw = 0, kZstd = 1 };

// A chunk that is stored in a data file.
struct StoredChunk {
  Hash128 hash;   // of the unpacked bytes
  Hash128 keyed;  // the same with the index's secret
  uint32_t file = 0;
  Encoding encoding = Encoding::kRaw;
  uint64_t offset = 0;
  uint32_t stored_bytes = 0;
  uint32_t bytes = 0;
  std::optional<ChunkHash> gpu_hash;  // as the GPU computes it, if it is known
};

// A region's chunks: 0 for one of zeros, else a number of a stored chunk plus 1.
struct IndexedRegion {
  Region region;
  std::vector<uint32_t> chunks;
};

struct Index {
  std::vector<StoredChunk> chunks;
  std::vector<IndexedRegion> regions;
  std::vector<std::string> data_files;  // their paths below the image's folder, by rising number
  std::string secret;                   // of the chunks' keyed hashes
};

// Length of a region's chunk `number`.
inline uint64_t ChunkLength(uint64_t region_bytes, uint64_t number) {
  const uint64_t left = region_bytes - number * kChunkBytes;
  return left < kChunkBytes ? left : kChunkBytes;
}
inline uint64_t ChunkCount(uint64_t region_bytes) {
  return region_bytes / kChunkBytes + (region_bytes % kChunkBytes != 0);
}

std::string EncodeIndex(const Index& index);

// Any input is safe. `name` is for messages. What comes out is consistent in itself: chunks exist and have the lengths
// that regions need. Whether they lie inside the data files, and whether regions' processes exist, is the caller's to
// check.
absl::StatusOr<Index> DecodeIndex(std::string_view bytes, const std::string& name);

// Name of a data file: "memory/data-00000".
std::string DataFileName(uint32_t number);

}  // namespace cuda_remote::ckptfmt

#endif  // CUDA_REMOTE_CKPTFMT_INDEX_H_
