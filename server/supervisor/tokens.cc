// SPDX-License-Identifier: Apache-2.0
#include "server/supervisor/tokens.h"

#include <errno.h>
#include <fcntl.h>
#include <openssl/rand.h>
#include <openssl/sha.h>
#include <sys/stat.h>
#include <unistd.h>

#include <sstream>

#include "absl/status/status.h"
#include "proto/base/status_macros.h"
#include "proto/base/text.h"
#include "proto/base/unique_fd.h"
#include "proto/codec/text.h"
#include "proto/errors/absl_status.h"
#include "proto/folder/private_folder.h"

namespace cuda_remote::server {
namespace {

constexpr size_t kTokenBytes = 32;
constexpr size_t kMostBytes = 4 << 20;
constexpr char kPrefix[] = "cr-";  // so that tools that look for secrets in files can tell one

bool IsHash(const std::string& text) {
  return text.size() == 2 * SHA256_DIGEST_LENGTH && text.find_first_not_of("0123456789abcdef") == std::string::npos;
}

bool IsName(const std::string& text) {
  return !text.empty() && text.size() <= 64 && text[0] != '#' && Printable(text) == text &&
         text.find_first_of(" \t") == std::string::npos;
}

}  // namespace

std::string TokenHash(std::string_view token) {
  unsigned char hash[SHA256_DIGEST_LENGTH];
  SHA256(reinterpret_cast<const unsigned char*>(token.data()), token.size(), hash);
  return HexBytes({reinterpret_cast<const char*>(hash), sizeof(hash)});
}

absl::StatusOr<TokenNames> ReadTokens(const std::string& path) {
  CR_ASSIGN_OR_RETURN(const UniqueFd file, ToAbsl(OpenTrustedFile(path)));
  std::string bytes;
  char piece[16 << 10];
  ssize_t n;
  while ((n = read(file.get(), piece, sizeof(piece))) > 0 && bytes.size() <= kMostBytes) bytes.append(piece, size_t(n));
  if (n < 0) return ErrnoStatus("cannot read " + path);
  if (bytes.size() > kMostBytes) return absl::InvalidArgumentError("cannot read " + path + ": it is too long");
  TokenNames names;
  std::istringstream lines(bytes);
  int number = 0;
  for (std::string line; std::getline(lines, line);) {
    ++number;
    std::istringstream words(line);
    std::string name, hash, more;
    if (!(words >> name) || name[0] == '#') continue;
    words >> hash >> more;
    if (!IsName(name) || !IsHash(hash) || !more.empty()) {
      return absl::InvalidArgumentError(path + ", line " + std::to_string(number) +
                                        ": expected a name and a hash, as cr-server --new-token NAME writes them");
    }
    names.emplace(hash, name);
  }
  return names;
}

absl::StatusOr<std::string> MakeToken(const std::string& path, const std::string& name) {
  TokenNames names;
  if (!IsName(name)) {
    return absl::InvalidArgumentError("\"" + name +
                                      "\" cannot be the name of a token: one word of at most 64 characters");
  }
  if (access(path.c_str(), F_OK) == 0) {
    CR_ASSIGN_OR_RETURN(names, ReadTokens(path));
  }
  for (const auto& [hash, there] : names) {
    if (there == name)
      return absl::AlreadyExistsError(path + " has a token of " + name + " already; remove its line to replace it");
  }
  unsigned char bytes[kTokenBytes];
  const UniqueFd file(open(path.c_str(), O_CREAT | O_WRONLY | O_APPEND | O_CLOEXEC | O_NOFOLLOW, 0600));
  std::string token;
  if (file.ok() && RAND_bytes(bytes, sizeof(bytes)) == 1)
    token = kPrefix + HexBytes({reinterpret_cast<const char*>(bytes), sizeof(bytes)});
  struct stat facts {};
  const bool has_lines = file.ok() && fstat(file.get(), &facts) == 0 && facts.st_size > 0;
  // On a line of its own, also behind one that an editor has left without an end.
  const std::string line = (has_lines ? "\n" : "") + name + " " + TokenHash(token) + "\n";
  const bool written =
      !token.empty() && write(file.get(), line.data(), line.size()) == ssize_t(line.size()) && fsync(file.get()) == 0;
  if (!written) return ErrnoStatus("cannot write " + path);
  return token;
}

}  // namespace cuda_remote::server
