// SPDX-License-Identifier: Apache-2.0
#include "ckptfmt/chunk_store.h"

#include <zstd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/base/clock.h"
#include "proto/base/status_macros.h"
#include "proto/chunkhash/chunk_hash.h"
#include "proto/threads/mutex.h"

namespace cuda_remote::ckptfmt {
namespace {

// Copied chunks that are under way, for each writer.
constexpr size_t kWaiting = 8;
// Smaller ones say little about how fast compressing is.
constexpr size_t kWorthChoosing = 64 << 10;
constexpr std::chrono::milliseconds kTellEvery(100);

bool AllZero(std::string_view bytes) {
  return bytes.empty() || (bytes[0] == 0 && memcmp(bytes.data(), bytes.data() + 1, bytes.size() - 1) == 0);
}

}  // namespace

// One thread's compressor and data file.
class ChunkStore::Writer {
 public:
  explicit Writer(ChunkStore* store)
      : store_(store), compressor_(store->options_.zstd_level != 0 ? ZSTD_createCCtx() : nullptr, &ZSTD_freeCCtx) {}

  // Fills in where the bytes are and how.
  absl::Status Write(std::string_view bytes, StoredChunk* stored) {
    std::string_view out = bytes;
    const bool choose = store_->options_.zstd_level == kWhatIsFaster;
    if (compressor_ && (!choose || (bytes.size() >= kWorthChoosing && store_->choice_.Next()))) {
      const auto start = Now();
      packed_.resize(ZSTD_compressBound(bytes.size()));
      const size_t size = ZSTD_compressCCtx(compressor_.get(), packed_.data(), packed_.size(), bytes.data(),
                                            bytes.size(), choose ? 1 : store_->options_.zstd_level);
      store_->choice_.Compressed(bytes.size(), ZSTD_isError(size) ? bytes.size() : std::min(size, bytes.size()),
                                 SecondsSince(start));
      if (!ZSTD_isError(size) && size < bytes.size()) {
        out = {packed_.data(), size};
        stored->encoding = Encoding::kZstd;
      }
    }
    if (file_ && file_->bytes() + out.size() > store_->options_.data_file_bytes) {
      CR_RETURN_IF_ERROR(FinishFile());
    }
    if (!file_) {
      number_ = store_->next_file_.fetch_add(1);
      absl::StatusOr<OutputFile> created =
          OutputFile::Create(*store_->folder_, DataFileName(number_), /*hashed=*/false);
      if (!created.ok()) return created.status();
      file_ = *std::move(created);
    }
    stored->file = number_;
    stored->offset = file_->bytes();
    stored->stored_bytes = uint32_t(out.size());
    const double waited = file_->waited_seconds();
    const uint64_t until = file_->waited_bytes();
    const absl::Status status = file_->Append(out);
    store_->choice_.Waited(file_->waited_bytes() - until, file_->waited_seconds() - waited);
    return status;
  }

  // Flushes it to the disk.
  absl::Status FinishFile() {
    if (!file_) return absl::OkStatus();
    absl::StatusOr<FileRecord> record = file_->Finish();
    file_.reset();
    if (!record.ok()) return record.status();
    MutexLock lock(&store_->mutex_);
    store_->files_.push_back(*std::move(record));
    return absl::OkStatus();
  }

 private:
  ChunkStore* const store_;
  const std::unique_ptr<ZSTD_CCtx, size_t (*)(ZSTD_CCtx*)> compressor_;
  std::string packed_;
  std::optional<OutputFile> file_;
  uint32_t number_ = 0;
};

ChunkStore::ChunkStore(const OpenedFolder* folder, const ChunkStoreOptions& options)
    : folder_(folder), options_(options) {
  // Held while they start: a thread may fail at once.
  MutexLock lock(&mutex_);
  try {
    for (int i = 0; i < std::max(options.writers, 1); ++i) threads_.emplace_back([this] { Work(); });
  } catch (const std::system_error&) {
    // Fewer will do.
    if (threads_.empty()) failure_ = absl::ResourceExhaustedError("cannot start a thread that writes the image");
  }
}

ChunkStore::~ChunkStore() {
  {
    // Whoever goes without Finish does not want the rest.
    MutexLock lock(&mutex_);
    if (failure_.ok()) failure_ = absl::CancelledError("the checkpoint was cancelled");
  }
  Stop();
}

void ChunkStore::Stop() {
  {
    MutexLock lock(&mutex_);
    ending_ = true;
  }
  work_.NotifyAll();
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

ChunkStore::Totals ChunkStore::totals() const {
  MutexLock lock(&mutex_);
  return totals_;
}

void ChunkStore::AddKnown(const StoredChunk& chunk) {
  MutexLock lock(&mutex_);
  const Identity identity = {chunk.hash, chunk.keyed, chunk.bytes};
  known_.try_emplace(identity, Known{0, uint32_t(known_chunks_.size())});
  known_chunks_.push_back(chunk);
}

uint32_t ChunkStore::AddRegion(uint64_t bytes) {
  MutexLock lock(&mutex_);
  const uint64_t count = ChunkCount(bytes);
  regions_.push_back({bytes, count, std::vector<uint32_t>(size_t(count), kMissing)});
  return uint32_t(regions_.size() - 1);
}

void ChunkStore::AddPlace(const Hash128& place, const StoredChunk& chunk) {
  MutexLock lock(&mutex_);
  gpu_known_.try_emplace({*chunk.gpu_hash, place, chunk.bytes}, Identity{chunk.hash, chunk.keyed, chunk.bytes});
}

// Marks a chunk as given. `bytes`: its length, if the caller knows it; else it is told here.
absl::Status ChunkStore::GiveLocked(uint32_t region, uint64_t index, std::optional<uint64_t>* bytes) {
  if (!failure_.ok()) return failure_;
  if (region >= regions_.size() || index >= regions_[region].numbers.size() ||
      bytes->value_or(ChunkLength(regions_[region].bytes, index)) != ChunkLength(regions_[region].bytes, index)) {
    return absl::InvalidArgumentError(absl::StrCat("region ", region, " has no such chunk: ", index));
  }
  uint32_t& place = regions_[region].numbers[size_t(index)];
  if (place != kMissing) {
    return absl::InvalidArgumentError(absl::StrCat("chunk ", index, " of region ", region, " was given before"));
  }
  *bytes = ChunkLength(regions_[region].bytes, index);
  place = kGiven;
  --regions_[region].missing;
  return absl::OkStatus();
}

absl::Status ChunkStore::Add(uint32_t region, uint64_t index, std::string_view bytes, std::function<void()> done) {
  MutexLock lock(&mutex_);
  std::optional<uint64_t> length = bytes.size();
  absl::Status status = GiveLocked(region, index, &length);
  if (!status.ok()) {
    lock.Unlock();
    if (done) done();
    return status;
  }
  given_bytes_ += bytes.size();
  jobs_.push_back({region, index, bytes, std::move(done)});
  lock.Unlock();
  work_.NotifyOne();
  return status;
}

bool ChunkStore::Has(const Hash128& place, const ChunkHash& gpu_hash, uint64_t bytes) const {
  MutexLock lock(&mutex_);
  return gpu_known_.count({gpu_hash, place, uint32_t(bytes)}) != 0;
}

bool ChunkStore::AddUnread(uint32_t region, uint64_t index, const ChunkHash& gpu_hash, const Hash128& place_key) {
  MutexLock lock(&mutex_);
  if (!failure_.ok() || region >= regions_.size() || index >= regions_[region].numbers.size()) return false;
  std::optional<uint64_t> bytes = ChunkLength(regions_[region].bytes, index);
  const auto found = gpu_known_.find({gpu_hash, place_key, uint32_t(*bytes)});
  if (found == gpu_known_.end() || !GiveLocked(region, index, &bytes).ok()) return false;
  uint32_t& place = regions_[region].numbers[size_t(index)];
  Known& known = known_.at(found->second);
  if (known.number != 0) totals_.shared_bytes += *bytes;
  place = UseLocked(&known);
  return true;
}

absl::Status ChunkStore::AddZeros(uint32_t region, uint64_t index) {
  MutexLock lock(&mutex_);
  std::optional<uint64_t> bytes;
  CR_RETURN_IF_ERROR(GiveLocked(region, index, &bytes));
  regions_[region].numbers[size_t(index)] = 0;
  totals_.zero_bytes += *bytes;
  return absl::OkStatus();
}

// The number of a known chunk, which is one of the image from now on.
uint32_t ChunkStore::UseLocked(Known* known) {
  if (known->number != 0) return known->number;
  chunks_.push_back(known_chunks_[known->place]);
  known->number = uint32_t(chunks_.size());
  totals_.stored_bytes += chunks_.back().stored_bytes;
  totals_.linked_bytes += chunks_.back().stored_bytes;
  return known->number;
}

absl::Status ChunkStore::AddCopy(uint32_t region, uint64_t index, std::string_view bytes) {
  {
    MutexLock lock(&mutex_);
    while (copies_ >= kWaiting * std::max<size_t>(threads_.size(), 1)) space_.Wait(&mutex_);
    ++copies_;
  }
  const auto copy = std::make_shared<std::string>(bytes);
  return Add(region, index, *copy, [this, copy] {
    {
      MutexLock lock(&mutex_);
      --copies_;
    }
    space_.NotifyOne();
  });
}

void ChunkStore::Hold() {
  MutexLock lock(&mutex_);
  held_ = true;
}

void ChunkStore::Release() {
  MutexLock lock(&mutex_);
  held_ = false;
  work_.NotifyAll();
}

absl::Status ChunkStore::Wait(const std::function<bool(uint64_t, uint64_t)>& go_on) {
  Release();
  MutexLock lock(&mutex_);
  while (failure_.ok() && done_bytes_ < given_bytes_) {
    const auto end = Now() + kTellEvery;
    while (failure_.ok() && done_bytes_ != given_bytes_ && idle_.WaitUntil(&mutex_, end)) {
    }
    const uint64_t done = done_bytes_, given = given_bytes_;
    lock.Unlock();
    if (!go_on(done, given)) return absl::CancelledError("interrupted");
    lock.Lock();
  }
  return failure_;
}

absl::Status ChunkStore::Finish(std::vector<StoredChunk>* chunks, std::vector<std::vector<uint32_t>>* regions,
                                std::vector<std::string>* data_files, std::vector<FileRecord>* files) {
  Stop();
  MutexLock lock(&mutex_);
  if (!failure_.ok()) return failure_;
  for (size_t i = 0; i < regions_.size(); ++i) {
    if (regions_[i].missing == 0) continue;
    failure_ =
        absl::InvalidArgumentError(absl::StrCat(regions_[i].missing, " chunks of region ", i, " were not given"));
    return failure_;
  }
  RenumberLocked(chunks, data_files);
  for (RegionChunks& region : regions_) regions->push_back(std::move(region.numbers));
  for (FileRecord& file : files_) files->push_back(std::move(file));
  return absl::OkStatus();
}

// So that the index is the same whichever thread was first.
void ChunkStore::RenumberLocked(std::vector<StoredChunk>* chunks, std::vector<std::string>* data_files) {
  std::vector<uint32_t> final_numbers(chunks_.size() + 1);  // 0: none yet
  for (RegionChunks& region : regions_) {
    for (uint32_t& number : region.numbers) {
      if (number == 0) continue;
      uint32_t& final_number = final_numbers[number];
      if (final_number == 0) {
        chunks->push_back(chunks_[number - 1]);
        final_number = uint32_t(chunks->size());
      }
      number = final_number;
    }
  }
  std::map<uint32_t, uint32_t> places;  // of the files, by their numbers
  for (const StoredChunk& chunk : *chunks) places[chunk.file] = 0;
  for (auto& [file, place] : places) {
    place = uint32_t(data_files->size());
    data_files->push_back(DataFileName(file));
  }
  for (StoredChunk& chunk : *chunks) chunk.file = places[chunk.file];
}

void ChunkStore::Work() {
  const absl::Status status = WorkUntilDone();
  if (status.ok()) return;
  {
    MutexLock lock(&mutex_);
    if (failure_.ok()) failure_ = status;
  }
  idle_.NotifyAll();
  // Whoever gave the chunks that nobody will write any more may be waiting for their memory.
  for (Job job; TakeJob(&job);) {
    if (job.done) job.done();
  }
}

// False: there is none, and there will be none.
bool ChunkStore::TakeJob(Job* job) {
  MutexLock lock(&mutex_);
  while ((jobs_.empty() || held_) && !ending_) work_.Wait(&mutex_);
  if (jobs_.empty()) return false;
  *job = std::move(jobs_.front());
  jobs_.pop_front();
  return true;
}

absl::Status ChunkStore::WorkUntilDone() {
  Writer writer(this);
  for (Job job; TakeJob(&job);) {
    const absl::Status status = Store(job, &writer);
    if (job.done) job.done();
    if (!status.ok()) return status;
    MutexLock lock(&mutex_);
    done_bytes_ += job.bytes.size();
    if (done_bytes_ == given_bytes_) idle_.NotifyAll();
  }
  return writer.FinishFile();
}

absl::Status ChunkStore::Store(const Job& job, Writer* writer) {
  {
    MutexLock lock(&mutex_);
    if (!failure_.ok()) return failure_;
  }
  StoredChunk stored;
  const bool zero = AllZero(job.bytes);
  if (!zero) {
    stored.hash = HashOf(job.bytes);
    stored.keyed = KeyedHashOf(job.bytes, options_.secret);
    if (options_.gpu_hashes) stored.gpu_hash = HashChunk(job.bytes.data(), job.bytes.size());
  }
  stored.bytes = uint32_t(job.bytes.size());
  uint32_t number;
  {
    MutexLock lock(&mutex_);
    uint32_t& place = regions_[job.region].numbers[size_t(job.index)];
    if (zero) {
      totals_.zero_bytes += job.bytes.size();
      place = 0;
      return absl::OkStatus();
    }
    number = uint32_t(chunks_.size()) + 1;
    if (number >= kGiven) return absl::ResourceExhaustedError("more memory than an image can hold");
    const Identity identity = {stored.hash, stored.keyed, stored.bytes};
    const auto [known, is_new] = known_.try_emplace(identity, Known{number, 0});
    if (!is_new) {
      if (known->second.number != 0) totals_.shared_bytes += job.bytes.size();
      place = UseLocked(&known->second);
      if (stored.gpu_hash) chunks_[place - 1].gpu_hash = stored.gpu_hash;
      return absl::OkStatus();
    }
    place = number;
    chunks_.push_back(stored);
  }
  CR_RETURN_IF_ERROR(writer->Write(job.bytes, &stored));
  MutexLock lock(&mutex_);
  chunks_[number - 1] = stored;
  totals_.stored_bytes += stored.stored_bytes;
  return absl::OkStatus();
}

}  // namespace cuda_remote::ckptfmt
