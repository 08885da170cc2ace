// SPDX-License-Identifier: Apache-2.0
#include "proto/folder/this_job.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "proto/base/text.h"
#include "proto/folder/private_folder.h"

namespace cuda_remote {
namespace {

constexpr char kOfRoot[] = "/run/cuda-remote.job";
constexpr size_t kMostBytes = 8192;

bool ReadText(int fd, std::string* text) {
  text->resize(kMostBytes);
  const ssize_t length = read(fd, text->data(), text->size());
  close(fd);
  text->resize(length > 0 ? size_t(length) : 0);
  return length > 0;
}

// The line that begins at *at, which moves behind it.
std::string NextLine(const std::string& text, size_t* at) {
  const size_t end = text.find('\n', *at);
  if (end == std::string::npos) return {};
  const std::string line = text.substr(*at, end - *at);
  *at = end + 1;
  return line;
}

std::string OfUser() {
  const std::string user = std::to_string(geteuid()), runtime = "/run/user/" + user;
  struct stat facts;
  const bool usual = stat(runtime.c_str(), &facts) == 0 && S_ISDIR(facts.st_mode) && facts.st_uid == geteuid();
  return usual ? runtime + "/cuda-remote/job" : "/tmp/cuda-remote-" + user + "/job";
}

// The folder that the preloaded library is in; empty if there is none.
std::string OfPreloaded() {
  const auto path = reinterpret_cast<const char* (*)()>(dlsym(RTLD_DEFAULT, kPreloadedLibraryPath));
  const std::string library = path && path() ? path() : "";
  return library.substr(0, library.rfind('/') + 1);
}

}  // namespace

std::string JobMountPoint() {
  struct stat facts;
  const bool usual = geteuid() == 0 && stat("/run", &facts) == 0 && S_ISDIR(facts.st_mode) && facts.st_uid == 0 &&
                     (facts.st_mode & (S_IWGRP | S_IWOTH)) == 0 && access("/run", W_OK) == 0;
  return usual ? kOfRoot : OfUser();
}

bool FindThisJob(std::string* directory, std::string* name) {
  for (const std::string& place : {OfPreloaded(), std::string(kOfRoot), OfUser()}) {
    if (place.empty()) continue;
    StatusOr<UniqueFd> file = OpenTrustedFile(place + "/job");
    std::string text;
    if (!file.ok() || !ReadText(file->Release(), &text)) continue;
    size_t at = 0;
    *directory = NextLine(text, &at);
    *name = NextLine(text, &at);
    if (!directory->empty()) return true;
  }
  return false;
}

std::string SocketFolder(const std::string& directory) {
  const std::string folder = directory + "/user";
  struct stat facts;
  return lstat(folder.c_str(), &facts) == 0 && S_ISDIR(facts.st_mode) ? folder : directory;
}

std::string ThisJobText(const std::string& directory, const std::string& name) {
  return directory + "\n" + name + "\n";
}

bool ReadGpuServer(const std::string& directory, std::string* address, int* gpu) {
  std::string text;
  const int fd = open((directory + "/gpu-server").c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
  if (fd < 0 || !ReadText(fd, &text)) return false;
  size_t at = 0;
  *address = NextLine(text, &at);
  *gpu = atoi(NextLine(text, &at).c_str());
  return !address->empty();
}

std::string ServerNameFile(const std::string& socket_path) {
  return socket_path.substr(0, socket_path.rfind('.')) + ".server";
}

std::string NamedServer(const std::string& address) {
  constexpr char kUnix[] = "unix:", kSocket[] = ".sock";
  const size_t scheme = sizeof(kUnix) - 1, ending = sizeof(kSocket) - 1;
  if (address.size() < scheme + ending || address.compare(0, scheme, kUnix) != 0 ||
      address.compare(address.size() - ending, ending, kSocket) != 0) {
    return address;
  }
  std::string text;
  size_t at = 0;
  const int fd = open(ServerNameFile(address.substr(scheme)).c_str(), O_RDONLY | O_NONBLOCK | O_NOFOLLOW | O_CLOEXEC);
  if (fd < 0 || !ReadText(fd, &text)) return address;
  const std::string name = NextLine(text, &at);
  return name.empty() ? address : name;
}

bool ReadSharingScope(const std::string& directory, std::string* scope) {
  constexpr size_t kDigits = 32;
  std::string text;
  const int fd = open((directory + "/gpu-server").c_str(), O_RDONLY | O_CLOEXEC);
  if (fd >= 0 && ReadText(fd, &text)) {
    size_t at = 0;
    NextLine(text, &at);
    NextLine(text, &at);
    text = NextLine(text, &at);
  }
  if (text.size() < kDigits) return false;
  return BytesOfHex(text.substr(0, kDigits), scope);
}

}  // namespace cuda_remote
