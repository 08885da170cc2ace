// SPDX-License-Identifier: Apache-2.0
// What checkpoint/transaction reports of its work, on stderr: bars, lines, and the time of each step.
#ifndef CUDA_REMOTE_PROGRAMS_TOOLS_TOOL_REPORT_H_
#define CUDA_REMOTE_PROGRAMS_TOOLS_TOOL_REPORT_H_

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "checkpoint/transaction/job_report.h"
#include "programs/tools/foreground.h"
#include "programs/tools/steps.h"
#include "proto/cli/progress.h"

namespace cuda_remote::client::tools {

class ToolReport : public checkpoint::JobReport {
 public:
  // `quiet`: no bars; `times`: the time of each step, the first of which begins now.
  ToolReport(const char* tool, bool quiet, bool times, std::function<bool()> cancelled)
      : tool_(tool), quiet_(quiet), cancelled_(std::move(cancelled)), steps_(tool, times) {}

  const char* Tool() const override { return tool_; }
  void Say(const std::string& text) override { tools::Say(tool_, text); }
  std::unique_ptr<LongStep> Begin(const std::string& what) override { return std::make_unique<Bar>(what, quiet_); }
  void Done(const char* step) override { steps_.Done(step); }
  bool Cancelled() override { return cancelled_(); }

 protected:
  const Steps& steps() const { return steps_; }

 private:
  class Bar final : public LongStep {
   public:
    Bar(const std::string& what, bool quiet) : progress_(what, quiet) {}
    void Update(uint64_t done, uint64_t total) override { progress_.Update(done, total); }

   private:
    cli::Progress progress_;
  };

  const char* const tool_;
  const bool quiet_;
  const std::function<bool()> cancelled_;
  Steps steps_;
};

}  // namespace cuda_remote::client::tools

#endif  // CUDA_REMOTE_PROGRAMS_TOOLS_TOOL_REPORT_H_
