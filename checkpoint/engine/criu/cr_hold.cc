// SPDX-License-Identifier: Apache-2.0
// cr-hold: the action script, which CRIU calls at every stage of a restore, and of some dumps; so it has to start
// quickly.
//
// In a dump: when the processes are saved, and before they go on, it copies the files by which they share memory.
//
// When the processes are complete, and before they run, it waits until cr-restart has loaded and compared GPU memory:
// that writes "go" into the pipe $CUDA_REMOTE_HOLD. CRIU does not listen to what is answered there any more; to give
// the restore up, cr-restart kills all of the namespace, and this with it.

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "checkpoint/engine/criu/hold.h"

namespace {

using cuda_remote::checkpoint::kHoldGo;
using cuda_remote::checkpoint::kHoldVariable;
using cuda_remote::checkpoint::kSharedFileName;
using cuda_remote::checkpoint::kSharedFilesVariable;

// Whether `path` can be opened, and says so.
bool SaysGo(const char* path) {
  const int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return false;
  char answer[sizeof(kHoldGo)] = {};
  ssize_t got;
  do {
    got = read(fd, answer, sizeof(kHoldGo) - 1);
  } while (got < 0 && errno == EINTR);
  close(fd);
  return strcmp(answer, kHoldGo) == 0;
}

// Copies all that is not a hole.
bool CopyData(int from, int to, off_t size) {
  static char buffer[1 << 16];
  off_t at = 0;
  while (at < size && (at = lseek(from, at, SEEK_DATA)) >= 0) {
    const off_t end = lseek(from, at, SEEK_HOLE);
    while (at < end) {
      const size_t wanted = size_t(end - at) < sizeof(buffer) ? size_t(end - at) : sizeof(buffer);
      const ssize_t got = pread(from, buffer, wanted, at);
      if (got < 0 && errno == EINTR) continue;
      if (got <= 0 || pwrite(to, buffer, size_t(got), at) != got) return false;
      at += got;
    }
  }
  // Beyond the last data there is none: ENXIO.
  return (at >= 0 || errno == ENXIO) && ftruncate(to, size) == 0;
}

// A file that is not there any more is none that the processes have mapped.
bool CopyFile(int folder, int number, const char* path) {
  char name[64];
  snprintf(name, sizeof(name), "%s%d", kSharedFileName, number);
  const int from = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
  if (from < 0) return errno == ENOENT;
  const int to = openat(folder, name, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  struct stat facts;
  const bool ok = to >= 0 && fstat(from, &facts) == 0 && S_ISREG(facts.st_mode) && CopyData(from, to, facts.st_size);
  close(from);
  if (to >= 0) close(to);
  return ok;
}

bool CopySharedFiles(char* lines) {
  int folder = -1, number = 0;
  bool ok = true;
  for (char* line = lines; ok && *line != 0;) {
    char* const end = strchr(line, '\n');
    if (!end) return false;
    *end = 0;
    if (folder < 0) {
      // CRIU has it open, and nothing of that reaches its scripts.
      char path[64];
      snprintf(path, sizeof(path), "/proc/%d/fd/%d", int(getppid()), atoi(line));
      folder = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
      ok = folder >= 0;
    } else {
      ok = *line == 0 || CopyFile(folder, number, line);
      ++number;
    }
    line = end + 1;
  }
  return ok;
}

}  // namespace

int main() {
  const char* const stage = getenv("CRTOOLS_SCRIPT_ACTION");
  if (char* const files = getenv(kSharedFilesVariable)) {
    return stage && strcmp(stage, "post-dump") == 0 && !CopySharedFiles(files) ? 1 : 0;
  }
  const char* const path = getenv(kHoldVariable);
  if (!stage || !path) return 1;
  if (strcmp(stage, "post-restore") == 0) {
    struct stat facts;
    return stat(path, &facts) == 0 && S_ISFIFO(facts.st_mode) ? 0 : 1;
  }
  if (strcmp(stage, "pre-resume") == 0) {
    while (!SaysGo(path)) sleep(1);
  }
  return 0;
}
