// SPDX-License-Identifier: Apache-2.0
// The one progress bar. It shows how far a long step is, on stderr: on a terminal a bar with rate and time left, else
// now and then a line. Not thread-safe.
#ifndef CUDA_REMOTE_PROTO_CLI_PROGRESS_H_
#define CUDA_REMOTE_PROTO_CLI_PROGRESS_H_

#include <cstdint>
#include <string>

#include "proto/base/clock.h"

namespace cuda_remote::cli {

class Progress {
 public:
  // `what`: "saving GPU memory". `quiet`: shows nothing.
  Progress(std::string what, bool quiet);
  // Ends the line.
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // In bytes.
  void Update(uint64_t done, uint64_t total);

 private:
  const std::string what_;
  const bool quiet_;
  const bool terminal_;
  const Moment start_ = Now();
  Moment shown_;
  bool line_open_ = false;
};

}  // namespace cuda_remote::cli

#endif  // CUDA_REMOTE_PROTO_CLI_PROGRESS_H_
