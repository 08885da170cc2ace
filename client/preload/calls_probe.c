// SPDX-License-Identifier: Apache-2.0
// Runs env, by the function named and with an empty environment, or with that of the arguments behind it.
#define _GNU_SOURCE
#include <fcntl.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

extern char** environ;

static char kProgram[] = "/usr/bin/env";

static int EndOf(pid_t child) {
  int status = 0;
  return waitpid(child, &status, 0) == child && WIFEXITED(status) ? WEXITSTATUS(status) : 9;
}

int main(int count, char** words) {
  if (count < 2) return 8;
  const char* const function = words[1];
  char* arguments[] = {kProgram, NULL};
  char** const variables = words + 2;
  pid_t child = 0;
  // Those with an environment of their own get it from there, the others from the process.
  if (strcmp(function, "execve") == 0) execve(kProgram, arguments, variables);
  if (strcmp(function, "execvpe") == 0) execvpe("env", arguments, variables);
  if (strcmp(function, "execle") == 0) execle(kProgram, kProgram, NULL, variables);
  if (strcmp(function, "fexecve") == 0) fexecve(open(kProgram, O_RDONLY), arguments, variables);
  if (strcmp(function, "execveat") == 0) execveat(AT_FDCWD, kProgram, arguments, variables, 0);
  if (strcmp(function, "null") == 0) execve(kProgram, arguments, NULL);
  if (strcmp(function, "posix_spawn") == 0 && !posix_spawn(&child, kProgram, NULL, NULL, arguments, variables))
    return EndOf(child);
  if (strcmp(function, "posix_spawnp") == 0 && !posix_spawnp(&child, "env", NULL, NULL, arguments, variables))
    return EndOf(child);
  // The C library's own stack is shared with the parent here.
  if (strcmp(function, "vfork") == 0) {
    child = vfork();
    if (child == 0) {
      execve(kProgram, arguments, variables);
      _exit(7);
    }
    return EndOf(child);
  }
  environ = variables;
  if (strcmp(function, "execv") == 0) execv(kProgram, arguments);
  if (strcmp(function, "execvp") == 0) execvp("env", arguments);
  if (strcmp(function, "execl") == 0) execl(kProgram, kProgram, NULL);
  if (strcmp(function, "execlp") == 0) execlp("env", "env", NULL);
  // With arguments of their own, which must arrive in their order.
  if (strcmp(function, "execl-arguments") == 0)
    execl("/bin/sh", "sh", "-c", "echo \"$0 $@\"; env", "a", "b", "c", NULL);
  if (strcmp(function, "system") == 0) return system("echo \"it's\" 'one line'; env");
  if (strcmp(function, "popen") == 0) {
    char line[4096];
    FILE* const stream = popen("echo \"it's\" 'one line'; env", "r");
    while (stream && fgets(line, sizeof(line), stream)) fputs(line, stdout);
    return stream ? pclose(stream) : 6;
  }
  fprintf(stderr, "%s has failed\n", function);
  return 5;
}
