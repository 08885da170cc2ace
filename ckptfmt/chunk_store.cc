#include "ckptfmt/chunk_store.h"

#include <zstd.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <system_error>
#include <utility>

namespace cuda_remote::ckptfmt {
namespace {

// Chunks that wait for a writer, for each writer.
constexpr size_t kWaiting = 8;

}  // namespace

ChunkStore::ChunkStore(std::string folder, const ChunkStoreOptions& options)
    : folder_(std::move(folder)), options_(options) {
  try {
    for (int i = 0; i < std::max(options.writers, 1); ++i) threads_.emplace_back([this] { Work(); });
  } catch (const std::system_error&) {
    // Fewer will do.
    if (threads_.empty()) failure_ = absl::ResourceExhaustedError("the system lets us start no thread to write with");
  }
}

ChunkStore::~ChunkStore() {
  {
    // Whoever goes without Finish does not want the rest.
    std::lock_guard<std::mutex> lock(mutex_);
    jobs_.clear();
  }
  Stop();
}

void ChunkStore::Stop() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ending_ = true;
  }
  work_.notify_all();
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

absl::Status ChunkStore::Add(std::string_view bytes, const Hash& hash) {
  std::unique_lock<std::mutex> lock(mutex_);
  space_.wait(lock, [this] { return jobs_.size() < kWaiting * threads_.size() || !failure_.ok(); });
  if (!failure_.ok()) return failure_;
  Job job;
  job.number = added_++;
  job.hash = hash;
  if (!spare_.empty()) {
    job.bytes = std::move(spare_.back());
    spare_.pop_back();
  }
  lock.unlock();
  job.bytes.assign(bytes);
  lock.lock();
  jobs_.push_back(std::move(job));
  lock.unlock();
  work_.notify_one();
  return absl::OkStatus();
}

absl::Status ChunkStore::Finish(std::vector<StoredChunk>* chunks, std::vector<FileRecord>* files) {
  Stop();
  if (!failure_.ok()) return failure_;
  *chunks = std::move(chunks_);
  for (FileRecord& file : files_) files->push_back(std::move(file));
  return absl::OkStatus();
}

void ChunkStore::Work() {
  const absl::Status status = WorkUntilDone();
  if (status.ok()) return;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (failure_.ok()) failure_ = status;
    ending_ = true;  // the others may stop as well
    jobs_.clear();
  }
  work_.notify_all();
  space_.notify_all();
}

absl::Status ChunkStore::WorkUntilDone() {
  const std::unique_ptr<ZSTD_CCtx, size_t (*)(ZSTD_CCtx*)> compressor(
      options_.zstd_level != 0 ? ZSTD_createCCtx() : nullptr, &ZSTD_freeCCtx);
  std::string packed;
  std::optional<OutputFile> file;
  uint32_t file_number = 0;
  const auto finish_file = [&]() -> absl::Status {
    if (!file) return absl::OkStatus();
    absl::StatusOr<FileRecord> record = file->Finish();
    file.reset();
    if (!record.ok()) return record.status();
    std::lock_guard<std::mutex> lock(mutex_);
    files_.push_back(*std::move(record));
    return absl::OkStatus();
  };
  for (;;) {
    Job job;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      work_.wait(lock, [this] { return !jobs_.empty() || ending_; });
      if (jobs_.empty()) break;
      job = std::move(jobs_.front());
      jobs_.pop_front();
    }
    space_.notify_one();
    StoredChunk stored;
    stored.hash = job.hash;
    stored.bytes = uint32_t(job.bytes.size());
    std::string_view out = job.bytes;
    if (compressor) {
      packed.resize(ZSTD_compressBound(job.bytes.size()));
      const size_t size = ZSTD_compressCCtx(compressor.get(), packed.data(), packed.size(), job.bytes.data(),
                                            job.bytes.size(), options_.zstd_level);
      if (!ZSTD_isError(size) && size < job.bytes.size()) {
        out = {packed.data(), size};
        stored.encoding = Encoding::kZstd;
      }
    }
    if (file && file->bytes() + out.size() > options_.data_file_bytes) {
      if (absl::Status status = finish_file(); !status.ok()) return status;
    }
    if (!file) {
      file_number = next_file_.fetch_add(1);
      absl::StatusOr<OutputFile> created = OutputFile::Create(folder_, DataFileName(file_number));
      if (!created.ok()) return created.status();
      file = *std::move(created);
    }
    stored.file = file_number;
    stored.offset = file->bytes();
    stored.stored_bytes = uint32_t(out.size());
    if (absl::Status status = file->Append(out); !status.ok()) return status;
    stored_bytes_ += out.size();
    std::lock_guard<std::mutex> lock(mutex_);
    if (chunks_.size() <= job.number) chunks_.resize(job.number + 1);
    chunks_[job.number] = stored;
    if (spare_.size() < kWaiting) spare_.push_back(std::move(job.bytes));
  }
  return finish_file();
}

}  // namespace cuda_remote::ckptfmt
