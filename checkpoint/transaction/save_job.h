// SPDX-License-Identifier: Apache-2.0
// Saves a running job: the work of cr-checkpoint. checkpoint/README.md has its steps.
#ifndef CUDA_REMOTE_CHECKPOINT_TRANSACTION_SAVE_JOB_H_
#define CUDA_REMOTE_CHECKPOINT_TRANSACTION_SAVE_JOB_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "checkpoint/engine/snapshot_engine.h"
#include "checkpoint/gpu/gpu_state.h"
#include "checkpoint/gpu/precopy.h"
#include "checkpoint/job/job.h"
#include "checkpoint/job/step_gate.h"
#include "checkpoint/transaction/job_report.h"
#include "checkpoint/transaction/session_keeper.h"
#include "ckptfmt/image_writer.h"

namespace cuda_remote::checkpoint {

struct SaveJobOptions {
  std::string image;       // the image's folder; with `keep`, the folder of the images
  size_t keep = 0;         // how many images stay, which share what is the same in them; 0: `image` is the only one
  bool stop = false;       // ends the job once it is saved
  bool close_tcp = false;  // SaveOptions::close_tcp
  double timeout = 60;     // seconds to wait for CUDA calls that are in progress
  int compress = -1;       // ckptfmt::WriterOptions::zstd_level
  std::optional<uint64_t> pool;  // bytes of host memory for GPU memory that waits to be written; nothing: what is spare
  // Of cr-hostd's, which gives the image to its user when it is complete; null: a person has started the tool.
  StepGate* gate = nullptr;
  bool waits = false;  // over several hosts: all come so far, and stand still until all are saved
};

// Of a checkpoint that has succeeded. Times are in seconds.
struct SaveJobOutcome {
  std::string image;
  double seconds = 0, paused = 0;
  // Parts of it: making memory ready beforehand, then reading GPU memory and the engine's dump in the pause.
  double preparing = 0, reading = 0, dumping = 0;
  uint64_t prepared_bytes = 0;
  // Copying GPU memory while the job runs.
  PrecopyTimes precopy;
  SaveTimes saving;
  // Kept on the GPU in the pause and read behind it.
  uint64_t behind_bytes = 0;
  double behind = 0;
  ckptfmt::ImageSizes sizes;
};

// The step after which the outcome says how reading GPU memory went (JobReport::Done).
inline constexpr char kStepReading[] = "reading GPU memory";

// A failure to write `image`, as a person understands it: names the image in the place of `inside`, a path that only
// this process can use. If the disk is full, says what the image needs, in bytes, and what is free in `folder`.
absl::Status OfImage(const absl::Status& status, const std::string& inside, const std::string& image, uint64_t needed,
                     const std::string& folder);

// One checkpoint of the job in `directory`. On failure there is no image, and the job continues. `engine`: a new one.
// `keeper`: started for this job. For one thread; starts others meanwhile.
absl::Status SaveJob(const SaveJobOptions& options, const Job& job, const std::string& directory,
                     SnapshotEngine* engine, SessionKeeper* keeper, JobReport* report, SaveJobOutcome* outcome);

}  // namespace cuda_remote::checkpoint

#endif  // CUDA_REMOTE_CHECKPOINT_TRANSACTION_SAVE_JOB_H_
