// SPDX-License-Identifier: Apache-2.0
// Saving and restoring the processes of a job with CRIU.
//
// The dump runs inside the job's namespaces, so that CRIU sees an ordinary process tree; the restore is a command for
// the init process of a new namespace (isolate.h).
#ifndef CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_CRIU_H_
#define CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_CRIU_H_

#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "checkpoint/engine/criu/page_receiver.h"
#include "checkpoint/engine/criu/process_facts.pb.h"
#include "checkpoint/job/account.h"
#include "checkpoint/job/job.pb.h"

namespace cuda_remote::checkpoint {

// The CRIU to use: $CUDA_REMOTE_CRIU, the private one of tools/setup-criu, criu on the path. Fails if there is none.
absl::StatusOr<std::string> FindCriu();

// Whether this process has what no save and no restore can do without.
absl::Status HasCapabilities();

// Those that it keeps where it has a user's rights: to trace processes, to make them with given numbers, to repair TCP
// connections, and to give limits back. None to change the user, and none for files: CRIU opens, makes and removes by
// their names what the job had, and the user may have put something else there.
std::vector<int> CriuCapabilities();

// Its version, such as 4.2.1; empty if it does not say.
std::string CriuVersion(const std::string& criu);
// Why this CRIU does not work on this kernel, as its check says; empty: it does. What a container lacks and a restore
// does not need is no reason.
std::string CriuCheck(const std::string& criu);

// Fills in what an image must remember of the job's processes: standard streams, inherited files, and what they use of
// the processor and the kernel. `close_tcp`: TCP connections with others are to be closed in the image. Fails if there
// is something that cannot be saved.
absl::Status DescribeProcesses(const Job& job, bool close_tcp, ProcessFacts* facts);

// About how much memory of the job's processes a dump saves, in bytes.
uint64_t SavedBytes(const Job& job);

// What a dump finds out besides the image.
struct DumpFacts {
  std::set<int> stopped_before;  // for ContinueProcesses
  bool failure_passes = false;   // SnapshotEngine::FailurePasses
};

// Saves the job's processes into `image_folder`. Afterwards they run on, or are stopped (`leave_stopped`). CRIU's log
// is DumpLog. Of a user's own job, `work_folder` is touched with his rights only. `still`: SnapshotEngine::OnStill; may
// be null. `pages`: a new one, which then has files to finish. `cancelled`: SaveOptions::cancelled. CRIU is ended if it
// makes no progress.
absl::Status DumpProcesses(const Job& job, const ProcessFacts& facts, const std::string& image_folder,
                           const std::string& work_folder, bool leave_stopped,
                           const std::function<absl::Status()>& still, PageReceiver* pages, DumpFacts* found,
                           const std::function<bool()>& cancelled = nullptr);

std::string DumpLog(const Job& job, const std::string& image_folder, const std::string& work_folder);

// Waits until no CRIU saves the processes of the job whose `work_folder` this is: its caller may have been killed.
void AwaitDumpProcesses(const std::string& work_folder);

// After a dump that left them stopped: lets them run on, or ends them. `stopped_before`: processes that somebody else
// had stopped, as numbered inside; these stay so.
bool ContinueProcesses(const Job& job, const std::set<int>& stopped_before = {});
bool KillProcesses(const Job& job);

// The command that restores. *opened: descriptors that it inherits, for this process's streams and the files that the
// job needs; close them when it has run, and after a failure. `seen_image`: where CRIU finds the files of
// `image_folder`. `terminal`: for streams that were a terminal, -1 if there is none.
absl::Status RestoreCommand(const Job& job, const ProcessFacts& facts, const std::string& image_folder,
                            const std::string& seen_image, const std::string& work_folder, int terminal,
                            std::vector<std::string>* command, std::vector<int>* opened);

// Whether the restore needs a terminal.
bool NeedsTerminal(const ProcessFacts& facts);

// The first errors in CRIU's log `path`, for a message.
std::string CriuErrors(const std::string& path);

// Whether such errors may come from a missing capability.
bool MayLackRights(const std::string& errors);

// Where the build tree has cr-hold.
inline constexpr char kOwnFolder[] = "checkpoint/engine/criu";

// Names of CRIU's logs in the work folder (kEngineFiles).
inline constexpr char kDumpLog[] = "engine-dump.log";
inline constexpr char kRestoreLog[] = "engine-restore.log";
// Locked there as long as CRIU runs.
inline constexpr char kDumpLock[] = "engine-dump.lock";
// How the names of their copies beside an image end (SnapshotEngine::KeepLogs).
inline constexpr char kKeptDumpLog[] = "criu-dump.log";
inline constexpr char kKeptRestoreLog[] = "criu-restore.log";

// Of a job that runs as another user: all in the open folder becomes root's, and a CRIU with that user's rights can
// read it by a descriptor. Others cannot: nobody but root can come to it by its path.
absl::Status OpenToCriu(const Account& account, int folder);

// Writes what CRIU's log says to `kept`, a new file. Returns what is then to be added to the message of CRIU's failure.
std::string KeepCriuLog(const std::string& text, const std::string& kept);

}  // namespace cuda_remote::checkpoint

#endif  // CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_CRIU_H_
