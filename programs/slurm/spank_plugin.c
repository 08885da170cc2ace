// SPDX-License-Identifier: Apache-2.0
// A plugin for Slurm (SPANK) that gives sbatch the options of cr-sbatch: when one is given, on the command line or in
// the script, sbatch executes cr-sbatch with the same words. That one submits the job without these options.
//
// Slurm wants a plugin that was compiled for its own version, so sites compile it:
//
//     gcc -shared -fPIC -o cuda_remote.so spank_plugin.c
//
// and name it in plugstack.conf. CR_SBATCH is where cr-sbatch is; without it, it is looked for on the path:
//
//     optional /usr/local/lib/slurm/cuda_remote.so CR_SBATCH=/usr/bin/cr-sbatch
#include <slurm/spank.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

SPANK_PLUGIN(cuda_remote, 1)

static char g_program[4096] = "cr-sbatch";

// This process's words, as the kernel keeps them: sbatch changes its own copy while it reads it. They stay for ever.
static char** Words(void) {
  static char text[1 << 20];
  static char* words[1 << 14];
  FILE* const file = fopen("/proc/self/cmdline", "r");
  const size_t bytes = file ? fread(text, 1, sizeof(text) - 1, file) : 0;
  size_t count = 0;
  if (file) fclose(file);
  if (bytes == 0 || bytes == sizeof(text) - 1) return NULL;
  for (size_t at = 0; at < bytes; at += strlen(text + at) + 1) {
    if (count == sizeof(words) / sizeof(words[0]) - 1) return NULL;
    words[count++] = text + at;
  }
  return words;
}

static int Submit(int value, const char* argument, int remote) {
  (void)value;
  (void)argument;
  if (remote) return ESPANK_SUCCESS;
  char** const words = Words();
  const char* const name = words ? strrchr(words[0], '/') : NULL;
  if (!words || strcmp(name ? name + 1 : words[0], "sbatch") != 0) {
    slurm_error("the options --checkpoint-... are for sbatch only");
    return ESPANK_BAD_ARG;
  }
  execvp(g_program, words);
  slurm_error("cannot start %s: %m", g_program);
  return ESPANK_ERROR;
}

#define OPTION(name, argument, text) {name, argument, text, 1, 0, Submit}
static struct spank_option g_options[] = {
    OPTION("checkpoint-interval", "T", "save the job every T (30s, 10m, 2h), for the case that its node fails"),
    OPTION("checkpoint-dir", "DIR", "folder for images of the job (default: checkpoints)"),
    OPTION("checkpoint-on", "WHEN", "when to save the job and requeue it (default: preempt,timeout)"),
    OPTION("checkpoint-keep", "N", "keep the last N images (default: 2)"),
    OPTION("checkpoint-warning", "S", "begin to save the job S seconds before its time is over (default: 120)"),
    OPTION("checkpoint-addresses", "FIRST-LAST", "addresses for the parts of a job on several nodes"),
    OPTION("checkpoint-output", "FILE", "the program's own output, cut back to the image at a restart"),
    OPTION("checkpoint-error", "FILE", "the same for its standard error"),
    OPTION("checkpoint-cut", "FILE", "a file that the program writes, cut back to the image at a restart"),
};

int slurm_spank_init(spank_t spank, int count, char** words) {
  for (int i = 0; i < count; ++i) {
    if (strncmp(words[i], "CR_SBATCH=", 10) == 0) snprintf(g_program, sizeof(g_program), "%s", words[i] + 10);
  }
  if (spank_context() != S_CTX_ALLOCATOR) return ESPANK_SUCCESS;
  for (size_t i = 0; i < sizeof(g_options) / sizeof(g_options[0]); ++i) {
    const int error = spank_option_register(spank, &g_options[i]);
    if (error != ESPANK_SUCCESS) return error;
  }
  return ESPANK_SUCCESS;
}
