#include "client/tools/held_job.h"

#include <errno.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "replay/replayer/replayer.h"

namespace cuda_remote::client::tools {
namespace {

// The tool's requests are far from those that the job sends before and afterwards.
constexpr uint64_t kSequenceGap = uint64_t{1} << 32;
constexpr int kConnectAttempts = 200;
constexpr int kConnectPauseUs = 25000;
// Each waits some milliseconds.
constexpr int kHeldAttempts = 100;

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
std::unique_ptr<agent::AgentClient> ConnectPatiently(const std::string& directory, const std::function<bool()>& ended,
                                                     std::string* error) {
  for (int attempt = 0; attempt < kConnectAttempts; ++attempt) {
    std::unique_ptr<agent::AgentClient> client = agent::AgentClient::Connect(directory, error);
    if (client || ended()) return client;
    usleep(kConnectPauseUs);
  }
  return nullptr;
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

// Gives `given` to the job behind `agent` (null: there is none, and *error says so already), and closes it here.
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

}  // namespace

bool AskJob(const std::string& directory, agent::Info* info, std::string* error) {
  const std::unique_ptr<agent::AgentClient> agent = agent::AgentClient::Connect(directory, error);
  return agent && agent->GetInfo(info, error);
}

uint64_t AskHeldBytes(const std::string& directory) {
  std::string ignored;
  const std::unique_ptr<agent::AgentClient> agent = agent::AgentClient::Connect(directory, &ignored);
  agent::Activity activity;
  // A worker that is in the middle of a long call answers when that is done.
  for (int attempt = 0; agent && attempt < kHeldAttempts && agent->Look(&activity, &ignored); ++attempt) {
    if (activity.answered) return activity.held_bytes;
  }
  return 0;
}

std::unique_ptr<HeldJob> HeldJob::Take(const std::string& directory, const JobClaim& claim, int lock_ms,
                                       const std::function<bool()>& cancelled, std::string* error) {
  std::unique_ptr<HeldJob> job(new HeldJob);
  job->directory_ = directory;
  job->done_ = true;  // nothing to give back yet: the end of the connection is enough
  job->agent_ = agent::AgentClient::Connect(directory, error);
  if (!job->agent_) {
    *error = "the job has no checkpoint agent (it has not used CUDA yet, or has ended): " + *error;
    return nullptr;
  }
  if (!job->agent_->GetInfo(&job->info_, error)) return nullptr;
  if (job->info_.released) {
    *error = (claim.killed().empty() ? "an earlier tool" : claim.killed()) +
             " ended while it had the job's GPU session, which is lost";
    std::string problem;
    if (!claim.killed().empty() && job->agent_->Abandon(&problem)) {
      *error += "; the job's CUDA calls fail from now on. Restart the job from its last image with cr-restart";
    }
    return nullptr;
  }
  agent::LockOptions options;
  options.timeout_ms = lock_ms;
  options.cancelled = cancelled;
  if (!agent::LockAll({job->agent_.get()}, options, &job->closed_us_, error) ||
      !job->agent_->Take(&job->taken_, error)) {
    return nullptr;
  }
  const bool read = ReadAll(job->taken_.log_fd, &job->log_bytes_);
  close(job->taken_.log_fd);
  const uint64_t first = job->taken_.next_sequence + kSequenceGap;
  job->channel_ = ClientChannel::Adopt(job->taken_.fds, first, job->taken_.welcome, error);
  if (!job->channel_) return nullptr;
  if (!read || !replay::Log::Parse(job->log_bytes_, &job->log_, error)) {
    *error = "the job's replay log cannot be read: " + *error;
    return nullptr;
  }
  std::string calls;
  for (const std::string& call : replay::NotReplayable(job->log_)) calls += (calls.empty() ? "" : ", ") + call;
  if (!calls.empty()) {
    *error = "the job has objects that cannot be made again elsewhere; they came from: " + calls;
    return nullptr;
  }
  job->done_ = false;
  return job;
}

HeldJob::~HeldJob() {
  std::string ignored;
  if (!done_) GiveBack(&ignored);
}

double HeldJob::HeldSeconds() const { return double(agent::RealClock().now_us() - closed_us_) / 1e6; }

bool HeldJob::Release(std::string* error) {
  const bool released = agent_->Release(error);
  agent_.reset();
  return released;
}

bool HeldJob::GiveAndUnlock(const agent::Given& given, std::string* error) {
  if (!agent_)
    agent_ = ConnectPatiently(
        directory_, [] { return false; }, error);
  return GiveAndClose(agent_.get(), given, error) && agent_->Unlock(error);
}

bool HeldJob::GiveBack(std::string* error) {
  if (done_) return true;
  done_ = GiveAndUnlock(Make(*channel_, taken_.next_sequence, false, ""), error);
  channel_.reset();
  return done_;
}

bool HeldJob::Give(const ClientChannel& channel, const std::string& server, std::string* error) {
  if (!GiveAndUnlock(Make(channel, channel.next_sequence(), true, server), error)) return false;
  done_ = true;
  channel_.reset();
  return true;
}

void HeldJob::Abandon() {
  done_ = true;
  agent_.reset();
  channel_.reset();
}

std::unique_ptr<agent::AgentClient> GiveChannel(const std::string& directory, const ClientChannel& channel,
                                                const std::string& server, const std::function<bool()>& ended,
                                                std::string* error) {
  std::unique_ptr<agent::AgentClient> client = ConnectPatiently(directory, ended, error);
  if (!GiveAndClose(client.get(), Make(channel, channel.next_sequence(), true, server), error)) client.reset();
  return client;
}

}  // namespace cuda_remote::client::tools
