// SPDX-License-Identifier: Apache-2.0
// Our libraries in the place of the machine's own ones, for a job that has mounts of its own.
//
// LD_LIBRARY_PATH, which cr-run sets, reaches most programs. It does not reach those that get another environment (env
// -i, su -, a script that sets it anew), that have an RPATH, that load a library by its path, or that ask ldconfig. So
// each file that a program could load as the driver's library is covered by ours, and where the loader's cache names
// none, the job sees a cache that does.
#ifndef CUDA_REMOTE_CHECKPOINT_JOB_ISOLATION_STAND_INS_H_
#define CUDA_REMOTE_CHECKPOINT_JOB_ISOLATION_STAND_INS_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "checkpoint/job/isolation/isolate.h"
#include "checkpoint/job/job.h"

namespace cuda_remote::checkpoint {

inline constexpr char kLoaderCache[] = "/etc/ld.so.cache";
// Whether the job sees a cache of its own there, which a restart makes again.
bool HasOwnLoaderCache(const Job& job);

// What the job in the folder `directory` (LinkLibrary has made "lib" in it) is to see, for Plan::mounts. What covers a
// library is noted in *job, so that a restart covers it again; what is noted there already is covered if it is here.
// Fails if something could not be prepared; *mounts has the rest.
absl::Status PlanStandIns(const std::string& directory, Job* job, std::vector<Mount>* mounts);

// The file that the job sees at `path`: one of our libraries if it is covered, else `path` itself.
std::string SeenByJob(const Job& job, const std::string& path);

}  // namespace cuda_remote::checkpoint

#endif  // CUDA_REMOTE_CHECKPOINT_JOB_ISOLATION_STAND_INS_H_
