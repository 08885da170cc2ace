#include "ckptfmt/folder.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>

#include "absl/strings/str_cat.h"
#include "ckptfmt/manifest.h"

namespace cuda_remote::ckptfmt {
namespace {

namespace fs = std::filesystem;

bool Exists(const std::string& path) {
  struct stat facts;
  return lstat(path.c_str(), &facts) == 0;
}

std::string ParentOf(const std::string& path) {
  const size_t slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

// Whether all in the folder is what images have; else it is somebody's.
absl::Status CheckIsOurs(const std::string& folder) {
  std::error_code error;
  fs::directory_iterator entries(folder, error);
  if (error) return SystemError("read", folder, error.value());
  for (const fs::directory_entry& entry : entries) {
    const std::string name = entry.path().filename().string();
    if (name != kManifestName && name != kLogName && name != kMemoryFolder && name != kClientFolder) {
      return absl::FailedPreconditionError(absl::StrCat(
          folder, " holds something that is not part of a checkpoint image (", name, "); move or remove it"));
    }
  }
  return absl::OkStatus();
}

absl::Status RemoveAllIn(const std::string& folder) {
  if (absl::Status ours = CheckIsOurs(folder); !ours.ok()) return ours;
  // The manifest first: half an image must not look like one.
  unlink(absl::StrCat(folder, "/", kManifestName).c_str());
  std::error_code error;
  for (const char* name : {kLogName, kMemoryFolder, kClientFolder}) {
    const std::string path = absl::StrCat(folder, "/", name);
    fs::remove_all(path, error);
    if (error) return SystemError("remove", path, error.value());
  }
  return absl::OkStatus();
}

}  // namespace

std::string ImagePath(const std::string& dir) {
  std::string path = dir.empty() ? "." : dir;
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  std::error_code error;
  const fs::path resolved = fs::canonical(path, error);
  return error ? path : resolved.string();
}

bool IsImage(const std::string& dir) { return Exists(absl::StrCat(dir, "/", kManifestName)); }

absl::Status PutBackOldImage(const std::string& dir) {
  const std::string old = dir + ".old";
  if (Exists(dir) || !IsImage(old)) return absl::OkStatus();
  if (rename(old.c_str(), dir.c_str()) != 0) return SystemError("put back the image that a crash left as", old, errno);
  return SyncFolder(ParentOf(dir));
}

absl::StatusOr<Fd> MakePartial(const std::string& dir) {
  const std::string partial = dir + ".partial";
  // A few times, since another writer may finish or give up in between.
  for (int attempt = 0; attempt < 10; ++attempt) {
    const bool made = mkdir(partial.c_str(), 0700) == 0;
    if (!made && errno == ENOENT) {
      return absl::NotFoundError(
          absl::StrCat("cannot create ", partial, ": the folder ", ParentOf(dir), " does not exist"));
    }
    if (!made && errno != EEXIST) return SystemError("create", partial, errno);
    Fd fd(open(partial.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW));
    if (fd.get() < 0) {
      if (errno == ENOENT) continue;
      return SystemError("open", partial, errno);
    }
    if (flock(fd.get(), LOCK_EX | LOCK_NB) != 0) {
      if (errno != EWOULDBLOCK) return SystemError("lock", partial, errno);
      return absl::UnavailableError(
          absl::StrCat("another checkpoint is being written to ", partial, "; wait for it, or choose another folder"));
    }
    struct stat locked, named;
    if (fstat(fd.get(), &locked) != 0) return SystemError("look at", partial, errno);
    if (lstat(partial.c_str(), &named) != 0 || named.st_ino != locked.st_ino || named.st_dev != locked.st_dev) continue;
    if (absl::Status removed = RemoveAllIn(partial); !removed.ok()) return removed;
    return fd;
  }
  return absl::UnavailableError(absl::StrCat("cannot get hold of ", partial, ": others keep using it"));
}

absl::Status Publish(const std::string& dir) {
  const std::string partial = dir + ".partial";
  const std::string old = dir + ".old";
  const std::string parent = ParentOf(dir);
  if (!IsImage(dir)) {
    // Nothing there, or an empty folder; anything else makes rename fail.
    if (rename(partial.c_str(), dir.c_str()) != 0) return SystemError("give the image its name", dir, errno);
    Step("renamed");
    return SyncFolder(parent);
  }
  // The old image will lie in DIR.partial for a moment; the lock keeps the next writer from starting in it meanwhile.
  const Fd old_folder(open(dir.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  const bool locked = old_folder.get() >= 0 && flock(old_folder.get(), LOCK_EX | LOCK_NB) == 0;
  errno = EINVAL;
  if (!g_no_exchange_for_testing && renameat2(AT_FDCWD, partial.c_str(), AT_FDCWD, dir.c_str(), RENAME_EXCHANGE) == 0) {
    Step("exchanged");
    if (absl::Status synced = SyncFolder(parent); !synced.ok()) return synced;
    // The new image is there. What may be left of the old one is in nobody's way: the next checkpoint removes it.
    if (locked) RemovePartial(dir).IgnoreError();
    return absl::OkStatus();
  }
  if (errno != EINVAL && errno != ENOSYS) return SystemError("give the image its name", dir, errno);
  // The file system cannot exchange names.
  if (Exists(old)) {
    if (absl::Status removed = RemoveAllIn(old); !removed.ok()) return removed;
    if (rmdir(old.c_str()) != 0) return SystemError("remove", old, errno);
  }
  if (rename(dir.c_str(), old.c_str()) != 0) return SystemError("move the old image to", old, errno);
  Step("old moved away");
  if (rename(partial.c_str(), dir.c_str()) != 0) {
    const int error = errno;
    rename(old.c_str(), dir.c_str());
    return SystemError("give the image its name", dir, error);
  }
  Step("renamed");
  if (absl::Status synced = SyncFolder(parent); !synced.ok()) return synced;
  if (RemoveAllIn(old).ok()) rmdir(old.c_str());
  return absl::OkStatus();
}

absl::Status RemovePartial(const std::string& dir) {
  const std::string partial = dir + ".partial";
  if (absl::Status removed = RemoveAllIn(partial); !removed.ok()) return removed;
  if (rmdir(partial.c_str()) != 0) return SystemError("remove", partial, errno);
  return absl::OkStatus();
}

absl::StatusOr<std::vector<std::string>> ListFiles(const std::string& folder, const std::string& sub,
                                                   std::vector<std::string>* folders) {
  std::vector<std::string> files;
  folders->push_back(absl::StrCat(folder, "/", sub));
  std::error_code error;
  fs::directory_iterator entries(absl::StrCat(folder, "/", sub), error);
  if (error) return SystemError("read", absl::StrCat(folder, "/", sub), error.value());
  for (const fs::directory_entry& entry : entries) {
    const std::string path = absl::StrCat(sub, "/", entry.path().filename().string());
    const fs::file_status status = entry.symlink_status(error);
    if (status.type() == fs::file_type::regular) {
      files.push_back(path);
    } else if (status.type() == fs::file_type::directory) {
      absl::StatusOr<std::vector<std::string>> below = ListFiles(folder, path, folders);
      if (!below.ok()) return below.status();
      files.insert(files.end(), below->begin(), below->end());
    } else {
      return absl::FailedPreconditionError(
          absl::StrCat(folder, "/", path, " is neither a file nor a folder; an image cannot keep it"));
    }
  }
  std::sort(files.begin(), files.end());
  return files;
}

}  // namespace cuda_remote::ckptfmt
