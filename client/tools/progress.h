// SPDX-License-Identifier: Apache-2.0
// Shows how far a long step is: on a terminal a bar with rate and time left, else now and then a line. To stderr. Not
// thread-safe.
#ifndef CUDA_REMOTE_CLIENT_TOOLS_PROGRESS_H_
#define CUDA_REMOTE_CLIENT_TOOLS_PROGRESS_H_

#include <chrono>
#include <cstdint>
#include <string>

#include "checkpoint/transaction/job_report.h"

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
  using Clock = std::chrono::steady_clock;
  const std::string what_;
  const bool quiet_;
  const bool terminal_;
  const Clock::time_point start_ = Clock::now();
  Clock::time_point shown_;
  bool line_open_ = false;
};

}  // namespace cuda_remote::client::tools

#endif  // CUDA_REMOTE_CLIENT_TOOLS_PROGRESS_H_
