// SPDX-License-Identifier: Apache-2.0
#include "ckptfmt/index.h"

#include <cstdio>

#include "absl/strings/str_cat.h"
#include "ckptfmt/envelope.h"
#include "ckptfmt/manifest.h"
#include "ckptfmt/manifest.pb.h"

namespace cuda_remote::ckptfmt {
namespace {

constexpr uint32_t kMagic = 0x49465243;  // "CRFI"

bool IsSane(const StoredChunk& chunk, uint64_t data_files) {
  return chunk.file < data_files && uint32_t(chunk.encoding) <= uint32_t(Encoding::kZstd) && chunk.bytes > 0 &&
         chunk.bytes <= kChunkBytes && chunk.stored_bytes > 0 && chunk.stored_bytes <= chunk.bytes &&
         (chunk.encoding != Encoding::kRaw || chunk.stored_bytes == chunk.bytes);
}

bool IsKind(uint32_t kind) { return kind >= uint32_t(RegionKind::kAllocation) && kind <= uint32_t(RegionKind::kHeap); }

}  // namespace

std::string DataFileName(uint32_t number) {
  char name[32];
  snprintf(name, sizeof(name), "memory/data-%05u", number);
  return name;
}

std::string EncodeIndex(const Index& index) {
  IndexContents contents;
  contents.set_chunk_bytes(uint32_t(kChunkBytes));
  contents.set_secret(index.secret);
  for (const std::string& path : index.data_files) contents.add_data_files()->set_path(path);
  for (const StoredChunk& chunk : index.chunks) {
    StoredChunkEntry* const entry = contents.add_chunks();
    entry->set_hash(ToBytes(chunk.hash));
    entry->set_keyed_hash(ToBytes(chunk.keyed));
    if (chunk.gpu_hash) entry->set_gpu_hash(ToBytes(Hash128{chunk.gpu_hash->low, chunk.gpu_hash->high}));
    entry->set_data_file(chunk.file);
    entry->set_offset(chunk.offset);
    entry->set_encoding(uint32_t(chunk.encoding));
    entry->set_stored_bytes(chunk.stored_bytes);
    entry->set_bytes(chunk.bytes);
  }
  for (const IndexedRegion& indexed : index.regions) {
    const Region& region = indexed.region;
    RegionEntry* const entry = contents.add_regions();
    entry->set_process(region.process);
    entry->set_kind(uint32_t(region.kind));
    entry->set_address(region.address);
    entry->set_bytes(region.bytes);
    entry->set_object(region.object);
    entry->set_symbol(region.symbol);
    entry->set_context(region.context);
    entry->set_device(region.device);
    entry->set_module_index(region.module_index);
    entry->set_functions(region.flags);
    for (const uint32_t chunk : indexed.chunks) entry->add_chunks(chunk);
  }
  return Seal<IndexFile>(kMagic, Serialize(contents),
                         [](IndexFile* file, const std::string& bytes) { file->set_index(bytes); });
}

absl::StatusOr<Index> DecodeIndex(std::string_view bytes, const std::string& name) {
  const auto damaged = [&](const char* what) { return absl::DataLossError(absl::StrCat(name, " is damaged: ", what)); };
  IndexFile in;
  uint32_t version = 0;
  const absl::Status status = Unseal<IndexFile>(
      bytes, name, kMagic, [](const IndexFile& file) -> const std::string& { return file.index(); }, &in, &version);
  if (!status.ok()) return status;
  IndexContents contents;
  if (!contents.ParseFromString(in.index())) return damaged("its contents cannot be parsed");
  if (contents.chunk_bytes() != kChunkBytes) return damaged("its chunk size");
  Index index;
  index.secret = contents.secret();
  if (index.secret.size() != kSecretBytes) return damaged("its secret");
  for (const DataFile& file : contents.data_files()) {
    if (!IsDataFile(file.path()) || (!index.data_files.empty() && index.data_files.back() >= file.path())) {
      return damaged("the name of a data file");
    }
    index.data_files.push_back(file.path());
  }
  index.chunks.reserve(size_t(contents.chunks_size()));
  for (const StoredChunkEntry& entry : contents.chunks()) {
    StoredChunk chunk;
    if (!FromBytes(entry.hash(), &chunk.hash) || !FromBytes(entry.keyed_hash(), &chunk.keyed)) {
      return damaged("a chunk's hash");
    }
    if (!entry.gpu_hash().empty()) {
      Hash128 gpu;
      if (!FromBytes(entry.gpu_hash(), &gpu)) return damaged("a chunk's hash");
      chunk.gpu_hash = ChunkHash{gpu.low, gpu.high};
    }
    chunk.file = entry.data_file();
    chunk.encoding = Encoding(entry.encoding());
    chunk.offset = entry.offset();
    chunk.stored_bytes = entry.stored_bytes();
    chunk.bytes = entry.bytes();
    if (!IsSane(chunk, index.data_files.size())) return damaged("a chunk's entry");
    index.chunks.push_back(chunk);
  }
  for (const RegionEntry& entry : contents.regions()) {
    IndexedRegion indexed;
    Region& region = indexed.region;
    if (!IsKind(entry.kind())) return damaged("a region's kind");
    region.process = entry.process();
    region.kind = RegionKind(entry.kind());
    region.address = entry.address();
    region.bytes = entry.bytes();
    region.object = entry.object();
    region.symbol = entry.symbol();
    region.context = entry.context();
    region.device = entry.device();
    region.module_index = entry.module_index();
    region.flags = entry.functions();
    if (uint64_t(entry.chunks_size()) != ChunkCount(region.bytes)) return damaged("a region's chunks");
    indexed.chunks.assign(entry.chunks().begin(), entry.chunks().end());
    for (size_t i = 0; i < indexed.chunks.size(); ++i) {
      const uint32_t chunk = indexed.chunks[i];
      if (chunk == 0) continue;
      if (chunk > index.chunks.size() || index.chunks[chunk - 1].bytes != ChunkLength(region.bytes, i)) {
        return damaged("a region's chunk");
      }
    }
    index.regions.push_back(std::move(indexed));
  }
  return index;
}

}  // namespace cuda_remote::ckptfmt
