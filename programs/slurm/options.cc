// SPDX-License-Identifier: Apache-2.0
#include "programs/slurm/options.h"

#include <algorithm>
#include <filesystem>
#include <map>

namespace cuda_remote::client::slurm {

bool CheckpointOptions::On(const std::string& what) const { return std::find(on.begin(), on.end(), what) != on.end(); }

void AddCheckpointOptions(CLI::App* app, CheckpointOptions* options) {
  app->add_option("--checkpoint-dir", options->directory,
                  "folder for images, on a file system that all nodes have; each job has a folder of its own in it")
      ->type_name("DIR")
      ->capture_default_str();
  app->add_option("--checkpoint-interval", options->interval,
                  "also save the job repeatedly after this time (as in 30s, 10m, 2h), in case its node fails")
      ->type_name("TIME")
      ->transform(CLI::AsNumberWithUnit(std::map<std::string, double>{{"s", 1}, {"m", 60}, {"h", 3600}},
                                        CLI::AsNumberWithUnit::CASE_INSENSITIVE));
  app->add_option("--checkpoint-on", options->on,
                  "when the job is saved and ended: preempt (at SIGTERM), timeout (at the warning, SIGUSR1)")
      ->delimiter(',')
      ->check(CLI::IsMember({"preempt", "timeout"}))
      ->type_name("WHEN,...")
      ->default_str("preempt,timeout");
  app->add_option("--checkpoint-keep", options->keep, "keep the last N images of the job")
      ->type_name("N")
      ->check(CLI::Range(1, 10000))
      ->capture_default_str();
  app->add_option("--checkpoint-output", options->output,
                  "file for the program's standard output, which a restart cuts back to its length at the checkpoint; "
                  "%j is the job's number, %A the array's and %a the task's (default: Slurm's file)")
      ->type_name("FILE");
  app->add_option("--checkpoint-error", options->error, "file for its standard error; may be the same one")
      ->type_name("FILE");
  app->add_option("--checkpoint-cut", options->cut,
                  "a file that the program writes: a restart cuts it back to its length at the checkpoint")
      ->type_name("FILE");
  app->add_option("--checkpoint-addresses", options->addresses,
                  "FIRST-LAST[/PREFIX][@INTERFACE]: network addresses for jobs on several nodes; a job needs one for "
                  "each of its nodes. Ask the operator which ones to use")
      ->type_name("RANGE");
}

std::vector<std::string> ToWords(const CheckpointOptions& options) {
  const auto absolute = [](const std::string& path) { return std::filesystem::absolute(path).string(); };
  std::vector<std::string> words = {"--checkpoint-dir=" + absolute(options.directory)};
  if (options.interval > 0) words.push_back("--checkpoint-interval=" + std::to_string(options.interval) + "s");
  std::string on;
  for (const std::string& one : options.on) on += (on.empty() ? "" : ",") + one;
  words.push_back("--checkpoint-on=" + on);
  words.push_back("--checkpoint-keep=" + std::to_string(options.keep));
  if (!options.output.empty()) words.push_back("--checkpoint-output=" + absolute(options.output));
  if (!options.error.empty()) words.push_back("--checkpoint-error=" + absolute(options.error));
  if (!options.addresses.empty()) words.push_back("--checkpoint-addresses=" + options.addresses);
  for (const std::string& path : options.cut) words.push_back("--checkpoint-cut=" + absolute(path));
  return words;
}

}  // namespace cuda_remote::client::slurm
