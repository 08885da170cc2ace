// SPDX-License-Identifier: Apache-2.0
// What the driver prints: device printf to this process's standard output, the texts of device assertions to its
// standard error. Both are files in memory from Install on; the bytes go to the client before the reply of the call
// that made them appear. What goes to standard error is a warning in this worker's log, too: a server of a job's own
// logs errors alone, since its log is the job's standard error. Thread-safe after Install.
#ifndef CUDA_REMOTE_SERVER_WORKER_SESSION_OUTPUT_CAPTURE_H_
#define CUDA_REMOTE_SERVER_WORKER_SESSION_OUTPUT_CAPTURE_H_

#include <cstdint>
#include <functional>
#include <string_view>

#include "absl/status/status.h"
#include "proto/threads/mutex.h"

namespace cuda_remote::server {

class OutputCapture {
 public:
  // Puts memory files in the place of descriptors 1 and 2. Once for each process.
  absl::Status Install();

  // The standard error of before, for messages of the worker itself.
  int log_fd() const { return log_fd_; }

  // Hands all bytes that were written since the last time to `send`, in order; those for standard error after the
  // others. Cheap if there are none.
  void Flush(const std::function<void(std::string_view bytes, bool to_stderr)>& send);

 private:
  struct File {
    int fd = -1;
    uint64_t taken = 0;
  };
  static absl::Status Replace(int descriptor, const char* name, File* file);
  static void Take(File* file, const std::function<void(std::string_view)>& send);

  Mutex mutex_;
  File out_ CR_GUARDED_BY(mutex_), err_ CR_GUARDED_BY(mutex_);
  int log_fd_ = 2;
};

}  // namespace cuda_remote::server

#endif  // CUDA_REMOTE_SERVER_WORKER_SESSION_OUTPUT_CAPTURE_H_
