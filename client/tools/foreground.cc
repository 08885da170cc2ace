#include "client/tools/foreground.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>

namespace cuda_remote::client::tools {

void Say(const char* tool, const std::string& text) { fprintf(stderr, "%s: %s\n", tool, text.c_str()); }

void LetGoOfStreams() {
  const int null = open("/dev/null", O_RDWR | O_CLOEXEC);
  dup2(null, 0);
  dup2(null, 1);
  close(null);
}

// Whether standard error is a file that was not opened for appending.
static bool ErrorsGoToJobsFile() {
  struct stat about;
  const int flags = fcntl(STDERR_FILENO, F_GETFL);
  return fstat(STDERR_FILENO, &about) == 0 && S_ISREG(about.st_mode) && flags >= 0 && !(flags & O_APPEND);
}

int FinishJob(const char* tool, const Isolated& isolated, const std::string& directory, std::unique_ptr<GpuHost> host) {
  LetGoOfStreams();
  const pid_t child = isolated.init ? isolated.init : isolated.pid;
  const pid_t server = host ? host->process() : 0;
  int status = WaitForwarding(child, isolated.init != 0, [&](pid_t ended, int) {
    if (ended == server) Say(tool, "the process that connects the job to its GPU (cr-server or cr-relay) has ended");
  });
  if (isolated.init && !ProgramStatus(isolated, &status)) Say(tool, "the job was killed with all its processes");
  int code = ExitCode(status);
  std::ifstream stopped(directory + "/stopped");
  std::string image;
  if (WIFSIGNALED(status) && stopped && std::getline(stopped, image)) {
    // Into a file that the job writes to at its own position, the line would stand where the restarted job goes on. The
    // exit code says the same.
    if (!ErrorsGoToJobsFile()) Say(tool, "the job was stopped at a checkpoint; continue it with: cr-restart " + image);
    code = kExitStopped;
  }
  host.reset();
  RemoveJobFolder(directory);
  return code;
}

}  // namespace cuda_remote::client::tools
