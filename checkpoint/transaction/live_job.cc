// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/transaction/live_job.h"

#include <errno.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <optional>

#include "absl/strings/string_view.h"
#include "checkpoint/gpu/gpu_state.h"
#include "proto/agent/types.h"
#include "proto/base/clock.h"
#include "proto/base/proc.h"
#include "proto/base/status_macros.h"
#include "proto/base/unique_fd.h"
#include "proto/errors/absl_status.h"
#include "proto/folder/this_job.h"

namespace cuda_remote::checkpoint {
namespace {

// The tool's requests are far from those that the job sends before and afterwards.
constexpr uint64_t kSequenceGap = uint64_t{1} << 32;
constexpr auto kConnect = std::chrono::seconds(5);
constexpr int kConnectPauseUs = 25000;
// How long a process that has no session is asked again if it speaks to somebody else, who has no business there, and
// one that has its session.
constexpr auto kRefusedWithout = std::chrono::seconds(60), kRefused = std::chrono::seconds(2);
// Each waits some milliseconds.
constexpr int kHeldAttempts = 100;
// How long a process that has begun to use CUDA gets until its agent listens, and how often to look.
constexpr int kSocketMs = 5000, kSocketLookMs = 5;
// How long a request beside the job's calls may take, and a look whether it is answered.
constexpr auto kSideWait = std::chrono::seconds(5);
constexpr int kSideLookMs = 20;

absl::StatusOr<std::unique_ptr<agent::AgentClient>> ConnectTo(const CudaProcess& process,
                                                              const std::string& directory) {
  CR_RETURN_IF_ERROR(CheckNotStopped(process));
  return agent::AgentClient::Connect(directory, uint32_t(process.inner_pid), NameOf(process));
}

// To a process without a session. One that was just restored or continued needs a moment, and one that a signal has
// stopped is waited for. Stops early once `ended`.
absl::StatusOr<std::unique_ptr<agent::AgentClient>> ConnectPatiently(const std::string& directory, uint32_t pid,
                                                                     const std::string& name,
                                                                     const std::function<bool()>& ended) {
  for (const Moment begun = Now();;) {
    auto client = agent::AgentClient::Connect(directory, pid, name);
    const absl::Status asked = client.ok() ? (*client)->GetInfo().status() : client.status();
    if (asked.ok()) return client;
    const bool stands_still = absl::IsDeadlineExceeded(asked);
    if (ended() || (!stands_still && Now() >= begun + (client.ok() ? kRefusedWithout : kConnect))) return asked;
    usleep(kConnectPauseUs);
  }
}

// A process has its session a moment before its agent listens.
void AwaitSocket(const CudaProcess& process, const std::string& directory) {
  const std::string path = SocketFolder(directory) + "/" + agent::SocketName(uint32_t(process.inner_pid));
  for (int waited = 0; waited < kSocketMs && access(path.c_str(), F_OK) != 0; waited += kSocketLookMs) {
    if (HasEnded(process)) return;
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

// Gives `given` to the process behind `agent`, and closes it here.
absl::Status GiveAndClose(agent::AgentClient* agent, const agent::Given& given) {
  const UniqueFd socket(given.fds.socket), ring(given.fds.ring);
  if (!socket.ok()) return ErrnoStatus("cannot duplicate the channel");
  return agent->Give(given);
}

// A process whose session an earlier tool has taken with it.
absl::Status CheckNotLost(const CudaProcess& process, const agent::Info& info, agent::AgentClient* agent,
                          const JobClaim& claim) {
  if (!info.released) return absl::OkStatus();
  std::string lost = (claim.killed().empty() ? "an earlier tool" : claim.killed()) +
                     " ended while it had the GPU session of " + NameOf(process) + ", which is lost";
  if (!claim.killed().empty() && agent->Abandon().ok()) {
    lost += "; its CUDA calls fail from now on. Restart the job from its last image with cr-restart";
  }
  return absl::DataLossError(lost);
}

}  // namespace

uint64_t AskHeldBytes(const Job& job, const std::string& directory) {
  uint64_t bytes = 0;
  for (const CudaProcess& process : FindCudaProcesses(job, directory)) {
    const auto agent = ConnectTo(process, directory);
    // A worker that is in the middle of a long call answers when that is done.
    for (int attempt = 0; agent.ok() && attempt < kHeldAttempts; ++attempt) {
      const absl::StatusOr<agent::Activity> activity = (*agent)->Look();
      if (activity.ok() && !activity->answered) continue;
      if (activity.ok()) bytes += activity->held_bytes;
      break;
    }
  }
  return bytes;
}

absl::StatusOr<std::unique_ptr<RunningProcess>> RunningProcess::Connect(const CudaProcess& process,
                                                                        const std::string& directory) {
  CR_ASSIGN_OR_RETURN(auto agent, ConnectTo(process, directory));
  CR_ASSIGN_OR_RETURN(agent::Info info, agent->GetInfo());
  return std::unique_ptr<RunningProcess>(new RunningProcess(std::move(agent), std::move(info)));
}

absl::StatusOr<uint64_t> RunningProcess::Begin(const agent::SideRequest& request) { return agent_->Ask(request); }

absl::StatusOr<agent::SideAnswer> RunningProcess::Wait(uint64_t number) {
  const auto end = Now() + kSideWait;
  while (Now() < end) {
    CR_ASSIGN_OR_RETURN(std::optional<agent::SideAnswer> answer, agent_->Answer(number, kSideLookMs));
    if (answer) return *std::move(answer);
  }
  return absl::UnavailableError("the GPU server does not answer: the GPU may be busy with one kernel");
}

void ImagesAhead::Read(const Job& job, const std::string& directory) {
  known_.clear();
  for (const CudaProcess& process : FindCudaProcesses(job, directory)) {
    const auto agent = ConnectTo(process, directory);
    OfOne one;
    UniqueFd fd;
    std::string bytes;
    if (!agent.ok() || !(*agent)->AskImages(&one.number, &fd).ok() || !ReadAll(fd.get(), &bytes)) continue;
    auto images = replay::ParseImages(bytes);
    if (!images.ok()) continue;
    one.images = *std::move(images);
    known_.emplace_back(process, std::move(one));
  }
}

const ImagesAhead::OfOne* ImagesAhead::Find(const CudaProcess& process) const {
  for (const auto& [of, images] : known_) {
    if (of == process) return &images;
  }
  return nullptr;
}

absl::Status LiveProcess::Take() {
  CR_ASSIGN_OR_RETURN(taken_, agent_->Take(images_ ? images_->number : 0));
  state_ = State::kTaken;
  std::string bytes;
  const bool read = ReadAll(taken_.log_fd, &bytes);
  close(taken_.log_fd);
  CR_ASSIGN_OR_RETURN(channel_,
                      ToAbsl(ClientChannel::Adopt(taken_.fds, taken_.next_sequence + kSequenceGap, taken_.welcome)));
  auto log = read ? replay::Log::Parse(bytes, images_ ? images_->images : replay::Images()) : Error("");
  if (!log.ok()) return absl::DataLossError("the replay log cannot be read: " + log.status().message());
  log_ = *std::move(log);
  const std::string calls = NotReplayableIn(log_);
  if (calls.empty()) return absl::OkStatus();
  return absl::UnimplementedError(
      "it has GPU objects that cannot be recreated on another server; they were created by: " + calls +
      ". See docs/context-state.md");
}

absl::Status LiveProcess::Release() {
  const absl::Status released = agent_->Release();
  agent_.reset();
  CR_RETURN_IF_ERROR(released);
  state_ = State::kReleased;
  return absl::OkStatus();
}

void LiveProcess::PrepareSwitch(const ClientChannel* channel, const std::string& server) {
  new_channel_ = channel;
  new_server_ = server;
}

absl::Status LiveProcess::Switch() {
  CR_RETURN_IF_ERROR(GiveAndClose(agent_.get(), Make(*new_channel_, new_channel_->next_sequence(), true, new_server_)));
  state_ = State::kGivenNew;
  return absl::OkStatus();
}

absl::Status LiveProcess::Confirm() {
  for (int attempt = 0; attempt < kHeldAttempts; ++attempt) {
    CR_ASSIGN_OR_RETURN(const agent::Activity activity, agent_->Look());
    if (activity.answered) return absl::OkStatus();
  }
  return absl::UnavailableError("the GPU server does not answer");
}

agent::Given LiveProcess::Former() const { return Make(*channel_, taken_.next_sequence, false, ""); }

absl::Status LiveProcess::GiveBack() {
  // It has its channel; with the end of the connection it goes on.
  if (state_ == State::kRunning || state_ == State::kLocked || state_ == State::kTaken || state_ == State::kGivenOld) {
    return absl::OkStatus();
  }
  if (!agent_) {
    CR_ASSIGN_OR_RETURN(
        agent_, ConnectPatiently(directory_, uint32_t(process_.inner_pid), Name(), [this] { return HasEnded(); }));
  }
  CR_RETURN_IF_ERROR(GiveAndClose(agent_.get(), Former()));
  state_ = State::kGivenOld;
  return absl::OkStatus();
}

absl::Status LiveProcess::Unlock() {
  const bool given = state_ == State::kGivenOld || state_ == State::kGivenNew;
  const absl::Status unlocked = given && agent_ ? agent_->Unlock() : absl::OkStatus();
  agent_.reset();
  channel_.reset();
  state_ = State::kRunning;
  return unlocked;
}

void LiveProcess::Abandon() {
  agent_.reset();
  channel_.reset();
}

absl::StatusOr<std::vector<JobProcess*>> LiveJob::Find() {
  processes_.clear();
  for (const CudaProcess& process : FindCudaProcesses(job_, directory_)) {
    CR_RETURN_IF_ERROR(CheckNotStopped(process));
    AwaitSocket(process, directory_);
    auto agent = ConnectTo(process, directory_);
    auto info = agent.ok() ? (*agent)->GetInfo() : agent.status();
    for (const Moment begun = Now(); absl::IsFailedPrecondition(info.status()) && Now() < begun + kRefused;) {
      usleep(kConnectPauseUs);
      agent = ConnectTo(process, directory_);
      info = agent.ok() ? (*agent)->GetInfo() : agent.status();
    }
    if (!info.ok()) {
      const std::string why = NameOf(process) + " cannot be stopped: " + std::string(info.status().message());
      return EndsNow(process) ? absl::AbortedError(why) : absl::FailedPreconditionError(why);
    }
    CR_RETURN_IF_ERROR(CheckNotLost(process, *info, agent->get(), claim_));
    const ImagesAhead::OfOne* const images = images_ ? images_->Find(process) : nullptr;
    processes_.push_back(
        std::make_unique<LiveProcess>(process, directory_, *std::move(agent), *std::move(info), images));
  }
  std::vector<JobProcess*> found;
  for (const auto& process : processes_) found.push_back(process.get());
  return found;
}

absl::Status LiveJob::Pause(int timeout_ms) { return pause_.Take(directory_, timeout_ms); }

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

absl::StatusOr<std::unique_ptr<agent::AgentClient>> GiveChannel(const std::string& directory, uint32_t pid,
                                                                const std::string& name, const ClientChannel& channel,
                                                                const std::string& server,
                                                                const std::function<bool()>& ended) {
  CR_ASSIGN_OR_RETURN(auto client, ConnectPatiently(directory, pid, name, ended));
  CR_RETURN_IF_ERROR(GiveAndClose(client.get(), Make(channel, channel.next_sequence(), true, server)));
  return client;
}

}  // namespace cuda_remote::checkpoint
