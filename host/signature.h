// SPDX-License-Identifier: Apache-2.0
// A cr-hostd restores only what a cr-hostd with the same key has saved: it signs images. Images belong to their users,
// who can change them.
//
// No state but Key's.
#ifndef CUDA_REMOTE_HOST_SIGNATURE_H_
#define CUDA_REMOTE_HOST_SIGNATURE_H_

#include <stdint.h>

#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ckptfmt/folder.h"
#include "host/signature.pb.h"

namespace cuda_remote::host {

// No signature is longer than this.
inline constexpr uint64_t kMostSignatureBytes = 64u << 20;

class Key {
 public:
  // Reads the key at `path`, which only root may read; makes one if there is none.
  absl::Status Load(const std::string& path);

  // HMAC-SHA256.
  std::string CodeOf(std::string_view bytes) const;
  // Whether `code` is that; takes the same time for each wrong one.
  bool HasMade(std::string_view code, std::string_view bytes) const;
  // Names the key, and says nothing about it.
  std::string Id() const;

 private:
  std::string bytes_;
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

// Of an image of a job's part, of a checkpoint over several hosts; else empty.
struct PartOf {
  std::string checkpoint;  // its id
  std::string whole_job;   // what the user calls all parts together
};

// Signs the image in `folder`, which nobody else can reach: writes the file ckptfmt::kSignatureName.
absl::Status SignImage(const ckptfmt::OpenedFolder& folder, const Key& key, uint32_t user, const PartOf& part);

// What `bytes`, a file ckptfmt::kSignatureName, says. Fails if it was not made with `key`. Any input is safe. The paths
// that come out are below an image's folders, without empty, "." and ".." parts. `image` is for messages.
absl::StatusOr<Statement> ReadSignature(std::string_view bytes, const Key& key, const std::string& image);

}  // namespace cuda_remote::host

#endif  // CUDA_REMOTE_HOST_SIGNATURE_H_
