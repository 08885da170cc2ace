// SPDX-License-Identifier: Apache-2.0
#include "ckptfmt/image_store.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <iterator>
#include <map>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "ckptfmt/file.h"
#include "ckptfmt/folder.h"
#include "ckptfmt/index.h"
#include "ckptfmt/manifest.h"
#include "proto/base/status_macros.h"
#include "proto/folder/private_folder.h"

namespace cuda_remote::ckptfmt {
namespace {

using FileId = std::pair<dev_t, ino_t>;

// Shorter ones are not worth a hole.
constexpr uint64_t kHoleBytes = 4096;

bool FactsOf(const ImageReader& image, const std::string& path, struct stat* facts) {
  return fstatat(image.folder().fd(), path.c_str(), facts, AT_SYMLINK_NOFOLLOW) == 0 && S_ISREG(facts->st_mode);
}

}  // namespace

void UnusedSpace::Keep(const OpenedFolder& image, const Index& index) {
  std::vector<File*> of_image;
  for (const std::string& path : index.data_files) {
    struct stat facts;
    File* file = nullptr;
    if (fstatat(image.fd(), path.c_str(), &facts, AT_SYMLINK_NOFOLLOW) == 0 && S_ISREG(facts.st_mode)) {
      file = &files_[{facts.st_dev, facts.st_ino}];
      if (file->names++ == 0) file->path = image.FullPath(path);
    }
    of_image.push_back(file);
  }
  for (const StoredChunk& chunk : index.chunks) {
    if (!of_image[chunk.file]) continue;
    auto& needs = of_image[chunk.file]->needs;
    uint64_t from = chunk.offset, to = from + chunk.stored_bytes;
    auto next = needs.upper_bound(from);
    if (next != needs.begin() && std::prev(next)->second >= from) from = (--next)->first;
    for (; next != needs.end() && next->first <= to; next = needs.erase(next)) to = std::max(to, next->second);
    needs[from] = to;
  }
}

// Not every file system can make holes; the bytes stay then until no image has the file.
absl::Status UnusedSpace::FreeIn(const FileId& id, const File& file) {
  const UniqueFd fd(open(file.path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY));
  struct stat facts;
  if (fd.get() < 0) return absl::OkStatus();
  if (fstat(fd.get(), &facts) != 0) return SystemError("look at", file.path, errno);
  if (FileId(facts.st_dev, facts.st_ino) != id || facts.st_nlink != file.names) return absl::OkStatus();
  uint64_t at = 0;
  const auto free_to = [&](uint64_t from) {
    if (from < at + kHoleBytes) return absl::OkStatus();
    const off_t data = lseek(fd.get(), off_t(at), SEEK_DATA);
    if (data >= 0 && uint64_t(data) < from &&
        fallocate(fd.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, off_t(at), off_t(from - at)) != 0 &&
        errno != EOPNOTSUPP && errno != ENOSYS) {
      return SystemError("free unused space in", file.path, errno);
    }
    Step("hole made");
    return absl::OkStatus();
  };
  for (const auto& [from, to] : file.needs) {
    CR_RETURN_IF_ERROR(free_to(from));
    at = std::max(at, to);
  }
  return free_to(uint64_t(facts.st_size));
}

absl::Status UnusedSpace::Free() {
  for (const auto& [id, file] : files_) CR_RETURN_IF_ERROR(FreeIn(id, file));
  return absl::OkStatus();
}

struct ImageStore::State {
  OpenedFolder folder;  // locked
  uint64_t next = 1;
  std::map<uint64_t, std::unique_ptr<ImageReader>> images;  // those that can be read
  absl::Status sharing;

  std::string PathOf(uint64_t number) const { return folder.FullPath(StoreImageName(number)); }

  // Removes an image, or what is left of one. False: somebody has it open.
  absl::StatusOr<bool> Remove(const std::string& name) {
    absl::StatusOr<OpenedFolder> image = folder.OpenBelow(name);
    if (!image.ok()) return image.status();
    absl::StatusOr<bool> removed = RemoveUnused(&*image);
    Step("removed");
    return removed;
  }

  // Removes what is not complete.
  absl::Status CleanUp(const std::vector<std::string>& names) {
    for (const std::string& name : names) {
      bool partial = false;
      const uint64_t number = StoreImageNumber(name, &partial);
      if (number == 0) continue;
      next = std::max(next, number + 1);
      if (!partial) {
        // What cannot be looked at may be complete.
        const std::string manifest = absl::StrCat(folder.FullPath(name), "/", kManifestName);
        struct stat facts;
        if (lstat(manifest.c_str(), &facts) == 0) continue;
        if (errno != ENOENT && errno != ENOTDIR) return SystemError("look at", manifest, errno);
      }
      const absl::StatusOr<bool> removed = Remove(name);
      if (!removed.ok()) return removed.status();
    }
    return absl::OkStatus();
  }

  // Images that others could have changed, or that are damaged, are nothing to share with.
  void OpenImages() {
    bool partial = false;
    for (const std::string& path : ImagesIn(folder.path())) {
      const uint64_t number = StoreImageNumber(path.substr(path.rfind('/') + 1), &partial);
      if (images.count(number)) continue;
      auto image = ImageReader::Open(path, ImageReader::Owner::kTrusted, ImageReader::Parts::kFacts);
      if (image.ok()) images[number] = *std::move(image);
    }
  }

  absl::Status FreeSpace() {
    UnusedSpace unused;
    for (const auto& [number, image] : images) unused.Keep(image->folder(), image->index());
    return unused.Free();
  }
};

ImageStore::ImageStore(std::unique_ptr<State> state) : state_(std::move(state)) {}
ImageStore::~ImageStore() { Unlock(&state_->folder); }
const absl::Status& ImageStore::sharing() const { return state_->sharing; }

absl::StatusOr<std::unique_ptr<ImageStore>> ImageStore::Open(const std::string& dir) {
  std::string path = ImagePath(dir);
  if (IsImage(path)) {
    return absl::AlreadyExistsError(
        absl::StrCat(path, " is one image; choose another folder to keep several images in, or leave out --keep"));
  }
  const bool made = mkdir(path.c_str(), 0700) == 0;
  if (!made && errno != EEXIST) return SystemError("create", path, errno);
  path = ImagePath(path);
  auto state = std::make_unique<State>();
  absl::StatusOr<OpenedFolder> folder = OpenedFolder::Open(path);
  if (!folder.ok()) return folder.status();
  state->folder = *std::move(folder);
  if (made) CR_RETURN_IF_ERROR(SyncParent(state->folder));
  struct stat facts;
  if (fstat(state->folder.fd(), &facts) != 0) return SystemError("look at", path, errno);
  if (facts.st_uid != geteuid()) return NotOwn(path, facts.st_uid, "choose another folder for the images");
  if (const std::string why = WhyNotTrusted(facts); !why.empty()) {
    return absl::PermissionDeniedError(absl::StrCat(
        path, " ", why, ", who could put other images there; take that right away, or choose another folder"));
  }
  absl::StatusOr<std::vector<std::string>> names = NamesIn(state->folder);
  if (!names.ok()) return names.status();
  bool partial = false;
  const auto is_image = [&](const std::string& name) { return StoreImageNumber(name, &partial) != 0; };
  const auto other =
      std::find_if(names->begin(), names->end(), [](const std::string& name) { return name != kLockName; });
  if (other != names->end() && std::none_of(names->begin(), names->end(), is_image)) {
    return absl::AlreadyExistsError(
        absl::StrCat(path, " holds other things than images (", *other, "); choose another folder to keep images in"));
  }
  CR_RETURN_IF_ERROR(LockToWrite(&state->folder));
  names = NamesIn(state->folder);
  if (!names.ok()) return names.status();
  CR_RETURN_IF_ERROR(state->CleanUp(*names));
  state->OpenImages();
  return std::unique_ptr<ImageStore>(new ImageStore(std::move(state)));
}

absl::StatusOr<std::unique_ptr<ImageWriter>> ImageStore::Create(WriterOptions options) {
  State& state = *state_;
  if (!state.folder.IsInPlace()) {
    return absl::UnavailableError(absl::StrCat(state.folder.path(), " has been moved or removed meanwhile"));
  }
  if (!state.images.empty()) options.secret = state.images.rbegin()->second->index().secret;
  options.gpu_hashes = true;
  auto writer = ImageWriter::Create(state.PathOf(state.next++), options);
  if (!writer.ok()) return writer;
  state.sharing = absl::OkStatus();
  for (auto image = state.images.rbegin(); image != state.images.rend(); ++image) {
    const absl::Status shared = (*writer)->ShareWith(*image->second);
    if (state.sharing.ok()) state.sharing = shared;
  }
  return writer;
}

absl::StatusOr<OpenedFolder> ImageStore::BeginCopy(std::string* dir) {
  State& state = *state_;
  if (!state.folder.IsInPlace()) {
    return absl::UnavailableError(absl::StrCat(state.folder.path(), " has been moved or removed meanwhile"));
  }
  *dir = state.PathOf(state.next++);
  return MakePartial(*dir);
}

absl::StatusOr<size_t> ImageStore::Prune(size_t keep) {
  State& state = *state_;
  state.OpenImages();
  const auto last = state.images.find(state.next - 1);
  if (last == state.images.end()) {
    return absl::FailedPreconditionError(absl::StrCat(state.PathOf(state.next - 1), " is not there or cannot be read"));
  }
  const ImageInfo& saved = last->second->info();
  std::vector<uint64_t> of_job;
  for (const auto& [number, image] : state.images) {
    const ImageInfo& info = image->info();
    if (info.job_folder == saved.job_folder && info.host == saved.host) of_job.push_back(number);
  }
  size_t gone = 0;
  for (size_t i = 0; i + keep < of_job.size(); ++i) {
    // It is open here, too.
    state.images.erase(of_job[i]);
    const absl::StatusOr<bool> removed = state.Remove(StoreImageName(of_job[i]));
    if (!removed.ok()) return removed.status();
    gone += *removed;
  }
  // Those that are open elsewhere count again.
  state.OpenImages();
  CR_RETURN_IF_ERROR(state.FreeSpace());
  return gone;
}

absl::StatusOr<StoreListing> ListStore(const std::string& dir) {
  const std::vector<std::string> paths = ImagesIn(dir);
  if (paths.empty()) return absl::NotFoundError(absl::StrCat("there are no images in ", dir));
  StoreListing listing;
  listing.path = ImagePath(dir);
  std::vector<StoredImage>& images = listing.images;
  // Which image alone has a chunk, by file and offset.
  constexpr size_t kSeveral = SIZE_MAX;
  std::map<std::pair<FileId, uint64_t>, std::pair<size_t, uint64_t>> owners;
  for (const std::string& path : paths) {
    StoredImage stored;
    stored.path = path;
    const auto image = ImageReader::Open(path, ImageReader::Owner::kAnyone, ImageReader::Parts::kFacts);
    // Removed while we look.
    if (absl::IsNotFound(image.status())) continue;
    stored.status = image.status();
    if (image.ok()) {
      stored.info = (*image)->info();
      stored.sizes = (*image)->sizes();
      stored.own_bytes = stored.sizes.total_bytes - stored.sizes.stored_bytes;
      const Index& index = (*image)->index();
      std::vector<FileId> ids;
      for (const std::string& file : index.data_files) {
        struct stat facts {};
        FactsOf(**image, file, &facts);
        ids.push_back({facts.st_dev, facts.st_ino});
      }
      for (const StoredChunk& chunk : index.chunks) {
        const auto [owner, is_new] =
            owners.try_emplace({ids[chunk.file], chunk.offset}, images.size(), chunk.stored_bytes);
        if (!is_new && owner->second.first != images.size()) owner->second.first = kSeveral;
      }
    }
    images.push_back(std::move(stored));
  }
  for (const StoredImage& image : images) listing.total_bytes += image.own_bytes;
  for (const auto& [place, owner] : owners) {
    if (owner.first != kSeveral) images[owner.first].own_bytes += owner.second;
    listing.total_bytes += owner.second;
  }
  return listing;
}

namespace {

// DIR.partial, for an image that is written file by file.
absl::StatusOr<OpenedFolder> BeginFiles(const std::string& dir) {
  CR_RETURN_IF_ERROR(PutBackOldImage(dir));
  struct stat facts;
  if (stat(dir.c_str(), &facts) == 0 && !IsImage(dir)) {
    std::error_code error;
    if (!S_ISDIR(facts.st_mode) || !std::filesystem::is_empty(dir, error)) {
      return absl::AlreadyExistsError(
          absl::StrCat(dir, " exists and is not a checkpoint image; choose another name, or move it away"));
    }
  }
  CR_RETURN_IF_ERROR(CheckMayReplace(dir));
  return MakePartial(dir);
}

// Copies a file, or the parts of it that count, to where they were.
absl::Status CopyParts(const ImageReader& image, const OpenedFolder& to, const std::string& path, uint64_t bytes,
                       mode_t mode, const std::vector<std::pair<uint64_t, uint64_t>>& parts) {
  for (size_t at = path.find('/'); at != std::string::npos; at = path.find('/', at + 1)) {
    const std::string above = path.substr(0, at);
    if (mkdirat(to.fd(), above.c_str(), 0700) != 0 && errno != EEXIST) {
      return SystemError("create", to.FullPath(above), errno);
    }
  }
  absl::StatusOr<UniqueFd> from = OpenForReading(image.folder(), path);
  if (!from.ok()) return from.status();
  const UniqueFd out(openat(to.fd(), path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600));
  const auto failed = [&] { return SystemError("write", to.FullPath(path), errno); };
  if (!out.ok() || ftruncate(out.get(), off_t(bytes)) != 0) return failed();
  std::string piece;
  for (const auto& [offset, length] : parts) {
    for (uint64_t done = 0; done < length;) {
      piece.resize(size_t(std::min<uint64_t>(length - done, kBlockBytes)));
      const absl::Status read =
          ReadAt(from->get(), image.folder().FullPath(path), offset + done, piece.data(), piece.size());
      if (!read.ok()) return read;
      const ssize_t put = pwrite(out.get(), piece.data(), piece.size(), off_t(offset + done));
      if (put < 0 && errno == EINTR) continue;
      if (put <= 0) return failed();
      done += uint64_t(put);
    }
  }
  return fchmod(out.get(), mode) == 0 && fsync(out.get()) == 0 ? absl::OkStatus() : failed();
}

// Of an image that cr-hostd has signed: its files as they are, so that the signature is right for the new image, too.
absl::Status CopySigned(const ImageReader& image, const OpenedFolder& to, const Progress& progress) {
  const Index& index = image.index();
  std::map<std::string, std::vector<std::pair<uint64_t, uint64_t>>> chunks;
  for (const StoredChunk& chunk : index.chunks) {
    chunks[index.data_files[chunk.file]].push_back({chunk.offset, chunk.stored_bytes});
  }
  for (const FileFacts& file : image.files()) {
    // Data files have no hash; bytes that no chunk of this image names stay behind.
    const auto& parts = file.hash.empty() ? chunks[file.path] : decltype(chunks)::mapped_type{{0, file.bytes}};
    CR_RETURN_IF_ERROR(CopyParts(image, to, file.path, file.bytes, mode_t(file.mode), parts));
  }
  for (const char* name : {kSignatureName, kManifestName}) {
    struct stat facts;
    if (fstatat(image.folder().fd(), name, &facts, AT_SYMLINK_NOFOLLOW) != 0) {
      return SystemError("look at", image.folder().FullPath(name), errno);
    }
    CR_RETURN_IF_ERROR(CopyParts(image, to, name, uint64_t(facts.st_size), 0600, {{0, uint64_t(facts.st_size)}}));
  }
  // What was written, not what was read.
  const auto written = ImageReader::Open(to.path());
  if (!written.ok()) return written.status();
  CR_RETURN_IF_ERROR((*written)->Verify(progress));
  std::vector<std::string> folders;
  for (const char* name : {kClientFolder, kMemoryFolder, kProcessesFolder}) {
    struct stat facts;
    if (fstatat(to.fd(), name, &facts, AT_SYMLINK_NOFOLLOW) != 0) continue;
    const auto files = ListFiles(to, name, &folders);
    if (!files.ok()) return files.status();
  }
  for (const std::string& name : folders) {
    const absl::StatusOr<OpenedFolder> folder = to.OpenBelow(name);
    if (!folder.ok()) return folder.status();
    CR_RETURN_IF_ERROR(SyncFolder(*folder));
  }
  return SyncFolder(to);
}

}  // namespace

absl::Status ExportImage(const ImageReader& image, const std::string& dir, const Progress& progress) {
  if (struct stat facts; FactsOf(image, kSignatureName, &facts)) {
    const std::string path = ImagePath(dir);
    absl::StatusOr<OpenedFolder> partial = BeginFiles(path);
    if (!partial.ok()) return partial.status();
    absl::Status status = CopySigned(image, *partial, progress);
    if (status.ok()) status = Publish(&*partial, path);
    if (!status.ok()) RemoveFolder(&*partial).IgnoreError();
    return status;
  }
  auto created = ImageWriter::Create(dir);
  if (!created.ok()) return created.status();
  ImageWriter& writer = **created;
  const uint64_t total = image.sizes().region_bytes + image.sizes().client_bytes;
  uint64_t done = 0;
  const auto tell = [&](uint64_t bytes) {
    done += bytes;
    if (progress) progress(done, total);
  };
  for (size_t i = 0; i < image.regions().size(); ++i) {
    CR_RETURN_IF_ERROR(writer.BeginRegion(image.regions()[i]));
    const absl::Status read = image.ReadRegion(i, [&](uint64_t, std::string_view bytes, bool) {
      tell(bytes.size());
      return writer.AddData(bytes);
    });
    if (!read.ok()) return read;
    CR_RETURN_IF_ERROR(writer.EndRegion());
  }
  for (size_t i = 0; i < image.info().processes.size(); ++i) {
    const absl::StatusOr<std::string> log = image.ReadLog(i);
    if (!log.ok()) return log.status();
    CR_RETURN_IF_ERROR(writer.WriteLog(*log));
  }
  CR_RETURN_IF_ERROR(image.Verify(nullptr, ImageReader::Files::kAllButMemory));
  const std::string prefix = absl::StrCat(kClientFolder, "/");
  for (const FileFacts& file : image.files()) {
    if (!absl::StartsWith(file.path, prefix)) continue;
    const std::string name = file.path.substr(prefix.size());
    const std::filesystem::path to = std::filesystem::path(writer.client_dir()) / name;
    std::error_code error;
    std::filesystem::create_directories(to.parent_path(), error);
    // The folders are private; what has to be the same is in the manifest's modes.
    if (!error) std::filesystem::copy_file(std::filesystem::path(image.client_dir()) / name, to, error);
    if (!error) {
      std::filesystem::permissions(to, std::filesystem::perms(file.mode), error);
    }
    if (error) return SystemError("write", absl::StrCat(dir, "/", file.path), error.value());
    tell(file.bytes);
  }
  return writer.Commit(image.info());
}

}  // namespace cuda_remote::ckptfmt
