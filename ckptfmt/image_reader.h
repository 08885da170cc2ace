// SPDX-License-Identifier: Apache-2.0
// Reads a checkpoint image. It trusts nothing in the image: it compares everything with its checksum before it returns
// it.
//
// Open checks the manifest and the memory index; Verify checks the rest. Each read compares its chunk again, and so
// finds damage that happened after Verify. Errors name the file and the offset (kDataLoss), a missing file, or the
// version that is needed (kFailedPrecondition). All functions of an open reader are thread-safe.
#ifndef CUDA_REMOTE_CKPTFMT_IMAGE_READER_H_
#define CUDA_REMOTE_CKPTFMT_IMAGE_READER_H_

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ckptfmt/types.h"

namespace cuda_remote::ckptfmt {

struct Index;
class OpenedFolder;

// A file of the image, as the manifest lists it.
struct FileFacts {
  std::string path;  // below the image's folder
  uint64_t bytes = 0;
  std::string hash;  // XXH3-128, as xxh128sum prints it; empty for a file with chunks, which have their own
  uint32_t mode = 0;
};

// Where a piece of a region is.
struct ChunkFacts {
  uint64_t offset = 0;  // in the region
  uint64_t bytes = 0;
  bool zero = false;  // all zeros: not stored
  std::string hash;   // of its bytes; equal chunks have equal hashes
};

class ImageReader {
 public:
  // Who may own and write the image's folder and what is in it. A restart runs what an image says.
  enum class Owner {
    kAnyone,   // to look at it
    kTrusted,  // root and this user only; kPermissionDenied otherwise
  };
  // What of an image is opened.
  enum class Parts {
    kAll,
    kFacts,  // what it says; reading memory and Verify fail
  };
  // Opens `dir`, or the newest image in it if it is a store (image_store.h). If a checkpoint died in the instant of
  // replacing it, puts the image back under its name first. What is neither file nor folder, such as a symbolic link,
  // is refused. Everything is read through the folder that was opened here, whatever stands under its name later. An
  // image in a store is not removed as long as it is open.
  static absl::StatusOr<std::unique_ptr<ImageReader>> Open(const std::string& dir, Owner owner = Owner::kAnyone,
                                                           Parts parts = Parts::kAll);
  ~ImageReader();

  const std::string& dir() const;
  const ImageInfo& info() const;
  const ImageSizes& sizes() const;
  const std::vector<Region>& regions() const;
  const std::vector<FileFacts>& files() const;
  // For other files of this folder.
  const Index& index() const;
  const OpenedFolder& folder() const;

  // Compares files with their checksums, several at a time, and stops at the first damage. If it found several damaged
  // files, the error names the one that comes first in files(). Several threads call `progress`, one at a time.
  enum class Files {
    kAll,
    kAllButMemory,  // for callers that read the memory anyway: each read compares its chunk
  };
  absl::Status Verify(const Progress& progress = nullptr, Files which = Files::kAll) const;

  // The bytes of a process's replay log. `process`: its number in info().processes.
  absl::StatusOr<std::string> ReadLog(size_t process = 0) const;
  // Where it is, below the image's folder.
  std::string LogPath(size_t process) const;

  // Calls `use` with the region's bytes in order, a chunk (at most kChunkBytes) at a time, until it fails. `zero`: the
  // bytes are all zeros; memory that is known to be zero need not be written.
  using UseChunk = std::function<absl::Status(uint64_t offset, std::string_view bytes, bool zero)>;
  absl::Status ReadRegion(size_t region, const UseChunk& use) const;

  // Reads one chunk, as many bytes as the region has there, to `out`, and compares it with its hash; what `out` holds
  // after a failure has no meaning. `zero`: as above.
  absl::Status ReadChunk(size_t region, uint64_t index, char* out, bool* zero) const;

  // The region's chunks, without reading them.
  std::vector<ChunkFacts> ChunksOf(size_t region) const;

  // The folder with the engine's own files, by descriptor: the path leads there in this process and its children.
  std::string client_dir() const;

 private:
  struct State;
  static absl::StatusOr<std::unique_ptr<ImageReader>> OpenImage(const std::string& dir, Owner owner, Parts parts);
  explicit ImageReader(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace cuda_remote::ckptfmt

#endif  // CUDA_REMOTE_CKPTFMT_IMAGE_READER_H_
