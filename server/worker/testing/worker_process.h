// SPDX-License-Identifier: Apache-2.0
// A cr-worker under test: this process is its cr-server and its client.
#ifndef CUDA_REMOTE_SERVER_WORKER_TESTING_WORKER_PROCESS_H_
#define CUDA_REMOTE_SERVER_WORKER_TESTING_WORKER_PROCESS_H_

#include <sys/types.h>

#include <memory>
#include <string>
#include <vector>

#include "proto/base/unique_fd.h"
#include "proto/channel/client_channel.h"
#include "server/worker_link/worker_link.h"

namespace cuda_remote::server {

class WorkerProcess {
 public:
  // Starts `arguments[0]`, which is a cr-worker's path, and waits for Ready.
  explicit WorkerProcess(std::vector<std::string> arguments);
  ~WorkerProcess();

  // What the client's Hello asks for.

  const WorkerReady& ready() const { return ready_; }
  pid_t pid() const { return pid_; }

  // Opens the session. The channel, and with `raw_socket` and `raw_ring` duplicates of its descriptors, for clients
  // that do not behave.
  std::unique_ptr<ClientChannel> Connect(ChannelFds* raw = nullptr, const std::string& sharing_group = "",
                                         uint64_t session = 1);

  // Waits for the process to end. Its wait status; -1 if it does not end within the time.
  int WaitForEnd(int timeout_ms);
  // The reason that the worker gave when it ended; call after WaitForEnd.
  std::string EndReason();

 private:
  pid_t pid_ = -1;
  UniqueFd link_;
  WorkerReady ready_;
};

// The cr-worker and the driver to test with, from the environment (CR_WORKER, CR_WORKER_DRIVER) or the runfiles.
std::string WorkerPath();
std::string DriverPath();

}  // namespace cuda_remote::server

#endif  // CUDA_REMOTE_SERVER_WORKER_TESTING_WORKER_PROCESS_H_
