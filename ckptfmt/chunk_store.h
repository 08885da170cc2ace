// SPDX-License-Identifier: Apache-2.0
// Finds out which chunks of memory have to be stored, and writes those into data files, with threads of its own: what
// takes time (looking for zeros, hashing, compressing, writing) is not done by whoever reads the memory.
//
// Chunks come in any order and from any thread; what the index says of them in the end depends on their order in the
// image only. Where they lie depends on the threads: each writes its own data file. A failure is told by a later Add,
// and by Finish. The destructor stops the threads and leaves the files as they are.
#ifndef CUDA_REMOTE_CKPTFMT_CHUNK_STORE_H_
#define CUDA_REMOTE_CKPTFMT_CHUNK_STORE_H_

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <vector>

#include "absl/status/status.h"
#include "ckptfmt/compression_choice.h"
#include "ckptfmt/file.h"
#include "ckptfmt/index.h"
#include "proto/threads/mutex.h"

namespace cuda_remote::ckptfmt {

// The fastest level, for as long as it makes writing faster (compression_choice.h).
inline constexpr int kWhatIsFaster = -1;

struct ChunkStoreOptions {
  int zstd_level = 0;  // 0: stored as they are; kWhatIsFaster
  uint64_t data_file_bytes = uint64_t{4} << 30;
  int writers = 1;
  std::string secret;       // kSecretBytes
  bool gpu_hashes = false;  // whether stored chunks get their GPU hash
};

class ChunkStore {
 public:
  // What became of the chunks so far.
  struct Totals {
    uint64_t zero_bytes = 0;    // in chunks of zeros only
    uint64_t shared_bytes = 0;  // in chunks equal to another one
    uint64_t stored_bytes = 0;  // in the data files
    uint64_t linked_bytes = 0;  // of these, in files that were there before (AddKnown)
  };

  // `folder`: the image's, which outlives this; data files go below it.
  ChunkStore(const OpenedFolder* folder, const ChunkStoreOptions& options);
  ~ChunkStore();
  ChunkStore(const ChunkStore&) = delete;
  ChunkStore& operator=(const ChunkStore&) = delete;

  // A number for a data file that others have written; each once. DataFileName tells its name.
  uint32_t TakeFile() { return next_file_.fetch_add(1); }
  // A chunk that lies in such a file, with a keyed hash by the same secret: chunks with its bytes are not written.
  // Before any chunk is given.
  void AddKnown(const StoredChunk& chunk);

  // One more region, of `bytes`; they are numbered from 0.
  uint32_t AddRegion(uint64_t bytes);

  // Takes chunk `index` of a region, each exactly once. Does not wait and does not copy: `bytes` must stay as they are
  // until `done` is called, by one of the threads or by this function, whether all went well or not.
  absl::Status Add(uint32_t region, uint64_t index, std::string_view bytes, std::function<void()> done);
  // Says that an earlier image has this chunk at `place`. AddKnown was called for it, and its GPU hash is known.
  void AddPlace(const Hash128& place, const StoredChunk& chunk);
  // Whether AddUnread would take a chunk of this length. From any thread.
  bool Has(const Hash128& place, const ChunkHash& gpu_hash, uint64_t bytes) const;
  // Takes a chunk without its bytes, if an earlier image has one of this GPU hash and the same length at `place`. From
  // any thread.
  bool AddUnread(uint32_t region, uint64_t index, const ChunkHash& gpu_hash, const Hash128& place);
  // Takes a chunk of zeros.
  absl::Status AddZeros(uint32_t region, uint64_t index);
  // Takes a copy; waits while too many of those are under way.
  absl::Status AddCopy(uint32_t region, uint64_t index, std::string_view bytes);

  // From now on chunks are only kept; until Release, Wait, Finish or the end.
  void Hold();
  void Release();

  // Waits until all chunks that were given are done with, and tells how far that is ten times a second. kCancelled if
  // `go_on` returns false. Not needed before Finish, which waits without asking.
  absl::Status Wait(const std::function<bool(uint64_t done, uint64_t total)>& go_on);

  // Waits for all, flushes the files to the disk; once. `chunks`: the stored ones, numbered by their first use in the
  // regions' order; `regions`: each one's chunks as in the index. `data_files`: the files that these are in, by their
  // numbers in the chunks; `files`: those of them that were written here.
  absl::Status Finish(std::vector<StoredChunk>* chunks, std::vector<std::vector<uint32_t>>* regions,
                      std::vector<std::string>* data_files, std::vector<FileRecord>* files);

  Totals totals() const;

 private:
  struct Job {
    uint32_t region = 0;
    uint64_t index = 0;
    std::string_view bytes;
    std::function<void()> done;
  };
  struct RegionChunks {
    uint64_t bytes = 0;
    uint64_t missing = 0;           // not given yet
    std::vector<uint32_t> numbers;  // 0: zeros; n: the chunk stored as number n - 1; or one of the marks below
  };
  // What makes two chunks the same one.
  struct Identity {
    Hash128 hash, keyed;
    uint32_t bytes;
    bool operator==(const Identity& other) const {
      return hash == other.hash && keyed == other.keyed && bytes == other.bytes;
    }
  };
  // Nobody can choose chunks for which it is the same.
  struct IdentityHash {
    size_t operator()(const Identity& identity) const { return size_t(identity.keyed.low); }
  };
  struct Known {
    uint32_t number;  // in chunks_, plus 1; 0: it lies in known_chunks_ and has not been used
    uint32_t place;   // there
  };
  // A chunk as the GPU names it, and where it was.
  struct GpuIdentity {
    ChunkHash hash;
    Hash128 place;
    uint32_t bytes;
    bool operator==(const GpuIdentity& other) const {
      return hash == other.hash && place == other.place && bytes == other.bytes;
    }
  };
  struct GpuIdentityHash {
    size_t operator()(const GpuIdentity& identity) const { return size_t(identity.place.low); }
  };
  // Not numbers: there are never so many chunks.
  static constexpr uint32_t kMissing = UINT32_MAX, kGiven = UINT32_MAX - 1;

  class Writer;
  void Work();
  absl::Status WorkUntilDone();
  absl::Status Store(const Job& job, Writer* writer);
  bool TakeJob(Job* job);
  absl::Status GiveLocked(uint32_t region, uint64_t index, std::optional<uint64_t>* bytes) CR_REQUIRES(mutex_);
  uint32_t UseLocked(Known* known) CR_REQUIRES(mutex_);
  void Stop();
  void RenumberLocked(std::vector<StoredChunk>* chunks, std::vector<std::string>* data_files) CR_REQUIRES(mutex_);

  const OpenedFolder* const folder_;
  const ChunkStoreOptions options_;
  CompressionChoice choice_;
  std::atomic<uint32_t> next_file_{0};

  mutable Mutex mutex_;
  Condition work_;   // there is a job, or the end
  Condition space_;  // a copy is done with
  Condition idle_;   // all chunks are, or a failure
  std::deque<Job> jobs_ CR_GUARDED_BY(mutex_);
  size_t copies_ CR_GUARDED_BY(mutex_) = 0;  // of AddCopy, under way
  uint64_t given_bytes_ CR_GUARDED_BY(mutex_) = 0, done_bytes_ CR_GUARDED_BY(mutex_) = 0;
  bool held_ CR_GUARDED_BY(mutex_) = false, ending_ CR_GUARDED_BY(mutex_) = false;
  absl::Status failure_ CR_GUARDED_BY(mutex_);
  std::vector<RegionChunks> regions_ CR_GUARDED_BY(mutex_);
  std::unordered_map<Identity, Known, IdentityHash> known_ CR_GUARDED_BY(mutex_);
  std::vector<StoredChunk> known_chunks_ CR_GUARDED_BY(mutex_);
  std::unordered_map<GpuIdentity, Identity, GpuIdentityHash> gpu_known_ CR_GUARDED_BY(mutex_);
  std::vector<StoredChunk> chunks_ CR_GUARDED_BY(mutex_);  // in the order in which they came
  std::vector<FileRecord> files_ CR_GUARDED_BY(mutex_);
  Totals totals_ CR_GUARDED_BY(mutex_);

  std::vector<std::thread> threads_;
};

}  // namespace cuda_remote::ckptfmt

#endif  // CUDA_REMOTE_CKPTFMT_CHUNK_STORE_H_
