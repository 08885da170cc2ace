// SPDX-License-Identifier: Apache-2.0
#include "ckptfmt/image_reader.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zstd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <system_error>
#include <thread>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "ckptfmt/file.h"
#include "ckptfmt/folder.h"
#include "ckptfmt/index.h"
#include "ckptfmt/manifest.h"
#include "proto/base/status_macros.h"
#include "proto/threads/mutex.h"

namespace cuda_remote::ckptfmt {
namespace {

// That read and hash files; one does 2 to 3 GB/s.
constexpr unsigned kMostThreads = 8;
constexpr uint64_t kWorthAThread = 4 << 20;

}  // namespace

struct ImageReader::State {
  std::string dir;
  OpenedFolder folder;
  OpenedFolder client;  // the engine's folder in it, if there is one
  ImageInfo info;
  ImageSizes sizes;
  std::vector<FileRecord> files;
  std::vector<FileFacts> facts;
  Index index;
  std::vector<Region> regions;
  std::vector<UniqueFd> data;

  std::string FullPath(const std::string& path) const { return absl::StrCat(dir, "/", path); }

  const FileRecord* FindFile(const std::string& path) const {
    const auto found = std::lower_bound(files.begin(), files.end(), path,
                                        [](const FileRecord& file, const std::string& p) { return file.path < p; });
    return found != files.end() && found->path == path ? &*found : nullptr;
  }

  // A whole file, compared with its checksum.
  absl::StatusOr<std::string> ReadChecked(const std::string& path) const {
    const FileRecord* const file = FindFile(path);
    if (!file) return absl::DataLossError(absl::StrCat(FullPath(kManifestName), " lists no file ", path));
    absl::StatusOr<std::string> bytes = ReadWhole(folder, path, file->bytes);
    if (!bytes.ok()) return bytes.status();
    if (bytes->size() != file->bytes || HashOf(*bytes) != file->hash) {
      CR_RETURN_IF_ERROR(VerifyFile(*file, nullptr));
      return absl::DataLossError(absl::StrCat(FullPath(path), " is damaged"));
    }
    return bytes;
  }

  // `seen` gets how many bytes were compared.
  absl::Status VerifyFile(const FileRecord& file, const std::function<void(uint64_t)>& seen) const {
    const std::string path = FullPath(file.path);
    absl::StatusOr<UniqueFd> fd = OpenForReading(folder, file.path);
    if (!fd.ok()) return fd.status();
    std::string block(size_t(std::min<uint64_t>(kBlockBytes, file.bytes)), '\0');
    Hasher whole;
    const auto each_block = [&](const std::function<absl::Status(std::string_view, uint64_t)>& use) {
      for (uint64_t offset = 0; offset < file.bytes; offset += kBlockBytes) {
        const size_t length = size_t(std::min<uint64_t>(kBlockBytes, file.bytes - offset));
        CR_RETURN_IF_ERROR(ReadAt(fd->get(), path, offset, block.data(), length));
        CR_RETURN_IF_ERROR(use({block.data(), length}, offset));
      }
      return absl::OkStatus();
    };
    const absl::Status read = each_block([&](std::string_view bytes, uint64_t) {
      whole.Add(bytes);
      if (seen) seen(bytes.size());
      return absl::OkStatus();
    });
    if (!read.ok() || whole.Get() == file.hash) return read;
    // Where?
    const absl::Status found = each_block([&](std::string_view bytes, uint64_t offset) {
      if (Hash64Of(bytes) == file.blocks[size_t(offset / kBlockBytes)]) return absl::OkStatus();
      return absl::DataLossError(absl::StrCat(path, " is damaged: the ", bytes.size(), " bytes from offset ", offset,
                                              " are not those that were written"));
    });
    return found.ok() ? absl::DataLossError(absl::StrCat(path, " is damaged")) : found;
  }

  // Whether all files are there with the sizes that they should have.
  absl::Status CheckSizes() const {
    for (const FileRecord& file : files) {
      struct stat facts;
      const std::string path = FullPath(file.path);
      if (fstatat(folder.fd(), file.path.c_str(), &facts, AT_SYMLINK_NOFOLLOW) != 0) {
        if (errno == ENOENT || errno == ENOTDIR) {
          return absl::DataLossError(absl::StrCat(path, " is missing; the image is not complete"));
        }
        return SystemError("look at", path, errno);
      }
      if (!S_ISREG(facts.st_mode)) return absl::DataLossError(absl::StrCat(path, " is not a plain file"));
      if (uint64_t(facts.st_size) != file.bytes) {
        return absl::DataLossError(absl::StrCat(path, " is damaged: it is ", facts.st_size, " bytes long instead of ",
                                                file.bytes, " (from offset ",
                                                std::min(uint64_t(facts.st_size), file.bytes), " on)"));
      }
    }
    return absl::OkStatus();
  }

  absl::Status OpenData(Parts parts) {
    std::vector<bool> linked;
    for (const std::string& path : index.data_files) {
      const FileRecord* const file = FindFile(path);
      if (!file) return absl::DataLossError(absl::StrCat(FullPath(kManifestName), " lists no file ", path));
      struct stat there;
      linked.push_back(fstatat(folder.fd(), path.c_str(), &there, AT_SYMLINK_NOFOLLOW) == 0 && there.st_nlink > 1);
      if (parts == Parts::kFacts) continue;
      absl::StatusOr<UniqueFd> fd = OpenForReading(folder, path);
      if (!fd.ok()) return fd.status();
      data.push_back(*std::move(fd));
    }
    for (const StoredChunk& chunk : index.chunks) {
      const uint64_t end = FindFile(index.data_files[chunk.file])->bytes;
      if (chunk.offset > end || chunk.stored_bytes > end - chunk.offset) {
        return absl::DataLossError(absl::StrCat(FullPath(kIndexName), " is damaged: it names bytes behind the end of ",
                                                index.data_files[chunk.file]));
      }
      sizes.stored_bytes += chunk.stored_bytes;
      if (linked[chunk.file]) sizes.linked_bytes += chunk.stored_bytes;
    }
    return absl::OkStatus();
  }

  // A stored chunk, compared with its hash. `out` has room for chunk.bytes.
  absl::Status ReadStored(const StoredChunk& chunk, char* out) const {
    if (chunk.file >= data.size()) return absl::FailedPreconditionError("the image's memory has not been opened");
    const std::string path = FullPath(index.data_files[chunk.file]);
    const auto damaged = [&] {
      return absl::DataLossError(absl::StrCat(path, " is damaged: the ", chunk.stored_bytes, " bytes from offset ",
                                              chunk.offset, " are not those that were written"));
    };
    std::string packed;
    char* stored = out;
    if (chunk.encoding == Encoding::kZstd) {
      packed.resize(chunk.stored_bytes);
      stored = packed.data();
    }
    const absl::Status read = ReadAt(data[chunk.file].get(), path, chunk.offset, stored, chunk.stored_bytes);
    if (!read.ok()) return read;
    if (chunk.encoding == Encoding::kZstd) {
      const size_t unpacked = ZSTD_decompress(out, chunk.bytes, packed.data(), packed.size());
      if (ZSTD_isError(unpacked) || unpacked != chunk.bytes) return damaged();
    }
    return HashOf({out, chunk.bytes}) == chunk.hash ? absl::OkStatus() : damaged();
  }

  // The chunks that lie in a file, by their places in it.
  std::vector<const StoredChunk*> ChunksIn(const FileRecord& file) const {
    std::vector<const StoredChunk*> chunks;
    for (const StoredChunk& chunk : index.chunks) {
      if (index.data_files[chunk.file] == file.path) chunks.push_back(&chunk);
    }
    std::sort(chunks.begin(), chunks.end(),
              [](const StoredChunk* a, const StoredChunk* b) { return a->offset < b->offset; });
    return chunks;
  }

  // How many bytes of a file Verify compares.
  uint64_t BytesToVerify(const FileRecord& file) const {
    if (file.has_hash) return file.bytes;
    uint64_t bytes = 0;
    for (const StoredChunk* const chunk : ChunksIn(file)) bytes += chunk->stored_bytes;
    return bytes;
  }

  absl::Status Verify(const FileRecord& file, const std::function<void(uint64_t)>& seen) const {
    if (file.has_hash) return VerifyFile(file, seen);
    std::string bytes(kChunkBytes, '\0');
    for (const StoredChunk* const chunk : ChunksIn(file)) {
      CR_RETURN_IF_ERROR(ReadStored(*chunk, bytes.data()));
      seen(chunk->stored_bytes);
    }
    return absl::OkStatus();
  }
};

ImageReader::ImageReader(std::unique_ptr<State> state) : state_(std::move(state)) {}

ImageReader::~ImageReader() { Unlock(&state_->folder); }

absl::StatusOr<std::unique_ptr<ImageReader>> ImageReader::Open(const std::string& dir, Owner owner, Parts parts) {
  std::string newest = NewestImageIn(dir);
  if (newest.empty()) return OpenImage(dir, owner, parts);
  while (true) {
    absl::StatusOr<std::unique_ptr<ImageReader>> image = OpenImage(newest, owner, parts);
    if (!absl::IsNotFound(image.status())) return image;
    // It was removed meanwhile, since there is a newer one.
    const std::string next = NewestImageIn(dir);
    if (next.empty() || next == newest) return image;
    newest = next;
  }
}

absl::StatusOr<std::unique_ptr<ImageReader>> ImageReader::OpenImage(const std::string& dir, Owner owner, Parts parts) {
  auto state = std::make_unique<State>();
  state->dir = ImagePath(dir);
  CR_RETURN_IF_ERROR(PutBackOldImage(state->dir));
  state->dir = ImagePath(dir);
  absl::StatusOr<OpenedFolder> folder = OpenedFolder::Open(state->dir);
  if (absl::IsNotFound(folder.status()) && access(state->dir.c_str(), F_OK) != 0) {
    return absl::NotFoundError(absl::StrCat("there is no checkpoint image ", state->dir));
  }
  if (!folder.ok()) return folder.status();
  state->folder = *std::move(folder);
  // Who removes an image of a store holds it alone.
  if (IsStoreImage(state->dir)) LockToRead(&state->folder, /*wait=*/true);
  const std::string manifest_path = state->FullPath(kManifestName);
  absl::StatusOr<std::string> manifest = ReadWhole(state->folder, kManifestName, kMaxManifestBytes);
  if (absl::IsNotFound(manifest.status())) {
    return absl::NotFoundError(
        absl::StrCat(state->dir, " is not a checkpoint image: it has no ", kManifestName,
                     absl::EndsWith(state->dir, ".partial") ? " (a checkpoint that was not finished)" : ""));
  }
  if (!manifest.ok()) return manifest.status();
  CR_RETURN_IF_ERROR(CheckTree(state->folder, owner == Owner::kTrusted));
  if (absl::Status status = DecodeManifest(*manifest, manifest_path, &state->info, &state->files); !status.ok()) {
    return status;
  }
  CR_RETURN_IF_ERROR(state->CheckSizes());
  std::vector<std::string> needed = {kIndexName};
  for (size_t i = 0; i < state->info.processes.size(); ++i) needed.push_back(LogName(i));
  for (const std::string& path : needed) {
    const FileRecord* const file = state->FindFile(path);
    if (!file) return absl::DataLossError(absl::StrCat(manifest_path, " lists no file ", path));
    if (path != kIndexName) state->sizes.log_bytes += file->bytes;
  }
  absl::StatusOr<std::string> index = state->ReadChecked(kIndexName);
  if (!index.ok()) return index.status();
  absl::StatusOr<Index> decoded = DecodeIndex(*index, state->FullPath(kIndexName));
  if (!decoded.ok()) return decoded.status();
  state->index = *std::move(decoded);
  CR_RETURN_IF_ERROR(state->OpenData(parts));

  if (absl::StatusOr<OpenedFolder> client = state->folder.OpenBelow(kClientFolder); client.ok()) {
    state->client = *std::move(client);
  } else if (!absl::IsNotFound(client.status())) {
    return client.status();
  }

  state->sizes.total_bytes = manifest->size() + state->sizes.stored_bytes;
  for (const FileRecord& file : state->files) {
    if (!IsDataFile(file.path)) state->sizes.total_bytes += file.bytes;
    if (absl::StartsWith(file.path, "client/")) state->sizes.client_bytes += file.bytes;
    state->facts.push_back({file.path, file.bytes, file.has_hash ? ToHex(file.hash) : "", file.mode});
  }
  std::vector<bool> used(state->index.chunks.size());
  for (const IndexedRegion& indexed : state->index.regions) {
    if (indexed.region.process >= state->info.processes.size()) {
      return absl::DataLossError(absl::StrCat(state->FullPath(kIndexName), " is damaged: a region of no process"));
    }
    state->regions.push_back(indexed.region);
    state->sizes.region_bytes += indexed.region.bytes;
    for (size_t i = 0; i < indexed.chunks.size(); ++i) {
      const uint64_t length = ChunkLength(indexed.region.bytes, i);
      const uint32_t chunk = indexed.chunks[i];
      if (chunk == 0) {
        state->sizes.zero_bytes += length;
      } else if (used[chunk - 1]) {
        state->sizes.shared_bytes += length;
      } else {
        used[chunk - 1] = true;
      }
    }
  }
  return std::unique_ptr<ImageReader>(new ImageReader(std::move(state)));
}

const std::string& ImageReader::dir() const { return state_->dir; }
const ImageInfo& ImageReader::info() const { return state_->info; }
const ImageSizes& ImageReader::sizes() const { return state_->sizes; }
const std::vector<Region>& ImageReader::regions() const { return state_->regions; }
const std::vector<FileFacts>& ImageReader::files() const { return state_->facts; }
const Index& ImageReader::index() const { return state_->index; }
const OpenedFolder& ImageReader::folder() const { return state_->folder; }
std::string ImageReader::client_dir() const { return state_->client.DescriptorPath(); }

absl::Status ImageReader::Verify(const Progress& progress, Files which) const {
  std::vector<const FileRecord*> files;
  uint64_t total = 0;
  for (const FileRecord& file : state_->files) {
    // The index was compared when it was read.
    if (which == Files::kAllButMemory && absl::StartsWith(file.path, absl::StrCat(kMemoryFolder, "/"))) continue;
    files.push_back(&file);
    total += state_->BytesToVerify(file);
  }
  CR_RETURN_IF_ERROR(state_->CheckSizes());
  std::atomic<size_t> next{0};
  Mutex mutex;  // guards the rest
  uint64_t done = 0;
  absl::Status first;  // the damage that is told: that of the first file in the manifest's order
  size_t first_file = files.size();
  const auto work = [&] {
    for (size_t i; (i = next.fetch_add(1)) < files.size();) {
      const absl::Status status = state_->Verify(*files[i], [&](uint64_t bytes) {
        MutexLock lock(&mutex);
        done += bytes;
        if (progress) progress(done, total);
      });
      if (status.ok()) continue;
      MutexLock lock(&mutex);
      if (i < first_file) {
        first_file = i;
        first = status;
      }
      next = files.size();
    }
  };
  std::vector<std::thread> threads;
  const size_t most = std::min<uint64_t>({std::thread::hardware_concurrency(), kMostThreads, total / kWorthAThread});
  try {
    while (threads.size() + 1 < std::min(most, files.size())) threads.emplace_back(work);
  } catch (const std::system_error&) {
    // Fewer will do.
  }
  work();
  for (std::thread& thread : threads) thread.join();
  return first;
}

absl::StatusOr<std::string> ImageReader::ReadLog(size_t process) const { return state_->ReadChecked(LogPath(process)); }

std::string ImageReader::LogPath(size_t process) const { return LogName(process); }

absl::Status ImageReader::ReadRegion(size_t region, const UseChunk& use) const {
  if (region >= state_->index.regions.size()) return absl::InvalidArgumentError("no such region");
  const IndexedRegion& indexed = state_->index.regions[region];
  std::string bytes;
  for (size_t i = 0; i < indexed.chunks.size(); ++i) {
    bytes.resize(size_t(ChunkLength(indexed.region.bytes, i)));
    bool zero = false;
    CR_RETURN_IF_ERROR(ReadChunk(region, i, bytes.data(), &zero));
    CR_RETURN_IF_ERROR(use(i * kChunkBytes, bytes, zero));
  }
  return absl::OkStatus();
}

absl::Status ImageReader::ReadChunk(size_t region, uint64_t index, char* out, bool* zero) const {
  if (region >= state_->index.regions.size()) return absl::InvalidArgumentError("no such region");
  const IndexedRegion& indexed = state_->index.regions[region];
  if (index >= indexed.chunks.size()) return absl::InvalidArgumentError("no such chunk");
  const size_t length = size_t(ChunkLength(indexed.region.bytes, index));
  const uint32_t number = indexed.chunks[size_t(index)];
  *zero = number == 0;
  if (*zero) {
    memset(out, 0, length);
    return absl::OkStatus();
  }
  return state_->ReadStored(state_->index.chunks[number - 1], out);
}

std::vector<ChunkFacts> ImageReader::ChunksOf(size_t region) const {
  std::vector<ChunkFacts> facts;
  if (region >= state_->index.regions.size()) return facts;
  const IndexedRegion& indexed = state_->index.regions[region];
  for (size_t i = 0; i < indexed.chunks.size(); ++i) {
    ChunkFacts chunk;
    chunk.offset = i * kChunkBytes;
    chunk.bytes = ChunkLength(indexed.region.bytes, i);
    chunk.zero = indexed.chunks[i] == 0;
    if (!chunk.zero) chunk.hash = ToHex(state_->index.chunks[indexed.chunks[i] - 1].hash);
    facts.push_back(std::move(chunk));
  }
  return facts;
}

}  // namespace cuda_remote::ckptfmt
