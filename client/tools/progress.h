// SPDX-License-Identifier: Apache-2.0
// Shows how far a long step is: on a terminal a bar with rate and time left, else now and then a line. To stderr. Not
// thread-safe.
#ifndef CUDA_REMOTE_CLIENT_TOOLS_PROGRESS_H_
#define CUDA_REMOTE_CLIENT_TOOLS_PROGRESS_H_

#include <cstdint>
#include <string>

#include "checkpoint/transaction/job_report.h"
#include "proto/base/clock.h"

namespace cuda_remote::client::tools {

// "1.2 GiB", "17 MiB", "300 B".
std::string Bytes(double bytes);

class Progress final : public checkpoint::JobReport::LongStep {
 public:
  // `what`: "saving GPU memory". `quiet`: shows nothing.
  Progress(std::string what, bool quiet);
  // Ends the line.
  ~Progress() override;
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void Update(uint64_t done, uint64_t total) override;

 private:
  const std::string what_;
  const bool quiet_;
  const bool terminal_;
  const Moment start_ = Now();
  Moment shown_;
  bool line_open_ = false;
};

}  // namespace cuda_remote::client::tools

#endif  // CUDA_REMOTE_CLIENT_TOOLS_PROGRESS_H_
