// SPDX-License-Identifier: Apache-2.0
// CRIU's restore: the processes come back in a new namespace while GPU memory is loaded, and do not run before that is
// done.
#ifndef CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_CRIU_RESTORE_H_
#define CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_CRIU_RESTORE_H_

#include <stdio.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "checkpoint/engine/criu/criu.h"
#include "checkpoint/engine/criu/ghost_locks.h"
#include "checkpoint/engine/criu/process_facts.pb.h"
#include "checkpoint/engine/snapshot_engine.h"
#include "checkpoint/job/isolation/isolate.h"
#include "checkpoint/job/isolation/terminal.h"
#include "checkpoint/job/job.h"

namespace cuda_remote::checkpoint {

// Not thread-safe.
class CriuRestore final : public ProcessRestore {
 public:
  // `directory`: the job's folder from now on, which the job sees where its old one was. `mounts`: what else it sees
  // (stand_ins.h). `logs`: where CRIU's log stays after a failure; empty: nowhere. `files_image`: for CRIU to read
  // instead of the image's own files.img; empty: that. `network`: as SavedProcesses::Begin has it. `say`: called with a
  // sentence for each setting of a socket that cannot be as before; may be null.
  CriuRestore(const Job& job, const ProcessFacts& facts, const std::string& directory, std::vector<Mount> mounts,
              std::string logs = {}, std::string files_image = {}, int network = -1,
              std::function<void(const std::string&)> say = {})
      : job_(job),
        facts_(facts),
        directory_(directory),
        mounts_(std::move(mounts)),
        logs_(std::move(logs)),
        files_image_(std::move(files_image)),
        network_(network),
        say_(std::move(say)),
        account_(AccountOf(job)) {}
  ~CriuRestore() override;
  CriuRestore(const CriuRestore&) = delete;
  CriuRestore& operator=(const CriuRestore&) = delete;

  // Starts CRIU on the files in `image_folder`, which is opened here, and does not wait for it. While the caller has
  // one thread only.
  absl::Status Begin(const std::string& image_folder);

  // ProcessRestore.
  absl::Status AwaitHeld() override;
  absl::StatusOr<Isolated> Finish() override;
  pid_t copier() const override { return copy_.copier; }
  std::unique_ptr<JobTerminal> TakeTerminal() override { return std::move(terminal_); }

 private:
  // Where CRIU may write, as seen from here, if its rights are a user's.
  std::string Work() const { return directory_ + (account_ ? "/user" : ""); }
  std::string LogPath() const { return Work() + "/" + kRestoreLog; }
  absl::Status MakeHold();
  // What CRIU does not restore. All processes are there, and held.
  void RestoreTheRest();
  // A folder that shows the image's files but for files.img.
  absl::Status ShowImage(int image);
  void RemoveShownImage();
  void CloseOpened();

  const Job& job_;
  const ProcessFacts& facts_;
  const std::string directory_;
  const std::vector<Mount> mounts_;
  const std::string logs_, files_image_;
  const int network_;
  const std::function<void(const std::string&)> say_;
  const std::optional<Account> account_;
  Isolated isolated_;
  bool begun_ = false;
  std::string image_;  // the folder with the image's files, by a descriptor
  TerminalCopy copy_;
  std::unique_ptr<JobTerminal> terminal_;
  GhostLocks ghosts_;
  int hold_ = -1;            // the pipe that cr-hold reads
  int held_ = -1;            // inotify of it: cr-hold opens it when the processes are restored
  std::vector<int> opened_;  // what CRIU inherits
  FILE* output_ = nullptr;   // CRIU's words, which nobody needs: its log has them
};

}  // namespace cuda_remote::checkpoint

#endif  // CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_CRIU_RESTORE_H_
