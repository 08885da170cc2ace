// SPDX-License-Identifier: Apache-2.0
// What a person sees of the saving, restarting and moving of a job (save_job.h, restart_job.h, move_job.h), and how
// that person ends it. The tools show it; tests look at it.
#ifndef CUDA_REMOTE_CHECKPOINT_TRANSACTION_JOB_REPORT_H_
#define CUDA_REMOTE_CHECKPOINT_TRANSACTION_JOB_REPORT_H_

#include <cstdint>
#include <memory>
#include <string>

namespace cuda_remote::checkpoint {

// Only Say may be called by several threads at a time.
class JobReport {
 public:
  // A step of which a person wants to see how far it is. It ends with this object.
  class LongStep {
   public:
    virtual ~LongStep() = default;
    // In bytes.
    virtual void Update(uint64_t done, uint64_t total) = 0;
  };

  virtual ~JobReport() = default;

  // The tool's name, such as "cr-checkpoint". Valid until the program ends.
  virtual const char* Tool() const = 0;
  // One sentence: something is not as it should be, but the work goes on.
  virtual void Say(const std::string& text) = 0;
  // `what`: "saving GPU memory". Never null.
  virtual std::unique_ptr<LongStep> Begin(const std::string& what) = 0;
  // A step has ended. It began when the one before ended, or with the work.
  virtual void Done(const char* step) = 0;
  // Whether to give up. Functions that do fail, with "interrupted" or what they were at.
  virtual bool Cancelled() = 0;
};

}  // namespace cuda_remote::checkpoint

#endif  // CUDA_REMOTE_CHECKPOINT_TRANSACTION_JOB_REPORT_H_
