#include "ckptfmt/index.h"

#include <cstdio>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace cuda_remote::ckptfmt {
namespace {

constexpr char kMagic[8] = {'C', 'R', 'M', 'E', 'M', 'I', 'D', 'X'};

struct FileHeader {
  char magic[8];
  uint32_t version;
  uint32_t chunk_bytes;
  uint64_t chunks;
  uint64_t regions;
  uint32_t data_files;
  uint32_t reserved;
  uint64_t bytes;  // of the whole index, trailer included
};
static_assert(sizeof(FileHeader) == 48);

struct ChunkEntry {
  uint64_t hash_low;
  uint64_t hash_high;
  uint64_t offset;
  uint32_t file;
  uint32_t encoding;
  uint32_t stored_bytes;
  uint32_t bytes;
};
static_assert(sizeof(ChunkEntry) == 40);

struct RegionEntry {
  uint64_t address;
  uint64_t bytes;
  uint64_t object;
  uint64_t context;
  uint64_t flags;
  uint32_t kind;
  int32_t device;
  uint32_t module_index;
  uint32_t symbol_bytes;
};
static_assert(sizeof(RegionEntry) == 56);

template <typename T>
void Put(const T& value, std::string* out) {
  out->append(reinterpret_cast<const char*>(&value), sizeof(value));
}

void Pad(std::string* out) { out->append((8 - out->size() % 8) % 8, '\0'); }

class Reader {
 public:
  explicit Reader(std::string_view bytes) : bytes_(bytes) {}
  template <typename T>
  bool Take(T* value) {
    std::string_view view;
    if (!Take(sizeof(T), &view)) return false;
    memcpy(value, view.data(), sizeof(T));
    return true;
  }
  bool Take(uint64_t count, std::string_view* view) {
    if (bytes_.size() - at_ < count) return false;
    *view = bytes_.substr(at_, size_t(count));
    at_ += size_t(count);
    return true;
  }
  bool TakePadding() {
    for (; at_ % 8 != 0; ++at_) {
      if (at_ >= bytes_.size() || bytes_[at_] != 0) return false;
    }
    return true;
  }
  size_t at() const { return at_; }
  size_t left() const { return bytes_.size() - at_; }

 private:
  std::string_view bytes_;
  size_t at_ = 0;
};

}  // namespace

std::string DataFileName(uint32_t number) {
  char name[32];
  snprintf(name, sizeof(name), "memory/data-%05u", number);
  return name;
}

std::string EncodeIndex(const Index& index) {
  std::string out;
  FileHeader header{};
  memcpy(header.magic, kMagic, sizeof(kMagic));
  header.version = kFormatVersion;
  header.chunk_bytes = uint32_t(kChunkBytes);
  header.chunks = index.chunks.size();
  header.regions = index.regions.size();
  header.data_files = index.data_files;
  Put(header, &out);
  for (const StoredChunk& chunk : index.chunks) {
    Put(ChunkEntry{chunk.hash.low, chunk.hash.high, chunk.offset, chunk.file, uint32_t(chunk.encoding),
                   chunk.stored_bytes, chunk.bytes},
        &out);
  }
  for (const IndexedRegion& indexed : index.regions) {
    const Region& region = indexed.region;
    Put(RegionEntry{region.address, region.bytes, region.object, region.context, region.flags, uint32_t(region.kind),
                    region.device, region.module_index, uint32_t(region.symbol.size())},
        &out);
    out += region.symbol;
    Pad(&out);
    for (const uint32_t chunk : indexed.chunks) Put(chunk, &out);
    Pad(&out);
  }
  const uint64_t total = out.size() + 16;
  memcpy(&out[offsetof(FileHeader, bytes)], &total, sizeof(total));
  const Hash hash = HashOf(out);
  Put(hash.low, &out);
  Put(hash.high, &out);
  return out;
}

absl::StatusOr<Index> DecodeIndex(std::string_view bytes, const std::string& name) {
  size_t at = 0;
  const auto damaged = [&](const char* what) {
    return absl::DataLossError(absl::StrCat(name, " is damaged at offset ", at, ": ", what));
  };
  FileHeader header;
  Hash expected;
  if (bytes.size() < sizeof(header) + sizeof(expected)) return damaged("too short");
  memcpy(&header, bytes.data(), sizeof(header));
  if (memcmp(header.magic, kMagic, sizeof(kMagic)) != 0) return damaged("this is no memory index");
  const std::string_view body = bytes.substr(0, bytes.size() - sizeof(expected));
  memcpy(&expected, bytes.data() + body.size(), sizeof(expected));
  if (header.bytes != bytes.size()) return damaged("its size is not what it says");
  if (HashOf(body) != expected) return damaged("its checksum is wrong");
  if (header.version != kFormatVersion || header.chunk_bytes != kChunkBytes || header.reserved != 0) {
    return damaged("its header");
  }
  Reader reader(body);
  reader.Take(&header);
  if (header.chunks > reader.left() / sizeof(ChunkEntry) || header.chunks >= UINT32_MAX) return damaged("its header");
  Index index;
  index.data_files = header.data_files;
  index.chunks.reserve(size_t(header.chunks));
  for (uint64_t i = 0; i < header.chunks; ++i) {
    at = reader.at();
    ChunkEntry entry;
    reader.Take(&entry);
    const bool sane = entry.file < header.data_files && entry.encoding <= uint32_t(Encoding::kZstd) &&
                      entry.bytes > 0 && entry.bytes <= kChunkBytes && entry.stored_bytes > 0 &&
                      entry.stored_bytes <= entry.bytes &&
                      (entry.encoding != uint32_t(Encoding::kRaw) || entry.stored_bytes == entry.bytes);
    if (!sane) return damaged("a chunk's entry");
    index.chunks.push_back({{entry.hash_low, entry.hash_high},
                            entry.file,
                            Encoding(entry.encoding),
                            entry.offset,
                            entry.stored_bytes,
                            entry.bytes});
  }
  for (uint64_t i = 0; i < header.regions; ++i) {
    at = reader.at();
    RegionEntry entry;
    std::string_view symbol;
    if (!reader.Take(&entry) || !reader.Take(entry.symbol_bytes, &symbol) || !reader.TakePadding()) {
      return damaged("a region is cut off");
    }
    if (entry.kind < uint32_t(RegionKind::kAllocation) || entry.kind > uint32_t(RegionKind::kHeap)) {
      return damaged("a region's kind");
    }
    const uint64_t count = ChunkCount(entry.bytes);
    if (count > reader.left() / sizeof(uint32_t)) return damaged("a region's chunks");
    IndexedRegion indexed;
    Region& region = indexed.region;
    region.kind = RegionKind(entry.kind);
    region.address = entry.address;
    region.bytes = entry.bytes;
    region.object = entry.object;
    region.symbol = std::string(symbol);
    region.context = entry.context;
    region.device = entry.device;
    region.module_index = entry.module_index;
    region.flags = entry.flags;
    indexed.chunks.resize(size_t(count));
    for (uint64_t c = 0; c < count; ++c) {
      uint32_t& chunk = indexed.chunks[size_t(c)];
      reader.Take(&chunk);
      if (chunk == 0) continue;
      if (chunk > index.chunks.size() || index.chunks[chunk - 1].bytes != ChunkLength(entry.bytes, c)) {
        return damaged("a region's chunk");
      }
    }
    if (!reader.TakePadding()) return damaged("a region's chunks");
    index.regions.push_back(std::move(indexed));
  }
  at = reader.at();
  if (reader.left() != 0) return damaged("bytes after the last region");
  return index;
}

}  // namespace cuda_remote::ckptfmt
