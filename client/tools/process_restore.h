// A saved job's processes come back in a new namespace, beside other work: they are restored while GPU memory is
// loaded, and do not run before that is done.
#ifndef CUDA_REMOTE_CLIENT_TOOLS_PROCESS_RESTORE_H_
#define CUDA_REMOTE_CLIENT_TOOLS_PROCESS_RESTORE_H_

#include <stdio.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "client/tools/isolate.h"
#include "client/tools/job.h"
#include "client/tools/terminal.h"

namespace cuda_remote::client::tools {

// Functions return false and one sentence in *error. Not thread-safe.
class ProcessRestore {
 public:
  // `directory`: the job's folder from now on, which the job sees where its old one was. `mounts`: what else it sees
  // (stand_ins.h).
  ProcessRestore(const Job& job, const std::string& directory, std::vector<Mount> mounts = {})
      : job_(job), directory_(directory), mounts_(std::move(mounts)) {}
  // Without a Finish that succeeded: ends what has come back, and nothing of it has run.
  ~ProcessRestore();
  ProcessRestore(const ProcessRestore&) = delete;
  ProcessRestore& operator=(const ProcessRestore&) = delete;

  // Starts CRIU on the files in `image_folder`, which is opened here, and does not wait for it. While the caller has one
  // thread only.
  bool Begin(const std::string& image_folder, std::string* error);

  // Waits until the processes are restored, and lets them run.
  bool Finish(Isolated* isolated, std::string* error);

  // The process that copies the job's terminal to standard output, if there is one; 0 otherwise.
  pid_t copier() const { return copy_.copier; }
  // The job's own terminal beside this program's, if there is one; after Finish.
  std::unique_ptr<JobTerminal> TakeTerminal() { return std::move(terminal_); }

 private:
  std::string LogPath() const { return directory_ + "/criu-restore.log"; }
  bool MakeHold(std::string* error);
  void CloseOpened();

  const Job& job_;
  const std::string directory_;
  const std::vector<Mount> mounts_;
  Isolated isolated_;
  bool begun_ = false;
  TerminalCopy copy_;
  std::unique_ptr<JobTerminal> terminal_;
  int hold_ = -1;            // the pipe that cr-hold reads
  std::vector<int> opened_;  // what CRIU inherits
  FILE* output_ = nullptr;   // CRIU's words, which nobody needs: its log has them
};

}  // namespace cuda_remote::client::tools

#endif  // CUDA_REMOTE_CLIENT_TOOLS_PROCESS_RESTORE_H_
