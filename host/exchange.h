// SPDX-License-Identifier: Apache-2.0
// Images on their way between cr-hostd's own folder, which only root can reach, and the folders of their users.
//
// What is a user's is opened, made and changed with her rights only. What root's tools read was copied before it was
// checked, so that it cannot change after that.
#ifndef CUDA_REMOTE_HOST_EXCHANGE_H_
#define CUDA_REMOTE_HOST_EXCHANGE_H_

#include <sys/types.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "checkpoint/job/account.h"
#include "checkpoint/job/stall_watch.h"
#include "ckptfmt/file.h"
#include "ckptfmt/index.h"
#include "host/signature.h"
#include "proto/base/unique_fd.h"

namespace cuda_remote::host {

// Gives a user an image: a process with her rights, which makes DIR.partial at first, and copies the image when it is
// there. Until then nothing stands under DIR. Ends with this object, and removes DIR.partial if nothing was given. The
// user may stop the process: it is killed if it makes no progress, and then DIR.partial stays.
// The image may be the next one in a store (ckptfmt/image_store.h), which the process has locked meanwhile. Data files
// that it shares with others have come there before the rest (earlier_images.h).
class ImageGiver {
 public:
  // `own`: the folder with the image's folder "image", once it is there. The user cannot reach it by a path. `path`:
  // from this process's working folder. `keep`: not 0: the path is a store's, of which so many images of the job stay.
  // `cancelled`: asked now and then while this waits for the process; then what waits fails.
  static absl::StatusOr<std::unique_ptr<ImageGiver>> Begin(const checkpoint::Account& account, int own,
                                                           const std::string& path, size_t keep,
                                                           std::function<bool()> cancelled);
  ~ImageGiver();
  ImageGiver(const ImageGiver&) = delete;
  ImageGiver& operator=(const ImageGiver&) = delete;

  // Before anything else: waits until the process has made DIR.partial.
  absl::Status AwaitPlace();
  // After AwaitPlace: the image's name, once it is complete.
  const std::string& dir() const { return dir_; }
  // Copies the image, whose files are the user's by now, to the disk, where it has no name yet.
  absl::Status Copy();
  // After Copy: gives it its name. The text, if it is not empty: what went wrong after that.
  absl::StatusOr<std::string> Publish();

 private:
  ImageGiver(pid_t child, int socket, std::string user, std::function<bool()> cancelled)
      : child_(child), socket_(socket), user_(std::move(user)), cancelled_(std::move(cancelled)) {}
  absl::StatusOr<std::string> Await(const char* word);
  // The process sees that nobody waits for it.
  void End(const checkpoint::StallWatch::Limits& limits);
  pid_t child_;
  UniqueFd socket_;
  const std::string user_;  // for messages
  const std::function<bool()> cancelled_;
  std::string dir_;
};

// Makes the folders in which the image's file `path` is to be.
absl::Status MakeFoldersFor(const ckptfmt::OpenedFolder& folder, const std::string& path);

// Makes everything in `folder` the account's. Nobody else can reach it.
absl::Status GiveFiles(const checkpoint::Account& account, int folder);

// Reads the signature of the user's image whose folder is open as `image`, with her rights. Fails if it has none, is
// not signed with `key`, or is of another user's job. `dir` is for messages.
absl::StatusOr<Statement> ReadStatement(int image, const std::string& dir, const checkpoint::Account& account,
                                        const Key& key);

// Reads the index of an image that is signed by chunk, if it is as it was then.
absl::StatusOr<ckptfmt::Index> ReadSignedIndex(int image, const std::string& dir, const checkpoint::Account& account,
                                               const Statement& statement);
// A file of the user's image that is as it was signed, and not signed by chunk.
absl::StatusOr<std::string> ReadSignedFile(int image, const std::string& dir, const checkpoint::Account& account,
                                           const SignedFile& file);

// Copies the user's image at *path, or the newest in a folder of several (which *path then names), to the new folder
// `to`, if it is signed with `key` for this user and is as it was then; of data files that are signed by chunk, the
// chunks. *group, which may be null: SignImage's.
absl::Status TakeImage(const checkpoint::Account& account, const Key& key, const std::string& to, std::string* path,
                       std::string* group);

// Whether the file system of `folder` has so many bytes beside what stays free for others.
bool HasRoom(const std::string& folder, uint64_t bytes);

// Removes a folder of cr-hostd's own, with all in it. Nobody else can reach it.
void RemoveOwnFolder(const std::string& path);

}  // namespace cuda_remote::host

#endif  // CUDA_REMOTE_HOST_EXCHANGE_H_
