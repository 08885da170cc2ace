// SPDX-License-Identifier: Apache-2.0
// Fuzz target: manifest and memory index of a hostile image. Checksums are made right first, or nothing else would be
// tested. First byte of the input: which of the two.

#include <google/protobuf/message_lite.h>
#if __has_include(<google/protobuf/stubs/logging.h>)
#include <google/protobuf/stubs/logging.h>
#endif

#include <cstring>

#include "ckptfmt/index.h"
#include "ckptfmt/manifest.h"
#include "ckptfmt/manifest.pb.h"
#include "ckptfmt/testing.h"
#include "tests/fuzz/seeds.h"

using namespace cuda_remote;           // NOLINT: a test program
using namespace cuda_remote::ckptfmt;  // NOLINT

namespace {

void TryIndex(const std::string& bytes) {
  (void)DecodeIndex(bytes, "index");
  IndexFile file;
  file.set_magic(0x49465243);
  file.set_format_version(kFormatVersion);
  file.set_index(bytes);
  const std::string covered = std::string("CRFI\3\0\0\0", 8) + bytes;
  file.set_hash(ToBytes(HashOf(covered)));
  const auto index = DecodeIndex(file.SerializeAsString(), "index");
  if (!index.ok()) return;
  for (const StoredChunk& chunk : index->chunks) {
    if (chunk.file >= index->data_files.size()) __builtin_trap();
  }
  for (const std::string& path : index->data_files) {
    if (path.find("memory/data-") != 0 || path.find('.') != std::string::npos) __builtin_trap();
  }
  for (const IndexedRegion& indexed : index->regions) {
    for (size_t i = 0; i < indexed.chunks.size(); ++i) {
      if (indexed.chunks[i] > index->chunks.size()) __builtin_trap();
    }
  }
}

void TryManifest(const std::string& bytes) {
  ImageInfo info;
  std::vector<FileRecord> files;
  (void)DecodeManifest(bytes, "manifest", &info, &files);
  ManifestFile file;
  file.set_magic(0x4d465243);
  file.set_format_version(kFormatVersion);
  file.set_manifest(bytes);
  const std::string covered = std::string("CRFM\3\0\0\0", 8) + bytes;
  file.set_hash(ToBytes(HashOf(covered)));
  if (!DecodeManifest(file.SerializeAsString(), "manifest", &info, &files).ok()) return;
  for (const FileRecord& record : files) {
    if (record.path.find("..") == 0 || record.path[0] == '/') __builtin_trap();
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::string bytes(reinterpret_cast<const char*>(data + 1), size - 1);
  data[0] & 1 ? TryIndex(bytes) : TryManifest(bytes);
  return 0;
}

std::vector<std::string> FuzzSeeds() {
#if __has_include(<google/protobuf/stubs/logging.h>)
  // Else each name that is no UTF-8 is a line, and the test's log 170 MB. (Releases from 22 on log through abseil.)
  google::protobuf::SetLogHandler(nullptr);
#endif
  FileRecord file;
  file.path = "client/core.img";
  file.bytes = 10;
  file.blocks = {1};
  const std::string whole = EncodeManifest(SampleInfo(), {file});
  ManifestFile parsed;
  parsed.ParseFromString(whole);
  Index index;
  index.data_files = {"memory/data-00000"};
  index.secret = std::string(kSecretBytes, 's');
  index.chunks.push_back({{1, 2}, {5, 6}, 0, Encoding::kRaw, 0, 1000, 1000, std::nullopt});
  index.chunks.push_back({{3, 4}, {7, 8}, 0, Encoding::kZstd, 1000, 500, uint32_t(kChunkBytes), ChunkHash{9, 10}});
  for (const SampleRegion& sample : SampleRegions(true)) {
    index.regions.push_back({sample.region, std::vector<uint32_t>(ChunkCount(sample.region.bytes))});
  }
  index.regions[0].chunks[0] = 1;
  IndexFile encoded;
  encoded.ParseFromString(EncodeIndex(index));
  return {std::string(1, '\0') + whole, std::string(1, '\0') + parsed.manifest(), '\1' + encoded.index()};
}
