// SPDX-License-Identifier: Apache-2.0
// Folders that only this user (and root) can change: found, made and checked by descriptor. README.md has the rules.
//
// Part of the client library: libc only. Thread-safe.
#ifndef CUDA_REMOTE_PROTO_FOLDER_PRIVATE_FOLDER_H_
#define CUDA_REMOTE_PROTO_FOLDER_PRIVATE_FOLDER_H_

#include <sys/stat.h>
#include <sys/types.h>

#include <string>
#include <vector>

#include "proto/base/status.h"
#include "proto/base/unique_fd.h"

namespace cuda_remote {

enum class FolderUse {
  kLook,   // it must be there; changes nothing
  kMake,   // makes what is missing (mode 0700), and takes all rights of others away from the last folder
  kServe,  // as kMake, but others may enter the last folder if its mode says so
};

// Opens the folder at `path`, which belongs to this user.
StatusOr<UniqueFd> OpenFolder(const std::string& path, FolderUse use);

// The same without the descriptor.
Status CheckFolder(const std::string& path, FolderUse use);

// Opens the plain file `path` for reading if nobody but root and this user can have written it or put it
// there.
StatusOr<UniqueFd> OpenTrustedFile(const std::string& path);

// Whether `user` stands for all users that have no number in this process's user namespace.
bool IsUnmapped(uid_t user);

// Whether `user` is root or this user. In a user namespace, where others have no numbers, also one of those who has put
// something at `path`, if nobody else could have.
bool IsTrustedUser(uid_t user, const std::string& path);

// Why what `facts` describes is not only root's and this user's: "belongs to user 1000 (anna)" or "may be written by
// others (mode 0777)". Empty if it is. A sticky folder counts as one that others may write.
std::string WhyNotTrusted(const struct stat& facts);

// Where this user's sockets and jobs are, best first; a new one goes to the first.
//
//     $XDG_RUNTIME_DIR/cuda-remote   unless that folder is another user's (su keeps the variable), or is root's
//                                    /run/user/0, which goes when root logs out, with the folders of running jobs
//     /run/cuda-remote               root
//     /run/user/UID/cuda-remote      others
//     /tmp/cuda-remote-UID           where there is none of these
std::vector<std::string> RuntimeFolders();

}  // namespace cuda_remote

#endif  // CUDA_REMOTE_PROTO_FOLDER_PRIVATE_FOLDER_H_
