// SPDX-License-Identifier: Apache-2.0
// The driver's own checkpoint of another process's GPU state (cuCheckpointProcess*), to compare with.
//
// Usage: native_checkpoint PID FILE [COMMAND...]. Between checkpoint and restore it runs the command, which may save
// the process, and removes FILE, which the process waits for. Prints {"checkpoint_s": ..., "command_s": ...,
// "restore_began_unix_s": ...}, or {"error": ...} where the driver or the command fails.
#include <cuda.h>
#include <dlfcn.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

namespace {

double Now() {
  timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  return double(now.tv_sec) + double(now.tv_nsec) / 1e9;
}

int Fail(const char* what, int code) {
  printf("{\"error\": \"%s: CUDA error %d\"}\n", what, code);
  return 1;
}

// Runs a command with our standard error as its output; its exit code, -1 if it could not be run.
int Run(char** command) {
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, STDERR_FILENO, STDOUT_FILENO);
  pid_t child = 0;
  int status = 0;
  const bool ran = posix_spawnp(&child, command[0], &actions, nullptr, command, environ) == 0 &&
                   waitpid(child, &status, 0) == child && WIFEXITED(status);
  posix_spawn_file_actions_destroy(&actions);
  return ran ? WEXITSTATUS(status) : -1;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) return 2;
  const int pid = atoi(argv[1]);
  void* const library = dlopen("libcuda.so.1", RTLD_NOW);
  if (!library) return Fail("no libcuda.so.1", 0);
  // Older drivers, and the software GPU, do not have all of them.
  const auto init = reinterpret_cast<CUresult (*)(unsigned)>(dlsym(library, "cuInit"));
  using Step = CUresult (*)(int, void*);
  const char* const names[] = {"cuCheckpointProcessLock", "cuCheckpointProcessCheckpoint", "cuCheckpointProcessRestore",
                               "cuCheckpointProcessUnlock"};
  Step steps[4];
  for (int i = 0; i < 4; ++i) {
    steps[i] = reinterpret_cast<Step>(dlsym(library, names[i]));
    if (!steps[i]) return Fail(names[i], CUDA_ERROR_NOT_SUPPORTED);
  }
  if (!init) return Fail("cuInit", CUDA_ERROR_NOT_SUPPORTED);
  if (const CUresult result = init(0)) return Fail("cuInit", result);
  const double began = Now();
  double restore_began = 0, saved = 0, command = 0;
  for (int i = 0; i < 4; ++i) {
    if (i == 2) {
      saved = Now();
      if (argc > 3) {
        if (const int code = Run(argv + 3)) {
          printf("{\"error\": \"%s: exit code %d\"}\n", argv[3], code);
          return 1;
        }
        command = Now() - saved;
      }
      unlink(argv[2]);
      restore_began = Now();
    }
    if (const CUresult result = steps[i](pid, nullptr)) return Fail(names[i], result);
  }
  printf("{\"checkpoint_s\": %.4f, \"command_s\": %.4f, \"restore_began_unix_s\": %.6f}\n", saved - began, command,
         restore_began);
  return 0;
}
