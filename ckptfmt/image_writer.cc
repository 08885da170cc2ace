// SPDX-License-Identifier: Apache-2.0
#include "ckptfmt/image_writer.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ckptfmt/chunk_store.h"
#include "ckptfmt/file.h"
#include "ckptfmt/folder.h"
#include "ckptfmt/image_reader.h"
#include "ckptfmt/index.h"
#include "ckptfmt/manifest.h"
#include "proto/base/clock.h"
#include "proto/base/hash.h"
#include "proto/base/status_macros.h"
#include "proto/chunkhash/chunk_hash.h"

namespace cuda_remote::ckptfmt {
namespace {

// One thread hashes and writes 1.5 to 2 GB/s; more than this do not make the kernel's file cache faster.
constexpr unsigned kMostWriters = 8;
// Data files of earlier images that an image links. What lies in others, those with the fewest bytes that are still in
// use, is written again, so that the number of files does not grow for ever.
constexpr size_t kMostLinked = 200;

std::string HostName() {
  char name[256] = "?";
  gethostname(name, sizeof(name) - 1);
  return name;
}

// Whether that is the hash of a whole chunk of zeros.
bool IsZeros(const ChunkHash& hash, uint64_t bytes) {
  static const ChunkHash zeros = HashChunk(std::string(kChunkBytes, '\0').data(), kChunkBytes);
  return bytes == kChunkBytes && hash == zeros;
}

}  // namespace

struct ImageWriter::State {
  std::string dir;
  WriterOptions options;
  OpenedFolder folder;  // DIR.partial, locked
  OpenedFolder client;  // the engine's folder in it
  bool committed = false;
  bool failed = false;

  Index index;
  std::unique_ptr<ChunkStore> store;
  std::vector<FileRecord> files;  // finished ones
  std::string secret;
  std::map<std::pair<dev_t, ino_t>, uint32_t> linked;  // data files of earlier images, and their numbers here
  // The region that is given in order (BeginRegion).
  bool in_region = false;
  uint32_t region = 0;
  uint64_t received = 0;         // of it
  uint64_t given = 0;            // chunks of it
  std::string chunk;             // the begun one
  std::vector<OutputFile> logs;  // one for each process; written, not flushed
  ImageSizes sizes;

  absl::Status Check() const {
    if (failed) return absl::FailedPreconditionError("the image failed before; it cannot be continued");
    if (committed) return absl::FailedPreconditionError("the image is complete");
    return absl::OkStatus();
  }

  // Notes the failure, so that nothing is committed after it.
  absl::Status Fail(absl::Status status) {
    if (!status.ok()) failed = true;
    return status;
  }

  absl::StatusOr<OutputFile> Write(const std::string& name, std::string_view bytes) {
    absl::StatusOr<OutputFile> file = OutputFile::Create(folder, name);
    if (!file.ok()) return file;
    CR_RETURN_IF_ERROR(file->Append(bytes));
    return file;
  }

  // Makes the folders above the file `name`.
  absl::Status MakeFolderFor(const std::string& name) {
    for (size_t at = name.find('/'); at != std::string::npos; at = name.find('/', at + 1)) {
      const std::string path = name.substr(0, at);
      if (mkdirat(folder.fd(), path.c_str(), 0700) != 0 && errno != EEXIST) {
        return SystemError("create", folder.FullPath(path), errno);
      }
    }
    return absl::OkStatus();
  }

  absl::Status Flush(OutputFile* file) {
    absl::StatusOr<FileRecord> record = file->Finish();
    if (!record.ok()) return record.status();
    files.push_back(*std::move(record));
    return absl::OkStatus();
  }

  // Names a chunk by where it is. Processes are numbered anew in each image.
  Hash128 PlaceOf(const Region& of, uint64_t number) const {
    return KeyedHashOf(absl::StrCat(uint32_t(of.kind), " ", of.address, " ", of.object, " ", of.context, " ", of.device,
                                    " ", of.module_index, " ", number, " ", of.symbol),
                       secret);
  }

  // Of the linked data files those stay that have a chunk of this image.
  absl::Status KeepLinked() {
    for (const auto& [id, number] : linked) {
      const std::string name = DataFileName(number);
      if (!std::binary_search(index.data_files.begin(), index.data_files.end(), name)) {
        if (unlinkat(folder.fd(), name.c_str(), 0) != 0) return SystemError("remove", folder.FullPath(name), errno);
        Step("link removed");
        continue;
      }
      struct stat facts;
      if (fstatat(folder.fd(), name.c_str(), &facts, AT_SYMLINK_NOFOLLOW) != 0) {
        return SystemError("look at", folder.FullPath(name), errno);
      }
      FileRecord record;
      record.path = name;
      record.bytes = uint64_t(facts.st_size);
      record.has_hash = false;
      record.mode = facts.st_mode & 07777;
      files.push_back(std::move(record));
    }
    return absl::OkStatus();
  }

  absl::Status WriteSmallFile(const char* name, std::string_view bytes) {
    absl::StatusOr<OutputFile> file = Write(name, bytes);
    return file.ok() ? Flush(&*file) : file.status();
  }
};

ImageWriter::ImageWriter(std::unique_ptr<State> state) : state_(std::move(state)) {}

absl::StatusOr<std::unique_ptr<ImageWriter>> ImageWriter::Create(const std::string& dir, const WriterOptions& options) {
  auto state = std::make_unique<State>();
  state->dir = ImagePath(dir);
  state->options = options;
  CR_RETURN_IF_ERROR(PutBackOldImage(state->dir));
  struct stat facts;
  if (stat(state->dir.c_str(), &facts) == 0 && !IsImage(state->dir)) {
    // rmdir tells an empty folder from others; it is made again at once, with the image's rights.
    CR_RETURN_IF_ERROR(CheckMayReplace(state->dir));
    if (!NewestImageIn(state->dir).empty()) {
      return absl::AlreadyExistsError(
          absl::StrCat(state->dir, " holds several images; write one more there with --keep, or choose another name"));
    }
    if (!S_ISDIR(facts.st_mode) || rmdir(state->dir.c_str()) != 0) {
      return absl::AlreadyExistsError(
          absl::StrCat(state->dir, " exists and is not a checkpoint image; choose another name, or move it away"));
    }
    if (mkdir(state->dir.c_str(), 0700) != 0) return SystemError("create", state->dir, errno);
  }
  CR_RETURN_IF_ERROR(CheckMayReplace(state->dir));
  absl::StatusOr<OpenedFolder> folder = MakePartial(state->dir);
  if (!folder.ok()) return folder.status();
  state->folder = *std::move(folder);
  std::unique_ptr<ImageWriter> writer(new ImageWriter(std::move(state)));
  const OpenedFolder& partial = writer->state_->folder;
  for (const char* name : {kMemoryFolder, kClientFolder}) {
    if (mkdirat(partial.fd(), name, 0700) != 0) return SystemError("create", partial.FullPath(name), errno);
  }
  absl::StatusOr<OpenedFolder> client = partial.OpenBelow(kClientFolder);
  if (!client.ok()) return client.status();
  writer->state_->client = *std::move(client);
  ChunkStoreOptions store;
  store.zstd_level = options.zstd_level;
  store.data_file_bytes = options.data_file_bytes;
  store.secret = options.secret.empty() ? NewSecret() : options.secret;
  if (store.secret.size() != kSecretBytes) return absl::InternalError("the system has no random numbers");
  writer->state_->secret = store.secret;
  store.gpu_hashes = options.gpu_hashes;
  store.writers = options.writers;
  if (store.writers <= 0) store.writers = int(std::clamp(std::thread::hardware_concurrency() / 2, 1u, kMostWriters));
  writer->state_->store = std::make_unique<ChunkStore>(&partial, store);
  return writer;
}

ImageWriter::~ImageWriter() {
  if (state_->committed) return;
  state_->store.reset();
  state_->client = OpenedFolder();
  RemoveFolder(&state_->folder).IgnoreError();
}

absl::Status ImageWriter::ShareWith(const ImageReader& earlier) {
  State& state = *state_;
  CR_RETURN_IF_ERROR(state.Check());
  const Index& index = earlier.index();
  if (index.secret != state.secret) return absl::OkStatus();
  std::vector<uint64_t> used(index.data_files.size());
  for (const StoredChunk& chunk : index.chunks) used[chunk.file] += chunk.stored_bytes;
  std::vector<size_t> order(used.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return used[a] > used[b]; });
  constexpr uint32_t kNot = UINT32_MAX;
  std::vector<uint32_t> numbers(used.size(), kNot);
  absl::Status failed;
  // A file that was cut off has less than the index says.
  std::vector<uint64_t> ends(used.size());
  const auto is_there = [&](const StoredChunk& chunk) {
    return numbers[chunk.file] != kNot && chunk.offset + chunk.stored_bytes <= ends[chunk.file];
  };
  for (const size_t i : order) {
    const std::string& from = index.data_files[i];
    struct stat facts;
    if (fstatat(earlier.folder().fd(), from.c_str(), &facts, AT_SYMLINK_NOFOLLOW) != 0 || !S_ISREG(facts.st_mode)) {
      continue;
    }
    ends[i] = uint64_t(facts.st_size);
    const auto known = state.linked.find({facts.st_dev, facts.st_ino});
    if (known != state.linked.end()) {
      numbers[i] = known->second;
      continue;
    }
    if (state.linked.size() >= kMostLinked) continue;
    const uint32_t number = state.store->TakeFile();
    const std::string to = DataFileName(number);
    if (linkat(earlier.folder().fd(), from.c_str(), state.folder.fd(), to.c_str(), 0) != 0) {
      // With too many links already, or gone meanwhile, it is written again.
      if (errno != EMLINK && errno != ENOENT && failed.ok()) {
        failed = SystemError("make a hard link to", earlier.folder().FullPath(from), errno);
      }
      continue;
    }
    // What was linked is what is meant, also if the name has another file by now.
    struct stat link;
    if (fstatat(state.folder.fd(), to.c_str(), &link, AT_SYMLINK_NOFOLLOW) != 0 || link.st_ino != facts.st_ino ||
        link.st_dev != facts.st_dev) {
      unlinkat(state.folder.fd(), to.c_str(), 0);
      continue;
    }
    state.linked[{facts.st_dev, facts.st_ino}] = numbers[i] = number;
    Step("linked");
  }
  for (StoredChunk chunk : index.chunks) {
    if (!is_there(chunk)) continue;
    chunk.file = numbers[chunk.file];
    state.store->AddKnown(chunk);
  }
  if (state.options.job_folder.empty() || earlier.info().job_folder != state.options.job_folder ||
      earlier.info().host != HostName()) {
    return failed;
  }
  for (const IndexedRegion& indexed : index.regions) {
    for (size_t i = 0; i < indexed.chunks.size(); ++i) {
      if (indexed.chunks[i] == 0) continue;
      const StoredChunk& chunk = index.chunks[indexed.chunks[i] - 1];
      if (chunk.gpu_hash && is_there(chunk)) state.store->AddPlace(state.PlaceOf(indexed.region, i), chunk);
    }
  }
  return failed;
}

absl::StatusOr<uint32_t> ImageWriter::AddRegion(const Region& region) {
  CR_RETURN_IF_ERROR(state_->Check());
  if (state_->in_region) return state_->Fail(absl::FailedPreconditionError("the region before has not been ended"));
  state_->index.regions.push_back({region, {}});
  state_->sizes.region_bytes += region.bytes;
  return state_->store->AddRegion(region.bytes);
}

absl::Status ImageWriter::AddChunk(uint32_t region, uint64_t index, std::string_view bytes,
                                   std::function<void()> done) {
  return state_->store->Add(region, index, bytes, std::move(done));
}

bool ImageWriter::AddUnread(uint32_t region, uint64_t index, const ChunkHash& hash) {
  if (!state_->options.gpu_hashes || region >= state_->index.regions.size()) return false;
  const Region& of = state_->index.regions[region].region;
  if (IsZeros(hash, ChunkLength(of.bytes, index))) return state_->store->AddZeros(region, index).ok();
  return state_->store->AddUnread(region, index, hash, state_->PlaceOf(of, index));
}

bool ImageWriter::Has(const Region& region, uint64_t index, const ChunkHash& hash) const {
  if (!state_->options.gpu_hashes) return false;
  const uint64_t bytes = ChunkLength(region.bytes, index);
  return IsZeros(hash, bytes) || state_->store->Has(state_->PlaceOf(region, index), hash, bytes);
}

bool ImageWriter::keeps_gpu_hashes() const { return state_->options.gpu_hashes; }

void ImageWriter::HoldChunks() { state_->store->Hold(); }
void ImageWriter::ReleaseChunks() { state_->store->Release(); }

absl::Status ImageWriter::WaitForChunks(const std::function<bool(uint64_t, uint64_t)>& go_on) {
  CR_RETURN_IF_ERROR(state_->Check());
  return state_->Fail(state_->store->Wait(go_on));
}

absl::Status ImageWriter::BeginRegion(const Region& region) {
  const absl::StatusOr<uint32_t> added = AddRegion(region);
  if (!added.ok()) return added.status();
  state_->in_region = true;
  state_->region = *added;
  state_->received = state_->given = 0;
  return absl::OkStatus();
}

absl::Status ImageWriter::AddData(std::string_view bytes) {
  CR_RETURN_IF_ERROR(state_->Check());
  if (!state_->in_region) return state_->Fail(absl::FailedPreconditionError("data outside of a region"));
  const uint64_t expected = state_->index.regions.back().region.bytes;
  if (bytes.size() > expected - state_->received) {
    return state_->Fail(absl::InvalidArgumentError(absl::StrCat("more than the region's ", expected, " bytes")));
  }
  state_->received += bytes.size();
  while (!bytes.empty()) {
    if (state_->chunk.empty() && bytes.size() >= kChunkBytes) {
      if (absl::Status status = CopyChunk(bytes.substr(0, kChunkBytes)); !status.ok()) return state_->Fail(status);
      bytes.remove_prefix(kChunkBytes);
      continue;
    }
    const size_t take = std::min<size_t>(bytes.size(), kChunkBytes - state_->chunk.size());
    state_->chunk.append(bytes.substr(0, take));
    bytes.remove_prefix(take);
    if (state_->chunk.size() < kChunkBytes) break;
    if (absl::Status status = FlushChunk(); !status.ok()) return state_->Fail(status);
  }
  return absl::OkStatus();
}

absl::Status ImageWriter::EndRegion() {
  CR_RETURN_IF_ERROR(state_->Check());
  if (!state_->in_region) return state_->Fail(absl::FailedPreconditionError("no region to end"));
  const Region& region = state_->index.regions.back().region;
  if (state_->received != region.bytes) {
    return state_->Fail(absl::InvalidArgumentError(
        absl::StrCat("a region of ", region.bytes, " bytes ended after ", state_->received)));
  }
  if (!state_->chunk.empty()) {
    if (absl::Status status = FlushChunk(); !status.ok()) return state_->Fail(status);
  }
  state_->in_region = false;
  return absl::OkStatus();
}

absl::Status ImageWriter::FlushChunk() {
  const absl::Status status = CopyChunk(state_->chunk);
  state_->chunk.clear();
  return status;
}

absl::Status ImageWriter::CopyChunk(std::string_view bytes) {
  return state_->store->AddCopy(state_->region, state_->given++, bytes);
}

absl::Status ImageWriter::WriteLog(std::string_view bytes) {
  CR_RETURN_IF_ERROR(state_->Check());
  const std::string name = LogName(state_->logs.size());
  if (absl::Status status = state_->MakeFolderFor(name); !status.ok()) return state_->Fail(status);
  state_->sizes.log_bytes += bytes.size();
  // Flushing would wait for all that the file system has to write, while the job stands still.
  absl::StatusOr<OutputFile> log = state_->Write(name, bytes);
  if (!log.ok()) return state_->Fail(log.status());
  state_->logs.push_back(*std::move(log));
  return absl::OkStatus();
}

const std::string& ImageWriter::dir() const { return state_->dir; }

std::string ImageWriter::client_dir() const { return state_->client.DescriptorPath(); }

ImageSizes ImageWriter::sizes() const {
  ImageSizes sizes = state_->sizes;
  const ChunkStore::Totals totals = state_->store->totals();
  sizes.zero_bytes = totals.zero_bytes;
  sizes.shared_bytes = totals.shared_bytes;
  sizes.stored_bytes = totals.stored_bytes;
  sizes.linked_bytes = totals.linked_bytes;
  return sizes;
}

absl::Status ImageWriter::Commit(ImageInfo info, const Progress& progress) {
  CR_RETURN_IF_ERROR(state_->Check());
  if (state_->in_region) return state_->Fail(absl::FailedPreconditionError("the last region has not been ended"));
  if (state_->logs.size() != info.processes.size()) {
    return state_->Fail(absl::FailedPreconditionError(
        absl::StrCat("the image has ", info.processes.size(), " processes and ", state_->logs.size(), " logs")));
  }
  return state_->Fail(CommitFiles(std::move(info), progress));
}

absl::Status ImageWriter::CommitFiles(ImageInfo info, const Progress& progress) {
  State& state = *state_;
  Step("begin");
  std::vector<std::vector<uint32_t>> chunks;
  if (absl::Status status = state.store->Finish(&state.index.chunks, &chunks, &state.index.data_files, &state.files);
      !status.ok()) {
    return status;
  }
  for (size_t i = 0; i < chunks.size(); ++i) state.index.regions[i].chunks = std::move(chunks[i]);
  state.index.secret = state.secret;
  CR_RETURN_IF_ERROR(state.KeepLinked());
  for (OutputFile& log : state.logs) {
    CR_RETURN_IF_ERROR(state.Flush(&log));
  }
  CR_RETURN_IF_ERROR(state.WriteSmallFile(kIndexName, EncodeIndex(state.index)));
  Step("memory written");

  // The engine's files: theirs are the only bytes that this process has not seen yet.
  std::vector<std::string> folders;
  absl::StatusOr<std::vector<std::string>> client = ListFiles(state.folder, kClientFolder, &folders);
  if (!client.ok()) return client.status();
  uint64_t total = 0;
  for (const std::string& path : *client) {
    struct stat facts;
    if (fstatat(state.folder.fd(), path.c_str(), &facts, AT_SYMLINK_NOFOLLOW) == 0) total += uint64_t(facts.st_size);
  }
  uint64_t done = 0;
  for (const std::string& path : *client) {
    absl::StatusOr<FileRecord> record = HashFile(state.folder, path, /*sync=*/true, [&](uint64_t bytes) {
      done += bytes;
      if (progress) progress(std::min(done, total), total);
    });
    if (!record.ok()) return record.status();
    state.sizes.client_bytes += record->bytes;
    state.files.push_back(*std::move(record));
  }
  folders.push_back(kMemoryFolder);
  for (size_t i = 0; i < state.logs.size(); ++i) folders.push_back(absl::StrCat(kProcessesFolder, "/", i));
  if (!state.logs.empty()) folders.push_back(kProcessesFolder);
  for (const std::string& name : folders) {
    const absl::StatusOr<OpenedFolder> folder = state.folder.OpenBelow(name);
    if (!folder.ok()) return folder.status();
    CR_RETURN_IF_ERROR(SyncFolder(*folder));
  }
  Step("client checksummed");

  if (info.created_unix_ms == 0) info.created_unix_ms = UnixMs();
  if (info.host.empty()) info.host = HostName();
  state.sizes.total_bytes = state.store->totals().stored_bytes;
  for (const FileRecord& file : state.files) state.sizes.total_bytes += file.has_hash ? file.bytes : 0;
  const std::string manifest = EncodeManifest(info, state.files);
  state.sizes.total_bytes += manifest.size();
  CR_RETURN_IF_ERROR(state.WriteSmallFile(kManifestName, manifest));
  Step("manifest written");
  CR_RETURN_IF_ERROR(SyncFolder(state.folder));
  Step("synced");
  CR_RETURN_IF_ERROR(Publish(&state.folder, state.dir));
  state.committed = true;
  return absl::OkStatus();
}

}  // namespace cuda_remote::ckptfmt
