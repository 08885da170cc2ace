// SPDX-License-Identifier: Apache-2.0
#include "ckptfmt/file.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "proto/base/clock.h"
#include "proto/base/status_macros.h"

namespace cuda_remote::ckptfmt {

ssize_t (*g_write_for_testing)(int fd, const void* data, size_t bytes) = nullptr;
int (*g_sync_for_testing)(int fd) = nullptr;
void (*g_step_for_testing)(const char* step) = nullptr;
bool g_no_exchange_for_testing = false;
bool g_no_folder_locks_for_testing = false;
int (*g_disk_for_testing)(uint64_t bytes) = nullptr;

namespace {

int Sync(int fd) { return g_sync_for_testing ? g_sync_for_testing(fd) : fsync(fd); }

// Of the bytes from `from` to `to`; returns 0, or why the disk does not have them. A failure to write them is told once
// for each descriptor, here or by fsync.
int SyncRange(int fd, uint64_t from, uint64_t to, unsigned flags) {
  if (sync_file_range(fd, off_t(from), off_t(to - from), flags) == 0) return 0;
  // Where there is no such call, fsync does all of it.
  const bool missing = errno == EINVAL || errno == ENOSYS || errno == ENOTSUP || errno == ESPIPE || errno == EPERM;
  return missing ? 0 : errno;
}

}  // namespace

std::string ParentOf(const std::string& path) {
  const size_t slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

absl::Status SystemError(const std::string& doing, const std::string& path, int error) {
  const std::string text = absl::StrCat("cannot ", doing, " ", path, ": ", strerror(error));
  switch (error) {
    case ENOSPC:
    case EDQUOT:
    case EFBIG:
      return absl::ResourceExhaustedError(
          absl::StrCat(text, "; free some space there, or write the image somewhere else"));
    case ENOENT:
    case ENOTDIR:
    case ESTALE:  // another host of a network file system has removed it
      return absl::NotFoundError(text);
    case EACCES:
    case EPERM:
    case EROFS:
      return absl::PermissionDeniedError(text);
    case EIO:
      return absl::DataLossError(text);
    default:
      return absl::UnavailableError(text);
  }
}

absl::StatusOr<OpenedFolder> OpenedFolder::Open(const std::string& path) {
  UniqueFd fd(open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  if (fd.get() < 0) return SystemError("open the folder", path, errno);
  return OpenedFolder(std::move(fd), path);
}

absl::StatusOr<OpenedFolder> OpenedFolder::OpenBelow(const std::string& path) const {
  UniqueFd fd(openat(fd_.get(), path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  if (fd.get() < 0) return SystemError("open the folder", FullPath(path), errno);
  return OpenedFolder(std::move(fd), FullPath(path));
}

bool OpenedFolder::IsInPlace() const {
  // A network file system remembers names for a while; opening the folder that holds them makes it ask the server.
  const UniqueFd above(open(ParentOf(path_).c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  struct stat opened, named;
  return fstat(fd_.get(), &opened) == 0 && lstat(path_.c_str(), &named) == 0 && opened.st_ino == named.st_ino &&
         opened.st_dev == named.st_dev;
}

void FileHasher::Add(std::string_view bytes) {
  whole_.Add(bytes);
  bytes_ += bytes.size();
  while (!bytes.empty()) {
    if (block_.empty() && bytes.size() >= kBlockBytes) {
      blocks_.push_back(Hash64Of(bytes.substr(0, kBlockBytes)));
      bytes.remove_prefix(kBlockBytes);
      continue;
    }
    const size_t take = std::min(bytes.size(), kBlockBytes - block_.size());
    block_.append(bytes.substr(0, take));
    bytes.remove_prefix(take);
    if (block_.size() < kBlockBytes) break;
    blocks_.push_back(Hash64Of(block_));
    block_.clear();
  }
}

void FileHasher::Finish(FileRecord* record) {
  if (!block_.empty()) blocks_.push_back(Hash64Of(block_));
  block_.clear();
  record->bytes = bytes_;
  record->hash = whole_.Get();
  record->blocks = std::move(blocks_);
}

absl::StatusOr<OutputFile> OutputFile::Create(const OpenedFolder& folder, const std::string& path, bool hashed) {
  OutputFile file;
  file.hashed_ = hashed;
  file.path_ = path;
  file.full_path_ = folder.FullPath(path);
  file.fd_ = UniqueFd(openat(folder.fd(), path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (file.fd_.get() < 0) return SystemError("create", file.full_path_, errno);
  return file;
}

absl::Status OutputFile::Append(std::string_view bytes) {
  const uint64_t end = bytes_ += bytes.size();
  if (hashed_) hasher_.Add(bytes);
  while (!bytes.empty()) {
    const ssize_t n = g_write_for_testing ? g_write_for_testing(fd_.get(), bytes.data(), bytes.size())
                                          : write(fd_.get(), bytes.data(), bytes.size());
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return SystemError("write", full_path_, n < 0 ? errno : ENOSPC);
    bytes.remove_prefix(size_t(n));
  }
  // Lets the disk begin while memory is still being read, instead of all at the end.
  constexpr uint64_t kStride = 32u << 20;
  if (end - started_ < kStride) return absl::OkStatus();
  int error = SyncRange(fd_.get(), started_, end, SYNC_FILE_RANGE_WRITE);
  if (error != 0) return SystemError("write", full_path_, error);
  const auto start = Now();
  if (g_disk_for_testing) {
    error = g_disk_for_testing(started_ - waited_);
  } else if (started_ > waited_) {
    error = SyncRange(fd_.get(), waited_, started_,
                      SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER);
  }
  if (error != 0) return SystemError("write", full_path_, error);
  waited_seconds_ += SecondsSince(start);
  waited_ = started_;
  started_ = end;
  return absl::OkStatus();
}

absl::StatusOr<FileRecord> OutputFile::Finish() {
  if (Sync(fd_.get()) != 0) return SystemError("write", full_path_, errno);
  fd_.Close();
  FileRecord record;
  record.path = path_;
  record.has_hash = hashed_;
  if (hashed_) hasher_.Finish(&record);
  record.bytes = bytes_;
  return record;
}

absl::StatusOr<UniqueFd> OpenForReading(const OpenedFolder& folder, const std::string& path) {
  const std::string full_path = folder.FullPath(path);
  // O_NONBLOCK: opening a pipe must not wait for its writer.
  UniqueFd fd(openat(folder.fd(), path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
  if (fd.get() < 0) return SystemError("open", full_path, errno);
  struct stat facts;
  if (fstat(fd.get(), &facts) != 0) return SystemError("look at", full_path, errno);
  if (!S_ISREG(facts.st_mode)) return absl::FailedPreconditionError(absl::StrCat(full_path, " is not a plain file"));
  return fd;
}

absl::Status ReadAt(int fd, const std::string& full_path, uint64_t offset, char* out, size_t bytes) {
  while (bytes > 0) {
    const ssize_t n = pread(fd, out, bytes, off_t(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return SystemError("read", full_path, errno);
    if (n == 0) return absl::DataLossError(absl::StrCat(full_path, " ends at ", offset, "; it has been cut off"));
    out += n;
    offset += uint64_t(n);
    bytes -= size_t(n);
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> ReadWhole(const OpenedFolder& folder, const std::string& path, uint64_t limit) {
  const std::string full_path = folder.FullPath(path);
  absl::StatusOr<UniqueFd> fd = OpenForReading(folder, path);
  if (!fd.ok()) return fd.status();
  struct stat facts;
  if (fstat(fd->get(), &facts) != 0) return SystemError("look at", full_path, errno);
  if (uint64_t(facts.st_size) > limit) {
    return absl::DataLossError(absl::StrCat(full_path, " is ", facts.st_size, " bytes long, which it cannot be"));
  }
  std::string bytes(size_t(facts.st_size), '\0');
  CR_RETURN_IF_ERROR(ReadAt(fd->get(), full_path, 0, bytes.data(), bytes.size()));
  return bytes;
}

absl::StatusOr<FileRecord> HashFile(const OpenedFolder& folder, const std::string& path, bool sync,
                                    const std::function<void(uint64_t)>& seen) {
  const std::string full_path = folder.FullPath(path);
  absl::StatusOr<UniqueFd> fd = OpenForReading(folder, path);
  if (!fd.ok()) return fd.status();
  struct stat facts;
  if (fstat(fd->get(), &facts) != 0) return SystemError("look at", full_path, errno);
  if (sync && Sync(fd->get()) != 0) return SystemError("write", full_path, errno);
  FileRecord record;
  record.path = path;
  record.mode = facts.st_mode & 07777;
  FileHasher hasher;
  std::string block(kBlockBytes, '\0');
  for (;;) {
    const ssize_t n = pread(fd->get(), block.data(), block.size(), off_t(hasher.bytes()));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return SystemError("read", full_path, errno);
    if (n == 0) break;
    hasher.Add({block.data(), size_t(n)});
    if (seen) seen(uint64_t(n));
  }
  hasher.Finish(&record);
  return record;
}

absl::Status SyncFolder(const std::string& path) {
  UniqueFd fd(open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (fd.get() < 0) return SystemError("open", path, errno);
  return SyncFolder(OpenedFolder(std::move(fd), path));
}

absl::Status SyncFolder(const OpenedFolder& folder) {
  // Some file systems cannot do that, and need not.
  if (Sync(folder.fd()) == 0 || errno == EINVAL || errno == ENOTSUP) return absl::OkStatus();
  return SystemError("write", folder.path(), errno);
}

}  // namespace cuda_remote::ckptfmt
