// SPDX-License-Identifier: Apache-2.0
// What a saved job needs of the machine that restarts it, and cuda-remote's own libraries, of which an image has
// copies.
//
// CRIU maps a process's libraries again by their paths, and refuses one that has changed. So the client library would
// bind an image to one installation: after an upgrade no image could be restarted. An image therefore has those of our
// libraries that the job's processes had mapped, and says that they lie in the job's folder; a restart puts them there.
//
// Not thread-safe.
#ifndef CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_NEEDS_H_
#define CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_NEEDS_H_

#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "checkpoint/engine/criu/process_facts.pb.h"
#include "checkpoint/job/job.h"
#include "ckptfmt/types.h"
#include "proto/base/unique_fd.h"

namespace cuda_remote::checkpoint {

// The files in CRIU's files.img that must be there at a restart, with the kernel's release. False if `image` is not
// such a file, or `remaps` is neither empty nor CRIU's remap-fpath.img. Any input is safe. Not needed: deleted files,
// which are in `remaps`, also where another file has the name by now; and what `exists` denies.
bool ReadNeeds(std::string_view image, std::string_view remaps, const Job& job, const ProcessFacts& facts,
               bool (*exists)(const Job& job, const std::string& path), ckptfmt::Needs* needs);

// A library of ours that the image is to have: the file, its path in the job, and that of the copy.
struct KeptFile {
  UniqueFd from;
  std::string path, to;
};

// What CRIU has just saved into `client_folder` of a job that stands still: fills in *needs, gives our libraries that
// go into `client_folder`, and changes their paths in files.img.
absl::Status DescribeNeeds(const Job& job, const ProcessFacts& facts, const std::string& client_folder,
                           ckptfmt::Needs* needs, std::vector<KeptFile>* kept);

// Copies them; the job may run on, and end, meanwhile.
absl::Status CopyKeptLibraries(const std::vector<KeptFile>& kept);

// Puts the image's own libraries where its processes will look for them: `directory` is the job's folder here.
absl::Status PutKeptLibraries(const std::string& client_folder, const std::string& directory);

}  // namespace cuda_remote::checkpoint

#endif  // CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_NEEDS_H_
