// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/transaction/session_holder.h"

#include <signal.h>
#include <stdio.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include "proto/base/status_macros.h"
#include "proto/channel/handshake.h"
#include "proto/errors/absl_status.h"

namespace cuda_remote::checkpoint {
namespace {

// How often a child that gives the sessions back may be killed.
constexpr int kMostGivers = 10;
constexpr int kMostSendSeconds = 1;

}  // namespace

absl::StatusOr<std::unique_ptr<SessionHolder>> SessionHolder::Open(const Job& job, const std::string& directory,
                                                                   const char* tool, SnapshotEngine* engine) {
  CR_ASSIGN_OR_RETURN(UniqueFd listener, ToAbsl(ListenUnix(directory + "/" + kHolderName)));
  return std::unique_ptr<SessionHolder>(new SessionHolder(job, directory, tool, engine, std::move(listener)));
}

SessionHolder::~SessionHolder() {
  unlink((directory_ + "/" + kHolderName).c_str());
  if (giver_ > 0) {
    // The job has ended.
    kill(giver_, SIGKILL);
    waitpid(giver_, nullptr, 0);
  }
}

void SessionHolder::Ask(std::vector<pollfd>* waiting) const {
  // While there is a connection, the next one waits for its end.
  if (giver_ == 0) waiting->push_back({tool_socket_.ok() ? tool_socket_.get() : listener_.get(), POLLIN, 0});
}

void SessionHolder::Ready(const std::vector<pollfd>& waiting) {
  for (const pollfd& one : waiting) {
    if (one.revents == 0) continue;
    if (one.fd == listener_.get()) {
      Accept();
    } else if (one.fd == tool_socket_.get()) {
      Read();
    }
  }
}

void SessionHolder::Accept() {
  const int socket = accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC);
  uint32_t user = 0, pid = 0;
  if (socket >= 0 && PeerUser(socket, &user, &pid) && (user == 0 || user == geteuid())) {
    tool_socket_.Reset(socket);
  } else if (socket >= 0) {
    close(socket);
  }
}

void SessionHolder::Read() {
  agent::Message message;
  if (agent::ReceiveMessage(tool_socket_.get(), 0, &message) == agent::ReceiveStatus::kOk) {
    sessions_.Serve(tool_socket_.get(), &message, [this] { return claim_.Take(directory_); });
    if (!sessions_.armed()) claim_.Release();
    return;
  }
  tool_socket_.Close();
  if (!sessions_.armed()) return Finish();
  givers_ = 0;
  StartGiver();
}

void SessionHolder::StartGiver() {
  fflush(nullptr);
  const pid_t parent = getpid();
  giver_ = ++givers_ <= kMostGivers ? fork() : -1;
  if (giver_ == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(1);
    setsid();
    prctl(PR_SET_NAME, "cr-keeper");
    if (sessions_.GiveBack(job_, directory_, tool_, engine_)) {
      fprintf(stderr,
              "%s: a tool and its cr-keeper were killed while they had the job's GPU sessions; the job has them again "
              "and continues\n",
              tool_);
    }
    fflush(nullptr);
    _exit(0);
  }
  if (giver_ > 0) return;
  giver_ = 0;
  fprintf(stderr, "%s: the job's GPU sessions cannot be given back; its CUDA calls fail from now on\n", tool_);
  Finish();
}

void SessionHolder::Ended(pid_t child, int status) {
  if (child != giver_) return;
  giver_ = 0;
  if (WIFSIGNALED(status)) {
    StartGiver();
  } else {
    Finish();
  }
}

void SessionHolder::Finish() {
  sessions_.Drop();
  claim_.Release();
}

UniqueFd ConnectToHolder(const std::string& directory) {
  auto holder = ConnectUnix(directory + "/" + kHolderName, nullptr, kMostConnectMs);
  if (!holder.ok()) return UniqueFd();
  // A program that is stopped reads nothing.
  const timeval most{kMostSendSeconds, 0};
  setsockopt(holder->get(), SOL_SOCKET, SO_SNDTIMEO, &most, sizeof(most));
  return *std::move(holder);
}

}  // namespace cuda_remote::checkpoint
