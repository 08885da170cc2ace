// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/transaction/live_job.h"

#include <errno.h>
#include <signal.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <string_view>

#include "checkpoint/gpu/gpu_state.h"
#include "proto/agent/types.h"
#include "proto/base/clock.h"
#include "proto/folder/this_job.h"

namespace cuda_remote::checkpoint {
namespace {

// The tool's requests are far from those that the job sends before and afterwards.
constexpr uint64_t kSequenceGap = uint64_t{1} << 32;
constexpr int kConnectAttempts = 200;
constexpr int kConnectPauseUs = 25000;
// Each waits some milliseconds.
constexpr int kHeldAttempts = 100;
// How long a process that has begun to use CUDA gets until its agent listens, and how often to look.
constexpr int kSocketMs = 5000, kSocketLookMs = 5;
// How long a request beside the job's calls may take, and a look whether it is answered.
constexpr auto kSideWait = std::chrono::seconds(5);
constexpr int kSideLookMs = 20;
// How older client libraries refuse what is possible by now.
constexpr std::string_view kNoLook = "Look is not possible", kNoGive = "Give is not possible";

bool ReadAll(int fd, std::string* bytes) {
  struct stat facts;
  if (fstat(fd, &facts) != 0) return false;
  bytes->resize(size_t(facts.st_size));
  for (size_t done = 0; done < bytes->size();) {
    const ssize_t got = pread(fd, &(*bytes)[done], bytes->size() - done, off_t(done));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return false;
    done += size_t(got);
  }
  return true;
}

// A process that was just restored or continued needs a moment. Stops early once `ended`.
std::unique_ptr<agent::AgentClient> ConnectPatiently(const std::string& directory, uint32_t pid,
                                                     const std::string& name, const std::function<bool()>& ended,
                                                     std::string* error) {
  for (int attempt = 0; attempt < kConnectAttempts; ++attempt) {
    std::unique_ptr<agent::AgentClient> client = agent::AgentClient::Connect(directory, pid, name, error);
    if (client || ended()) return client;
    usleep(kConnectPauseUs);
  }
  return nullptr;
}

// A process has its session a moment before its agent listens.
void AwaitSocket(const CudaProcess& process, const std::string& directory) {
  const std::string path = SocketFolder(directory) + "/" + agent::SocketName(uint32_t(process.inner_pid));
  for (int waited = 0; waited < kSocketMs && access(path.c_str(), F_OK) != 0; waited += kSocketLookMs) {
    if (!IsRunning(process.pid)) return;
    usleep(kSocketLookMs * 1000);
  }
}

agent::Given Make(const ClientChannel& channel, uint64_t next_sequence, bool new_worker, const std::string& server) {
  agent::Given given;
  given.fds = channel.DupFds();
  given.next_sequence = next_sequence;
  given.welcome = channel.welcome();
  given.new_worker = new_worker;
  given.server = server;
  return given;
}

// Gives `given` to the process behind `agent` (null: there is none, and *error says so already), and closes it here.
bool GiveAndClose(agent::AgentClient* agent, const agent::Given& given, std::string* error) {
  bool ok = agent != nullptr;
  if (ok && given.fds.socket < 0) {
    *error = std::string("cannot duplicate the channel: ") + strerror(errno);
    ok = false;
  }
  ok = ok && agent->Give(given, error);
  if (given.fds.socket >= 0) close(given.fds.socket);
  if (given.fds.ring >= 0) close(given.fds.ring);
  return ok;
}

// A process whose session an earlier tool has taken with it.
bool CheckNotLost(const CudaProcess& process, const agent::Info& info, agent::AgentClient* agent, const JobClaim& claim,
                  std::string* error) {
  if (!info.released) return true;
  *error = (claim.killed().empty() ? "an earlier tool" : claim.killed()) + " ended while it had the GPU session of " +
           NameOf(process) + ", which is lost";
  std::string problem;
  if (!claim.killed().empty() && agent->Abandon(&problem)) {
    *error += "; its CUDA calls fail from now on. Restart the job from its last image with cr-restart";
  }
  return false;
}

}  // namespace

uint64_t AskHeldBytes(const Job& job, const std::string& directory) {
  uint64_t bytes = 0;
  for (const CudaProcess& process : FindCudaProcesses(job, directory)) {
    std::string ignored;
    const auto agent = agent::AgentClient::Connect(directory, uint32_t(process.inner_pid), NameOf(process), &ignored);
    agent::Activity activity;
    // A worker that is in the middle of a long call answers when that is done.
    for (int attempt = 0; agent && attempt < kHeldAttempts && agent->Look(&activity, &ignored); ++attempt) {
      if (!activity.answered) continue;
      bytes += activity.held_bytes;
      break;
    }
  }
  return bytes;
}

std::unique_ptr<RunningProcess> RunningProcess::Connect(const CudaProcess& process, const std::string& directory,
                                                        std::string* error) {
  auto agent = agent::AgentClient::Connect(directory, uint32_t(process.inner_pid), NameOf(process), error);
  agent::Info info;
  if (!agent || !agent->GetInfo(&info, error)) return nullptr;
  return std::unique_ptr<RunningProcess>(new RunningProcess(std::move(agent), std::move(info)));
}

bool RunningProcess::Begin(const agent::SideRequest& request, uint64_t* number, std::string* error) {
  return agent_->Ask(request, number, error);
}

bool RunningProcess::Wait(uint64_t number, agent::SideAnswer* answer, std::string* error) {
  const auto end = Now() + kSideWait;
  while (Now() < end) {
    bool answered = false;
    if (!agent_->Answer(number, kSideLookMs, &answered, answer, error)) return false;
    if (answered) return true;
  }
  *error = "the GPU server does not answer: the GPU may be busy with one kernel";
  return false;
}

void ImagesAhead::Read(const Job& job, const std::string& directory) {
  known_.clear();
  for (const CudaProcess& process : FindCudaProcesses(job, directory)) {
    std::string ignored, bytes;
    const auto agent = agent::AgentClient::Connect(directory, uint32_t(process.inner_pid), NameOf(process), &ignored);
    OfOne one;
    int fd = -1;
    if (!agent || !agent->AskImages(&one.number, &fd, &ignored)) continue;
    const bool read = ReadAll(fd, &bytes);
    close(fd);
    if (read && replay::ParseImages(bytes, &one.images, &ignored)) known_.emplace_back(process, std::move(one));
  }
}

const ImagesAhead::OfOne* ImagesAhead::Find(const CudaProcess& process) const {
  for (const auto& [of, images] : known_) {
    if (of == process) return &images;
  }
  return nullptr;
}

bool LiveProcess::Take(std::string* error) {
  if (!agent_->Take(images_ ? images_->number : 0, &taken_, error)) return false;
  state_ = State::kTaken;
  std::string bytes;
  const bool read = ReadAll(taken_.log_fd, &bytes);
  close(taken_.log_fd);
  channel_ = ClientChannel::Adopt(taken_.fds, taken_.next_sequence + kSequenceGap, taken_.welcome, error);
  if (!channel_) return false;
  if (!read || !replay::Log::Parse(bytes, &log_, error, images_ ? images_->images : replay::Images())) {
    *error = "the replay log cannot be read: " + *error;
    return false;
  }
  const std::string calls = NotReplayableIn(log_);
  if (calls.empty()) return true;
  *error = "it has GPU objects that cannot be recreated on another server; they were created by: " + calls +
           ". See docs/context-state.md";
  return false;
}

bool LiveProcess::Release(std::string* error) {
  const bool released = agent_->Release(error);
  agent_.reset();
  if (released) state_ = State::kReleased;
  return released;
}

void LiveProcess::PrepareSwitch(const ClientChannel* channel, const std::string& server) {
  new_channel_ = channel;
  new_server_ = server;
}

bool LiveProcess::Switch(std::string* error) {
  if (!GiveAndClose(agent_.get(), Make(*new_channel_, new_channel_->next_sequence(), true, new_server_), error)) {
    return false;
  }
  state_ = State::kGivenNew;
  return true;
}

bool LiveProcess::Confirm(std::string* error) {
  agent::Activity activity;
  for (int attempt = 0; attempt < kHeldAttempts; ++attempt) {
    if (!agent_->Look(&activity, error)) {
      // Of an older client library, which does not look in this state.
      return error->compare(0, kNoLook.size(), kNoLook) == 0;
    }
    if (activity.answered) return true;
  }
  *error = "the GPU server does not answer";
  return false;
}

agent::Given LiveProcess::Former() const { return Make(*channel_, taken_.next_sequence, false, ""); }

bool LiveProcess::GiveBack(std::string* error) {
  // It has its channel; with the end of the connection it goes on.
  if (state_ == State::kRunning || state_ == State::kLocked || state_ == State::kTaken || state_ == State::kGivenOld) {
    return true;
  }
  if (state_ == State::kGivenNew) {
    if (GiveAndClose(agent_.get(), Former(), error)) {
      state_ = State::kGivenOld;
      return true;
    }
    if (error->compare(0, kNoGive.size(), kNoGive) != 0) return false;
    // An older client library, which wants its new channel taken first; for that the new worker must be there.
    agent::Taken dropped;
    if (!agent_->Take(0, &dropped, error)) return false;
    for (const int fd : {dropped.log_fd, dropped.fds.socket, dropped.fds.ring}) {
      if (fd >= 0) close(fd);
    }
  }
  if (!agent_) {
    agent_ = ConnectPatiently(
        directory_, uint32_t(process_.inner_pid), Name(), [this] { return HasEnded(); }, error);
  }
  if (!GiveAndClose(agent_.get(), Former(), error)) return false;
  state_ = State::kGivenOld;
  return true;
}

bool LiveProcess::Unlock(std::string* error) {
  const bool given = state_ == State::kGivenOld || state_ == State::kGivenNew;
  const bool unlocked = !given || (agent_ && agent_->Unlock(error));
  agent_.reset();
  channel_.reset();
  state_ = State::kRunning;
  return unlocked;
}

void LiveProcess::Abandon() {
  agent_.reset();
  channel_.reset();
}

bool LiveJob::Find(std::vector<JobProcess*>* processes, bool* again, std::string* error) {
  *again = false;
  processes_.clear();
  for (const CudaProcess& process : FindCudaProcesses(job_, directory_)) {
    AwaitSocket(process, directory_);
    std::unique_ptr<agent::AgentClient> agent =
        agent::AgentClient::Connect(directory_, uint32_t(process.inner_pid), NameOf(process), error);
    agent::Info info;
    if (!agent || !agent->GetInfo(&info, error)) {
      *again = EndsNow(process.pid);
      *error = NameOf(process) + " cannot be stopped: " + *error;
      return false;
    }
    if (!CheckNotLost(process, info, agent.get(), claim_, error)) return false;
    const ImagesAhead::OfOne* const images = images_ ? images_->Find(process) : nullptr;
    processes_.push_back(std::make_unique<LiveProcess>(process, directory_, std::move(agent), std::move(info), images));
  }
  for (const auto& process : processes_) processes->push_back(process.get());
  return true;
}

std::vector<uint64_t> LiveJob::SessionsAt(const std::string& server) const {
  std::vector<uint64_t> sessions;
  for (const auto& process : processes_) {
    if (process->info().server == server) sessions.push_back(process->info().session);
  }
  return sessions;
}

bool LiveJob::AreAll() {
  const std::vector<CudaProcess> found = FindCudaProcesses(job_, directory_);
  return std::equal(found.begin(), found.end(), processes_.begin(), processes_.end(),
                    [](const CudaProcess& now, const auto& held) { return now == held->process(); });
}

std::unique_ptr<agent::AgentClient> GiveChannel(const std::string& directory, uint32_t pid, const std::string& name,
                                                const ClientChannel& channel, const std::string& server,
                                                const std::function<bool()>& ended, std::string* error) {
  std::unique_ptr<agent::AgentClient> client = ConnectPatiently(directory, pid, name, ended, error);
  if (!GiveAndClose(client.get(), Make(channel, channel.next_sequence(), true, server), error)) client.reset();
  return client;
}

}  // namespace cuda_remote::checkpoint
