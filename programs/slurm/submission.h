// SPDX-License-Identifier: Apache-2.0
// What cr-sbatch makes of the words for sbatch: where the script is in them, and the script that is submitted instead.
#ifndef CUDA_REMOTE_PROGRAMS_SLURM_SUBMISSION_H_
#define CUDA_REMOTE_PROGRAMS_SLURM_SUBMISSION_H_

#include <string>
#include <vector>

namespace cuda_remote::client::slurm {

struct Submission {
  std::vector<std::string> own;        // options of cr-sbatch
  std::vector<std::string> options;    // options of sbatch, without --wrap
  std::string script;                  // its path; empty: --wrap, or standard input
  std::vector<std::string> arguments;  // of the script
  std::string wrapped;                 // the command of --wrap
  bool has_wrap = false;
  std::string unknown;  // the last option that is none of sbatch's known ones, and
  std::string guessed;  // the word behind it that was taken for its value
};

// Tells the words of `words` apart, which sbatch would get. Own options are those that begin with --checkpoint-, and
// --help and --version. A site's plugins can have options of their own, so that unknown ones are sbatch's: the next
// word is taken for their value unless it begins with a dash.
Submission Divide(const std::vector<std::string>& words);

// Options of cr-sbatch in the lines with #SBATCH that a script begins with.
std::vector<std::string> OwnWordsOf(const std::string& text);

// A batch script that runs `runner`, a command line, on the script `text`: with the options of sbatch in the lines
// that `text` begins with, and with `text` itself at its end, from line *line on. `name`: the job's, if no option names
// it.
std::string MakeBatchScript(const std::string& text, const std::string& name, const std::vector<std::string>& runner,
                            int* line);

// What follows the first `line` - 1 lines of a text.
std::string FromLine(const std::string& text, int line);

// A word as a shell reads it back.
std::string Quoted(const std::string& word);

}  // namespace cuda_remote::client::slurm

#endif  // CUDA_REMOTE_PROGRAMS_SLURM_SUBMISSION_H_
