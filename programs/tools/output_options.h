// SPDX-License-Identifier: Apache-2.0
// --output, --error and --append of cr-run and cr-restart.
#ifndef CUDA_REMOTE_PROGRAMS_TOOLS_OUTPUT_OPTIONS_H_
#define CUDA_REMOTE_PROGRAMS_TOOLS_OUTPUT_OPTIONS_H_

#include <CLI/CLI.hpp>

#include "checkpoint/job/outputs.h"

namespace cuda_remote::client::tools {

inline void AddOutputOptions(CLI::App* app, checkpoint::OutputOptions* options) {
  app->add_option("--output", options->output,
                  "file for the job's standard output; another job cannot use this file meanwhile")
      ->type_name("FILE");
  app->add_option("--error", options->error, "file for its standard error; may be the same one")->type_name("FILE");
  app->add_flag("--append", options->append, "append to these files, instead of emptying them");
}

}  // namespace cuda_remote::client::tools

#endif  // CUDA_REMOTE_PROGRAMS_TOOLS_OUTPUT_OPTIONS_H_
