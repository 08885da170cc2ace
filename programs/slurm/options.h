// SPDX-License-Identifier: Apache-2.0
// When and where a job of Slurm is saved: options of cr-sbatch, which hands them on to cr-slurm-run.
#ifndef CUDA_REMOTE_PROGRAMS_SLURM_OPTIONS_H_
#define CUDA_REMOTE_PROGRAMS_SLURM_OPTIONS_H_

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

namespace cuda_remote::client::slurm {

struct CheckpointOptions {
  std::string directory = "checkpoints";
  double interval = 0;  // seconds; 0: only before Slurm ends the job
  std::vector<std::string> on = {"preempt", "timeout"};
  int keep = 2;
  std::string output, error;
  std::vector<std::string> cut;
  std::string addresses;

  bool On(const std::string& what) const;
};

void AddCheckpointOptions(CLI::App* app, CheckpointOptions* options);

// The words that give another program the same options. Paths become absolute.
std::vector<std::string> ToWords(const CheckpointOptions& options);

}  // namespace cuda_remote::client::slurm

#endif  // CUDA_REMOTE_PROGRAMS_SLURM_OPTIONS_H_
