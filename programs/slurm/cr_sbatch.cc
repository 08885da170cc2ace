// SPDX-License-Identifier: Apache-2.0
// cr-sbatch: submits a batch script to Slurm whose job can be saved and restarted. See --help.

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <fstream>
#include <iostream>
#include <iterator>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "checkpoint/job/job.h"
#include "programs/slurm/options.h"
#include "programs/slurm/submission.h"
#include "proto/cli/help.h"
#include "proto/errors/absl_status.h"

namespace cuda_remote::client::slurm {
namespace {

constexpr char kTool[] = "cr-sbatch";
constexpr int kExitFailed = 1;
constexpr int kExitUsage = 2;

constexpr char kExamples[] = R"(
Examples:
  cr-sbatch job.sh                                      saved before it is preempted or its time is over, and requeued
  cr-sbatch --checkpoint-interval 10m --time=4:00:00 --gres=gpu:1 job.sh
  cr-sbatch --checkpoint-dir /scratch/me/images --array=0-9 job.sh
  cr-sbatch --checkpoint-warning 300 job.sh             begin to save it 300 s before its time is over
  cr-sbatch --wrap './train --epochs 90'
  cr-sbatch --checkpoint-addresses 10.9.0.50-10.9.0.250 -N 2 -n 8 --wrap 'srun --mpi=pmix ./heat'

All other words go to sbatch as they are. Lines with #SBATCH in the script work as with sbatch, and may have these
options, too. The whole script runs under cr-run. It needs no change. srun in it is cr-srun, which starts tasks inside
of the job. A job on several nodes has a part on each. cr-sbatch adds --requeue, --open-mode=append and
--signal=B:USR1@SECONDS. A requeued job continues from its newest image, on any nodes and any GPUs. Saving needs what
cr-checkpoint needs. The nodes need cr-slurm-run, in the same folder as here.

Exit codes: sbatch's own; 1 the job was not submitted; 2 wrong use.
)";

int Fail(const std::string& text, int code = kExitFailed) {
  fprintf(stderr, "%s: %s\n", kTool, text.c_str());
  return code;
}

// The script's text, and a name for the job.
absl::Status ReadScript(const Submission& submission, std::string* text, std::string* name) {
  if (submission.has_wrap) {
    *text = "#!/bin/sh\n" + submission.wrapped + "\n";
    *name = "wrap";
  } else if (submission.script.empty() && !submission.guessed.empty()) {
    return absl::InvalidArgumentError("no script is named, since " + submission.guessed +
                                      " was taken for the value of the unknown option " + submission.unknown +
                                      "; write -- in front of the script, or " + submission.unknown + "=" +
                                      submission.guessed + " to submit what is read from standard input");
  } else if (submission.script.empty()) {
    text->assign(std::istreambuf_iterator<char>(std::cin), {});
    *name = "sbatch";
  } else {
    std::ifstream file(submission.script, std::ios::binary);
    text->assign(std::istreambuf_iterator<char>(file), {});
    *name = submission.script.substr(submission.script.rfind('/') + 1);
    if (!file) return ErrnoStatus("cannot read the script " + submission.script);
  }
  if (text->compare(0, 2, "#!") == 0) return absl::OkStatus();
  return absl::InvalidArgumentError("the script " + submission.script +
                                    " does not begin with #!, so Slurm would not run it");
}

void Parse(CLI::App* app, const std::vector<std::string>& words) {
  app->parse(std::vector<std::string>(words.rbegin(), words.rend()));  // as CLI11 wants them
}

int Main(int argc, char** argv) {
  const Submission submission = Divide(std::vector<std::string>(argv + 1, argv + argc));
  CheckpointOptions options;
  int warning = 120;
  CLI::App app("Submits a batch script to Slurm, and saves and restarts its job.", kTool);
  SetUpProgram(&app, "[OPTIONS] [SBATCH OPTIONS] [SCRIPT]");
  app.footer(kExamples);
  AddCheckpointOptions(&app, &options);
  app.add_option("--checkpoint-warning", warning,
                 "how many seconds before the end of its time Slurm warns the job, which is then saved and requeued")
      ->type_name("SECONDS")
      ->check(CLI::Range(1, 65535))
      ->capture_default_str();
  // Those of the command line first: they may ask for help. Then again, since they come before the script's.
  std::string text, name;
  try {
    Parse(&app, submission.own);
    const absl::Status read = ReadScript(submission, &text, &name);
    if (!read.ok()) return Fail(std::string(read.message()), kExitUsage);
    Parse(&app, OwnWordsOf(text));
    Parse(&app, submission.own);
  } catch (const CLI::ParseError& wrong) {
    return app.exit(wrong) == 0 ? 0 : kExitUsage;
  }
  const std::string program = checkpoint::FindCompanion("cr-slurm-run");
  if (program.empty()) return Fail("cr-slurm-run is not beside this program");
  std::vector<std::string> runner = {program};
  for (const std::string& word : ToWords(options)) runner.push_back(word);
  int line = 0;
  const std::string script = MakeBatchScript(text, name, runner, &line);

  const int file = memfd_create("script", 0);
  if (file < 0 || write(file, script.data(), script.size()) != ssize_t(script.size())) {
    return Fail(std::string("no memory for the script: ") + strerror(errno));
  }
  std::vector<std::string> command = {"sbatch", "--requeue", "--open-mode=append"};
  if (options.On("timeout")) command.push_back("--signal=B:USR1@" + std::to_string(warning));
  command.insert(command.end(), submission.options.begin(), submission.options.end());
  command.push_back("/proc/self/fd/" + std::to_string(file));
  command.insert(command.end(), submission.arguments.begin(), submission.arguments.end());
  std::vector<char*> words;
  for (std::string& word : command) words.push_back(&word[0]);
  words.push_back(nullptr);
  execvp(words[0], words.data());
  return Fail(std::string("cannot start sbatch: ") + strerror(errno));
}

}  // namespace
}  // namespace cuda_remote::client::slurm

int main(int argc, char** argv) {
  try {
    return cuda_remote::client::slurm::Main(argc, argv);
  } catch (const std::exception& error) {
    fprintf(stderr, "cr-sbatch: %s\n", error.what());
    return 1;
  }
}
