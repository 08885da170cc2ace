// SPDX-License-Identifier: Apache-2.0
// Preloaded into cr-checkpoint, or another DYING_PROGRAM: counts what a process of it does to files below DYING_UNDER,
// and at number DYING_AT kills it (DYING_WAY kill) or has the file system be full (full: only writes count). What was
// counted goes to the file DYING_LOG, a line each. With DYING_WAY links, the file system has no hard links.

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <mutex>
#include <string>

namespace {

// Of all threads: what the number DYING_AT kills has told of all before it.
std::mutex g_mutex;
long g_count = 0;

template <typename Function>
Function Real(const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_NEXT, name));
}

const char* Setting(const char* name) {
  const char* const value = getenv(name);
  return value ? value : "";
}

// Programs that the tool starts have the library, too.
bool IsTool() {
  static const std::string program = *Setting("DYING_PROGRAM") ? Setting("DYING_PROGRAM") : "cr-checkpoint";
  static const bool is = program_invocation_short_name == program && *Setting("DYING_UNDER");
  return is;
}

bool IsBelow(int folder, const char* path) {
  std::string full = path;
  if (full.empty() || full[0] != '/') {
    char target[4096] = ".";
    const std::string link = "/proc/self/fd/" + std::to_string(folder);
    if (folder != AT_FDCWD) {
      const ssize_t length = readlink(link.c_str(), target, sizeof(target) - 1);
      if (length < 0) return false;
      target[length] = 0;
    }
    full = std::string(target) + "/" + full;
  }
  const std::string under = Setting("DYING_UNDER");
  return full.compare(0, under.size(), under) == 0;
}

// True: this call has to fail, with errno.
bool Happens(const char* what, int folder, const char* path) {
  if (!IsTool() || !IsBelow(folder, path)) return false;
  const bool full = strcmp(Setting("DYING_WAY"), "full") == 0;
  if (full && strcmp(what, "write") != 0) return false;
  const std::lock_guard<std::mutex> lock(g_mutex);
  const long number = ++g_count;
  if (const int log = open(Setting("DYING_LOG"), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600); log >= 0) {
    dprintf(log, "%s %s\n", what, path);
    close(log);
  }
  if (number != atol(Setting("DYING_AT"))) return false;
  if (!full) raise(SIGKILL);
  errno = ENOSPC;
  return true;
}

}  // namespace

#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED ssize_t write(int fd, const void* bytes, size_t count) {
  static const auto real = Real<ssize_t (*)(int, const void*, size_t)>("write");
  return Happens("write", fd, "") ? -1 : real(fd, bytes, count);
}

EXPORTED int openat(int folder, const char* path, int flags, ...) {
  static const auto real = Real<int (*)(int, const char*, int, ...)>("openat");
  va_list arguments;
  va_start(arguments, flags);
  const mode_t mode = flags & O_CREAT ? va_arg(arguments, mode_t) : 0;
  va_end(arguments);
  if ((flags & O_CREAT) && Happens("create", folder, path)) return -1;
  return real(folder, path, flags, mode);
}

EXPORTED int mkdir(const char* path, mode_t mode) noexcept {
  static const auto real = Real<int (*)(const char*, mode_t)>("mkdir");
  return Happens("mkdir", AT_FDCWD, path) ? -1 : real(path, mode);
}

EXPORTED int mkdirat(int folder, const char* path, mode_t mode) noexcept {
  static const auto real = Real<int (*)(int, const char*, mode_t)>("mkdirat");
  return Happens("mkdir", folder, path) ? -1 : real(folder, path, mode);
}

EXPORTED int linkat(int from_folder, const char* from, int folder, const char* path, int flags) noexcept {
  static const auto real = Real<int (*)(int, const char*, int, const char*, int)>("linkat");
  if (strcmp(Setting("DYING_WAY"), "links") == 0 && IsTool() && IsBelow(folder, path)) {
    errno = EPERM;
    return -1;
  }
  return Happens("link", folder, path) ? -1 : real(from_folder, from, folder, path, flags);
}

EXPORTED int unlinkat(int folder, const char* path, int flags) noexcept {
  static const auto real = Real<int (*)(int, const char*, int)>("unlinkat");
  return Happens("remove", folder, path) ? -1 : real(folder, path, flags);
}

EXPORTED int rmdir(const char* path) noexcept {
  static const auto real = Real<int (*)(const char*)>("rmdir");
  return Happens("remove", AT_FDCWD, path) ? -1 : real(path);
}

EXPORTED int rename(const char* from, const char* to) noexcept {
  static const auto real = Real<int (*)(const char*, const char*)>("rename");
  return Happens("rename", AT_FDCWD, to) ? -1 : real(from, to);
}

EXPORTED int renameat(int from_folder, const char* from, int folder, const char* to) noexcept {
  static const auto real = Real<int (*)(int, const char*, int, const char*)>("renameat");
  return Happens("rename", folder, to) ? -1 : real(from_folder, from, folder, to);
}

EXPORTED int fsync(int fd) {
  static const auto real = Real<int (*)(int)>("fsync");
  return Happens("fsync", fd, "") ? -1 : real(fd);
}

EXPORTED int fallocate(int fd, int mode, off_t offset, off_t length) {
  static const auto real = Real<int (*)(int, int, off_t, off_t)>("fallocate");
  return Happens("fallocate", fd, "") ? -1 : real(fd, mode, offset, length);
}
