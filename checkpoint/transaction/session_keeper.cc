// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/transaction/session_keeper.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <sstream>
#include <utility>
#include <vector>

#include "checkpoint/agent/agent_client.h"
#include "checkpoint/job/job_claim.h"
#include "checkpoint/transaction/session_keeper.gen.h"
#include "proto/agent/message.h"

namespace cuda_remote::checkpoint {
namespace {

// The messages on the socket pair, which are packets as those of an agent.
constexpr agent::Type kProcess = agent::Type(100);  // KeptProcess; kSession follows
constexpr agent::Type kSession = agent::Type(101);  // agent::Given
constexpr agent::Type kKeep = agent::Type(102);     // Keep; answered
constexpr agent::Type kToEnd = agent::Type(103);
constexpr agent::Type kDrop = agent::Type(104);

constexpr int kAnswerMs = 30000;
constexpr int kAgainUs = 20000;

int FileWith(const std::string& text) {
  const int fd = memfd_create("cuda-remote-facts", MFD_CLOEXEC);
  if (fd >= 0 && pwrite(fd, text.data(), text.size(), 0) == ssize_t(text.size())) return fd;
  if (fd >= 0) close(fd);
  return -1;
}

std::string TextIn(int fd) {
  struct stat facts {};
  std::string text(fstat(fd, &facts) == 0 ? size_t(facts.st_size) : 0, '\0');
  const ssize_t got = pread(fd, &text[0], text.size(), 0);
  text.resize(got > 0 ? size_t(got) : 0);
  return text;
}

// Who ends tools by their name or their command line does not mean this process.
void CallMyself(std::string name) {
  prctl(PR_SET_NAME, name.c_str());
  std::ifstream in("/proc/self/stat");
  std::string text;
  std::getline(in, text);
  std::istringstream fields(text.substr(text.rfind(')') + 1));
  // From the third on; the 48th and 49th are where the arguments lie.
  std::string skipped;
  for (int field = 3; field < 48; ++field) fields >> skipped;
  uintptr_t begin = 0, end = 0;
  if (!(fields >> begin >> end) || begin == 0 || end <= begin) return;
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

class Keeper {
 public:
  Keeper(const Job& job, std::string directory, const char* tool, SnapshotEngine* engine)
      : job_(job), directory_(std::move(directory)), tool_(tool), engine_(engine) {}

  void Run(int socket) {
    agent::Message message;
    while (agent::ReceiveMessage(socket, -1, &message) == agent::ReceiveStatus::kOk) Serve(socket, &message);
    if (!armed_) return;
    // A child of the tool's that has not executed anything yet has the socket, too, so most often the engine is done.
    engine_->AwaitDump(job_, directory_, stopped_ ? SnapshotEngine::After::kStop : SnapshotEngine::After::kRun);
    if (to_end_) {
      engine_->End(job_, facts_);
    } else {
      GiveBack();
    }
  }

 private:
  struct Kept {
    int pid = 0;
    uint32_t inner_pid = 0;
    std::string name;
    agent::Given session;
  };

  void Serve(int socket, agent::Message* message) {
    if (message->type == kProcess) {
      KeptProcess process;
      DecodeKeptProcess(message->body, &process);
      next_.pid = int(process.pid);
      next_.inner_pid = process.inner_pid;
      next_.name = std::move(process.name);
    } else if (message->type == kSession && agent::DecodeGiven(*message, &next_.session)) {
      kept_.push_back(std::exchange(next_, Kept()));
      message->fds.clear();
    } else if (message->type == kKeep && message->fds.size() == 1) {
      struct Keep keep;
      DecodeKeep(message->body, &keep);
      stopped_ = keep.stopped;
      facts_ = TextIn(message->fds[0]);
      armed_ = claim_.Take(directory_);
      agent::Message answer;
      answer.type = armed_ ? agent::Type::kOk : agent::Type::kError;
      agent::SendMessage(socket, answer);
    } else if (message->type == kToEnd) {
      to_end_ = true;
    } else if (message->type == kDrop) {
      for (const Kept& kept : kept_) {
        close(kept.session.fds.socket);
        close(kept.session.fds.ring);
      }
      kept_.clear();
      armed_ = to_end_ = false;
      claim_.Release();
    }
    for (const int fd : message->fds) close(fd);
  }

  // The process's agent, once that has noticed that the tool is gone; null if it has a session, or has ended. One that
  // stands still is waited for: without this process its session would be lost.
  std::unique_ptr<agent::AgentClient> AwaitReleased(const Kept& kept) const {
    while (IsRunning(kept.pid)) {
      std::string ignored;
      agent::Info info;
      auto client = agent::AgentClient::Connect(directory_, kept.inner_pid, kept.name, &ignored);
      if (client && client->GetInfo(&info, &ignored)) return info.released ? std::move(client) : nullptr;
      usleep(kAgainUs);
    }
    return nullptr;
  }

  void GiveBack() {
    if (stopped_) {
      // The tool has not come to end the job.
      unlink((directory_ + "/stopped").c_str());
      engine_->Resume(job_, facts_);
    }
    std::vector<std::unique_ptr<agent::AgentClient>> clients;
    bool ok = true;
    std::string error;
    // First all have a session, then all go on: what one does next may need another.
    for (const Kept& kept : kept_) {
      std::unique_ptr<agent::AgentClient> client = AwaitReleased(kept);
      if (!client) continue;
      if (client->Give(kept.session, &error)) {
        clients.push_back(std::move(client));
      } else if (IsRunning(kept.pid)) {
        ok = false;
        fprintf(stderr, "%s: %s cannot go on: %s\n", tool_, kept.name.c_str(), error.c_str());
      }
    }
    for (const auto& client : clients) client->Unlock(&error);
    if (!ok || !JobIsAlive(job_)) return;
    fprintf(stderr, "%s: it was killed while it had the job's GPU sessions; the job has them again and goes on\n",
            tool_);
  }

  const Job job_;
  const std::string directory_;
  const char* const tool_;
  SnapshotEngine* const engine_;
  KeeperClaim claim_;
  Kept next_;
  std::vector<Kept> kept_;
  std::string facts_;
  bool armed_ = false, stopped_ = false, to_end_ = false;
};

}  // namespace

std::unique_ptr<SessionKeeper> SessionKeeper::Start(const Job& job, const std::string& directory, const char* tool,
                                                    SnapshotEngine* engine, int messages, std::string* error) {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) {
    *error = std::string("socketpair: ") + strerror(errno);
    return nullptr;
  }
  fflush(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    setsid();
    const int socket = KeepOnly(ends[1], messages);
    for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGPIPE}) ::signal(signal, SIG_IGN);
    CallMyself("cr-keeper");
    Keeper(job, directory, tool, engine).Run(socket);
    fflush(nullptr);
    _exit(0);
  }
  close(ends[1]);
  if (child > 0) return std::unique_ptr<SessionKeeper>(new SessionKeeper(ends[0], child));
  *error = std::string("fork: ") + strerror(errno);
  close(ends[0]);
  return nullptr;
}

SessionKeeper::~SessionKeeper() {
  // Whoever else has inherited it.
  shutdown(socket_, SHUT_RDWR);
  close(socket_);
  while (waitpid(process_, nullptr, 0) < 0 && errno == EINTR) {
  }
}

bool SessionKeeper::Keep(const std::string& facts, SnapshotEngine::After after, std::string* error) {
  keeps_ = true;
  bool ok = true;
  for (const auto& process : live_->processes()) {
    agent::Message who, session, ignored;
    who.type = kProcess;
    EncodeKeptProcess({uint32_t(process->process().pid), uint32_t(process->process().inner_pid), process->Name()},
                      &who.body);
    session.type = kSession;
    const agent::Given given = process->Former();
    agent::EncodeGiven(given, &session);
    ok = ok && given.fds.socket >= 0 && agent::SendMessage(socket_, who) && agent::SendMessage(socket_, session);
    for (const int fd : {given.fds.socket, given.fds.ring}) {
      if (fd >= 0) close(fd);
    }
  }
  agent::Message keep, answer;
  keep.type = kKeep;
  EncodeKeep({after == SnapshotEngine::After::kStop}, &keep.body);
  const int file = FileWith(facts);
  keep.fds = {file};
  ok = ok && file >= 0 && agent::SendMessage(socket_, keep) &&
       agent::ReceiveMessage(socket_, kAnswerMs, &answer) == agent::ReceiveStatus::kOk &&
       answer.type == agent::Type::kOk;
  if (file >= 0) close(file);
  if (!ok) *error = "the process that keeps the job's GPU sessions does not answer; try again";
  return ok;
}

void SessionKeeper::ToEnd() {
  agent::Message message;
  message.type = kToEnd;
  agent::SendMessage(socket_, message);
}

void SessionKeeper::Drop() {
  if (!std::exchange(keeps_, false)) return;
  agent::Message message;
  message.type = kDrop;
  agent::SendMessage(socket_, message);
}

}  // namespace cuda_remote::checkpoint
