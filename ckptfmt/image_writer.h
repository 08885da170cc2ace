// SPDX-License-Identifier: Apache-2.0
// Writes a checkpoint image: into DIR.partial, and under its own name only when it is complete and on the disk.
//
// Threads: AddChunk, AddUnread and Has may be called from any thread, everything else from one thread at a time.
// Errors: name the file, what failed and what to do. After an error the writer can only be destroyed, which removes
// what it wrote. An older image under DIR stays complete until the new one replaces it in one step.
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
  // Zstandard level for memory chunks. 0: not compressed. -1: the fastest level, wherever it makes writing faster; the
  // writer measures that as it writes. A chunk that does not shrink is always stored uncompressed.
  int zstd_level = 0;
  // Data files are not longer than this.
  uint64_t data_file_bytes = uint64_t{4} << 30;
  // Threads that hash, compress and write; each has a data file of its own. 0: by the number of processors.
  int writers = 0;
  // The secret of the chunks' keyed hashes (hash.h). To share with images, it must be theirs. Empty: a new one.
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

  // Does not write again what `earlier`, an image of the same store, has of the memory. Links its data files into the
  // new image. Call it before any memory is given. Fails if the file system has no hard links; the image can still be
  // written.
  absl::Status ShareWith(const ImageReader& earlier);

  // Memory, in any order: each region is announced, which gives it a number, and then each of its chunks (kChunkBytes,
  // the last one shorter) is given exactly once. The image lists regions in the order of AddRegion.
  absl::StatusOr<uint32_t> AddRegion(const Region& region);
  // Takes a chunk, from any thread, without copying it and without waiting: `bytes` must not change until `done` is
  // called. `done` is always called, on any thread, also if this or a later step fails. A later AddChunk, or Commit,
  // returns an error of writing.
  absl::Status AddChunk(uint32_t region, uint64_t index, std::string_view bytes, std::function<void()> done);
  // Takes a chunk that has this GPU hash now, without its bytes, from any thread. That works if the hash is that of
  // zeros, or if an earlier image of the job (ShareWith) has a chunk of the same hash and length at the same offset of
  // the same region, whichever process has the region. False: the chunk must be read and given to AddChunk.
  bool AddUnread(uint32_t region, uint64_t index, const ChunkHash& hash);
  // Whether AddUnread would take this chunk of such a region. From any thread.
  bool Has(const Region& region, uint64_t index, const ChunkHash& hash) const;
  // WriterOptions::gpu_hashes. Without them AddUnread and Has always return false.
  bool keeps_gpu_hashes() const;

  // Hashes and writes nothing until ReleaseChunks, WaitForChunks or Commit, because the processor and the disk are
  // needed for something else. Meanwhile no chunk's memory comes back.
  void HoldChunks();
  void ReleaseChunks();

  // Waits until the chunks given so far are written. Calls `go_on` ten times a second with the bytes written so far and
  // in all; returns kCancelled if it returns false. Not needed before Commit, which waits by itself.
  absl::Status WaitForChunks(const std::function<bool(uint64_t done, uint64_t total)>& go_on);

  // Memory, in order: for each region BeginRegion, then AddData with its bytes in pieces of any size, which are copied,
  // then EndRegion, which fails if the bytes were not exactly region.bytes.
  absl::Status BeginRegion(const Region& region);
  absl::Status AddData(std::string_view bytes);
  absl::Status EndRegion();

  // The replay log of the next process (ImageInfo::processes), as Log::Serialize wrote it; once for each. Commit
  // flushes them to the disk.
  absl::Status WriteLog(std::string_view bytes);

  // The folder for the engine's own files (DIR.partial/client): regular files and subfolders, written before Commit.
  // The path goes through a descriptor. It is valid in this process and its children, during the life of this object.
  std::string client_dir() const;

  // The image's name, once it is complete.
  const std::string& dir() const;

  // Checksums the engine's files, writes the manifest, syncs everything and gives the image its name.
  absl::Status Commit(ImageInfo info, const Progress& progress = nullptr);

  // The sizes so far; complete after Commit.
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
