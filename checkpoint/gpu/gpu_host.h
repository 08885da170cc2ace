// SPDX-License-Identifier: Apache-2.0
// Reaches a GPU server for a tool: turns an address that a person gives into the path of a socket on this machine. For
// a server on another host it starts a cr-relay; without an address, a cr-server of the job's own.
//
// The process that it starts ends with the GpuHost object, or with the tool if that is killed. A `detached` one does
// not; it keeps nothing of the tool's open, and writes its messages to a file beside its socket (relay.log). Another
// file there says which server a relay is for (relay.server, proto/folder/this_job.h).
#ifndef CUDA_REMOTE_CHECKPOINT_GPU_GPU_HOST_H_
#define CUDA_REMOTE_CHECKPOINT_GPU_GPU_HOST_H_

#include <sys/types.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "checkpoint/job/account.h"

namespace cuda_remote::checkpoint {

// How servers and relays are started.
struct GpuHostOptions {
  std::string folder;     // for their sockets
  bool detached = false;  // they outlive this tool, and end by themselves when they have had no session for a while
  std::optional<Account> account;  // whom they run as; `folder` is that user's then
  // The variables of that account, NAME=VALUE, which must outlive the host; null: this tool's own.
  const std::vector<std::string>* environment = nullptr;
};

// Fails unless `address` is "unix:PATH" or "HOST:PORT" with a port from 1 to 65535.
absl::Status CheckServerAddress(const std::string& address);

class GpuHost {
 public:
  // `address`: "unix:PATH" (a socket, or cr-server's folder), "HOST:PORT", or empty for an own server that serves `gpu`
  // only (-1: all).
  static absl::StatusOr<std::unique_ptr<GpuHost>> Open(const std::string& address, int gpu,
                                                       const GpuHostOptions& options);
  ~GpuHost();
  GpuHost(const GpuHost&) = delete;
  GpuHost& operator=(const GpuHost&) = delete;

  // Asks the server whether it can serve sessions of this host's account, and fails if it cannot, or does not answer
  // within 20 s. `goes_on`: as for control::CallOnSocket.
  absl::Status Ask(const std::function<bool(int waited_ms)>& goes_on) const;

  // Of the socket that serves sessions.
  const std::string& socket_path() const { return path_; }
  // For CUDA_REMOTE_SERVER.
  std::string server() const { return "unix:" + path_; }
  // The server or relay that was started, 0 if none was.
  pid_t process() const { return process_; }

 private:
  explicit GpuHost(const GpuHostOptions& options) : options_(options) {}
  const GpuHostOptions options_;
  std::string path_;
  pid_t process_ = 0;
};

// The ways to several servers, for jobs whose processes are not all on one. Each is opened once, and kept.
class GpuHosts {
 public:
  explicit GpuHosts(GpuHostOptions options) : options_(std::move(options)) {}

  // The way to `address`, which lives as long as this.
  absl::StatusOr<GpuHost*> Open(const std::string& address, int gpu);
  // Whether `pid` is a server or relay that was started.
  bool Started(pid_t pid) const;
  // All servers and relays that were started.
  std::vector<pid_t> Started() const;

 private:
  struct Entry {
    std::string address;
    std::unique_ptr<GpuHost> host;
  };
  const GpuHostOptions options_;
  std::vector<Entry> hosts_;
};

}  // namespace cuda_remote::checkpoint

#endif  // CUDA_REMOTE_CHECKPOINT_GPU_GPU_HOST_H_
