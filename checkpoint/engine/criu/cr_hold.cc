// cr-hold: cr-restart's action script, which CRIU calls at every stage of a restore; so it has to start quickly.
//
// When the processes are complete, and before they run, it waits until cr-restart has loaded and compared GPU memory:
// that writes "go" into the pipe $CUDA_REMOTE_HOLD. CRIU does not listen to what is answered there any more; to give
// the restore up, cr-restart kills all of the namespace, and this with it.

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "checkpoint/engine/criu/hold.h"

namespace {

using cuda_remote::checkpoint::kHoldGo;
using cuda_remote::checkpoint::kHoldVariable;

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

}  // namespace

int main() {
  const char* const stage = getenv("CRTOOLS_SCRIPT_ACTION");
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
