// SPDX-License-Identifier: Apache-2.0
// The link between cr-server (supervisor) and one cr-worker: a SEQPACKET socket pair, the worker's end at a descriptor
// that the command line names.
//
//     cr-worker --link-fd 3 [--driver PATH] [--gpu N] [--memory-limit BYTES] [--secret] [--log-level LEVEL]
//
//     worker -> supervisor   Ready   the driver is loaded, a session may come (or: it cannot be loaded, and why)
//     supervisor -> worker   Budget  the page of its owner's memory budget (memory_budget.h), if there is one
//     supervisor -> worker   Assign  a session: the client's Hello and connected socket
//     worker -> supervisor   Stats   now and then while the session lives
//     supervisor -> worker   Stop    end the session, tell the client why
//     worker -> supervisor   Ended   the session is over; the worker exits after it
//
// A worker serves one session and exits. If the supervisor is gone (end of file), so is the worker's reason to be.
// The packets have the form of the session socket's (proto/channel/handshake.h). Both ends come from the same
// installation, but malformed packets are refused all the same.
//
// Thread-safe where noted. Nothing throws but std::bad_alloc.
#ifndef CUDA_REMOTE_SERVER_WORKER_LINK_WORKER_LINK_H_
#define CUDA_REMOTE_SERVER_WORKER_LINK_WORKER_LINK_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "proto/base/unique_fd.h"
#include "proto/channel/channel_types.h"
#include "proto/threads/mutex.h"
#include "server/worker_link/worker_link.gen.h"

namespace cuda_remote::server {

inline constexpr int kWorkerLinkFd = 3;

// A session for this worker, with the descriptors that came beside the message.
struct WorkerAssign : WorkerAssignment {
  int client_socket = -1;  // the receiver owns both
  int budget_fd = -1;
};

// Stop and Ended carry one reason: EncodeEnd and DecodeEnd of proto/channel/handshake.h.

// The worker's end.
class WorkerLink {
 public:
  // Takes `fd` over, also on failure. Fails if it is no socket.
  static absl::StatusOr<std::unique_ptr<WorkerLink>> Open(int fd);
  ~WorkerLink();
  WorkerLink(const WorkerLink&) = delete;
  WorkerLink& operator=(const WorkerLink&) = delete;

  // All three: false if the supervisor is gone. Thread-safe.
  bool SendReady(const WorkerReady& ready);
  bool SendStats(const WorkerStats& stats);
  bool SendEnded(const std::string& reason);

  // Waits for a session, as long as it takes. False: the supervisor is gone or wants the worker to exit.
  bool WaitAssign(WorkerAssign* assign);

  // After WaitAssign: from a thread of the link's own, calls `stop` once when the supervisor wants the session to end
  // (with the reason, to be given to ServerChannel::End) or is gone (empty reason).
  void Watch(std::function<void(const std::string& reason)> stop);

  // The Welcome that answers an assigned client.
  static Welcome MakeWelcome(const WorkerAssign& assign);

 private:
  explicit WorkerLink(int fd) : fd_(fd) {}
  bool Send(uint32_t type, const std::string& body);
  UniqueFd fd_;
  UniqueFd wake_fd_;
  Mutex mutex_;  // of a packet that is being sent
  std::thread watcher_;
};

}  // namespace cuda_remote::server

#endif  // CUDA_REMOTE_SERVER_WORKER_LINK_WORKER_LINK_H_
