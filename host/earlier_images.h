// SPDX-License-Identifier: Apache-2.0
// What a user's earlier images have, for the next one (cr-checkpoint --keep): root's tool neither reads nor writes it
// again, and the user's new image gets hard links. The earlier images are those in the same store, or those of the same
// part of a job on several hosts (sets.h).
//
// They are the user's, who can change all of them at any time. So nothing is known from them but what cr-hostd has
// signed: the index of an image, and the SHA-256 of each chunk. From these a store of stand-ins is made in cr-hostd's
// own folder, with data files that have their sizes and no contents, and the tool writes the new image there. Whether
// the chunks themselves are what they were, a restart finds out, which compares each one (TakeImage).
//
// The user's images are opened and linked with the user's rights only. Not thread-safe.
#ifndef CUDA_REMOTE_HOST_EARLIER_IMAGES_H_
#define CUDA_REMOTE_HOST_EARLIER_IMAGES_H_

#include <sys/types.h>

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "checkpoint/job/account.h"
#include "ckptfmt/file.h"
#include "ckptfmt/index.h"
#include "host/signature.h"

namespace cuda_remote::host {

class EarlierImages {
 public:
  // `paths`: the earlier images, the newest last. Those that are not as they were signed, or are being removed, are
  // left out. `image`: the path of the new one, which an ImageGiver has begun. `own`: the path of the store of
  // stand-ins, which is not there yet.
  static absl::StatusOr<std::unique_ptr<EarlierImages>> Take(const checkpoint::Account& account, const Key& key,
                                                             std::vector<std::string> paths, const std::string& image,
                                                             const std::string& own);
  // Why an image cannot be shared with: the user's file system has no hard links. OK if it can.
  const absl::Status& sharing() const { return sharing_; }
  const KnownChunks& chunks() const { return chunks_; }

  // `image`: the new one, complete and signed, in cr-hostd's own folder. Its data files that are stand-ins go, and the
  // files that they stand for get their names in the user's image.
  absl::Status PlaceFiles(const ckptfmt::OpenedFolder& image);

 private:
  // A data file of the user's.
  struct File {
    std::string link;      // in the user's new image
    std::string stand_in;  // in cr-hostd's own folder; empty: there is none yet
    ino_t number = 0;      // the stand-in's
  };
  EarlierImages(const checkpoint::Account& account, std::string own) : account_(account), own_(std::move(own)) {}
  // What is signed of an image.
  struct Image {
    Statement statement;
    ckptfmt::Index index;
    std::map<std::string, std::string> contents;  // of its manifest and its index
    std::map<std::string, File*> files;           // the data files
  };
  absl::Status Look(const Key& key, const std::string& path, Image* image);
  absl::StatusOr<File*> LinkFile(const ckptfmt::OpenedFolder& image, const SignedFile& file);
  absl::Status MakeStandIn(const std::string& dir, const Image& image);

  const checkpoint::Account account_;
  const std::string own_;
  ckptfmt::OpenedFolder partial_;  // the user's new image
  absl::Status sharing_;
  KnownChunks chunks_;
  std::map<std::pair<dev_t, ino_t>, File> files_;
};

}  // namespace cuda_remote::host

#endif  // CUDA_REMOTE_HOST_EARLIER_IMAGES_H_
