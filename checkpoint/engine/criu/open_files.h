// SPDX-License-Identifier: Apache-2.0
// The files that a saved job has open, compared with what is there now. CRIU refuses a file whose length has changed;
// this says so earlier and in better words, and can cut files back that the job has gone on writing after the
// checkpoint.
#ifndef CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_OPEN_FILES_H_
#define CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_OPEN_FILES_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "checkpoint/engine/criu/process_facts.pb.h"

namespace cuda_remote::checkpoint {

struct SavedFile {
  std::string path;
  uint64_t bytes = 0;  // at the checkpoint
  bool written = false;
};

// The files in CRIU's files.img whose length counts (all but those that are only appended to). `remaps`: CRIU's
// remap-fpath.img; the files that it lists are left out, since another file may have taken their names. Empty: there is
// none. False if these are not such files. Any input is safe.
bool ParseFiles(std::string_view image, std::string_view remaps, const ProcessFacts& process_facts,
                std::vector<SavedFile>* files);

// Compares, and gives the files open for writing that have grown. Fails for a difference that cannot be undone.
absl::StatusOr<std::vector<SavedFile>> CompareFiles(const std::vector<SavedFile>& files);

// A process of a running job that has the plain file at `path` open for writing, for a message; empty: none.
std::string OtherWriter(const std::string& path);

// Cuts them back to their length at the checkpoint.
absl::Status CutBack(const std::vector<SavedFile>& longer);

}  // namespace cuda_remote::checkpoint

#endif  // CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_OPEN_FILES_H_
