// Writes memory chunks into data files with threads of its own, so that the disk works while memory is still being
// read.
//
// Add is for one thread; the work is done by several, each with its own data file. A failure is told by a later Add,
// and by Finish. The destructor stops the threads and leaves the files as they are.
#ifndef CUDA_REMOTE_CKPTFMT_CHUNK_STORE_H_
#define CUDA_REMOTE_CKPTFMT_CHUNK_STORE_H_

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "ckptfmt/file.h"
#include "ckptfmt/index.h"

namespace cuda_remote::ckptfmt {

struct ChunkStoreOptions {
  int zstd_level = 0;  // 0: stored as they are
  uint64_t data_file_bytes = uint64_t{4} << 30;
  int writers = 1;
};

class ChunkStore {
 public:
  // `folder`: the image's; data files go below it.
  ChunkStore(std::string folder, const ChunkStoreOptions& options);
  ~ChunkStore();
  ChunkStore(const ChunkStore&) = delete;
  ChunkStore& operator=(const ChunkStore&) = delete;

  // Takes a copy of a chunk (at most kChunkBytes); waits while too many are under way. Chunks are numbered from 0.
  absl::Status Add(std::string_view bytes, const Hash& hash);

  // Waits for all, flushes the files to the disk. `chunks` by number.
  absl::Status Finish(std::vector<StoredChunk>* chunks, std::vector<FileRecord>* files);

  uint32_t data_files() const { return next_file_; }
  uint64_t stored_bytes() const { return stored_bytes_; }

 private:
  struct Job {
    uint32_t number = 0;
    Hash hash;
    std::string bytes;
  };

  void Work();
  absl::Status WorkUntilDone();
  void Stop();

  const std::string folder_;
  const ChunkStoreOptions options_;
  std::atomic<uint32_t> next_file_{0};
  std::atomic<uint64_t> stored_bytes_{0};

  std::mutex mutex_;
  std::condition_variable work_;   // there is a job, or the end
  std::condition_variable space_;  // there is room for one, or a failure
  std::deque<Job> jobs_;
  std::vector<std::string> spare_;  // buffers to use again
  bool ending_ = false;
  absl::Status failure_;
  std::vector<StoredChunk> chunks_;
  std::vector<FileRecord> files_;
  uint32_t added_ = 0;

  std::vector<std::thread> threads_;
};

}  // namespace cuda_remote::ckptfmt

#endif  // CUDA_REMOTE_CKPTFMT_CHUNK_STORE_H_
