// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/transaction/session_keeper.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <utility>

#include "checkpoint/job/job_claim.h"
#include "checkpoint/transaction/kept_sessions.h"
#include "checkpoint/transaction/session_holder.h"
#include "proto/agent/message.h"
#include "proto/base/proc.h"
#include "proto/errors/absl_status.h"

namespace cuda_remote::checkpoint {
namespace {

constexpr int kAnswerMs = 30000, kHolderMs = 1000;

// Who ends tools by their name or their command line does not mean this process.
void CallMyself(std::string name) {
  prctl(PR_SET_NAME, name.c_str());
  const ProcessStat stat = StatOf(getpid());
  const auto begin = uintptr_t(stat.arguments), end = uintptr_t(stat.arguments_end);
  if (begin == 0 || end <= begin) return;
  name.resize(end - begin, '\0');
  name.back() = '\0';
  memcpy(reinterpret_cast<void*>(begin), name.data(), name.size());
}

// Closes all descriptors but two: `messages`, which becomes standard error, and `socket`. Returns that one's number.
int KeepOnly(int socket, int messages) {
  const int null = open("/dev/null", O_RDWR | O_CLOEXEC);
  // Either may have one of the numbers that are given now.
  socket = fcntl(socket, F_DUPFD_CLOEXEC, 3);
  messages = fcntl(messages, F_DUPFD_CLOEXEC, 3);
  for (const int stream : {0, 1}) dup2(null, stream);
  dup2(messages, 2);
  constexpr int kSocket = 3;
  if (socket != kSocket) dup3(socket, kSocket, O_CLOEXEC);
  syscall(SYS_close_range, unsigned(kSocket + 1), ~0u, 0u);
  return kSocket;
}

// In the keeper.
void Run(int socket, const Job& job, const std::string& directory, const char* tool, SnapshotEngine* engine) {
  KeptSessions sessions;
  KeeperClaim claim(KeeperClaim::Whose::kKeeper);
  agent::Message message;
  while (agent::ReceiveMessage(socket, -1, &message) == agent::ReceiveStatus::kOk) {
    sessions.Serve(socket, &message, [&] { return claim.Take(directory); });
    if (!sessions.armed()) claim.Release();
  }
  if (!sessions.armed()) return;
  if (sessions.GiveBack(job, directory, tool, engine)) {
    fprintf(stderr, "%s: it was killed while it had the job's GPU sessions; the job has them again and continues\n",
            tool);
  }
  if (sessions.holder() >= 0) KeptSessions::SendDrop(sessions.holder());
}

}  // namespace

absl::StatusOr<std::unique_ptr<SessionKeeper>> SessionKeeper::Start(const Job& job, const std::string& directory,
                                                                    const char* tool, SnapshotEngine* engine,
                                                                    int messages) {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) return ErrnoStatus("socketpair");
  UniqueFd tools_end(ends[0]);
  const UniqueFd keepers_end(ends[1]);
  fflush(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    setsid();
    const int socket = KeepOnly(keepers_end.get(), messages);
    for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGPIPE}) ::signal(signal, SIG_IGN);
    CallMyself("cr-keeper");
    Run(socket, job, directory, tool, engine);
    fflush(nullptr);
    _exit(0);
  }
  if (child < 0) return ErrnoStatus("fork");
  return std::unique_ptr<SessionKeeper>(new SessionKeeper(directory, std::move(tools_end), child));
}

SessionKeeper::~SessionKeeper() {
  holder_.Close();
  // Whoever else has inherited it.
  shutdown(socket_.get(), SHUT_RDWR);
  socket_.Close();
  while (waitpid(process_, nullptr, 0) < 0 && errno == EINTR) {
  }
}

absl::Status SessionKeeper::Keep(const std::string& facts, SnapshotEngine::After after) {
  keeps_ = true;
  holder_ = ConnectToHolder(directory_);
  // The keeper lets go of this connection when it is done. A holder that is stopped, as by a terminal, is done without.
  if (holder_.ok() && !KeptSessions::Send(holder_.get(), *live_, facts, after, -1, kHolderMs)) {
    holder_.Close();
  }
  if (KeptSessions::Send(socket_.get(), *live_, facts, after, holder_.get(), kAnswerMs)) return absl::OkStatus();
  return absl::UnavailableError("the process that keeps the job's GPU sessions does not answer; try again");
}

void SessionKeeper::ToEnd() {
  if (holder_.ok()) KeptSessions::SendToEnd(holder_.get());
  KeptSessions::SendToEnd(socket_.get());
}

void SessionKeeper::Drop() {
  if (!std::exchange(keeps_, false)) return;
  if (holder_.ok()) {
    KeptSessions::SendDrop(holder_.get());
    holder_.Close();
  }
  KeptSessions::SendDrop(socket_.get());
}

}  // namespace cuda_remote::checkpoint
