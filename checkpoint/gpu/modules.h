// SPDX-License-Identifier: Apache-2.0
// Whether the GPUs that a job goes to can run its modules; asked before anything is moved.
#ifndef CUDA_REMOTE_CHECKPOINT_GPU_MODULES_H_
#define CUDA_REMOTE_CHECKPOINT_GPU_MODULES_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ckptfmt/image_reader.h"
#include "ckptfmt/types.h"
#include "replay/log/log.h"

namespace cuda_remote::checkpoint {

// Fails if the log has a module with code for one of the GPUs `before` and for none of `after`: names the first such
// module and counts the others. A module that no GPU of before could run, or that cannot be read, is left to the
// driver. Memory: one list of entries at a time; nothing is unpacked.
absl::Status CheckModules(const replay::Log& log, const std::vector<ckptfmt::DeviceFacts>& before,
                          const std::vector<ckptfmt::DeviceFacts>& after);

// Whether a process that saw the GPUs `before` can go on with `after`, at `where` (for messages): there are as many,
// and they can run its modules.
absl::Status CheckDevices(const replay::Log& log, const std::vector<ckptfmt::DeviceFacts>& before,
                          const std::vector<ckptfmt::DeviceFacts>& after, const std::string& where);

// Why the processes of an image cannot go on with the GPUs `after`, at `where`: a sentence for each reason, with the
// process. Fails if a log cannot be read.
absl::StatusOr<std::vector<std::string>> ListRefusals(const ckptfmt::ImageReader& image,
                                                      const std::vector<ckptfmt::DeviceFacts>& after,
                                                      const std::string& where);

}  // namespace cuda_remote::checkpoint

#endif  // CUDA_REMOTE_CHECKPOINT_GPU_MODULES_H_
