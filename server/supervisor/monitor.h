// SPDX-License-Identifier: Apache-2.0
// cr-nvml as the supervisor sees it: started with the first question, started again if it died, killed if it hangs.
//
// A question's socket goes to the process, which answers there; the supervisor never waits. Owned by the Supervisor:
// event loop's thread only, with its mutex held.
#ifndef CUDA_REMOTE_SERVER_SUPERVISOR_MONITOR_H_
#define CUDA_REMOTE_SERVER_SUPERVISOR_MONITOR_H_

#include <sys/types.h>

#include <deque>
#include <string>

#include "absl/status/status.h"
#include "proto/base/clock.h"
#include "server/nvml/ask.gen.h"
#include "server/supervisor/options.h"
#include "server/supervisor/restrict.h"

namespace cuda_remote::server {

class Monitor {
 public:
  // Both must outlive it. `restrictions`: what the process gives up; read when it starts.
  Monitor(const Options& options, const Restrictions* restrictions) : options_(options), restrictions_(restrictions) {}
  ~Monitor();

  // Hands a question on, with the socket for its answer (taken over). What cannot be handed on is refused there.
  void Submit(int socket, const Ask& ask, bool stopping);
  // The link's descriptor, to be watched for reading; -1: none.
  int link() const { return link_; }
  void ReadLink();
  // Whether questions are open, so that KillOverdue must be called now and then.
  bool busy() const { return !open_.empty(); }
  void KillOverdue();
  bool running() const { return pid_ > 0; }
  void Stop();
  // A child has ended: true if it was this one. `how`: for the log.
  bool Gone(pid_t pid, const std::string& how);

 private:
  absl::Status Start();
  void CloseLink();

  const Options& options_;
  const Restrictions* const restrictions_;
  pid_t pid_ = 0;
  int link_ = -1;
  bool stopping_ = false;
  std::deque<Moment> open_;  // when each unanswered question was handed over
};

}  // namespace cuda_remote::server

#endif  // CUDA_REMOTE_SERVER_SUPERVISOR_MONITOR_H_
