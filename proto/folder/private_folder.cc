// SPDX-License-Identifier: Apache-2.0
#include "proto/folder/private_folder.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <deque>
#include <utility>

#include "proto/base/environment.h"
#include "proto/base/status_macros.h"

namespace cuda_remote {
namespace {

constexpr mode_t kOthersMayWrite = S_IWGRP | S_IWOTH;
constexpr mode_t kRightsOfOthers = S_IRWXG | S_IRWXO;
constexpr int kMostLinks = 40;
// Somebody else makes and removes what is looked for.
constexpr int kMostAttempts = 100;
constexpr uid_t kUsualOverflow = 65534;

bool IsTrusted(uid_t user) { return user == 0 || user == geteuid(); }

// What `path` is in: the working folder if it has no slash.
std::string FolderOf(const std::string& path) {
  const size_t slash = path.rfind('/');
  return slash == std::string::npos ? "." : path.substr(0, slash + 1);
}

bool HasNothingIn(int folder) {
  DIR* const list = fdopendir(openat(folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!list) return false;
  bool empty = true;
  while (const dirent* const entry = readdir(list)) {
    empty = empty && (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0);
  }
  closedir(list);
  return empty;
}

std::deque<std::string> PartsOf(const std::string& path) {
  std::deque<std::string> parts;
  for (size_t at = 0; at < path.size();) {
    size_t end = path.find('/', at);
    if (end == std::string::npos) end = path.size();
    if (end > at && path.compare(at, end - at, ".") != 0) parts.push_back(path.substr(at, end - at));
    at = end + 1;
  }
  return parts;
}

// A walk from "/", every step checked before the next one.
class Walk {
 public:
  // Goes to the folder `path`. With `make`, makes what is missing.
  Status To(const std::string& path, bool make) {
    std::string whole = path;
    char here[PATH_MAX];
    if (path.empty() || (path[0] != '/' && !getcwd(here, sizeof(here))))
      return Error("there is no folder \"" + path + "\"");
    if (path[0] != '/') whole = std::string(here) + "/" + path;
    std::deque<std::string> parts = PartsOf(whole);
    CR_RETURN_IF_ERROR(ToRoot());
    int attempts = 0;
    while (!parts.empty()) {
      const std::string part = parts.front();
      const std::string name = at_ + "/" + part;
      UniqueFd next(openat(folder_.get(), part.c_str(), O_PATH | O_NOFOLLOW | O_CLOEXEC));
      if (!next.ok()) {
        if (errno != ENOENT || !make) return ErrnoError("cannot open the folder " + name);
        if (mkdirat(folder_.get(), part.c_str(), 0700) != 0 && errno != EEXIST) {
          return ErrnoError("cannot make the folder " + name);
        }
        if (++attempts > kMostAttempts) return Error("the folder " + name + " keeps disappearing");
        continue;
      }
      struct stat facts;
      if (fstat(next.get(), &facts) != 0) return ErrnoError("cannot look at the folder " + name);
      parts.pop_front();
      if (S_ISLNK(facts.st_mode)) {
        if (parts.empty()) return Error(name + " is a symbolic link, not a folder; name the folder that it leads to");
        CR_RETURN_IF_ERROR(Follow(name, next.get(), facts, &parts));
        continue;
      }
      if (!S_ISDIR(facts.st_mode)) return Error(name + " is not a folder");
      // The last folder has rules of its own.
      if (!parts.empty()) CR_RETURN_IF_ERROR(Enter(name, facts));
      at_ = part == ".." ? at_ + "/.." : name;
      folder_ = std::move(next);
      facts_ = facts;
    }
    return OkStatus();
  }

  // Checks the folder that the walk has reached as one on the way to something in it.
  Status EnterLast() { return Enter(at_, facts_); }

  int folder() const { return folder_.get(); }
  const struct stat& facts() const { return facts_; }
  // Others may put things into the folder that was checked last, and nobody else may take them away (it is sticky).
  bool shared() const { return shared_; }

 private:
  Status ToRoot() {
    folder_.Reset(open("/", O_PATH | O_DIRECTORY | O_CLOEXEC));
    if (folder_.get() < 0 || fstat(folder_.get(), &facts_) != 0) return ErrnoError("cannot open the folder /");
    at_.clear();
    shared_ = false;
    return Enter("/", facts_);
  }

  Status Enter(const std::string& name, const struct stat& facts) {
    if (!IsTrusted(facts.st_uid) && (shared_ || !IsUnmapped(facts.st_uid))) {
      return Error("the folder " + name + " belongs to user " + std::to_string(facts.st_uid) +
                   ", who could replace what is in it; choose a folder below your own ones");
    }
    shared_ = (facts.st_mode & kOthersMayWrite) != 0;
    if (shared_ && !(facts.st_mode & S_ISVTX)) {
      return Error("the folder " + name + " " + WhyNotTrusted(facts) +
                   ", who could replace what is in it; run chmod go-w on it, or choose another folder");
    }
    return OkStatus();
  }

  Status Follow(const std::string& name, int link, const struct stat& facts, std::deque<std::string>* parts) {
    if (!IsTrusted(facts.st_uid) && (shared_ || !IsUnmapped(facts.st_uid))) {
      return Error("the symbolic link " + name + " belongs to user " + std::to_string(facts.st_uid) +
                   ", who chose where it leads; remove it, or choose another folder");
    }
    char target[PATH_MAX];
    const ssize_t length = readlinkat(link, "", target, sizeof(target));
    if (length <= 0 || length == ssize_t(sizeof(target))) return ErrnoError("cannot read the symbolic link " + name);
    if (++links_ > kMostLinks) return Error("too many symbolic links lead to " + name);
    const std::deque<std::string> more = PartsOf(std::string(target, size_t(length)));
    parts->insert(parts->begin(), more.begin(), more.end());
    return target[0] == '/' ? ToRoot() : OkStatus();
  }

  UniqueFd folder_;
  struct stat facts_ = {};
  std::string at_;
  bool shared_ = false;
  int links_ = 0;
};

// The last folder belongs to this user, and nobody else may change it from now on.
Status MakeOwn(const Walk& walk, const std::string& path, FolderUse use, int folder) {
  struct stat facts = walk.facts();
  if (facts.st_uid != geteuid()) {
    return Error(
        "the folder " + path + " belongs to user " + std::to_string(facts.st_uid) +
        ", not to the user of this program (" + std::to_string(geteuid()) +
        (use == FolderUse::kLook ? "); run this program as that user" : "); remove it, or choose another folder"));
  }
  const bool writable = (facts.st_mode & kOthersMayWrite) != 0;
  if (!writable && (use != FolderUse::kMake || (facts.st_mode & kRightsOfOthers) == 0)) return OkStatus();
  if (writable && (use != FolderUse::kMake || !HasNothingIn(folder))) {
    return Error("the folder " + path + " " + WhyNotTrusted(facts) +
                 ", who may have put something into it; remove it, or choose another folder");
  }
  if (fchmod(folder, facts.st_mode & 07777 & ~kRightsOfOthers) != 0) {
    return ErrnoError("cannot make the folder " + path + " private");
  }
  if (!writable || HasNothingIn(folder)) return OkStatus();
  // So that the next attempt refuses it, too.
  fchmod(folder, facts.st_mode & 07777);
  return Error("another user has put something into the folder " + path + "; remove it, or choose another folder");
}

}  // namespace

bool IsUnmapped(uid_t user) {
  uid_t overflow = kUsualOverflow;
  if (FILE* const file = fopen("/proc/sys/kernel/overflowuid", "re")) {
    if (fscanf(file, "%u", &overflow) != 1) overflow = kUsualOverflow;
    fclose(file);
  }
  if (user != overflow) return false;
  FILE* const map = fopen("/proc/self/uid_map", "re");
  if (!map) return false;
  bool mapped = false;
  unsigned first, outside, count;
  while (fscanf(map, "%u %u %u", &first, &outside, &count) == 3) {
    mapped = mapped || (user >= first && user - first < count);
  }
  fclose(map);
  return !mapped;
}

std::string WhyNotTrusted(const struct stat& facts) {
  if (!IsTrusted(facts.st_uid)) return "belongs to user " + std::to_string(facts.st_uid);
  if ((facts.st_mode & kOthersMayWrite) == 0) return {};
  char mode[16];
  snprintf(mode, sizeof(mode), "%04o", unsigned(facts.st_mode & 07777));
  return std::string("may be written by other users (mode ") + mode + ")";
}

StatusOr<UniqueFd> OpenFolder(const std::string& path, FolderUse use) {
  Walk walk;
  CR_RETURN_IF_ERROR(walk.To(path, use != FolderUse::kLook));
  UniqueFd folder(openat(walk.folder(), ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  const int code = errno;
  // Somebody else's folder cannot be opened, and the reason is whose it is.
  CR_RETURN_IF_ERROR(MakeOwn(walk, path, use, folder.get()));
  if (!folder.ok()) return ErrnoError("cannot open the folder " + path, code);
  return folder;
}

Status CheckFolder(const std::string& path, FolderUse use) { return OpenFolder(path, use).status(); }

bool IsTrustedUser(uid_t user, const std::string& path) {
  if (IsTrusted(user)) return true;
  if (!IsUnmapped(user)) return false;
  Walk walk;
  return walk.To(FolderOf(path), /*make=*/false).ok() && walk.EnterLast().ok() && !walk.shared();
}

StatusOr<UniqueFd> OpenTrustedFile(const std::string& path) {
  Walk walk;
  CR_RETURN_IF_ERROR(walk.To(FolderOf(path), /*make=*/false));
  CR_RETURN_IF_ERROR(walk.EnterLast());
  // O_NONBLOCK: opening a pipe must not wait for its writer.
  const std::string name = path.substr(path.rfind('/') + 1);
  UniqueFd file(openat(walk.folder(), name.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  struct stat facts;
  if (!file.ok() || fstat(file.get(), &facts) != 0) return ErrnoError("cannot open " + path);
  const bool unmapped = !walk.shared() && IsUnmapped(facts.st_uid) && (facts.st_mode & kOthersMayWrite) == 0;
  const std::string why = unmapped ? std::string() : WhyNotTrusted(facts);
  if (!S_ISREG(facts.st_mode) || !why.empty()) return Error(path + " " + (why.empty() ? "is not a plain file" : why));
  return file;
}

std::vector<std::string> RuntimeFolders() {
  const uid_t user = geteuid();
  const std::string of_user = "/run/user/" + std::to_string(user);
  struct stat facts;
  const auto is_own_folder = [&](const std::string& path) {
    return stat(path.c_str(), &facts) == 0 && S_ISDIR(facts.st_mode) && facts.st_uid == user;
  };
  std::vector<std::string> folders;
  const char* const named = TrustedVariable("XDG_RUNTIME_DIR");
  std::string runtime = named ? named : "";
  while (runtime.size() > 1 && runtime.back() == '/') runtime.pop_back();
  if (!runtime.empty() && runtime[0] == '/' && runtime != of_user &&
      (is_own_folder(runtime) || stat(runtime.c_str(), &facts) != 0)) {
    folders.push_back(runtime + "/cuda-remote");
  }
  if (user == 0) {
    if (is_own_folder("/run") && access("/run", W_OK) == 0) folders.push_back("/run/cuda-remote");
  } else if (is_own_folder(of_user)) {
    folders.push_back(of_user + "/cuda-remote");
  }
  folders.push_back("/tmp/cuda-remote-" + std::to_string(user));
  return folders;
}

}  // namespace cuda_remote
