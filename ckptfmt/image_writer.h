// SPDX-License-Identifier: Apache-2.0
// Writes a checkpoint image: into DIR.partial, and under its own name only when it is complete and on the disk.
//
// Not thread-safe, but AddChunk, AddUnread and Has. Errors say which file, what failed and what to do; after an
// error the writer is only good for being destroyed, which removes what it wrote. An image that stood under DIR before
// stays there, whole, until the new one takes its place in one step.
#ifndef CUDA_REMOTE_CKPTFMT_IMAGE_WRITER_H_
#define CUDA_REMOTE_CKPTFMT_IMAGE_WRITER_H_

#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ckptfmt/types.h"

namespace cuda_remote::ckptfmt {

class ImageReader;

struct WriterOptions {
  // Zstandard level for memory chunks; 0: stored as they are; -1: the fastest level where it makes writing faster, which
  // is found out meanwhile. A chunk that would not shrink is stored as it is anyway.
  int zstd_level = 0;
  // Data files are not longer than this.
  uint64_t data_file_bytes = uint64_t{4} << 30;
  // Threads that hash, compress and write data files, each its own; 0: as many as the machine bears.
  int writers = 0;
  // Of the chunks' keyed hashes (hash.h), that of the images to share with. Empty: a new one.
  std::string secret;
  // Whether the image keeps the GPU hashes of its chunks, so that later images need not read them (AddUnread).
  bool gpu_hashes = false;
  // Of the new image (ImageInfo::job_folder). AddUnread takes chunks of images with the same one only.
  std::string job_folder;
};

class ImageWriter {
 public:
  // Starts an image that will be `dir`. Fails with kAlreadyExists if there is something under that name that is not an
  // image, with kPermissionDenied if it or DIR.partial belongs to another user, and with kUnavailable if another
  // checkpoint is being written there. What a checkpoint that died left behind is removed first.
  static absl::StatusOr<std::unique_ptr<ImageWriter>> Create(const std::string& dir, const WriterOptions& options = {});

  // Removes everything unless Commit succeeded.
  ~ImageWriter();
  ImageWriter(const ImageWriter&) = delete;
  ImageWriter& operator=(const ImageWriter&) = delete;

  // Before any memory is given: what of it is in `earlier`, an image of the same folder, is not written again. The new
  // image gets hard links to the data files. Fails if the file system has none; the image can be written all the same.
  absl::Status ShareWith(const ImageReader& earlier);

  // Memory, in any order: each region is announced, which gives it a number, and then each of its chunks (kChunkBytes,
  // the last one shorter) is given exactly once. The image lists regions in the order of AddRegion.
  absl::StatusOr<uint32_t> AddRegion(const Region& region);
  // From any thread. Nothing is copied and nothing waits: `bytes` must stay as they are until `done` is called, on any
  // thread, also if this or a later step fails. A failure to write is told by a later AddChunk or by Commit.
  absl::Status AddChunk(uint32_t region, uint64_t index, std::string_view bytes, std::function<void()> done);
  // A chunk that need not be read, by what the GPU says of it now: it is all zeros, or an earlier image of the job
  // (ShareWith) has one of the same length and GPU hash at the same place, that is, at the same offset of the same
  // region of any of the job's processes. It counts as given then. False: it must be read. From any thread.
  bool AddUnread(uint32_t region, uint64_t index, const GpuHash& hash);
  // Whether AddUnread would take that chunk of such a region. From any thread.
  bool Has(const Region& region, uint64_t index, const GpuHash& hash) const;
  // WriterOptions::gpu_hashes. Without them AddUnread and Has always return false.
  bool keeps_gpu_hashes() const;

  // Lets chunks wait where they are, so that nothing is hashed or written until WaitForChunks or Commit: for as long as
  // the processor and the disk are needed for something else. Whoever gives them must have memory for all.
  void HoldChunks();

  // Waits until the chunks given so far are in their files, and tells now and then how far that is; kCancelled if
  // `go_on` returns false. For whoever wants to see it or to end it: Commit waits by itself.
  absl::Status WaitForChunks(const std::function<bool(uint64_t done, uint64_t total)>& go_on);

  // Memory, in order: for each region BeginRegion, then AddData with its bytes in pieces of any size, which are copied,
  // then EndRegion, which fails if the bytes were not exactly region.bytes.
  absl::Status BeginRegion(const Region& region);
  absl::Status AddData(std::string_view bytes);
  absl::Status EndRegion();

  // The replay log of the next process (ImageInfo::processes), as Log::Serialize wrote it; once for each. Commit flushes
  // them to the disk.
  absl::Status WriteLog(std::string_view bytes);

  // Where the engine writes its own files (DIR.partial/client, by descriptor): plain files, in subfolders if it likes.
  // They may be written until Commit. The path leads there in this process and its children as long as this object
  // lives.
  std::string client_dir() const;

  // The image's name, once it is complete.
  const std::string& dir() const;

  // Checksums the engine's files, writes the manifest, syncs everything and gives the image its name.
  absl::Status Commit(ImageInfo info, const Progress& progress = nullptr);

  // So far; complete after Commit.
  ImageSizes sizes() const;

 private:
  struct State;
  explicit ImageWriter(std::unique_ptr<State> state);
  absl::Status CopyChunk(std::string_view bytes);
  absl::Status FlushChunk();
  absl::Status CommitFiles(ImageInfo info, const Progress& progress);

  std::unique_ptr<State> state_;
};

}  // namespace cuda_remote::ckptfmt

#endif  // CUDA_REMOTE_CKPTFMT_IMAGE_WRITER_H_
