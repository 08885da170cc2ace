// SPDX-License-Identifier: Apache-2.0
// Files through which a job's processes share memory, and which have a name: POSIX shared memory in /dev/shm, files
// that are mapped to be written together in folders for temporary files, and the session folders of Open MPI. CRIU
// saves a file that has a name by its name alone. On another host, or when the job has ended and has removed them, they
// would be missing; and after a checkpoint of a job that went on, their contents would not be those of its memory. So
// an image has them, as "shared-file-N" beside CRIU's files, copied while the processes stand still (cr_hold.cc).
#ifndef CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_SHARED_FILES_H_
#define CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_SHARED_FILES_H_

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "checkpoint/engine/criu/process_facts.pb.h"
#include "proto/base/mappings.h"
#include "proto/base/unique_fd.h"

namespace cuda_remote::checkpoint {

// Those that these processes, numbered as seen here, have open or mapped, and nobody else. Also the temporary folders
// in which they have Unix sockets. `processes`: with what each has mapped. `own_folder`: what is in it is left out, the
// job's folder. Files that disappear meanwhile are left out, too. Those that stand in *facts already are known to be
// nobody else's.
void FindSharedFiles(const std::map<int, std::vector<Mapping>>& processes, const std::string& own_folder,
                     ProcessFacts* facts);

// A file that was opened under a name that is gone, and has another one in the same folder. (glibc's sem_open makes
// each semaphore so.) CRIU keeps such a file by a link beside it, link_remap.NUMBER, whose numbers begin anew with each
// dump: where several jobs have such files in one folder, /dev/shm above all, their dumps must come one after the
// other. Holds the locks of these folders (flock) from before a dump until SettleLinks is done, and removes what a dump
// of this job that was killed has left there. If another one has a folder for 30 s, goes on without it; then CRIU may
// find its links' names taken.
class LinkLocks {
 public:
  explicit LinkLocks(const ProcessFacts& facts);
  LinkLocks(const LinkLocks&) = delete;
  LinkLocks& operator=(const LinkLocks&) = delete;

  // For CRIU, which goes on if its caller is killed.
  const std::vector<UniqueFd>& locks() const { return locks_; }

 private:
  std::vector<UniqueFd> locks_;
};

// After a dump these links are taken away, and the image's ones get names of their own, which say which of the shared
// files it is. Fails if one of the links is no shared file.
absl::Status SettleLinks(const ProcessFacts& facts, const std::string& image_folder);

// What cr-hold must know to copy them into the folder that is open as `image`: kSharedFilesVariable's value.
std::string SharedFilesToCopy(const ProcessFacts& facts, int image);

// Brings them back from the open folder `image`, with the links that are in `files`, CRIU's files.img. What is there
// with the same contents stays. Fails if one cannot be made, or has other contents and is used by a process.
absl::Status RestoreSharedFiles(const ProcessFacts& facts, int image, std::string_view files);

// CRIU makes a deleted file that is still in use under a name beside its own, NAME.cr.NUMBER.ghost, and a restore that
// is killed leaves that. Removes those of the files `paths` that nobody uses: the next restore would fail at them.
void RemoveGhosts(const std::vector<std::string>& paths);

}  // namespace cuda_remote::checkpoint

#endif  // CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_SHARED_FILES_H_
