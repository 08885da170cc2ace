// SPDX-License-Identifier: Apache-2.0
#include "programs/tools/foreground.h"

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>

#include "checkpoint/job/hostd_places.h"
#include "checkpoint/transaction/session_holder.h"

namespace cuda_remote::client::tools {

using namespace checkpoint;

void Say(const char* tool, const std::string& text) { fprintf(stderr, "%s: %s\n", tool, text.c_str()); }

void Say(const char* tool, const absl::Status& failure) { Say(tool, std::string(failure.message())); }

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

// Signals that a shell sends to a job as a whole.
static bool TakeSignal(const Isolated& isolated, pid_t child, JobTerminal* terminal, int signal) {
  if (signal == SIGWINCH && terminal) {
    terminal->Resize();
    return true;
  }
  if (signal != SIGTSTP) return false;
  kill(child, SIGTSTP);
  // With a terminal of its own the program may do something else about it; init says when it has stopped.
  if (!terminal && !StopOwnGroup()) kill(child, SIGCONT);
  return true;
}

int FinishJob(const char* tool, const Isolated& isolated, const std::string& directory, const Job& job,
              std::unique_ptr<JobTerminal> terminal, std::unique_ptr<GpuHosts> hosts, SnapshotEngine* engine) {
  LetGoOfStreams();
  const pid_t child = isolated.init ? isolated.init : isolated.pid;
  DeviceWatch devices(tool, job);
  std::unique_ptr<SessionHolder> holder;
  if ((isolated.init || job.users_own()) && engine) {
    auto opened = SessionHolder::Open(job, directory, tool, engine);
    if (opened.ok()) {
      holder = *std::move(opened);
    } else {
      Say(tool,
          std::string(opened.status().message()) + "; if a checkpoint is killed, the job may lose its GPU sessions");
    }
  }
  Beside beside;
  beside.ended = [&](pid_t ended, int status) {
    if (holder) holder->Ended(ended, status);
    if (!hosts->Started(ended)) return;
    Say(tool, "the process that connects the job to its GPU (cr-server or cr-relay) has ended");
  };
  beside.take = [&](int signal) { return TakeSignal(isolated, child, terminal.get(), signal); };
  beside.ask = [&](std::vector<pollfd>* waiting) {
    const int limit = devices.Ask(waiting);
    if (holder) holder->Ask(waiting);
    if (!terminal) return limit;
    waiting->push_back({isolated.report, POLLIN, 0});
    const int other = terminal->Ask(waiting);
    return limit < 0 ? other : other < 0 ? limit : std::min(limit, other);
  };
  beside.ready = [&](const std::vector<pollfd>& waiting) {
    devices.Look();
    if (holder) holder->Ready(waiting);
    if (!terminal) return;
    terminal->Ready(waiting);
    if (StopOf(isolated) == 0) return;
    terminal->Drain();
    terminal->Release();
    if (!StopOwnGroup()) kill(child, SIGCONT);
  };
  int status = WaitForwarding(child, isolated.init != 0, beside);
  holder.reset();
  if (terminal) terminal->Drain();
  terminal.reset();
  if (isolated.init && !ProgramStatus(isolated, &status)) Say(tool, "the job was killed with all its processes");
  int code = ExitCode(status);
  std::ifstream stopped(directory + "/stopped");
  std::string image;
  if (WIFSIGNALED(status) && stopped && std::getline(stopped, image)) {
    // Into a file that the job writes to at its own position, the line would stand where the restarted job goes on. The
    // exit code says the same.
    const bool moved = image.compare(0, strlen(kMovedTo), kMovedTo) == 0;
    if (!ErrorsGoToJobsFile()) {
      Say(tool, moved ? "the job was " + image + ", where it continues"
                      : "the job was stopped at a checkpoint; continue it with: cr-restart " + image);
    }
    code = kExitStopped;
  }
  hosts.reset();
  RemoveJobFolder(directory);
  return code;
}

}  // namespace cuda_remote::client::tools
