// SPDX-License-Identifier: Apache-2.0
#include "host/signature.h"

#include <errno.h>
#include <fcntl.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <vector>

#include "ckptfmt/file.h"
#include "ckptfmt/index.h"
#include "ckptfmt/manifest.h"
#include "proto/base/clock.h"
#include "proto/base/status_macros.h"
#include "proto/base/text.h"
#include "proto/base/unique_fd.h"
#include "proto/errors/absl_status.h"

namespace cuda_remote::host {
namespace {

constexpr size_t kKeyBytes = 32, kMostKeyBytes = 4096, kIdBytes = 8;
// Of an image that is signed by file, and by chunk.
constexpr uint32_t kByFile = 1, kByChunk = 2;
constexpr char kIdText[] = "cuda-remote: which key";

std::string HashOf(int fd, uint64_t* bytes, bool* ok) {
  Digest digest;
  std::vector<char> part(1 << 20);
  ssize_t got;
  *bytes = 0;
  while ((got = read(fd, part.data(), part.size())) > 0) {
    digest.Add(part.data(), size_t(got));
    *bytes += uint64_t(got);
  }
  *ok = got == 0;
  return digest.Finish();
}

// As in manifests: below an image's folders, and nowhere else.
bool IsImagePath(const std::string& path) {
  if (path == ckptfmt::kManifestName) return true;
  bool known = false;
  for (const char* folder : {ckptfmt::kProcessesFolder, ckptfmt::kMemoryFolder, ckptfmt::kClientFolder}) {
    known = known || path.compare(0, strlen(folder) + 1, std::string(folder) + "/") == 0;
  }
  if (!known || path.find('\0') != std::string::npos) return false;
  for (size_t at = 0; at <= path.size();) {
    size_t end = path.find('/', at);
    if (end == std::string::npos) end = path.size();
    const std::string part = path.substr(at, end - at);
    if (part.empty() || part == "." || part == "..") return false;
    at = end + 1;
  }
  return true;
}

// The hashes of all chunks of an image, in the order of its index.
absl::StatusOr<std::string> HashChunks(const ckptfmt::OpenedFolder& folder, const KnownChunks& earlier) {
  const auto bytes = ckptfmt::ReadWhole(folder, ckptfmt::kIndexName, UINT64_MAX);
  if (!bytes.ok()) return bytes.status();
  CR_ASSIGN_OR_RETURN(const ckptfmt::Index index, ckptfmt::DecodeIndex(*bytes, folder.FullPath(ckptfmt::kIndexName)));
  std::vector<UniqueFd> files;
  std::vector<ino_t> numbers;
  for (const std::string& path : index.data_files) {
    CR_ASSIGN_OR_RETURN(UniqueFd file, ckptfmt::OpenForReading(folder, path));
    struct stat facts;
    if (fstat(file.get(), &facts) != 0) return ckptfmt::SystemError("look at", folder.FullPath(path), errno);
    numbers.push_back(facts.st_ino);
    files.push_back(std::move(file));
  }
  std::string hashes, part;
  for (const ckptfmt::StoredChunk& chunk : index.chunks) {
    if (const std::string* const known = earlier.Find(numbers[chunk.file], chunk)) {
      hashes += *known;
      continue;
    }
    const std::string path = folder.FullPath(index.data_files[chunk.file]);
    if (earlier.HasFile(numbers[chunk.file])) return absl::InternalError("no earlier image has this chunk of " + path);
    part.resize(chunk.stored_bytes);
    CR_RETURN_IF_ERROR(ckptfmt::ReadAt(files[chunk.file].get(), path, chunk.offset, part.data(), part.size()));
    Digest digest;
    digest.Add(part.data(), part.size());
    hashes += digest.Finish();
  }
  return hashes;
}

std::string HostName() {
  char name[256] = "?";
  gethostname(name, sizeof(name) - 1);
  return name;
}

}  // namespace

absl::Status Key::Load(const std::string& path) {
  UniqueFd file(open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (file.ok()) {
    char fresh[kKeyBytes];
    const bool made = getrandom(fresh, sizeof(fresh), 0) == ssize_t(sizeof(fresh)) &&
                      write(file.get(), fresh, sizeof(fresh)) == ssize_t(sizeof(fresh)) && fsync(file.get()) == 0;
    OPENSSL_cleanse(fresh, sizeof(fresh));
    if (!made) {
      const absl::Status failed = ErrnoStatus("cannot write the key " + path);
      unlink(path.c_str());
      return failed;
    }
  } else if (errno != EEXIST) {
    return ErrnoStatus("cannot make the key " + path);
  }
  // It may be a link, as all files of a Kubernetes Secret are. What is opened must be root's.
  file.Reset(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat facts;
  if (!file.ok() || fstat(file.get(), &facts) != 0) return ErrnoStatus("cannot read the key " + path);
  char bytes[kMostKeyBytes + 1];
  const ssize_t got = S_ISREG(facts.st_mode) ? read(file.get(), bytes, sizeof(bytes)) : -1;
  if (facts.st_uid != geteuid() || (facts.st_mode & 077) != 0) {
    return absl::PermissionDeniedError("the key " + path +
                                       " must belong to root, and nobody else may read it (chown root, chmod 600)");
  }
  if (got < ssize_t(kKeyBytes) || got > ssize_t(kMostKeyBytes)) {
    OPENSSL_cleanse(bytes, sizeof(bytes));
    return absl::FailedPreconditionError(
        "the key " + path + " must have 32 to 4096 bytes; copy it from another host, or remove it for a new one");
  }
  void* const page = mmap(nullptr, kMostKeyBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  const bool mapped = page != MAP_FAILED && madvise(page, kMostKeyBytes, MADV_DONTDUMP) == 0;
  const absl::Status failed = mapped ? absl::OkStatus() : ErrnoStatus("no memory for the key");
  if (mapped) {
    page_ = static_cast<unsigned char*>(page);
    bytes_ = size_t(got);
    memcpy(page_, bytes, bytes_);
  }
  OPENSSL_cleanse(bytes, sizeof(bytes));
  return failed;
}

Key::~Key() {
  if (!page_) return;
  OPENSSL_cleanse(page_, kMostKeyBytes);
  munmap(page_, kMostKeyBytes);
}

absl::Status Key::HideFromChildren() const {
  if (madvise(page_, kMostKeyBytes, MADV_WIPEONFORK) == 0) return absl::OkStatus();
  return ErrnoStatus("cannot keep the key from processes of users");
}

std::string Key::CodeOf(std::string_view bytes) const {
  unsigned char code[EVP_MAX_MD_SIZE];
  unsigned length = 0;
  HMAC(EVP_sha256(), page_, int(bytes_), reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size(), code,
       &length);
  return std::string(reinterpret_cast<const char*>(code), length);
}

bool Key::HasMade(std::string_view code, std::string_view bytes) const {
  const std::string own = CodeOf(bytes);
  return own.size() == code.size() && CRYPTO_memcmp(own.data(), code.data(), own.size()) == 0;
}

std::string Key::Id() const { return CodeOf(kIdText).substr(0, kIdBytes); }

Digest::Digest() : context_(EVP_MD_CTX_new()) {
  EVP_DigestInit_ex(static_cast<EVP_MD_CTX*>(context_), EVP_sha256(), nullptr);
}

Digest::~Digest() { EVP_MD_CTX_free(static_cast<EVP_MD_CTX*>(context_)); }

void Digest::Add(const void* bytes, size_t count) {
  EVP_DigestUpdate(static_cast<EVP_MD_CTX*>(context_), bytes, count);
}

std::string Digest::Finish() {
  unsigned char hash[EVP_MAX_MD_SIZE];
  unsigned length = 0;
  EVP_DigestFinal_ex(static_cast<EVP_MD_CTX*>(context_), hash, &length);
  return std::string(reinterpret_cast<const char*>(hash), length);
}

KnownChunks::Place KnownChunks::PlaceOf(ino_t file, const ckptfmt::StoredChunk& chunk) {
  return {file, chunk.offset, chunk.stored_bytes, chunk.hash.high, chunk.hash.low, chunk.keyed.high, chunk.keyed.low};
}

void KnownChunks::Add(ino_t file, const ckptfmt::StoredChunk& chunk, std::string_view hash) {
  files_.insert(file);
  hashes_.emplace(PlaceOf(file, chunk), hash);
}

const std::string* KnownChunks::Find(ino_t file, const ckptfmt::StoredChunk& chunk) const {
  const auto found = hashes_.find(PlaceOf(file, chunk));
  return found == hashes_.end() ? nullptr : &found->second;
}

absl::Status SignImage(const ckptfmt::OpenedFolder& folder, const Key& key, uint32_t user, const PartOf& part,
                       const KnownChunks* earlier) {
  std::vector<std::string> paths = {ckptfmt::kManifestName}, folders;
  for (const char* name : {ckptfmt::kClientFolder, ckptfmt::kMemoryFolder, ckptfmt::kProcessesFolder}) {
    struct stat facts;
    if (fstatat(folder.fd(), name, &facts, AT_SYMLINK_NOFOLLOW) != 0) continue;
    CR_ASSIGN_OR_RETURN(const std::vector<std::string> files, ckptfmt::ListFiles(folder, name, &folders));
    paths.insert(paths.end(), files.begin(), files.end());
  }
  Statement statement;
  statement.set_version(earlier ? kByChunk : kByFile);
  statement.set_user(user);
  statement.set_group(part.checkpoint);
  statement.set_whole_job(part.whole_job);
  statement.set_host(HostName());
  statement.set_signed_unix_ms(uint64_t(UnixMs()));
  for (const std::string& path : paths) {
    const auto file = ckptfmt::OpenForReading(folder, path);
    uint64_t bytes = 0;
    bool read = false;
    SignedFile* const one = statement.add_files();
    one->set_path(path);
    if (earlier && ckptfmt::IsDataFile(path)) {
      struct stat facts;
      if (!file.ok() || fstat(file->get(), &facts) != 0) return absl::DataLossError("cannot read " + path);
      one->set_bytes(uint64_t(facts.st_size));
      one->set_by_chunk(true);
      continue;
    }
    if (file.ok()) one->set_hash(HashOf(file->get(), &bytes, &read));
    one->set_bytes(bytes);
    if (!read) return absl::DataLossError("cannot read the image's file " + path);
  }
  if (earlier) {
    CR_ASSIGN_OR_RETURN(*statement.mutable_chunks(), HashChunks(folder, *earlier));
  }
  SignatureFile file;
  file.set_statement(statement.SerializeAsString());
  file.set_code(key.CodeOf(file.statement()));
  file.set_key(key.Id());
  CR_ASSIGN_OR_RETURN(ckptfmt::OutputFile out,
                      ckptfmt::OutputFile::Create(folder, ckptfmt::kSignatureName, /*hashed=*/false));
  CR_RETURN_IF_ERROR(out.Append(file.SerializeAsString()));
  return out.Finish().status();
}

absl::StatusOr<Statement> ReadSignature(std::string_view bytes, const Key& key, const std::string& image) {
  SignatureFile file;
  if (!file.ParseFromArray(bytes.data(), int(bytes.size())) || file.code().size() != kHashBytes) {
    return absl::DataLossError(image + ": its file " + ckptfmt::kSignatureName + " is not a signature of cr-hostd");
  }
  if (file.key() != key.Id()) {
    return absl::PermissionDeniedError(image + " was signed with another key (" + HexBytes(file.key()) +
                                       ") than this host's cr-hostd has (" + HexBytes(key.Id()) +
                                       "); hosts that are to restore each other's images need the same key file");
  }
  Statement statement;
  if (!key.HasMade(file.code(), file.statement()) || !statement.ParseFromString(file.statement())) {
    return absl::PermissionDeniedError(image +
                                       ": its signature is not of this cluster's cr-hostd; it was forged or changed");
  }
  bool ok = (statement.version() == kByFile || statement.version() == kByChunk) &&
            statement.chunks().size() % kHashBytes == 0;
  for (const SignedFile& one : statement.files()) {
    ok = ok && IsImagePath(one.path()) &&
         (one.by_chunk() ? statement.version() == kByChunk && ckptfmt::IsDataFile(one.path())
                         : one.hash().size() == kHashBytes);
  }
  if (ok) return statement;
  return absl::UnimplementedError(image + " was signed by a newer cr-hostd, which this one does not understand");
}

}  // namespace cuda_remote::host
