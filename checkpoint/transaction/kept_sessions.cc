// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/transaction/kept_sessions.h"

#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <memory>
#include <utility>

#include "checkpoint/agent/agent_client.h"
#include "checkpoint/transaction/session_keeper.gen.h"

namespace cuda_remote::checkpoint {
namespace {

// The messages, which are packets as those of an agent.
constexpr agent::Type kProcess = agent::Type(100);  // KeptProcess; kSession follows
constexpr agent::Type kSession = agent::Type(101);  // agent::Given
constexpr agent::Type kKeep = agent::Type(102);     // Keep; answered
constexpr agent::Type kToEnd = agent::Type(103);
constexpr agent::Type kDrop = agent::Type(104);

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

void SendType(int socket, agent::Type type) {
  agent::Message message;
  message.type = type;
  agent::SendMessage(socket, message);
}

// The process's agent, once that has noticed that the tool is gone; null if it has a session, or has ended. One that
// stands still is waited for: otherwise its session would be lost.
std::unique_ptr<agent::AgentClient> AwaitReleased(const std::string& directory, const CudaProcess& process,
                                                  const std::string& name) {
  while (!HasEnded(process)) {
    auto client = agent::AgentClient::Connect(directory, uint32_t(process.inner_pid), name);
    const auto info = client.ok() ? (*client)->GetInfo() : client.status();
    if (info.ok()) return info->released ? *std::move(client) : nullptr;
    usleep(kAgainUs);
  }
  return nullptr;
}

}  // namespace

bool KeptSessions::Send(int socket, const LiveJob& live, const std::string& facts, SnapshotEngine::After after,
                        int holder, int most_ms) {
  bool ok = true;
  for (const auto& process : live.processes()) {
    agent::Message who, session;
    who.type = kProcess;
    const CudaProcess& of = process->process();
    EncodeKeptProcess({uint32_t(of.pid), uint32_t(of.inner_pid), process->Name(), of.mark}, &who.body);
    session.type = kSession;
    const agent::Given given = process->Former();
    agent::EncodeGiven(given, &session);
    ok = ok && given.fds.socket >= 0 && agent::SendMessage(socket, who) && agent::SendMessage(socket, session);
    for (const int fd : {given.fds.socket, given.fds.ring}) {
      if (fd >= 0) close(fd);
    }
  }
  agent::Message keep, answer;
  keep.type = kKeep;
  EncodeKeep({after == SnapshotEngine::After::kStop}, &keep.body);
  const int file = FileWith(facts);
  keep.fds = {file};
  if (holder >= 0) keep.fds.push_back(holder);
  ok = ok && file >= 0 && agent::SendMessage(socket, keep) &&
       agent::ReceiveMessage(socket, most_ms, &answer) == agent::ReceiveStatus::kOk && answer.type == agent::Type::kOk;
  if (file >= 0) close(file);
  return ok;
}

void KeptSessions::SendToEnd(int socket) { SendType(socket, kToEnd); }

void KeptSessions::SendDrop(int socket) { SendType(socket, kDrop); }

bool KeptSessions::Take(agent::Message* message) {
  bool complete = false;
  if (message->type == kProcess) {
    KeptProcess process;
    DecodeKeptProcess(message->body, &process);
    next_.process.pid = int(process.pid);
    next_.process.inner_pid = int(process.inner_pid);
    next_.process.mark = process.mark;
    next_.name = std::move(process.name);
  } else if (message->type == kSession && agent::DecodeGiven(*message, &next_.session)) {
    kept_.push_back(std::exchange(next_, Kept()));
    message->fds.clear();
  } else if (message->type == kKeep && !message->fds.empty() && message->fds.size() <= 2) {
    struct Keep keep;
    DecodeKeep(message->body, &keep);
    stopped_ = keep.stopped;
    facts_ = TextIn(message->fds[0]);
    if (message->fds.size() == 2) {
      if (holder_ >= 0) close(holder_);
      holder_ = message->fds[1];
      message->fds.pop_back();
    }
    complete = true;
  } else if (message->type == kToEnd) {
    to_end_ = true;
  } else if (message->type == kDrop) {
    Drop();
  }
  for (const int fd : message->fds) close(fd);
  return complete;
}

void KeptSessions::Answer(int socket, bool ok) { SendType(socket, ok ? agent::Type::kOk : agent::Type::kError); }

void KeptSessions::Drop() {
  for (const Kept& kept : kept_) {
    close(kept.session.fds.socket);
    close(kept.session.fds.ring);
  }
  kept_.clear();
  armed_ = to_end_ = false;
  if (holder_ >= 0) close(holder_);
  holder_ = -1;
}

bool KeptSessions::GiveBack(const Job& job, const std::string& directory, const char* tool,
                            SnapshotEngine* engine) const {
  // A child of the tool's that has not executed anything yet has its socket, too, so most often the engine is done.
  engine->AwaitDump(job, directory, stopped_ ? SnapshotEngine::After::kStop : SnapshotEngine::After::kRun);
  if (to_end_) {
    engine->End(job, facts_);
    return false;
  }
  if (stopped_) {
    // The tool has not come to end the job.
    unlink((directory + "/stopped").c_str());
    engine->Resume(job, facts_);
  }
  return GiveAll(job, directory, tool);
}

bool KeptSessions::GiveAll(const Job& job, const std::string& directory, const char* tool) const {
  std::vector<std::unique_ptr<agent::AgentClient>> clients;
  bool ok = true;
  // First all have a session, then all go on: what one does next may need another.
  for (const Kept& kept : kept_) {
    std::unique_ptr<agent::AgentClient> client = AwaitReleased(directory, kept.process, kept.name);
    if (!client) continue;
    const absl::Status given = client->Give(kept.session);
    if (given.ok()) {
      clients.push_back(std::move(client));
    } else if (!EndsNow(kept.process)) {
      ok = false;
      fprintf(stderr, "%s: %s cannot continue: %s\n", tool, kept.name.c_str(), std::string(given.message()).c_str());
    }
  }
  // One that does not answer goes on when its connection ends.
  for (const auto& client : clients) client->Unlock().IgnoreError();
  return ok && JobIsAlive(job);
}

}  // namespace cuda_remote::checkpoint
