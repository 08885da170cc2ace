// SPDX-License-Identifier: Apache-2.0
#include "host/earlier_images.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <string_view>

#include "ckptfmt/folder.h"
#include "ckptfmt/index.h"
#include "ckptfmt/manifest.h"
#include "host/exchange.h"
#include "proto/base/status_macros.h"
#include "proto/base/unique_fd.h"
#include "proto/errors/absl_status.h"

namespace cuda_remote::host {
namespace {

// What a user has put there costs cr-hostd no more than this: the newest images, and links. An image links fewer files.
constexpr size_t kMostImages = 32, kMostFiles = 1000;

// A new file in cr-hostd's own folder: `contents`, and zeros behind it that take no room.
absl::Status WriteOwn(const ckptfmt::OpenedFolder& folder, const std::string& path, std::string_view contents,
                      uint64_t bytes) {
  CR_RETURN_IF_ERROR(MakeFoldersFor(folder, path));
  constexpr int kFlags = O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW;
  const UniqueFd file(openat(folder.fd(), path.c_str(), kFlags, 0600));
  if (file.ok() && ftruncate(file.get(), off_t(bytes)) == 0) {
    while (!contents.empty()) {
      const ssize_t put = write(file.get(), contents.data(), contents.size());
      if (put < 0 && errno == EINTR) continue;
      if (put <= 0) break;
      contents.remove_prefix(size_t(put));
    }
    if (contents.empty()) return absl::OkStatus();
  }
  return ckptfmt::SystemError("write", folder.FullPath(path), errno);
}

}  // namespace

absl::StatusOr<std::unique_ptr<EarlierImages>> EarlierImages::Take(const checkpoint::Account& account, const Key& key,
                                                                   std::vector<std::string> paths,
                                                                   const std::string& image, const std::string& own) {
  std::unique_ptr<EarlierImages> earlier(new EarlierImages(account, own));
  if (mkdir(own.c_str(), 0700) != 0) return ckptfmt::SystemError("create", own, errno);
  {
    const checkpoint::ActAs user(&account);
    CR_ASSIGN_OR_RETURN(earlier->partial_, ckptfmt::OpenedFolder::Open(image + ".partial"));
    if (mkdirat(earlier->partial_.fd(), ckptfmt::kMemoryFolder, 0700) != 0) {
      return ckptfmt::SystemError("create", earlier->partial_.FullPath(ckptfmt::kMemoryFolder), errno);
    }
  }
  std::reverse(paths.begin(), paths.end());
  paths.resize(std::min(paths.size(), kMostImages));
  for (size_t i = 0; i < paths.size(); ++i) {
    Image one;
    // One that was changed, or is of somebody else's making, is left out.
    if (!earlier->Look(key, paths[i], &one).ok()) continue;
    CR_RETURN_IF_ERROR(earlier->MakeStandIn(own + "/" + ckptfmt::StoreImageName(paths.size() - i), one));
  }
  return earlier;
}

// What is signed of an earlier image. Its data files are linked.
absl::Status EarlierImages::Look(const Key& key, const std::string& path, Image* image) {
  ckptfmt::OpenedFolder folder;
  {
    const checkpoint::ActAs user(&account_);
    CR_ASSIGN_OR_RETURN(folder, ckptfmt::OpenedFolder::Open(path));
  }
  CR_ASSIGN_OR_RETURN(image->statement, ReadStatement(folder.fd(), path, account_, key));
  if (image->statement.chunks().empty()) return absl::NotFoundError("it has no memory that is signed by chunk");
  CR_ASSIGN_OR_RETURN(image->index, ReadSignedIndex(folder.fd(), path, account_, image->statement));
  for (const SignedFile& one : image->statement.files()) {
    if (one.by_chunk()) {
      CR_ASSIGN_OR_RETURN(image->files[one.path()], LinkFile(folder, one));
    } else if (one.path() == ckptfmt::kManifestName || one.path() == ckptfmt::kIndexName) {
      CR_ASSIGN_OR_RETURN(image->contents[one.path()], ReadSignedFile(folder.fd(), path, account_, one));
    }
  }
  for (const std::string& one : image->index.data_files) {
    if (image->files.count(one) == 0) return absl::DataLossError("its signature lacks " + one);
  }
  return absl::OkStatus();
}

// A data file of an earlier image, which is linked into the new image unless it is there already.
absl::StatusOr<EarlierImages::File*> EarlierImages::LinkFile(const ckptfmt::OpenedFolder& image,
                                                             const SignedFile& file) {
  const checkpoint::ActAs user(&account_);
  const std::string path = image.FullPath(file.path());
  struct stat facts, linked;
  if (fstatat(image.fd(), file.path().c_str(), &facts, AT_SYMLINK_NOFOLLOW) != 0) {
    return ckptfmt::SystemError("look at", path, errno);
  }
  if (!S_ISREG(facts.st_mode) || uint64_t(facts.st_size) != file.bytes()) {
    return absl::DataLossError(path + " is not as it was signed");
  }
  const auto known = files_.find({facts.st_dev, facts.st_ino});
  if (known != files_.end()) return &known->second;
  if (files_.size() >= kMostFiles) return absl::ResourceExhaustedError("the earlier images have too many data files");
  File fresh;
  fresh.link = std::string(ckptfmt::kMemoryFolder) + "/earlier-" + std::to_string(files_.size());
  if (linkat(image.fd(), file.path().c_str(), partial_.fd(), fresh.link.c_str(), 0) != 0) {
    const absl::Status failed = ckptfmt::SystemError("make a hard link to", path, errno);
    if (errno != EMLINK && errno != ENOENT && sharing_.ok()) sharing_ = failed;
    return failed;
  }
  // What was linked is what is meant, also if the name has another file by now.
  if (fstatat(partial_.fd(), fresh.link.c_str(), &linked, AT_SYMLINK_NOFOLLOW) != 0 || linked.st_ino != facts.st_ino ||
      linked.st_dev != facts.st_dev) {
    unlinkat(partial_.fd(), fresh.link.c_str(), 0);
    return absl::UnavailableError(path + " has been changed meanwhile");
  }
  return &(files_[{facts.st_dev, facts.st_ino}] = std::move(fresh));
}

// The image in cr-hostd's own folder that stands for an earlier one.
absl::Status EarlierImages::MakeStandIn(const std::string& dir, const Image& image) {
  uint64_t bytes = 0;
  for (const auto& [name, contents] : image.contents) bytes += contents.size();
  if (!HasRoom(own_, bytes)) return absl::ResourceExhaustedError("there is no room left in cr-hostd's folder " + own_);
  if (mkdir(dir.c_str(), 0700) != 0) return ckptfmt::SystemError("create", dir, errno);
  CR_ASSIGN_OR_RETURN(const ckptfmt::OpenedFolder folder, ckptfmt::OpenedFolder::Open(dir));
  for (const SignedFile& one : image.statement.files()) {
    const auto contents = image.contents.find(one.path());
    const auto found = image.files.find(one.path());
    File* const file = found == image.files.end() ? nullptr : found->second;
    if (file && !file->stand_in.empty()) {
      CR_RETURN_IF_ERROR(MakeFoldersFor(folder, one.path()));
      if (linkat(AT_FDCWD, file->stand_in.c_str(), folder.fd(), one.path().c_str(), 0) == 0) continue;
      return ckptfmt::SystemError("link", file->stand_in, errno);
    }
    CR_RETURN_IF_ERROR(
        WriteOwn(folder, one.path(), contents == image.contents.end() ? "" : contents->second, one.bytes()));
    struct stat facts;
    if (!file) continue;
    if (fstatat(folder.fd(), one.path().c_str(), &facts, AT_SYMLINK_NOFOLLOW) != 0) {
      return ckptfmt::SystemError("look at", folder.FullPath(one.path()), errno);
    }
    file->stand_in = folder.FullPath(one.path());
    file->number = facts.st_ino;
  }
  const std::string_view hashes = image.statement.chunks();
  for (size_t i = 0; i < image.index.chunks.size(); ++i) {
    const ckptfmt::StoredChunk& chunk = image.index.chunks[i];
    const File* const file = image.files.at(image.index.data_files[chunk.file]);
    chunks_.Add(file->number, chunk, hashes.substr(i * kHashBytes, kHashBytes));
  }
  return absl::OkStatus();
}

absl::Status EarlierImages::PlaceFiles(const ckptfmt::OpenedFolder& image) {
  std::map<ino_t, std::string> names;  // of the stand-ins; empty: the image does not have it
  for (const auto& [id, file] : files_) names[file.number];
  std::vector<std::string> folders;
  CR_ASSIGN_OR_RETURN(const std::vector<std::string> paths,
                      ckptfmt::ListFiles(image, ckptfmt::kMemoryFolder, &folders));
  for (const std::string& path : paths) {
    struct stat facts;
    if (fstatat(image.fd(), path.c_str(), &facts, AT_SYMLINK_NOFOLLOW) != 0) {
      return ckptfmt::SystemError("look at", image.FullPath(path), errno);
    }
    const auto stand_in = names.find(facts.st_ino);
    if (stand_in == names.end()) continue;
    stand_in->second = path;
    if (unlinkat(image.fd(), path.c_str(), 0) != 0) return ckptfmt::SystemError("remove", image.FullPath(path), errno);
  }
  const checkpoint::ActAs user(&account_);
  for (const auto& [id, file] : files_) {
    const std::string& name = names[file.number];
    if (name.empty()) {
      unlinkat(partial_.fd(), file.link.c_str(), 0);
    } else if (renameat(partial_.fd(), file.link.c_str(), partial_.fd(), name.c_str()) != 0) {
      return ckptfmt::SystemError("name", partial_.FullPath(file.link), errno);
    }
  }
  return absl::OkStatus();
}

}  // namespace cuda_remote::host
