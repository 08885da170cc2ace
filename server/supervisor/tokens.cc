// SPDX-License-Identifier: Apache-2.0
#include "server/supervisor/tokens.h"

#include <errno.h>
#include <fcntl.h>
#include <openssl/rand.h>
#include <openssl/sha.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <sstream>

#include "proto/base/text.h"
#include "proto/codec/text.h"
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

bool ReadTokens(const std::string& path, TokenNames* names, std::string* error) {
  names->clear();
  const int fd = OpenTrustedFile(path, error);
  if (fd < 0) return false;
  std::string bytes;
  char piece[16 << 10];
  ssize_t n;
  while ((n = read(fd, piece, sizeof(piece))) > 0 && bytes.size() <= kMostBytes) bytes.append(piece, size_t(n));
  const int failure = n < 0 ? errno : 0;
  close(fd);
  if (failure != 0 || bytes.size() > kMostBytes) {
    *error = "cannot read " + path + ": " + (failure ? strerror(failure) : "it is too long");
    return false;
  }
  std::istringstream lines(bytes);
  int number = 0;
  for (std::string line; std::getline(lines, line);) {
    ++number;
    std::istringstream words(line);
    std::string name, hash, more;
    if (!(words >> name) || name[0] == '#') continue;
    words >> hash >> more;
    if (!IsName(name) || !IsHash(hash) || !more.empty()) {
      *error = path + ", line " + std::to_string(number) +
               ": expected a name and a hash, as cr-server --new-token NAME writes them";
      return false;
    }
    names->emplace(hash, name);
  }
  return true;
}

std::string MakeToken(const std::string& path, const std::string& name, std::string* error) {
  TokenNames names;
  if (!IsName(name)) {
    *error = "\"" + name + "\" cannot be the name of a token: one word of at most 64 characters";
    return {};
  }
  if (access(path.c_str(), F_OK) == 0 && !ReadTokens(path, &names, error)) return {};
  for (const auto& [hash, there] : names) {
    if (there != name) continue;
    *error = path + " has a token of " + name + " already; remove its line to replace it";
    return {};
  }
  unsigned char bytes[kTokenBytes];
  const int fd = open(path.c_str(), O_CREAT | O_WRONLY | O_APPEND | O_CLOEXEC | O_NOFOLLOW, 0600);
  std::string token;
  if (fd >= 0 && RAND_bytes(bytes, sizeof(bytes)) == 1)
    token = kPrefix + HexBytes({reinterpret_cast<const char*>(bytes), sizeof(bytes)});
  // On a line of its own, also behind one that an editor has left without an end.
  const std::string line = (names.empty() ? "" : "\n") + name + " " + TokenHash(token) + "\n";
  const bool written = !token.empty() && write(fd, line.data(), line.size()) == ssize_t(line.size()) && fsync(fd) == 0;
  if (!written) *error = "cannot write " + path + ": " + strerror(errno);
  if (fd >= 0) close(fd);
  return written ? token : std::string();
}

}  // namespace cuda_remote::server
