// A saved job's processes come back in a new namespace, beside other work: they are restored while GPU memory is
// loaded, and do not run before that is done.
#ifndef CUDA_REMOTE_CLIENT_TOOLS_PROCESS_RESTORE_H_
#define CUDA_REMOTE_CLIENT_TOOLS_PROCESS_RESTORE_H_

#include <stdio.h>

#include <string>
#include <vector>

#include "client/tools/isolate.h"
#include "client/tools/job.h"
#include "client/tools/terminal.h"

namespace cuda_remote::client::tools {

// Functions return false and one sentence in *error. Not thread-safe.
class ProcessRestore {
 public:
  // `directory`: the job's folder from now on, which the job sees where its old one was.
  ProcessRestore(const Job& job, const std::string& directory) : job_(job), directory_(directory) {}
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

 private:
  std::string LogPath() const { return directory_ + "/criu-restore.log"; }
  bool MakeHold(std::string* error);
  void CloseOpened();

  const Job& job_;
  const std::string directory_;
  Isolated isolated_;
  bool begun_ = false;
  TerminalCopy copy_;
  int hold_ = -1;            // the pipe that cr-hold reads
  std::vector<int> opened_;  // what CRIU inherits
  FILE* output_ = nullptr;   // CRIU's words, which nobody needs: its log has them
};

}  // namespace cuda_remote::client::tools

#endif  // CUDA_REMOTE_CLIENT_TOOLS_PROCESS_RESTORE_H_
