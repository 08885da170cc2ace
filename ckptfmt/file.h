// SPDX-License-Identifier: Apache-2.0
// Files of an image: written with their checksums growing along, read with errors that name them.
//
// Not thread-safe, but ReadAt. Errors are absl::Status with the path and what the system said.
#ifndef CUDA_REMOTE_CKPTFMT_FILE_H_
#define CUDA_REMOTE_CKPTFMT_FILE_H_

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/base/hash.h"
#include "proto/base/unique_fd.h"

namespace cuda_remote::ckptfmt {

// Checksummed piece of a file, so that damage can be told with its place.
inline constexpr size_t kBlockBytes = 2u << 20;

// The folder that holds `path`.
std::string ParentOf(const std::string& path);

// The last failed system call as a status: "cannot write PATH: No space left on device (...)".
absl::Status SystemError(const std::string& doing, const std::string& path, int error);

// A folder that is open. What is in it is reached through the descriptor, so that nobody can put another folder in its
// place meanwhile; its path is for messages.
class OpenedFolder {
 public:
  OpenedFolder() = default;
  OpenedFolder(UniqueFd fd, std::string path) : fd_(std::move(fd)), path_(std::move(path)) {}
  // The last part of `path` is not followed if it is a symbolic link.
  static absl::StatusOr<OpenedFolder> Open(const std::string& path);
  // A folder below this one.
  absl::StatusOr<OpenedFolder> OpenBelow(const std::string& path) const;

  int fd() const { return fd_.get(); }
  const std::string& path() const { return path_; }
  std::string FullPath(const std::string& path) const { return path_ + "/" + path; }
  // For programs that take a path: leads here as long as this process has it open.
  std::string DescriptorPath() const { return "/proc/self/fd/" + std::to_string(fd_.get()); }
  // Whether this is what stands at path(), also if another host of a network file system has changed that just now.
  bool IsInPlace() const;
  // The file in it by which it is locked (folder.h); -1: none.
  UniqueFd& lock() { return lock_; }

 private:
  UniqueFd fd_;
  UniqueFd lock_;
  std::string path_;
};

// What the manifest says of a file.
struct FileRecord {
  std::string path;  // below the image's folder
  uint64_t bytes = 0;
  Hash128 hash;
  std::vector<uint64_t> blocks;  // XXH3-64 of each kBlockBytes
  bool has_hash = true;          // a data file has none: its chunks have
  uint32_t mode = 0600;
};

// Takes the checksums of a file's bytes as they pass.
class FileHasher {
 public:
  void Add(std::string_view bytes);
  // Fills in bytes, hash and blocks.
  void Finish(FileRecord* record);
  uint64_t bytes() const { return bytes_; }

 private:
  Hasher whole_;
  std::string block_;  // the begun one
  std::vector<uint64_t> blocks_;
  uint64_t bytes_ = 0;
};

// A new file, written from its start to its end.
class OutputFile {
 public:
  // `hashed`: false for a data file.
  static absl::StatusOr<OutputFile> Create(const OpenedFolder& folder, const std::string& path, bool hashed = true);

  // Waits for the disk when it is far behind: what the kernel keeps in memory of the file has a bound.
  absl::Status Append(std::string_view bytes);
  uint64_t bytes() const { return bytes_; }
  // Seconds that Append has waited for the disk, and for how many bytes.
  double waited_seconds() const { return waited_seconds_; }
  uint64_t waited_bytes() const { return waited_; }
  // Flushes to the disk and closes.
  absl::StatusOr<FileRecord> Finish();

 private:
  UniqueFd fd_;
  std::string full_path_;
  std::string path_;
  FileHasher hasher_;
  bool hashed_ = true;
  uint64_t bytes_ = 0;
  // The disk has been told to write what is before, and has written what is before.
  uint64_t started_ = 0, waited_ = 0;
  double waited_seconds_ = 0;
};

// An existing plain file in the folder; symbolic links are not followed.
absl::StatusOr<UniqueFd> OpenForReading(const OpenedFolder& folder, const std::string& path);
// Reads exactly `bytes.size()` bytes; kDataLoss if the file ends before.
absl::Status ReadAt(int fd, const std::string& full_path, uint64_t offset, char* out, size_t bytes);
absl::StatusOr<std::string> ReadWhole(const OpenedFolder& folder, const std::string& path, uint64_t limit);
// Its size, hash, blocks and mode. `sync`: flushes it to the disk too. `seen` is told the bytes as they pass.
absl::StatusOr<FileRecord> HashFile(const OpenedFolder& folder, const std::string& path, bool sync,
                                    const std::function<void(uint64_t)>& seen);
// Flushes a folder's names to the disk.
absl::Status SyncFolder(const std::string& path);
absl::Status SyncFolder(const OpenedFolder& folder);

// For tests: stand in for write(2) and fsync(2), is called between the steps of a commit, and plays a file system that
// cannot exchange names. Null and false: as usual.
extern ssize_t (*g_write_for_testing)(int fd, const void* data, size_t bytes);
extern int (*g_sync_for_testing)(int fd);
extern void (*g_step_for_testing)(const char* step);
extern bool g_no_exchange_for_testing;
// Plays a network file system and one process on each host: no process sees the locks of folders that others have.
extern bool g_no_folder_locks_for_testing;
// Stands in for waiting until the disk has written so many bytes; returns 0, or what sync_file_range fails with.
extern int (*g_disk_for_testing)(uint64_t bytes);
inline void Step(const char* step) {
  if (g_step_for_testing) g_step_for_testing(step);
}

}  // namespace cuda_remote::ckptfmt

#endif  // CUDA_REMOTE_CKPTFMT_FILE_H_
