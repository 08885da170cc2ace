// SPDX-License-Identifier: Apache-2.0
#include "programs/slurm/job_start.h"

#include <algorithm>
#include <cstdlib>
#include <sstream>

#include "proto/base/proc.h"

namespace cuda_remote::client::slurm {
namespace {

std::string Value(const Variables& variables, const std::string& name) {
  const auto found = variables.find(name);
  return found == variables.end() ? "" : found->second;
}

}  // namespace

absl::StatusOr<SlurmJob> ReadSlurmJob(const Variables& variables) {
  SlurmJob job;
  job.id = Value(variables, "SLURM_JOB_ID");
  if (!IsNumber(job.id)) {
    return absl::FailedPreconditionError(
        "this is not a Slurm job: SLURM_JOB_ID is not set. Submit it with cr-sbatch, or use cr-run");
  }
  const std::string tasks = Value(variables, "SLURM_STEP_NUM_TASKS");
  if (IsNumber(tasks) && atoi(tasks.c_str()) > 1) {
    return absl::UnimplementedError("it runs in a step of " + tasks +
                                    " tasks, and can save only one; start it once, with mpirun or torchrun");
  }
  const std::string nodes = Value(variables, "SLURM_JOB_NUM_NODES");
  job.nodes = IsNumber(nodes) ? std::max(atoi(nodes.c_str()), 1) : 1;
  job.tasks = Value(variables, "SLURM_TASKS_PER_NODE");
  const std::string components = Value(variables, "SLURM_HET_SIZE");
  job.has_gpu_node = IsNumber(components) && atoi(components.c_str()) > 1;
  const std::string gpu_nodes = Value(variables, "SLURM_JOB_NUM_NODES_HET_GROUP_1");
  if (job.has_gpu_node && (components != "2" || gpu_nodes != "1")) {
    return absl::UnimplementedError(
        "a heterogeneous job needs two components of one node each: the program's, and the one with the GPUs; "
        "this one has " +
        components + " components, and " + gpu_nodes + " nodes in the second");
  }
  job.array = Value(variables, "SLURM_ARRAY_JOB_ID");
  job.task = Value(variables, "SLURM_ARRAY_TASK_ID");
  if (!IsNumber(job.array) || !IsNumber(job.task)) job.array = job.task = "";
  const std::string restarts = Value(variables, "SLURM_RESTART_COUNT");
  job.restarts = IsNumber(restarts) ? atoi(restarts.c_str()) : 0;
  return job;
}

absl::StatusOr<Start> ChooseStart(const SlurmJob& job, const std::string& folder, const std::string& image) {
  if (job.restarts == 0 && !image.empty()) {
    return absl::AlreadyExistsError(folder +
                                    " has images of another job with this number; remove them, or name "
                                    "another --checkpoint-dir");
  }
  return image.empty() ? Start::kProgram : Start::kImage;
}

std::string Expand(const std::string& text, const SlurmJob& job) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    const char next = text[i] == '%' && i + 1 < text.size() ? text[i + 1] : 0;
    if (next != 'j' && next != 'A' && next != 'a' && next != '%') {
      out += text[i];
      continue;
    }
    ++i;
    if (next == '%') out += '%';
    if (next == 'j') out += job.id;
    if (next == 'A') out += job.array.empty() ? job.id : job.array;
    if (next == 'a') out += job.array.empty() ? "0" : job.task;
  }
  return out;
}

std::string SettingIn(const std::string& text, const std::string& name) {
  std::istringstream lines(text);
  for (std::string line, first, equals, value; std::getline(lines, line);) {
    std::istringstream words(line);
    if (words >> first >> equals >> value && first == name && equals == "=") return value;
  }
  return "";
}

bool NumberGpus(const std::string& assigned, std::string* seen) {
  seen->clear();
  int count = 0;
  for (size_t at = 0; at <= assigned.size(); ++count) {
    const size_t end = std::min(assigned.find(',', at), assigned.size());
    const std::string one = assigned.substr(at, end - at);
    if (!IsNumber(one) && one.compare(0, 4, "GPU-") != 0 && one.compare(0, 4, "MIG-") != 0) return false;
    *seen += (count > 0 ? "," : "") + std::to_string(count);
    at = end + 1;
  }
  return true;
}

}  // namespace cuda_remote::client::slurm
