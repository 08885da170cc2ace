// SPDX-License-Identifier: Apache-2.0
// For tests: CRIU's files.img and remap-fpath.img, made by hand.
#ifndef CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_TESTING_FILES_IMAGE_H_
#define CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_TESTING_FILES_IMAGE_H_

#include <cstdint>
#include <protozero/pbf_writer.hpp>
#include <string>

namespace cuda_remote::checkpoint {

// An image without files.
inline std::string EmptyFilesImage() {
  const uint32_t magic[2] = {0x54564319, 0x56303138};
  return std::string(reinterpret_cast<const char*>(magic), sizeof(magic));
}

// Adds a file: `type` as in FdTypes, and its message in `field` of the FileEntry (CRIU's images/fdinfo.proto).
inline void AddFile(std::string* image, int type, uint32_t field, const std::string& message) {
  std::string entry;
  protozero::pbf_writer file(entry);
  file.add_enum(1, type);
  file.add_uint32(2, 7);
  file.add_message(field, message);
  const uint32_t bytes = uint32_t(entry.size());
  image->append(reinterpret_cast<const char*>(&bytes), sizeof(bytes));
  image->append(entry);
}

// An image without files that have lost their names.
inline std::string EmptyRemapsImage() {
  const uint32_t magic[2] = {0x54564319, 0x59133954};
  return std::string(reinterpret_cast<const char*>(magic), sizeof(magic));
}

// Ways in which a file's name is gone (CRIU's images/remap-file-path.proto).
inline constexpr uint32_t kLinkedRemap = 0, kGhostRemap = 1, kProcRemap = 2;

// Adds a file without a name, by its number in files.img. `other`: what has its contents.
inline void AddRemap(std::string* image, uint32_t file, uint32_t other, uint32_t type) {
  std::string entry;
  protozero::pbf_writer remap(entry);
  remap.add_uint32(1, file);
  remap.add_uint32(2, other);
  remap.add_uint32(3, type);
  const uint32_t bytes = uint32_t(entry.size());
  image->append(reinterpret_cast<const char*>(&bytes), sizeof(bytes));
  image->append(entry);
}

}  // namespace cuda_remote::checkpoint

#endif  // CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_TESTING_FILES_IMAGE_H_
