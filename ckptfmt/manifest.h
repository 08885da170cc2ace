// SPDX-License-Identifier: Apache-2.0
// manifest.pb: what an image says of itself, with the size and checksums of every other file. FORMAT.md specifies it.
#ifndef CUDA_REMOTE_CKPTFMT_MANIFEST_H_
#define CUDA_REMOTE_CKPTFMT_MANIFEST_H_

#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ckptfmt/file.h"
#include "ckptfmt/types.h"

namespace cuda_remote::ckptfmt {

inline constexpr char kManifestName[] = "manifest.pb";
inline constexpr char kIndexName[] = "memory/index";
inline constexpr char kProcessesFolder[] = "processes";
inline constexpr char kMemoryFolder[] = "memory";
inline constexpr char kClientFolder[] = "client";

// No manifest is longer than this.
inline constexpr uint64_t kMaxManifestBytes = 256u << 20;

// Whether `path` is a file with chunks: "memory/data-00000".
bool IsDataFile(std::string_view path);

// The replay log of a process, by its number: "processes/0/log".
std::string LogName(size_t process);

// The bytes of manifest.pb. `files` in any order.
std::string EncodeManifest(const ImageInfo& info, std::vector<FileRecord> files);

// Any input is safe. kDataLoss for damage, kFailedPrecondition for another format version. `name` is for messages. The
// paths that come out are below processes/, memory/ or client/, distinct and without "..".
absl::Status DecodeManifest(std::string_view bytes, const std::string& name, ImageInfo* info,
                            std::vector<FileRecord>* files);

}  // namespace cuda_remote::ckptfmt

#endif  // CUDA_REMOTE_CKPTFMT_MANIFEST_H_
