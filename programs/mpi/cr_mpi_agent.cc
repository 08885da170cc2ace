// SPDX-License-Identifier: Apache-2.0
// cr-mpi-agent: what cr-mpirun starts on other hosts, and what mpirun starts in the place of ssh. People do not call
// it.
//
//   cr-mpi-agent [OPTIONS] HOST COMMAND...   by mpirun, in the job: asks cr-mpirun, which is outside of the job, to
//   start
//                                            the command on the host. It does not wait for it.
//                                            In a job of Slurm it has the part itself run the command, and waits.
//   cr-mpi-agent --serve                     by cr-slurm-run, in a part: runs these commands
//   cr-mpi-agent --part PROGRAM...           by cr-mpirun, on the host: runs cr-run with streams that a checkpoint can
//                                            save, and ends it when standard input ends, as it does with cr-mpirun.
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <string>
#include <vector>

#include "programs/mpi/part_shell.h"
#include "programs/mpi/parts.h"
#include "proto/frame/version.h"

namespace cuda_remote::client::mpi {
namespace {

constexpr char kTool[] = "cr-mpi-agent";
constexpr int kExitFailed = 125;
constexpr int kPartSeconds = 60;  // for a part that has just been started

int Fail(const std::string& text) {
  fprintf(stderr, "%s: %s\n", kTool, text.c_str());
  return kExitFailed;
}

int Fail(const absl::Status& status) { return Fail(std::string(status.message())); }

void CopyOut(const char* bytes, ssize_t count) {
  for (ssize_t done = 0; done < count;) {
    const ssize_t wrote = write(STDERR_FILENO, bytes + done, size_t(count - done));
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote <= 0) return;  // nobody listens any more
    done += wrote;
  }
}

int RunPart(char** words) {
  int ends[2];
  const int null = open("/dev/null", O_RDWR | O_CLOEXEC);
  signal(SIGPIPE, SIG_IGN);
  if (null < 0 || pipe2(ends, O_CLOEXEC) != 0) return Fail(std::string("cannot start the part: ") + strerror(errno));
  const pid_t parent = getpid(), child = fork();
  if (child < 0) return Fail(std::string("fork: ") + strerror(errno));
  if (child == 0) {
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (getppid() != parent) _exit(kExitFailed);
    signal(SIGPIPE, SIG_DFL);
    dup2(null, 0);
    dup2(ends[1], 1);
    dup2(ends[1], 2);
    execv(words[0], words);
    fprintf(stderr, "%s: cannot start %s: %s\n", kTool, words[0], strerror(errno));
    _exit(kExitFailed);
  }
  close(ends[1]);
  bool asked = true;
  // cr-run keeps its standard error until it ends, so the pipe ends with it.
  while (true) {
    pollfd waiting[] = {{ends[0], POLLIN, 0}, {asked ? STDIN_FILENO : -1, POLLIN, 0}};
    if (poll(waiting, 2, -1) < 0) continue;
    char bytes[4096];
    if (waiting[1].revents != 0) {
      const ssize_t got = read(STDIN_FILENO, bytes, sizeof(bytes));
      if (got == 0 || (got < 0 && errno != EINTR && errno != EAGAIN)) {
        asked = false;
        kill(child, SIGTERM);
      }
    }
    if (waiting[0].revents == 0) continue;
    const ssize_t got = read(ends[0], bytes, sizeof(bytes));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) break;
    CopyOut(bytes, got);
  }
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

int Main(int argc, char** argv) {
  if (argc == 2 && strcmp(argv[1], "--version") == 0) {
    printf("%s\n", VersionLine(kTool).c_str());
    return 0;
  }
  if (argc > 2 && strcmp(argv[1], "--part") == 0) return RunPart(argv + 2);
  const char* const folder = getenv(kLaunchFolder);
  const char* const key_file = getenv(kPartsKey);
  if (argc == 2 && strcmp(argv[1], "--serve") == 0) {
    int port = kPartsPort;
    if (!key_file) return Fail(std::string(kPartsKey) + " is not set: only cr-slurm-run uses --serve");
    const absl::StatusOr<std::string> key = ReadPartsKey(key_file);
    if (!key.ok()) return Fail(key.status());
    const absl::StatusOr<UniqueFd> listening = ListenForParts("0.0.0.0", &port);
    if (!listening.ok()) return Fail(listening.status());
    ServeParts(listening->get(), *key);
  }
  const absl::StatusOr<Launch> launch = ParseLaunch({argv + 1, argv + argc});
  if (!launch.ok()) return Fail(launch.status());
  if (!folder && key_file) {
    const absl::StatusOr<std::string> key = ReadPartsKey(key_file);
    if (!key.ok()) return Fail(key.status());
    const absl::StatusOr<int> code =
        RunInPart(launch->ip, kPartsPort, *key, launch->command, kPartSeconds, STDERR_FILENO);
    return code.ok() ? *code : Fail(code.status());
  }
  if (!folder) return Fail(std::string(kLaunchFolder) + " is not set: only cr-mpirun uses this program");
  if (const absl::Status written = WriteLaunch(folder, *launch); !written.ok()) {
    return Fail(std::string(written.message()) +
                "; a job whose cr-mpirun has ended, as one that was restarted, starts no processes on further hosts");
  }
  return 0;
}

}  // namespace
}  // namespace cuda_remote::client::mpi

int main(int argc, char** argv) { return cuda_remote::client::mpi::Main(argc, argv); }
