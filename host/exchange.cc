// SPDX-License-Identifier: Apache-2.0
#include "host/exchange.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <vector>

#include "ckptfmt/file.h"
#include "ckptfmt/folder.h"
#include "ckptfmt/image_store.h"
#include "ckptfmt/manifest.h"
#include "proto/base/status_macros.h"
#include "proto/base/unique_fd.h"
#include "proto/errors/absl_status.h"

namespace cuda_remote::host {
namespace {

constexpr size_t kPart = 1u << 20;
constexpr char kImage[] = "image";
// How often is looked whether the user's process makes progress.
constexpr int kLookMs = 100;
// One in so many blocks of the file system stays free.
constexpr uint64_t kKeptFree = 20;

}  // namespace

absl::Status MakeFoldersFor(const ckptfmt::OpenedFolder& folder, const std::string& path) {
  for (size_t at = path.find('/'); at != std::string::npos; at = path.find('/', at + 1)) {
    const std::string above = path.substr(0, at);
    if (mkdirat(folder.fd(), above.c_str(), 0700) != 0 && errno != EEXIST) {
      return ckptfmt::SystemError("create", folder.FullPath(above), errno);
    }
  }
  return absl::OkStatus();
}

namespace {

absl::Status CopyFile(int from, const ckptfmt::OpenedFolder& to, const std::string& path, uint64_t bytes,
                      const std::function<absl::Status(const char*, size_t)>& seen) {
  CR_RETURN_IF_ERROR(MakeFoldersFor(to, path));
  auto out = ckptfmt::OutputFile::Create(to, path, /*hashed=*/false);
  if (!out.ok()) return out.status();
  std::vector<char> part(kPart);
  uint64_t left = bytes;
  while (left > 0) {
    const ssize_t got = read(from, part.data(), size_t(std::min<uint64_t>(left, part.size())));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return ckptfmt::SystemError("read", path, errno);
    if (got == 0) return absl::DataLossError(path + " has become shorter meanwhile");
    if (seen) CR_RETURN_IF_ERROR(seen(part.data(), size_t(got)));
    CR_RETURN_IF_ERROR(out->Append({part.data(), size_t(got)}));
    left -= uint64_t(got);
  }
  return out->Finish().status();
}

// In the user's process: the image's files and folders, the manifest last.
absl::Status CopyImage(const ckptfmt::OpenedFolder& from, const ckptfmt::OpenedFolder& to, int socket) {
  const auto is_awaited = [socket](const char*, size_t) {
    char byte;
    return recv(socket, &byte, 1, MSG_PEEK | MSG_DONTWAIT) == 0 ? absl::CancelledError("interrupted")
                                                                : absl::OkStatus();
  };
  std::vector<std::string> folders, paths = {ckptfmt::kSignatureName};
  for (const char* name : {ckptfmt::kClientFolder, ckptfmt::kMemoryFolder, ckptfmt::kProcessesFolder}) {
    struct stat facts;
    if (fstatat(from.fd(), name, &facts, AT_SYMLINK_NOFOLLOW) != 0) continue;
    if (mkdirat(to.fd(), name, 0700) != 0 && errno != EEXIST)
      return ckptfmt::SystemError("create", to.FullPath(name), errno);
    const auto files = ckptfmt::ListFiles(from, name, &folders);
    if (!files.ok()) return files.status();
    paths.insert(paths.end(), files->begin(), files->end());
  }
  paths.push_back(ckptfmt::kManifestName);
  for (const std::string& path : paths) {
    const auto file = ckptfmt::OpenForReading(from, path);
    if (!file.ok()) return file.status();
    struct stat facts;
    if (fstat(file->get(), &facts) != 0) return ckptfmt::SystemError("look at", from.FullPath(path), errno);
    if (absl::Status status = CopyFile(file->get(), to, path, uint64_t(facts.st_size), is_awaited); !status.ok())
      return status;
  }
  for (const std::string& name : folders) {
    const auto folder = to.OpenBelow(name);
    if (!folder.ok()) continue;  // an empty one
    CR_RETURN_IF_ERROR(ckptfmt::SyncFolder(*folder));
  }
  return ckptfmt::SyncFolder(to);
}

void Answer(int socket, const absl::Status& status, const std::string& said = {}) {
  const std::string text = status.ok() ? "+" + said : "-" + std::string(status.message());
  const ssize_t ignored = send(socket, text.data(), text.size(), MSG_NOSIGNAL);
  static_cast<void>(ignored);
}

// Whether an image is a part's in a set of images (sets.h).
bool IsInSet(const std::string& dir) { return ckptfmt::IsStoreImage(dir.substr(0, dir.rfind('/'))); }

// DIR.partial of the single image DIR.
absl::StatusOr<ckptfmt::OpenedFolder> BeginImage(const std::string& dir) {
  absl::Status status = ckptfmt::PutBackOldImage(dir);
  struct stat facts;
  if (status.ok() && stat(dir.c_str(), &facts) == 0 && !ckptfmt::IsImage(dir) &&
      (!S_ISDIR(facts.st_mode) || !std::filesystem::is_empty(dir))) {
    status =
        absl::AlreadyExistsError(dir + " exists and is not a checkpoint image; choose another name, or move it away");
  }
  if (status.ok()) status = ckptfmt::CheckMayReplace(dir);
  if (!status.ok()) return status;
  auto partial = ckptfmt::MakePartial(dir);
  // Of a set: another job's checkpoint may have taken the number.
  if (partial.ok() && IsInSet(dir) && ckptfmt::IsImage(dir)) {
    ckptfmt::RemoveFolder(&*partial).IgnoreError();
    return absl::AlreadyExistsError(dir + " is an image of another checkpoint; try again");
  }
  return partial;
}

// The user's process, from DIR.partial to the image.
void GiveAsUser(int own, const std::string& path, size_t keep, int socket) {
  std::string dir = ckptfmt::ImagePath(path);
  std::unique_ptr<ckptfmt::ImageStore> store;
  absl::Status status;
  if (keep > 0) {
    auto opened = ckptfmt::ImageStore::Open(path);
    status = opened.status();
    if (opened.ok()) store = *std::move(opened);
  }
  auto partial = !status.ok() ? absl::StatusOr<ckptfmt::OpenedFolder>(status)
                 : store      ? store->BeginCopy(&dir)
                              : BeginImage(dir);
  Answer(socket, partial.status(), dir);
  if (!partial.ok()) return;
  char word;
  bool given = false, copied = false;
  if (recv(socket, &word, 1, 0) == 1) {
    const int fd = openat(own, kImage, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
    status = fd >= 0 ? CopyImage(ckptfmt::OpenedFolder(UniqueFd(fd), kImage), *partial, socket)
                     : ckptfmt::SystemError("open", kImage, errno);
    copied = status.ok();
    if (!copied) ckptfmt::RemoveFolder(&*partial).IgnoreError();
    Answer(socket, status);
  }
  if (copied && recv(socket, &word, 1, 0) == 1) {
    status = ckptfmt::Publish(&*partial, dir);
    given = status.ok();
    if (!given) ckptfmt::RemoveFolder(&*partial).IgnoreError();
    const absl::StatusOr<size_t> pruned = given && store ? store->Prune(keep) : size_t{0};
    Answer(socket, status,
           pruned.ok() ? ""
                       : "the image is complete, but old images could not be removed: " +
                             std::string(pruned.status().message()) + "; the next checkpoint tries again");
  }
  if (!given) ckptfmt::RemoveFolder(&*partial).IgnoreError();
  if (!given && IsInSet(dir)) rmdir(dir.substr(0, dir.rfind('/')).c_str());  // if there are no other parts in it
}

}  // namespace

absl::StatusOr<std::unique_ptr<ImageGiver>> ImageGiver::Begin(const checkpoint::Account& account, int own,
                                                              const std::string& path, size_t keep,
                                                              std::function<bool()> cancelled) {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) return ErrnoStatus("socketpair");
  const pid_t child = fork();
  if (child == 0) {
    close(ends[0]);
    // It comes to its end, whatever is sent to the group.
    for (const int number : {SIGINT, SIGTERM, SIGHUP, SIGQUIT}) signal(number, SIG_IGN);
    if (checkpoint::Become(account)) {
      // It still has what its parent had in memory.
      const rlimit none = {0, 0};
      setrlimit(RLIMIT_CORE, &none);
      prctl(PR_SET_DUMPABLE, 0);
      try {
        GiveAsUser(own, path, keep, ends[1]);
      } catch (const std::exception& problem) {
        Answer(ends[1], absl::InternalError(problem.what()));
      }
    }
    _exit(0);
  }
  const int why = errno;
  close(ends[1]);
  if (child < 0) {
    close(ends[0]);
    return ErrnoStatus("fork", why);
  }
  return std::unique_ptr<ImageGiver>(new ImageGiver(child, ends[0], NameOf(account), std::move(cancelled)));
}

ImageGiver::~ImageGiver() { End(checkpoint::StallWatch::kPatient); }

void ImageGiver::End(const checkpoint::StallWatch::Limits& limits) {
  socket_.Close();
  if (child_ > 0) checkpoint::ReapWithoutStall(std::exchange(child_, -1), limits);
}

absl::Status ImageGiver::AwaitPlace() {
  CR_ASSIGN_OR_RETURN(dir_, Await(nullptr));
  return absl::OkStatus();
}

// The answer to `word`; null: to its beginning.
absl::StatusOr<std::string> ImageGiver::Await(const char* word) {
  const absl::Status died = absl::UnavailableError("the process that writes the image has died");
  char text[8192];
  ssize_t got;
  if (word && send(socket_.get(), word, 1, MSG_NOSIGNAL) != 1) return died;
  checkpoint::StallWatch watch(child_);
  pollfd waiting{socket_.get(), POLLIN, 0};
  while (poll(&waiting, 1, kLookMs) <= 0) {
    const bool stalled = watch.IsStalled();
    if (!stalled && !cancelled_()) continue;
    End(checkpoint::StallWatch::kHurried);
    if (!stalled) return absl::CancelledError("interrupted");
    return absl::DeadlineExceededError("the process that writes the image with the rights of " + user_ +
                                       " was stopped, or has made no progress for minutes; cr-hostd has ended it");
  }
  do {
    got = recv(socket_.get(), text, sizeof(text), 0);
  } while (got < 0 && errno == EINTR);
  if (got > 0 && text[0] == '+') return std::string(text + 1, size_t(got - 1));
  return got > 1 ? absl::UnknownError(std::string(text + 1, size_t(got - 1))) : died;
}

absl::Status ImageGiver::Copy() { return Await("c").status(); }

absl::StatusOr<std::string> ImageGiver::Publish() { return Await("p"); }

absl::Status GiveFiles(const checkpoint::Account& account, int folder) {
  const std::string path = "/proc/self/fd/" + std::to_string(folder) + "/" + kImage;
  std::error_code problem;
  bool ok = lchown(path.c_str(), account.user, account.group) == 0;
  for (auto one = std::filesystem::recursive_directory_iterator(path, problem);
       ok && !problem && one != std::filesystem::recursive_directory_iterator(); one.increment(problem)) {
    ok = lchown(one->path().c_str(), account.user, account.group) == 0;
    // Those of a job that runs as a user are her group's to read, for the engine.
    if (ok && !one->is_symlink()) ok = chmod(one->path().c_str(), one->is_directory() ? 0700 : 0600) == 0;
  }
  if (ok && !problem) return absl::OkStatus();
  return ErrnoStatus("cannot give the image to " + NameOf(account), problem ? problem.value() : errno);
}

namespace {

UniqueFd OpenAsUser(const checkpoint::Account& account, int folder, const std::string& name, int flags) {
  const checkpoint::ActAs user(&account);
  return UniqueFd(openat(folder, name.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY | flags));
}

// A plain file of the user's image.
UniqueFd OpenFileAsUser(const checkpoint::Account& account, int image, const std::string& name, struct stat* facts) {
  UniqueFd file = OpenAsUser(account, image, name, O_NOFOLLOW);
  const bool plain = file.get() >= 0 && fstat(file.get(), facts) == 0 && S_ISREG(facts->st_mode);
  return plain ? std::move(file) : UniqueFd();
}

absl::Status Changed(const std::string& dir, const std::string& path) {
  return absl::DataLossError(dir + "/" + path + " is not as cr-hostd has signed it; the image was changed");
}

}  // namespace

absl::StatusOr<Statement> ReadStatement(int image, const std::string& dir, const checkpoint::Account& account,
                                        const Key& key) {
  struct stat facts;
  const UniqueFd file = OpenFileAsUser(account, image, ckptfmt::kSignatureName, &facts);
  if (file.get() < 0) {
    return absl::PermissionDeniedError(dir + " is not signed: cr-hostd restores only what it has saved itself");
  }
  std::string bytes(size_t(std::min<uint64_t>(uint64_t(facts.st_size), kMostSignatureBytes)), '\0');
  if (read(file.get(), &bytes[0], bytes.size()) != ssize_t(bytes.size())) bytes.clear();
  CR_ASSIGN_OR_RETURN(Statement statement, ReadSignature(bytes, key, dir));
  if (statement.user() == account.user) return statement;
  return absl::PermissionDeniedError(dir + " is of a job of user " + std::to_string(statement.user()) + ", not of " +
                                     NameOf(account));
}

absl::StatusOr<std::string> ReadSignedFile(int image, const std::string& dir, const checkpoint::Account& account,
                                           const SignedFile& file) {
  struct stat facts;
  const UniqueFd opened = OpenFileAsUser(account, image, file.path(), &facts);
  std::string bytes;
  bool fits = opened.ok() && !file.by_chunk() && uint64_t(facts.st_size) == file.bytes();
  if (fits) {
    bytes.resize(size_t(file.bytes()));
    Digest digest;
    fits = ckptfmt::ReadAt(opened.get(), file.path(), 0, bytes.data(), bytes.size()).ok();
    digest.Add(bytes.data(), bytes.size());
    fits = fits && digest.Finish() == file.hash();
  }
  if (fits) return bytes;
  return Changed(dir, file.path());
}

absl::StatusOr<ckptfmt::Index> ReadSignedIndex(int image, const std::string& dir, const checkpoint::Account& account,
                                               const Statement& statement) {
  for (const SignedFile& one : statement.files()) {
    if (one.path() != ckptfmt::kIndexName) continue;
    CR_ASSIGN_OR_RETURN(const std::string bytes, ReadSignedFile(image, dir, account, one));
    CR_ASSIGN_OR_RETURN(ckptfmt::Index index, ckptfmt::DecodeIndex(bytes, dir + "/" + one.path()));
    if (index.chunks.size() == statement.chunks().size() / kHashBytes) return index;
  }
  return absl::DataLossError(dir + ": its signature does not fit to its memory");
}

namespace {

// The chunks of a data file that is signed by chunk, to their places in a new file. `seen` is told how many bytes come.
absl::Status CopyChunks(int from, const ckptfmt::OpenedFolder& to, const SignedFile& file, const std::string& dir,
                        const ckptfmt::Index& index, const std::string& hashes,
                        const std::function<absl::Status(size_t)>& seen) {
  CR_RETURN_IF_ERROR(MakeFoldersFor(to, file.path()));
  constexpr int kFlags = O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW;
  const UniqueFd out(openat(to.fd(), file.path().c_str(), kFlags, 0600));
  if (!out.ok() || ftruncate(out.get(), off_t(file.bytes())) != 0) {
    return ckptfmt::SystemError("write", to.FullPath(file.path()), errno);
  }
  const auto& files = index.data_files;
  const auto number = uint32_t(std::find(files.begin(), files.end(), file.path()) - files.begin());
  std::string part;
  for (size_t i = 0; i < index.chunks.size(); ++i) {
    const ckptfmt::StoredChunk& chunk = index.chunks[i];
    if (chunk.file != number) continue;
    part.resize(chunk.stored_bytes);
    Digest digest;
    const bool read = ckptfmt::ReadAt(from, file.path(), chunk.offset, part.data(), part.size()).ok();
    digest.Add(part.data(), part.size());
    if (!read || digest.Finish() != std::string_view(hashes).substr(i * kHashBytes, kHashBytes)) {
      return Changed(dir, file.path());
    }
    CR_RETURN_IF_ERROR(seen(part.size()));
    for (size_t done = 0; done < part.size();) {
      const ssize_t put = pwrite(out.get(), &part[done], part.size() - done, off_t(chunk.offset + done));
      if (put < 0 && errno == EINTR) continue;
      if (put <= 0) return ckptfmt::SystemError("write", to.FullPath(file.path()), errno);
      done += size_t(put);
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status TakeImage(const checkpoint::Account& account, const Key& key, const std::string& to, std::string* path,
                       std::string* group) {
  std::string dir;
  {
    const checkpoint::ActAs user(&account);
    dir = ckptfmt::ImagePath(*path);
    const std::string newest = ckptfmt::NewestImageIn(dir);
    if (!newest.empty()) *path = dir = newest;
  }
  ckptfmt::OpenedFolder image(OpenAsUser(account, AT_FDCWD, dir, O_DIRECTORY), dir);
  const int from = image.fd();
  if (from < 0) {
    if (errno == ENOENT) return absl::NotFoundError("there is no checkpoint image " + *path);
    return ErrnoStatus("cannot open " + dir);
  }
  // Of a store or a set: until it is copied, a checkpoint of the job does not remove it.
  if (ckptfmt::IsStoreImage(dir) || IsInSet(dir)) {
    const checkpoint::ActAs user(&account);
    if (!ckptfmt::LockToRead(&image, /*wait=*/false)) {
      return absl::UnavailableError("the image " + dir + " is being removed or written");
    }
    if (!ckptfmt::IsImage(dir)) return absl::NotFoundError("there is no checkpoint image " + dir + " any more");
  }
  CR_ASSIGN_OR_RETURN(const Statement statement, ReadStatement(from, dir, account, key));
  if (group) *group = statement.group();
  ckptfmt::Index index;
  uint64_t total = 0;
  for (const SignedFile& one : statement.files()) total += one.by_chunk() ? 0 : one.bytes();
  if (!statement.chunks().empty()) {
    CR_ASSIGN_OR_RETURN(index, ReadSignedIndex(from, dir, account, statement));
    for (const ckptfmt::StoredChunk& chunk : index.chunks) total += chunk.stored_bytes;
  }
  const absl::Status no_room = absl::ResourceExhaustedError("cr-hostd's folder has no room for a copy of the image (" +
                                                            std::to_string(total >> 20) +
                                                            " MiB); the operator can give it another one with --state");
  if (!HasRoom(to.substr(0, to.rfind('/')), total)) return no_room;
  if (mkdir(to.c_str(), 0700) != 0) return ErrnoStatus("cannot make " + to);
  CR_ASSIGN_OR_RETURN(const ckptfmt::OpenedFolder own, ckptfmt::OpenedFolder::Open(to));
  for (const char* name : {ckptfmt::kClientFolder, ckptfmt::kMemoryFolder, ckptfmt::kProcessesFolder}) {
    if (mkdirat(own.fd(), name, 0700) != 0) return ckptfmt::SystemError("create", name, errno);
  }
  for (const SignedFile& one : statement.files()) {
    struct stat facts;
    const UniqueFd file = OpenFileAsUser(account, from, one.path(), &facts);
    Digest digest;
    const bool fits = file.get() >= 0 && uint64_t(facts.st_size) == one.bytes();
    if (fits && one.by_chunk()) {
      CR_RETURN_IF_ERROR(CopyChunks(file.get(), own, one, dir, index, statement.chunks(),
                                    [&](size_t count) { return HasRoom(to, count) ? absl::OkStatus() : no_room; }));
      continue;
    }
    if (fits) {
      CR_RETURN_IF_ERROR(CopyFile(file.get(), own, one.path(), one.bytes(), [&](const char* part, size_t count) {
        digest.Add(part, count);
        // Other requests may have begun with the same room.
        return HasRoom(to, count) ? absl::OkStatus() : no_room;
      }));
    }
    if (!fits || digest.Finish() != one.hash()) return Changed(dir, one.path());
  }
  return absl::OkStatus();
}

bool HasRoom(const std::string& folder, uint64_t bytes) {
  struct statvfs facts;
  if (statvfs(folder.c_str(), &facts) != 0) return false;
  const uint64_t block = facts.f_frsize, kept = facts.f_blocks / kKeptFree;
  return facts.f_bavail >= kept && (facts.f_bavail - kept) >= bytes / std::max<uint64_t>(block, 1);
}

void RemoveOwnFolder(const std::string& path) {
  std::error_code ignored;
  std::filesystem::remove_all(path, ignored);
}

}  // namespace cuda_remote::host
