// SPDX-License-Identifier: Apache-2.0
// The folders that an image is written in: making DIR.partial, giving it the image's name, and what crashes leave
// behind. What is in them, and whose they are.
#ifndef CUDA_REMOTE_CKPTFMT_FOLDER_H_
#define CUDA_REMOTE_CKPTFMT_FOLDER_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ckptfmt/file.h"

namespace cuda_remote::ckptfmt {

// In the folder of an image that cr-hostd has made (host/signature.h). The manifest does not list it.
inline constexpr char kSignatureName[] = "signature";
// The empty file by which a store, or DIR.partial, is locked for its writer. Unlike the lock of a folder, which is one
// machine's, network file systems show the lock of a file to all hosts if it is open for writing.
inline constexpr char kLockName[] = "lock";

// DIR without trailing slashes, and with symbolic links resolved if it exists.
std::string ImagePath(const std::string& dir);

// Whether `dir` is an image: a folder with a manifest.
bool IsImage(const std::string& dir);

// The images of a store (image_store.h) have the names image-000001, image-000002 and so on.
std::string StoreImageName(uint64_t number);
// The number in such a name, 0 if it is none. `partial`: whether it goes on with .partial.
uint64_t StoreImageNumber(std::string_view name, bool* partial);
// Whether this is the path of an image with such a name.
bool IsStoreImage(const std::string& path);
// The complete images in a folder, by rising number; empty if `dir` is an image itself, or cannot be read.
std::vector<std::string> ImagesIn(const std::string& dir);
// The last of these; empty if there is none.
std::string NewestImageIn(const std::string& dir);

// If a crash left the image that was to be replaced under DIR.old and nothing under DIR, puts it back. Does nothing to
// an image of another user.
absl::Status PutBackOldImage(const std::string& dir);

// kPermissionDenied if `dir` is there and not this user's: a new image would take the place of somebody else's.
// kAlreadyExists if it is a symbolic link, which ImagePath could not resolve.
absl::Status CheckMayReplace(const std::string& dir);

// Locks a folder that images are written to, until Unlock or the end of `folder`, against writers on this machine and
// on all hosts of a file system whose locks they share. Makes its lock file if it has none. Waits 3 seconds for another
// writer, which may have been killed and be about to end; kUnavailable if it goes on.
absl::Status LockToWrite(OpenedFolder* folder);
// Locks an image against RemoveUnused, until Unlock or the end of `image`. False: somebody has locked it alone, and
// `wait` says not to wait for that. Where the file system has no locks, this is none.
bool LockToRead(OpenedFolder* image, bool wait);
// Also where the lock has got into a process that this one has started.
void Unlock(OpenedFolder* folder);

// Makes an empty DIR.partial, locked as by LockToWrite. Removes a dead one of this user's first, and refuses one that
// somebody else has made or may write to (kPermissionDenied).
absl::StatusOr<OpenedFolder> MakePartial(const std::string& dir);

// Gives `partial`, which is DIR.partial, the name DIR, in place of an image or an empty folder that has it. On the disk
// and unlocked when it returns. If it fails, `partial` is DIR.partial again, still locked, and an image that had the
// name DIR has it.
absl::Status Publish(OpenedFolder* partial, const std::string& dir);

// Removes an image, or DIR.partial, with all in it; only its own kind of files. Fails, and removes nothing, if the
// folder has another name by now.
absl::Status RemoveFolder(OpenedFolder* folder);
// Does so unless somebody reads the image (LockToRead) or writes it, on any host. False: somebody does.
absl::StatusOr<bool> RemoveUnused(OpenedFolder* folder);

// Flushes the names beside the folder to the disk. Who may not read them flushes the whole file system.
absl::Status SyncParent(const OpenedFolder& folder);

// The names in a folder, sorted.
absl::StatusOr<std::vector<std::string>> NamesIn(const OpenedFolder& folder);

// "PATH belongs to user N, ...".
absl::Status NotOwn(const std::string& path, uid_t owner, const std::string& what_to_do);

// Plain files below `folder`/`sub`, as paths from `folder`, sorted. Fails for anything that is neither file nor folder.
absl::StatusOr<std::vector<std::string>> ListFiles(const OpenedFolder& folder, const std::string& sub,
                                                   std::vector<std::string>* folders);

// Fails for anything in the image's folder that is neither file nor folder. With `owner`, also unless the folder and
// all in it belong to root or this user, and nobody else may write to it (kPermissionDenied).
absl::Status CheckTree(const OpenedFolder& folder, bool owner);

}  // namespace cuda_remote::ckptfmt

#endif  // CUDA_REMOTE_CKPTFMT_FOLDER_H_
