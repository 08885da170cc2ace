// SPDX-License-Identifier: Apache-2.0
#include "programs/slurm/step.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <numeric>
#include <sstream>

#include "absl/status/status.h"
#include "proto/base/status_macros.h"

namespace cuda_remote::client::slurm {
namespace {

constexpr int kMost = 1 << 20;

enum class Use { kTasks, kNodes, kPerNode, kCpus, kMpi, kExport, kNothing };

// The options of srun that a step here can have. kNothing: they change nothing here, or say what is so anyway.
struct Option {
  const char* name;
  char letter;  // 0: none
  enum { kFlag, kValue, kMayHaveValue } form;
  Use use;
};
constexpr Option kOptions[] = {
    {"ntasks", 'n', Option::kValue, Use::kTasks},
    {"nodes", 'N', Option::kValue, Use::kNodes},
    {"ntasks-per-node", 0, Option::kValue, Use::kPerNode},
    {"cpus-per-task", 'c', Option::kValue, Use::kCpus},
    {"mpi", 0, Option::kValue, Use::kMpi},
    {"export", 0, Option::kValue, Use::kExport},
    {"job-name", 'J', Option::kValue, Use::kNothing},
    {"cpu-bind", 0, Option::kValue, Use::kNothing},
    {"kill-on-bad-exit", 'K', Option::kMayHaveValue, Use::kNothing},
    {"exclusive", 0, Option::kMayHaveValue, Use::kNothing},
    {"exact", 0, Option::kFlag, Use::kNothing},
    {"overlap", 0, Option::kFlag, Use::kNothing},
    {"quiet", 'Q', Option::kFlag, Use::kNothing},
    {"unbuffered", 'u', Option::kFlag, Use::kNothing},
    {"verbose", 'v', Option::kFlag, Use::kNothing},
};

const Option* Find(const std::string& name) {
  const auto* const found =
      std::find_if(std::begin(kOptions), std::end(kOptions), [&](const Option& one) { return name == one.name; });
  return found == std::end(kOptions) ? nullptr : found;
}

const Option* Find(char letter) {
  const auto* const found =
      std::find_if(std::begin(kOptions), std::end(kOptions), [&](const Option& one) { return letter == one.letter; });
  return found == std::end(kOptions) ? nullptr : found;
}

// 0: no number from 1 on.
int Number(const std::string& text) {
  if (text.empty() || text.size() > 7 || text.find_first_not_of("0123456789") != std::string::npos) return 0;
  const int number = std::stoi(text);
  return number <= kMost ? number : 0;
}

int NumberOf(const Variables& variables, const char* name) {
  const auto found = variables.find(name);
  return found == variables.end() ? 0 : Number(found->second);
}

bool ParseMpi(const std::string& text, Mpi* mpi) {
  if (text == "none") {
    *mpi = Mpi::kNone;
  } else if (text == "pmi2") {
    *mpi = Mpi::kPmi2;
  } else if (text == "pmix" || text.compare(0, strlen("pmix_v"), "pmix_v") == 0) {
    *mpi = Mpi::kPmix;
  } else {
    return false;
  }
  return true;
}

struct Wishes {
  int tasks = 0, nodes = 0, per_node = 0;  // 0: not said
  std::string mpi;
};

absl::Status Apply(const Option& option, const std::string& value, Wishes* wishes, Step* step) {
  int* const numbers[] = {&wishes->tasks, &wishes->nodes, &wishes->per_node, &step->cpus};
  if (option.use <= Use::kCpus) {
    int* const number = numbers[int(option.use)];
    *number = Number(value);
    if (*number > 0) return absl::OkStatus();
    return absl::InvalidArgumentError(std::string("--") + option.name + "=" + value +
                                      ": a step in this job cannot have this number");
  }
  if (option.use == Use::kMpi) wishes->mpi = value;
  if (option.use == Use::kExport && value != "ALL") {
    return absl::UnimplementedError("--export=" + value + ": only --export=ALL works for a step in this job; use env");
  }
  return absl::OkStatus();
}

absl::Status Distribute(const Wishes& wishes, const Variables& variables, int nodes, Step* step) {
  if (wishes.nodes > nodes) {
    return absl::InvalidArgumentError("the step wants " + std::to_string(wishes.nodes) + " nodes, and the job has " +
                                      std::to_string(nodes));
  }
  int used = wishes.nodes > 0 ? wishes.nodes : nodes;
  int per_node = wishes.per_node;
  int tasks = wishes.tasks;
  if (tasks == 0 && per_node > 0) tasks = per_node * used;
  if (tasks == 0) tasks = NumberOf(variables, "SLURM_NTASKS");
  if (tasks == 0) tasks = std::max(NumberOf(variables, "SLURM_NTASKS_PER_NODE"), 1) * used;
  used = std::min(used, tasks);
  if (per_node > 0 && per_node * used < tasks) {
    return absl::InvalidArgumentError(std::to_string(tasks) + " tasks do not fit on " + std::to_string(used) +
                                      " nodes with " + std::to_string(per_node) + " each");
  }
  for (int i = 0, left = tasks; i < used; ++i) {
    const int even = tasks / used + (i < tasks % used ? 1 : 0);
    step->tasks.push_back(per_node > 0 ? std::min(per_node, left) : even);
    left -= step->tasks.back();
  }
  while (step->tasks.back() == 0) step->tasks.pop_back();
  return absl::OkStatus();
}

}  // namespace

int Step::Count() const { return std::accumulate(tasks.begin(), tasks.end(), 0); }

absl::StatusOr<Step> ParseStep(const std::vector<std::string>& words, const Variables& variables, int nodes) {
  Step step;
  Wishes wishes;
  const auto type = variables.find("SLURM_MPI_TYPE");
  if (type != variables.end()) wishes.mpi = type->second;
  size_t at = 0;
  for (; at < words.size() && words[at].size() > 1 && words[at][0] == '-'; ++at) {
    const std::string& word = words[at];
    if (word == "--") {
      ++at;
      break;
    }
    const bool is_long = word[1] == '-';
    const size_t equals = is_long ? word.find('=') : std::string::npos;
    const std::string name = is_long ? word.substr(2, equals - 2) : word.substr(1, 1);
    const Option* const option = is_long ? Find(name) : Find(name[0]);
    if (!option) {
      return absl::UnimplementedError("a step in this job cannot have the option " + std::string(is_long ? "--" : "-") +
                                      name + " of srun; the step runs inside of the job, so that it can be saved");
    }
    std::string value = is_long ? (equals == std::string::npos ? "" : word.substr(equals + 1)) : word.substr(2);
    if (option->form == Option::kFlag && !value.empty() && !is_long) {
      // Such as -uQ: what follows are more letters.
      for (const char letter : value) {
        const Option* const more = Find(letter);
        if (more && more->form == Option::kFlag) continue;
        return absl::InvalidArgumentError("the options " + word + " cannot be read; write each by itself");
      }
    }
    if (option->form == Option::kValue && value.empty()) {
      if (++at >= words.size()) {
        return absl::InvalidArgumentError(std::string("--") + option->name + " has no value");
      }
      value = words[at];
    }
    CR_RETURN_IF_ERROR(Apply(*option, value, &wishes, &step));
  }
  step.command.assign(words.begin() + long(at), words.end());
  if (step.command.empty()) return absl::InvalidArgumentError("no program is given");
  if (!wishes.mpi.empty() && !ParseMpi(wishes.mpi, &step.mpi)) {
    return absl::InvalidArgumentError("--mpi=" + wishes.mpi + ": a step in this job can have pmix, pmi2 or none");
  }
  CR_RETURN_IF_ERROR(Distribute(wishes, variables, nodes, &step));
  return step;
}

Variables TaskVariables(int rank, const std::vector<int>& tasks) {
  size_t node = 0;
  int first = 0;
  while (node + 1 < tasks.size() && rank >= first + tasks[node]) first += tasks[node++];
  const std::string count = std::to_string(std::accumulate(tasks.begin(), tasks.end(), 0));
  return {{"SLURM_PROCID", std::to_string(rank)},
          {"SLURM_LOCALID", std::to_string(rank - first)},
          {"SLURM_NODEID", std::to_string(node)},
          {"SLURM_NTASKS", count},
          {"SLURM_NPROCS", count},
          {"SLURM_STEP_NUM_TASKS", count},
          {"SLURM_STEP_NUM_NODES", std::to_string(tasks.size())}};
}

std::vector<std::string> LauncherWords(const Step& step, const std::string& launcher,
                                       const std::vector<std::string>& addresses,
                                       const std::vector<std::string>& exported,
                                       const std::vector<std::string>& wrapper) {
  const bool hydra = step.mpi == Mpi::kPmi2;
  std::vector<std::string> words = {launcher, "-n", std::to_string(step.Count())};
  if (!hydra) words.insert(words.end(), {"--bind-to", "none", "--map-by", "slot", "--oversubscribe"});
  std::string hosts;
  for (size_t i = 0; i < addresses.size() && i < step.tasks.size(); ++i) {
    hosts += (i > 0 ? "," : "") + addresses[i] + ":" + std::to_string(step.tasks[i]);
  }
  if (!hosts.empty()) {
    words.insert(words.end(), {hydra ? "-hosts" : "--host", hosts});
    // Hydra does it by itself.
    for (size_t i = 0; !hydra && i < exported.size(); ++i) words.insert(words.end(), {"-x", exported[i]});
  }
  words.insert(words.end(), wrapper.begin(), wrapper.end());
  words.insert(words.end(), step.command.begin(), step.command.end());
  return words;
}

std::vector<std::string> Divided(const std::string& text) {
  std::vector<std::string> parts;
  std::istringstream in(text);
  for (std::string part; std::getline(in, part, ',');) parts.push_back(part);
  return parts;
}

}  // namespace cuda_remote::client::slurm
