// SPDX-License-Identifier: Apache-2.0
#include "ckptfmt/folder.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "ckptfmt/manifest.h"
#include "proto/base/status_macros.h"
#include "proto/folder/private_folder.h"

namespace cuda_remote::ckptfmt {
namespace {

namespace fs = std::filesystem;

// How long to wait for another writer, and how often to try.
constexpr int kLockMs = 3000, kLockPauseMs = 20;

bool Exists(const std::string& path) {
  struct stat facts;
  return lstat(path.c_str(), &facts) == 0;
}

// Whether all in the folder is what images have; else it is somebody's.
absl::Status CheckIsOurs(const OpenedFolder& folder) {
  const absl::StatusOr<std::vector<std::string>> names = NamesIn(folder);
  if (!names.ok()) return names.status();
  for (const std::string& name : *names) {
    if (name != kManifestName && name != kProcessesFolder && name != kMemoryFolder && name != kClientFolder &&
        name != kSignatureName && name != kLockName) {
      return absl::FailedPreconditionError(absl::StrCat(
          folder.path(), " holds something that is not part of a checkpoint image (", name, "); move or remove it"));
    }
  }
  return absl::OkStatus();
}

// Removes what has this name in the folder, with all in it. Symbolic links are removed and not followed.
absl::Status RemoveBelow(const OpenedFolder& folder, const std::string& name) {
  if (unlinkat(folder.fd(), name.c_str(), 0) == 0 || errno == ENOENT) return absl::OkStatus();
  if (errno != EISDIR && errno != EPERM) return SystemError("remove", folder.FullPath(name), errno);
  const absl::StatusOr<OpenedFolder> below = folder.OpenBelow(name);
  if (!below.ok()) return below.status();
  const absl::StatusOr<std::vector<std::string>> names = NamesIn(*below);
  if (!names.ok()) return names.status();
  for (const std::string& inner : *names) {
    CR_RETURN_IF_ERROR(RemoveBelow(*below, inner));
  }
  if (unlinkat(folder.fd(), name.c_str(), AT_REMOVEDIR) == 0) return absl::OkStatus();
  return SystemError("remove", folder.FullPath(name), errno);
}

absl::Status RemoveAllIn(const OpenedFolder& folder) {
  CR_RETURN_IF_ERROR(CheckIsOurs(folder));
  // The manifest first: half an image must not look like one.
  for (const char* name : {kManifestName, kProcessesFolder, kMemoryFolder, kClientFolder, kSignatureName}) {
    CR_RETURN_IF_ERROR(RemoveBelow(folder, name));
    Step("part removed");
  }
  return absl::OkStatus();
}

// Locks the folder or file for this program alone. False: another one has it, or the file is gone.
absl::StatusOr<bool> LockAlone(int fd, const std::string& path) {
  if (flock(fd, LOCK_EX | LOCK_NB) == 0) return true;
  switch (errno) {
    case EWOULDBLOCK:
    case EINTR:
    case ESTALE:
      return false;
    // A network file system without locks. The folder's lock, which needs none, keeps this machine's programs apart.
    case ENOLCK:
    case ENOSYS:
    case EOPNOTSUPP:
      return true;
    default:
      return SystemError("lock", path, errno);
  }
}

absl::StatusOr<bool> LockFolderAlone(const OpenedFolder& folder) {
  return g_no_folder_locks_for_testing ? true : LockAlone(folder.fd(), folder.path());
}

// Opens a file of the folder to lock it: for writing, as a network file system wants it.
UniqueFd OpenToLock(const OpenedFolder& folder, const char* name, int flags = 0) {
  // O_NONBLOCK: a pipe must not make us wait.
  constexpr int kFlags = O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC;
  return UniqueFd(openat(folder.fd(), name, kFlags | flags, 0600));
}

// Locks a folder for a writer, if nobody has.
absl::StatusOr<bool> TryToLock(OpenedFolder* folder) {
  absl::StatusOr<bool> alone = LockFolderAlone(*folder);
  if (!alone.ok() || !*alone) return alone;
  const std::string path = folder->FullPath(kLockName);
  UniqueFd lock = OpenToLock(*folder, kLockName, O_CREAT);
  struct stat facts, named;
  if (lock.get() < 0 && errno != ELOOP && errno != EISDIR && errno != ENXIO) return SystemError("open", path, errno);
  if (lock.get() < 0 || fstat(lock.get(), &facts) != 0 || !S_ISREG(facts.st_mode)) {
    return absl::FailedPreconditionError(
        absl::StrCat(path, " is not a plain file, and the folder is locked by a file of that name; remove it"));
  }
  alone = LockAlone(lock.get(), path);
  if (!alone.ok() || !*alone) return alone;
  // Whoever had it may have removed it. Opened anew, since names may be remembered (OpenedFolder::IsInPlace).
  const UniqueFd again = OpenToLock(*folder, kLockName);
  if (again.get() < 0 || fstat(again.get(), &named) != 0 || named.st_ino != facts.st_ino ||
      named.st_dev != facts.st_dev) {
    return false;
  }
  folder->lock() = std::move(lock);
  return true;
}

// Unlocks a folder that needs its lock file no more.
void RemoveLock(OpenedFolder* folder) {
  if (folder->lock().get() >= 0) unlinkat(folder->fd(), kLockName, 0);
  Unlock(folder);
}

absl::Status CheckOwner(const std::string& path, const struct stat& facts) {
  const std::string why = WhyNotTrusted(facts);
  if (why.empty()) return absl::OkStatus();
  return absl::PermissionDeniedError(absl::StrCat(
      path, " ", why, ", who can make a restarted job do what they want; take only images that you trust"));
}

absl::Status CheckBelow(const OpenedFolder& folder, bool owner) {
  const absl::StatusOr<std::vector<std::string>> names = NamesIn(folder);
  if (!names.ok()) return names.status();
  struct stat facts;
  for (const std::string& name : *names) {
    // By descriptor: what is looked at is what was opened.
    const UniqueFd fd(openat(folder.fd(), name.c_str(), O_PATH | O_NOFOLLOW | O_CLOEXEC));
    if (fd.get() < 0 || fstat(fd.get(), &facts) != 0) return SystemError("look at", folder.FullPath(name), errno);
    if (!S_ISREG(facts.st_mode) && !S_ISDIR(facts.st_mode)) {
      return absl::FailedPreconditionError(absl::StrCat(
          folder.FullPath(name), S_ISLNK(facts.st_mode) ? " is a symbolic link" : " is neither a file nor a folder",
          ", which no image has; somebody has changed the image"));
    }
    if (owner) {
      CR_RETURN_IF_ERROR(CheckOwner(folder.FullPath(name), facts));
    }
    if (!S_ISDIR(facts.st_mode)) continue;
    const absl::StatusOr<OpenedFolder> below = folder.OpenBelow(name);
    if (!below.ok()) return below.status();
    CR_RETURN_IF_ERROR(CheckBelow(*below, owner));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::vector<std::string>> NamesIn(const OpenedFolder& folder) {
  const int fd = openat(folder.fd(), ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  DIR* const list = fd >= 0 ? fdopendir(fd) : nullptr;
  if (!list) return SystemError("read", folder.path(), errno);
  std::vector<std::string> names;
  errno = 0;
  while (const dirent* const entry = readdir(list)) {
    const std::string name = entry->d_name;
    if (name != "." && name != "..") names.push_back(name);
    errno = 0;
  }
  const int failure = errno;
  closedir(list);
  if (failure != 0) return SystemError("read", folder.path(), failure);
  std::sort(names.begin(), names.end());
  return names;
}

absl::Status RemoveFolder(OpenedFolder* folder) {
  // It may have become an image.
  if (!folder->IsInPlace()) {
    return absl::FailedPreconditionError(absl::StrCat(folder->path(), " has been moved, and is not removed"));
  }
  CR_RETURN_IF_ERROR(RemoveAllIn(*folder));
  CR_RETURN_IF_ERROR(RemoveBelow(*folder, kLockName));
  // NFS keeps a file that is open in its folder, under another name.
  folder->lock().Close();
  if (rmdir(folder->path().c_str()) != 0) return SystemError("remove", folder->path(), errno);
  return absl::OkStatus();
}

absl::StatusOr<bool> RemoveUnused(OpenedFolder* folder) {
  absl::StatusOr<bool> alone = LockFolderAlone(*folder);
  if (!alone.ok() || !*alone) return alone;
  if (folder->lock().get() < 0) {
    UniqueFd lock = OpenToLock(*folder, kLockName);
    if (lock.get() >= 0) alone = LockAlone(lock.get(), folder->FullPath(kLockName));
    if (!alone.ok() || !*alone) return alone;
    folder->lock() = std::move(lock);
  }
  {
    const UniqueFd manifest = OpenToLock(*folder, kManifestName);
    if (manifest.get() >= 0) alone = LockAlone(manifest.get(), folder->FullPath(kManifestName));
    if (!alone.ok() || !*alone) return alone;
    CR_RETURN_IF_ERROR(CheckIsOurs(*folder));
    if (folder->IsInPlace()) CR_RETURN_IF_ERROR(RemoveBelow(*folder, kManifestName));
  }
  CR_RETURN_IF_ERROR(RemoveFolder(folder));
  return true;
}

absl::Status NotOwn(const std::string& path, uid_t owner, const std::string& what_to_do) {
  return absl::PermissionDeniedError(absl::StrCat(path, " belongs to user ", owner,
                                                  ", not to the user of this program (", geteuid(), "); ", what_to_do));
}

absl::Status SyncParent(const OpenedFolder& folder) {
  const std::string parent = ParentOf(folder.path());
  const absl::Status status = SyncFolder(parent);
  if (!absl::IsPermissionDenied(status)) return status;
  return syncfs(folder.fd()) == 0 ? absl::OkStatus() : SystemError("write", parent, errno);
}

std::string ImagePath(const std::string& dir) {
  std::string path = dir.empty() ? "." : dir;
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  std::error_code error;
  const fs::path resolved = fs::canonical(path, error);
  return error ? path : resolved.string();
}

bool IsImage(const std::string& dir) { return Exists(absl::StrCat(dir, "/", kManifestName)); }

std::string StoreImageName(uint64_t number) {
  char name[32];
  snprintf(name, sizeof(name), "image-%06llu", static_cast<unsigned long long>(number));
  return name;
}

uint64_t StoreImageNumber(std::string_view name, bool* partial) {
  constexpr std::string_view kStart = "image-", kPartial = ".partial";
  *partial = name.size() > kPartial.size() && name.substr(name.size() - kPartial.size()) == kPartial;
  if (*partial) name.remove_suffix(kPartial.size());
  uint64_t number = 0;
  if (name.substr(0, kStart.size()) != kStart ||
      !absl::SimpleAtoi(absl::string_view(name.data() + kStart.size(), name.size() - kStart.size()), &number)) {
    return 0;
  }
  return StoreImageName(number) == name ? number : 0;
}

bool IsStoreImage(const std::string& path) {
  bool partial = false;
  return StoreImageNumber(path.substr(path.rfind('/') + 1), &partial) != 0;
}

std::vector<std::string> ImagesIn(const std::string& dir) {
  std::vector<std::string> images;
  const std::string path = ImagePath(dir);
  if (IsImage(path)) return images;
  const absl::StatusOr<OpenedFolder> folder = OpenedFolder::Open(path);
  const absl::StatusOr<std::vector<std::string>> names =
      folder.ok() ? NamesIn(*folder) : absl::StatusOr<std::vector<std::string>>(folder.status());
  if (!names.ok()) return images;
  std::vector<uint64_t> numbers;
  bool partial = false;
  for (const std::string& name : *names) {
    const uint64_t number = StoreImageNumber(name, &partial);
    if (number != 0 && !partial && IsImage(folder->FullPath(name))) numbers.push_back(number);
  }
  std::sort(numbers.begin(), numbers.end());
  for (const uint64_t number : numbers) images.push_back(folder->FullPath(StoreImageName(number)));
  return images;
}

std::string NewestImageIn(const std::string& dir) {
  const std::vector<std::string> images = ImagesIn(dir);
  return images.empty() ? "" : images.back();
}

absl::Status PutBackOldImage(const std::string& dir) {
  const std::string old = dir + ".old";
  struct stat facts;
  if (Exists(dir) || !IsImage(old) || lstat(old.c_str(), &facts) != 0 || facts.st_uid != geteuid()) {
    return absl::OkStatus();
  }
  if (rename(old.c_str(), dir.c_str()) != 0) return SystemError("put back the image that a crash left as", old, errno);
  const absl::StatusOr<OpenedFolder> back = OpenedFolder::Open(dir);
  return back.ok() ? SyncParent(*back) : back.status();
}

absl::Status CheckMayReplace(const std::string& dir) {
  struct stat facts;
  if (lstat(dir.c_str(), &facts) != 0) return absl::OkStatus();
  if (facts.st_uid != geteuid()) return NotOwn(dir, facts.st_uid, "choose another name for the image");
  if (!S_ISLNK(facts.st_mode)) return absl::OkStatus();
  return absl::AlreadyExistsError(
      absl::StrCat(dir, " is a symbolic link to something that is not there; remove it, or choose another name"));
}

absl::Status LockToWrite(OpenedFolder* folder) {
  for (int waited = 0;; waited += kLockPauseMs) {
    const absl::StatusOr<bool> locked = TryToLock(folder);
    if (!locked.ok()) return locked.status();
    if (*locked) return absl::OkStatus();
    if (waited >= kLockMs) {
      return absl::UnavailableError(absl::StrCat("another checkpoint is being written to ", folder->path(),
                                                 "; wait for it, or choose another folder"));
    }
    usleep(kLockPauseMs * 1000);
  }
}

bool LockToRead(OpenedFolder* image, bool wait) {
  const auto lock = [&](int fd) { return flock(fd, LOCK_SH | (wait ? 0 : LOCK_NB)) == 0 || errno != EWOULDBLOCK; };
  if (!g_no_folder_locks_for_testing && !lock(image->fd())) return false;
  // Every image has its manifest, also one of before, and one that this user may only read.
  image->lock() =
      UniqueFd(openat(image->fd(), kManifestName, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC));
  return image->lock().get() < 0 || lock(image->lock().get());
}

void Unlock(OpenedFolder* folder) {
  if (folder->lock().get() >= 0) flock(folder->lock().get(), LOCK_UN);
  folder->lock().Close();
  flock(folder->fd(), LOCK_UN);
}

absl::StatusOr<OpenedFolder> MakePartial(const std::string& dir) {
  const std::string partial = dir + ".partial";
  // A few times, since another writer may finish or give up in between.
  for (int attempt = 0; attempt < 10; ++attempt) {
    const bool made = mkdir(partial.c_str(), 0700) == 0;
    if (!made && errno == ENOENT) {
      const std::string parent = ParentOf(dir);
      // Such as /proc: the folder is there, and nobody can make anything in it.
      if (Exists(parent)) {
        return absl::FailedPreconditionError(
            absl::StrCat("cannot create ", partial, ": nothing can be created in ", parent, "; choose another folder"));
      }
      return absl::NotFoundError(absl::StrCat("cannot create ", partial, ": the folder ", parent, " does not exist"));
    }
    if (!made && errno != EEXIST) return SystemError("create", partial, errno);
    struct stat facts;
    if (lstat(partial.c_str(), &facts) == 0 && facts.st_uid != geteuid()) {
      return NotOwn(partial, facts.st_uid, "remove it, or choose another name for the image");
    }
    UniqueFd fd(open(partial.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW));
    if (fd.get() < 0) {
      if (errno == ENOENT) continue;
      return SystemError("open", partial, errno);
    }
    OpenedFolder folder(std::move(fd), partial);
    if (fstat(folder.fd(), &facts) != 0) return SystemError("look at", partial, errno);
    if (!folder.IsInPlace()) continue;
    // What the image holds is for this user only; others may have left files and links in an open folder.
    if (facts.st_uid != geteuid()) {
      return NotOwn(partial, facts.st_uid, "remove it, or choose another name for the image");
    }
    if (const std::string why = WhyNotTrusted(facts); !why.empty()) {
      return absl::PermissionDeniedError(
          absl::StrCat(partial, " ", why, "; remove it, or choose another name for the image"));
    }
    // No file is made in what is none of ours.
    absl::Status status = CheckIsOurs(folder);
    if (status.ok()) status = LockToWrite(&folder);
    if (!folder.IsInPlace()) {
      // Its writer has finished, or given up.
      RemoveLock(&folder);
      continue;
    }
    CR_RETURN_IF_ERROR(status);
    CR_RETURN_IF_ERROR(RemoveAllIn(folder));
    Step("folder made");
    return folder;
  }
  return absl::UnavailableError(absl::StrCat("cannot get hold of ", partial, ": others keep using it"));
}

absl::Status Publish(OpenedFolder* folder, const std::string& dir) {
  const std::string partial = dir + ".partial";
  const std::string old = dir + ".old";
  if (!folder->IsInPlace()) {
    return absl::PermissionDeniedError(absl::StrCat("another user has put something else in the place of ", partial));
  }
  if (!IsImage(dir)) {
    // Nothing there, or an empty folder; anything else makes rename fail.
    if (rename(partial.c_str(), dir.c_str()) != 0) return SystemError("give the image its name", dir, errno);
    Step("renamed");
    const absl::Status synced = SyncParent(*folder);
    if (synced.ok()) {
      RemoveLock(folder);
    } else {
      rename(dir.c_str(), partial.c_str());
    }
    return synced;
  }
  // The old image will lie in DIR.partial for a moment; the lock keeps the next writer from starting in it meanwhile.
  CR_RETURN_IF_ERROR(CheckMayReplace(dir));
  UniqueFd old_fd(open(dir.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW));
  OpenedFolder replaced(std::move(old_fd), partial);
  const absl::StatusOr<bool> locked = replaced.fd() >= 0 ? TryToLock(&replaced) : false;
  errno = EINVAL;
  if (!g_no_exchange_for_testing && renameat2(AT_FDCWD, partial.c_str(), AT_FDCWD, dir.c_str(), RENAME_EXCHANGE) == 0) {
    Step("exchanged");
    const absl::Status synced = SyncParent(*folder);
    if (!synced.ok()) {
      renameat2(AT_FDCWD, partial.c_str(), AT_FDCWD, dir.c_str(), RENAME_EXCHANGE);
      RemoveLock(&replaced);
      return synced;
    }
    RemoveLock(folder);
    // The new image is there. What may be left of the old one is in nobody's way: the next checkpoint removes it.
    // Without room for its lock file, the old one is locked on this machine.
    if (!locked.ok() || *locked) RemoveUnused(&replaced).IgnoreError();
    return absl::OkStatus();
  }
  const int why = errno;
  RemoveLock(&replaced);
  if (why != EINVAL && why != ENOSYS) return SystemError("give the image its name", dir, why);
  // The file system cannot exchange names.
  if (Exists(old)) {
    CR_RETURN_IF_ERROR(CheckMayReplace(old));
    absl::StatusOr<OpenedFolder> before = OpenedFolder::Open(old);
    if (!before.ok()) return before.status();
    CR_RETURN_IF_ERROR(RemoveFolder(&*before));
  }
  if (rename(dir.c_str(), old.c_str()) != 0) return SystemError("move the old image to", old, errno);
  Step("old moved away");
  if (rename(partial.c_str(), dir.c_str()) != 0) {
    const int error = errno;
    rename(old.c_str(), dir.c_str());
    return SystemError("give the image its name", dir, error);
  }
  Step("renamed");
  if (const absl::Status synced = SyncParent(*folder); !synced.ok()) {
    if (rename(dir.c_str(), partial.c_str()) == 0) rename(old.c_str(), dir.c_str());
    return synced;
  }
  RemoveLock(folder);
  if (absl::StatusOr<OpenedFolder> moved = OpenedFolder::Open(old); moved.ok()) RemoveFolder(&*moved).IgnoreError();
  return absl::OkStatus();
}

absl::StatusOr<std::vector<std::string>> ListFiles(const OpenedFolder& folder, const std::string& sub,
                                                   std::vector<std::string>* folders) {
  std::vector<std::string> files;
  folders->push_back(sub);
  const absl::StatusOr<OpenedFolder> below = folder.OpenBelow(sub);
  if (!below.ok()) return below.status();
  const absl::StatusOr<std::vector<std::string>> names = NamesIn(*below);
  if (!names.ok()) return names.status();
  for (const std::string& name : *names) {
    const std::string path = absl::StrCat(sub, "/", name);
    struct stat facts;
    if (fstatat(below->fd(), name.c_str(), &facts, AT_SYMLINK_NOFOLLOW) != 0) {
      return SystemError("look at", below->FullPath(name), errno);
    }
    if (S_ISREG(facts.st_mode)) {
      files.push_back(path);
    } else if (S_ISDIR(facts.st_mode)) {
      absl::StatusOr<std::vector<std::string>> more = ListFiles(folder, path, folders);
      if (!more.ok()) return more.status();
      files.insert(files.end(), more->begin(), more->end());
    } else {
      return absl::FailedPreconditionError(
          absl::StrCat(below->FullPath(name), " is neither a file nor a folder; an image cannot keep it"));
    }
  }
  std::sort(files.begin(), files.end());
  return files;
}

absl::Status CheckTree(const OpenedFolder& folder, bool owner) {
  struct stat facts;
  if (fstat(folder.fd(), &facts) != 0) return SystemError("look at", folder.path(), errno);
  if (owner) {
    CR_RETURN_IF_ERROR(CheckOwner(folder.path(), facts));
  }
  return CheckBelow(folder, owner);
}

}  // namespace cuda_remote::ckptfmt
