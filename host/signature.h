// SPDX-License-Identifier: Apache-2.0
// A cr-hostd restores only what a cr-hostd with the same key has saved: it signs images. Images belong to their users,
// who can change them.
//
// No state but Key's.
#ifndef CUDA_REMOTE_HOST_SIGNATURE_H_
#define CUDA_REMOTE_HOST_SIGNATURE_H_

#include <stdint.h>
#include <sys/types.h>

#include <map>
#include <set>
#include <string>
#include <string_view>
#include <tuple>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ckptfmt/folder.h"
#include "ckptfmt/index.h"
#include "host/signature.pb.h"

namespace cuda_remote::host {

// No signature is longer than this.
inline constexpr uint64_t kMostSignatureBytes = 64u << 20;
inline constexpr size_t kHashBytes = 32;  // of SHA-256

// The key is in one page of memory, which is in no core file.
class Key {
 public:
  Key() = default;
  ~Key();
  Key(const Key&) = delete;
  Key& operator=(const Key&) = delete;

  // Reads the key at `path`, which only root may read; makes one if there is none.
  absl::Status Load(const std::string& path);

  // From now on, children of this process do not have the key: they may become a user's.
  absl::Status HideFromChildren() const;

  // HMAC-SHA256.
  std::string CodeOf(std::string_view bytes) const;
  // Whether `code` is that; takes the same time for each wrong one.
  bool HasMade(std::string_view code, std::string_view bytes) const;
  // Names the key, and says nothing about it.
  std::string Id() const;

 private:
  unsigned char* page_ = nullptr;
  size_t bytes_ = 0;
};

// SHA-256, of bytes as they pass.
class Digest {
 public:
  Digest();
  ~Digest();
  Digest(const Digest&) = delete;
  Digest& operator=(const Digest&) = delete;
  void Add(const void* bytes, size_t count);
  std::string Finish();

 private:
  void* const context_;
};

// SHA-256 of chunks that earlier images have, by the places where they seem to lie (earlier_images.h).
class KnownChunks {
 public:
  void Add(ino_t file, const ckptfmt::StoredChunk& chunk, std::string_view hash);
  // Null: there is no such chunk.
  const std::string* Find(ino_t file, const ckptfmt::StoredChunk& chunk) const;
  // Whether this is such a file, which has no bytes to read.
  bool HasFile(ino_t file) const { return files_.count(file) != 0; }

 private:
  // File, offset, bytes, and both hashes.
  using Place = std::tuple<ino_t, uint64_t, uint32_t, uint64_t, uint64_t, uint64_t, uint64_t>;
  static Place PlaceOf(ino_t file, const ckptfmt::StoredChunk& chunk);
  std::map<Place, std::string> hashes_;
  std::set<ino_t> files_;
};

// Of an image of a job's part, of a checkpoint over several hosts; else empty.
struct PartOf {
  std::string checkpoint;  // its id
  std::string whole_job;   // what the user calls all parts together
};

// Signs the image in `folder`, which nobody else can reach: writes the file ckptfmt::kSignatureName.
// `earlier`: not null for the image of a store, which is signed by chunk. The bytes of chunks that it knows are not
// read.
absl::Status SignImage(const ckptfmt::OpenedFolder& folder, const Key& key, uint32_t user, const PartOf& part,
                       const KnownChunks* earlier = nullptr);

// What `bytes`, a file ckptfmt::kSignatureName, says. Fails if it was not made with `key`. Any input is safe. The paths
// that come out are below an image's folders, without empty, "." and ".." parts. A file has a hash unless it is signed
// by chunk, and all chunks have whole hashes. `image` is for messages.
absl::StatusOr<Statement> ReadSignature(std::string_view bytes, const Key& key, const std::string& image);

}  // namespace cuda_remote::host

#endif  // CUDA_REMOTE_HOST_SIGNATURE_H_
