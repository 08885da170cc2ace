// SPDX-License-Identifier: Apache-2.0
// A folder that keeps several images, which share what is the same in them: cr-checkpoint --keep.
//
// Each image has a folder of its own (image-000001, ...), is complete by itself, and has hard links to the data files
// that it shares with others. There are no counters of use: a byte is needed if an image in the folder names it.
// FORMAT.md says more.
#ifndef CUDA_REMOTE_CKPTFMT_IMAGE_STORE_H_
#define CUDA_REMOTE_CKPTFMT_IMAGE_STORE_H_

#include <sys/types.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ckptfmt/file.h"
#include "ckptfmt/image_reader.h"
#include "ckptfmt/image_writer.h"
#include "ckptfmt/index.h"

namespace cuda_remote::ckptfmt {

// The writer's side. Not thread-safe. Only one object of one process has a store open at a time.
class ImageStore {
 public:
  // Makes the folder if it is not there. Removes what tools that were killed have left in it. Fails with kAlreadyExists
  // if it is an image or holds other things only, with kPermissionDenied if it is another user's or others may write to
  // it, and with kUnavailable if another tool has it.
  static absl::StatusOr<std::unique_ptr<ImageStore>> Open(const std::string& dir);
  ~ImageStore();
  ImageStore(const ImageStore&) = delete;
  ImageStore& operator=(const ImageStore&) = delete;

  // Starts the next image. Memory that the store's images hold is not written again.
  absl::StatusOr<std::unique_ptr<ImageWriter>> Create(WriterOptions options);
  // Starts the next image for a caller who copies a complete one: an empty folder, locked, for Publish (folder.h),
  // which gives it the name *dir. Sharing is the caller's to do.
  absl::StatusOr<OpenedFolder> BeginCopy(std::string* dir);
  // Why that image cannot share: the file system has no hard links. OK if it can.
  const absl::Status& sharing() const;

  // Call it after the commit of an image that Create began, or Publish of one of BeginCopy. Removes all images of its
  // job (ImageInfo::job_folder) except the last `keep`, frees the space that no image needs, and returns how many it
  // removed. An image that is open somewhere (ImageReader) stays until the next time.
  absl::StatusOr<size_t> Prune(size_t keep);

 private:
  struct State;
  explicit ImageStore(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

// Finds the bytes of data files that no image needs any more, and gives them back to the file system.
class UnusedSpace {
 public:
  // What this image needs of its data files stays.
  void Keep(const OpenedFolder& image, const Index& index);
  // Makes holes in these data files. One that also has a name elsewhere stays as it is: what is there needs what it
  // needs.
  absl::Status Free();

 private:
  struct File {
    std::string path;
    uint64_t names = 0;                  // in these images
    std::map<uint64_t, uint64_t> needs;  // from, to; they do not touch each other
  };
  static absl::Status FreeIn(const std::pair<dev_t, ino_t>& id, const File& file);
  std::map<std::pair<dev_t, ino_t>, File> files_;
};

// An image of a store, for those who look at it.
struct StoredImage {
  std::string path;
  absl::Status status;  // why it cannot be read; then the rest is empty
  ImageInfo info;
  ImageSizes sizes;
  uint64_t own_bytes = 0;  // of sizes.total_bytes: what would be free without this image
};

struct StoreListing {
  std::string path;
  std::vector<StoredImage> images;  // the complete ones, by rising number
  uint64_t total_bytes = 0;         // of all of them; what several have counts once
};
// kNotFound if there is no image in `dir`.
absl::StatusOr<StoreListing> ListStore(const std::string& dir);

// Writes the contents of `image` to a new image `dir` that shares no files. One that cr-hostd has signed keeps its
// signature.
absl::Status ExportImage(const ImageReader& image, const std::string& dir, const Progress& progress);

}  // namespace cuda_remote::ckptfmt

#endif  // CUDA_REMOTE_CKPTFMT_IMAGE_STORE_H_
