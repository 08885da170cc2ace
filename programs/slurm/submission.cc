// SPDX-License-Identifier: Apache-2.0
#include "programs/slurm/submission.h"

#include <algorithm>
#include <cstring>
#include <set>
#include <sstream>

namespace cuda_remote::client::slurm {
namespace {

// Options of sbatch that take no value, or only one behind "=". All others take the next word.
const std::set<std::string>& LongFlags() {
  static const auto* const flags =
      new std::set<std::string>{"--contiguous", "--exclusive",  "--get-user-env", "--help",          "--hold",
                                "--ignore-pbs", "--immediate",  "--nice",         "--no-kill",       "--no-requeue",
                                "--parsable",   "--propagate",  "--quiet",        "--reboot",        "--requeue",
                                "--share",      "--spread-job", "--test-only",    "--oversubscribe", "--overcommit",
                                "--usage",      "--verbose",    "--version",      "--wait",          "--use-min-nodes"};
  return *flags;
}
constexpr char kShortFlags[] = "hHIkOQsvVW";

// Options that take a value, as sbatch 24.05 has them.
const std::set<std::string>& LongValues() {
  static const auto* const values = new std::set<std::string>{"--account",
                                                              "--acctg-freq",
                                                              "--array",
                                                              "--batch",
                                                              "--bb",
                                                              "--bbf",
                                                              "--begin",
                                                              "--chdir",
                                                              "--cluster-constraint",
                                                              "--clusters",
                                                              "--comment",
                                                              "--constraint",
                                                              "--container",
                                                              "--container-id",
                                                              "--core-spec",
                                                              "--cores-per-socket",
                                                              "--cpu-freq",
                                                              "--cpus-per-gpu",
                                                              "--cpus-per-task",
                                                              "--deadline",
                                                              "--delay-boot",
                                                              "--dependency",
                                                              "--distribution",
                                                              "--error",
                                                              "--exclude",
                                                              "--export",
                                                              "--export-file",
                                                              "--extra",
                                                              "--extra-node-info",
                                                              "--gid",
                                                              "--gpu-bind",
                                                              "--gpu-freq",
                                                              "--gpus",
                                                              "--gpus-per-node",
                                                              "--gpus-per-socket",
                                                              "--gpus-per-task",
                                                              "--gres",
                                                              "--gres-flags",
                                                              "--hint",
                                                              "--input",
                                                              "--job-name",
                                                              "--jobid",
                                                              "--kill-on-invalid-dep",
                                                              "--licenses",
                                                              "--mail-type",
                                                              "--mail-user",
                                                              "--mcs-label",
                                                              "--mem",
                                                              "--mem-bind",
                                                              "--mem-per-cpu",
                                                              "--mem-per-gpu",
                                                              "--mincpus",
                                                              "--network",
                                                              "--nodefile",
                                                              "--nodelist",
                                                              "--nodes",
                                                              "--ntasks",
                                                              "--ntasks-per-core",
                                                              "--ntasks-per-gpu",
                                                              "--ntasks-per-node",
                                                              "--ntasks-per-socket",
                                                              "--open-mode",
                                                              "--output",
                                                              "--partition",
                                                              "--power",
                                                              "--prefer",
                                                              "--priority",
                                                              "--profile",
                                                              "--qos",
                                                              "--reservation",
                                                              "--segment",
                                                              "--signal",
                                                              "--sockets-per-node",
                                                              "--switches",
                                                              "--thread-spec",
                                                              "--threads-per-core",
                                                              "--time",
                                                              "--time-min",
                                                              "--tmp",
                                                              "--tres-bind",
                                                              "--tres-per-task",
                                                              "--uid",
                                                              "--wait-all-nodes",
                                                              "--wckey",
                                                              "--wrap"};
  return *values;
}
constexpr char kShortValues[] = "aAbBcCdDeFGiJLmMnNopqStwx";

bool BeginsWith(const std::string& text, const char* begin) { return text.compare(0, strlen(begin), begin) == 0; }

// Whether the next word is the value of this option.
bool TakesNext(const std::string& option) {
  if (BeginsWith(option, "--")) return option.find('=') == std::string::npos && LongFlags().count(option) == 0;
  return option.size() == 2 && !strchr(kShortFlags, option[1]);
}

bool IsOwn(const std::string& option) {
  return BeginsWith(option, "--checkpoint-") || option == "--help" || option == "-h" || option == "--version";
}

// Whether an option that may take the next word is none of those that do.
bool IsGuess(const std::string& option) {
  if (option == ":" || IsOwn(option)) return false;
  return BeginsWith(option, "--") ? LongValues().count(option) == 0 : !strchr(kShortValues, option[1]);
}

// Calls `use` for the lines that sbatch reads, up to the first command.
template <typename Use>
void ForSbatchLines(const std::string& text, const Use& use) {
  std::istringstream lines(text);
  std::string line;
  while (std::getline(lines, line)) {
    if (line.find_first_not_of(" \t\r") != std::string::npos && line[0] != '#') return;
    if (BeginsWith(line, "#SBATCH") || BeginsWith(line, "#PBS") || BeginsWith(line, "#BSUB")) use(line);
  }
}

// The words of a line behind "#SBATCH", up to a comment.
std::vector<std::string> WordsOf(const std::string& line) {
  std::istringstream in(line.substr(strlen("#SBATCH")));
  std::vector<std::string> words;
  for (std::string word; in >> word && word[0] != '#';) words.push_back(word);
  return words;
}

bool HasOwnWords(const std::string& line) {
  return BeginsWith(line, "#SBATCH") && line.find(" --checkpoint-") != std::string::npos;
}

}  // namespace

Submission Divide(const std::vector<std::string>& words) {
  Submission found;
  size_t at = 0;
  // A colon stands between the components of a heterogeneous job.
  const auto is_option = [](const std::string& word) { return word == ":" || (word.size() > 1 && word[0] == '-'); };
  for (; at < words.size() && is_option(words[at]); ++at) {
    const std::string& word = words[at];
    if (word == "--") {
      ++at;
      break;
    }
    const bool guesses = TakesNext(word) && IsGuess(word);
    const bool has_next = TakesNext(word) && at + 1 < words.size() && !(guesses && is_option(words[at + 1]));
    if (guesses && has_next) {
      found.unknown = word;
      found.guessed = words[at + 1];
    }
    const bool is_wrap = word == "--wrap" || BeginsWith(word, "--wrap=");
    if (is_wrap) {
      found.has_wrap = true;
      found.wrapped = has_next ? words[at + 1] : word.substr(std::min(word.size(), strlen("--wrap=")));
    } else {
      std::vector<std::string>& to = IsOwn(word) ? found.own : found.options;
      to.push_back(word);
      if (has_next) to.push_back(words[at + 1]);
    }
    if (has_next) ++at;
  }
  if (at < words.size() && !found.has_wrap) found.script = words[at++];
  found.arguments.assign(words.begin() + long(at), words.end());
  return found;
}

std::string Quoted(const std::string& word) {
  std::string out = "'";
  for (const char c : word) out += c == '\'' ? "'\\''" : std::string(1, c);
  return out + "'";
}

std::vector<std::string> OwnWordsOf(const std::string& text) {
  std::vector<std::string> words;
  ForSbatchLines(text, [&](const std::string& line) {
    if (!HasOwnWords(line)) return;
    const Submission found = Divide(WordsOf(line));
    words.insert(words.end(), found.own.begin(), found.own.end());
  });
  return words;
}

std::string MakeBatchScript(const std::string& text, const std::string& name, const std::vector<std::string>& runner,
                            int* line) {
  std::string script = "#!/bin/sh\n";
  if (!name.empty()) script += "#SBATCH --job-name=" + Quoted(name) + "\n";
  ForSbatchLines(text, [&](const std::string& one) {
    if (!HasOwnWords(one)) {
      script += one + "\n";
      return;
    }
    const Submission found = Divide(WordsOf(one));
    if (found.options.empty()) return;
    script += "#SBATCH";
    for (const std::string& word : found.options) script += " " + word;
    script += "\n";
  });
  script += "# The script below runs under cr-run, so that it can be saved and restarted.\nexec";
  for (const std::string& word : runner) script += " " + Quoted(word);
  *line = int(std::count(script.begin(), script.end(), '\n')) + 2;
  return script + " --script-line=" + std::to_string(*line) + " -- \"$0\" \"$@\"\n" + text;
}

std::string FromLine(const std::string& text, int line) {
  size_t at = 0;
  for (; line > 1 && at < text.size(); --line) {
    const size_t end = text.find('\n', at);
    at = end == std::string::npos ? text.size() : end + 1;
  }
  return text.substr(at);
}

}  // namespace cuda_remote::client::slurm
