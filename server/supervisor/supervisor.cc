// SPDX-License-Identifier: Apache-2.0
#include "server/supervisor/supervisor.h"

#include <errno.h>
#include <fcntl.h>
#include <malloc.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <utility>

#include "absl/status/statusor.h"
#include "proto/base/clock.h"
#include "proto/base/short_waits.h"
#include "proto/base/status_macros.h"
#include "proto/channel/end_reasons.h"
#include "proto/channel/handshake.h"
#include "proto/codec/text.h"
#include "proto/control/control.pb.h"
#include "proto/control/socket_call.h"
#include "proto/errors/absl_status.h"
#include "proto/folder/private_folder.h"
#include "proto/logging/log.h"
#include "proto/nvml/query.h"
#include "proto/threads/mutex.h"
#include "server/supervisor/control_messages.h"
#include "server/supervisor/spawn.h"

namespace cuda_remote::server {
namespace {

constexpr auto kHelloTimeout = std::chrono::seconds(10);
constexpr auto kWorkerStartTimeout = std::chrono::seconds(60);
// How long a worker may take to follow a Stop, or to exit after its session.
constexpr auto kStopTimeout = std::chrono::seconds(3);
constexpr auto kFailurePause = std::chrono::seconds(2);
// Local clients that have not sent a request, of all and of one user; fewer of all with few descriptors.
constexpr size_t kMostNewClients = 256;
constexpr size_t kMostNewClientsOfOne = 64;
constexpr size_t kDescriptorsForEachNewClient = 8;
// How long nobody is accepted when there are no descriptors.
constexpr auto kAcceptPause = std::chrono::milliseconds(200);
// How many are accepted before the rest of the loop gets a turn: clients may come faster than they are accepted.
constexpr int kMostAcceptedAtOnce = 64;
// Workers that start at a time. More at once are not ready any sooner.
constexpr int kMostStarting = 8;
constexpr size_t kGroupBytes = 16;
// Freed memory goes back to the system when so many sessions have ended, or all have; some moments later, since gRPC
// still has some of their buffers.
constexpr int kEndsBeforeTrim = 32;
constexpr auto kTrimDelay = std::chrono::seconds(2);
// How long a process's next session gets the same GPUs: programs that choose GPUs open a second one at once.
constexpr auto kPlaceTime = std::chrono::seconds(60);
constexpr size_t kMostReason = 1000;
// Of a list of sessions in one packet; the rest is asked for again.
constexpr size_t kMostControlBytes = 32u << 10;

std::string DescribeStatus(int status) {
  if (WIFEXITED(status)) return "exited with code " + std::to_string(WEXITSTATUS(status));
  if (WIFSIGNALED(status)) {
    const char* const name = sigabbrev_np(WTERMSIG(status));
    return std::string("was killed by ") +
           (name ? std::string("SIG") + name : "signal " + std::to_string(WTERMSIG(status)));
  }
  return "ended";
}

sigset_t LoopSignals() {
  sigset_t signals;
  sigemptyset(&signals);
  for (int signal : {SIGCHLD, SIGTERM, SIGINT, SIGHUP}) sigaddset(&signals, signal);
  return signals;
}

std::string Counted(int count, const std::string& what) {
  return std::to_string(count) + " " + what + (count == 1 ? "" : "s");
}

std::string Numbers(const std::vector<int>& numbers) {
  std::string text;
  for (const int number : numbers) text += (text.empty() ? "" : ",") + std::to_string(number);
  return text;
}

}  // namespace

void Supervisor::BlockSignals() {
  const sigset_t signals = LoopSignals();
  sigprocmask(SIG_BLOCK, &signals, nullptr);
}

std::string SessionSocketPath(const std::string& directory) { return directory + "/session.sock"; }
std::string ControlSocketPath(const std::string& directory) { return directory + "/control.sock"; }

Supervisor::Supervisor(Options options)
    : options_(std::move(options)), started_(Now()), policy_(options_.policy), monitor_(options_, &own_limits_) {
  own_limits_.drop_capabilities = options_.restrict_workers;
  if (options_.restrict_workers) own_limits_.calls = ForbiddenCalls(/*network=*/false);
  guest_limits_ = own_limits_;
  guest_limits_.account = options_.session_user;
  char host[256] = "localhost";
  gethostname(host, sizeof(host) - 1);
  name_ = host;
}

absl::Status Supervisor::MakeDirectory() {
  const std::string& directory = options_.directory;
  // Who can write to the folder, or to one above it, can put a socket of his own in our place.
  CR_RETURN_IF_ERROR(ToAbsl(CheckFolder(directory, FolderUse::kServe)));
  // Others only need to pass through to the socket.
  if (options_.serves_others && chmod(directory.c_str(), 0711) != 0)
    return ErrnoStatus("cannot let others into " + directory);
  lock_fd_.Reset(open((directory + "/server.lock").c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0600));
  if (!lock_fd_.ok() || flock(lock_fd_.get(), LOCK_EX | LOCK_NB) != 0) {
    return errno == EWOULDBLOCK ? absl::AlreadyExistsError("another cr-server is running in " + directory)
                                : ErrnoStatus("cannot lock " + directory + "/server.lock");
  }
  return absl::OkStatus();
}

absl::Status Supervisor::Start() {
  CR_RETURN_IF_ERROR(MakeDirectory());
  CR_ASSIGN_OR_RETURN(listen_fd_, ToAbsl(ListenUnix(SessionSocketPath(options_.directory))));
  // Who they are is asked of the kernel at each connection.
  if (options_.serves_others && chmod(SessionSocketPath(options_.directory).c_str(), 0666) != 0)
    return ErrnoStatus("cannot let others use " + SessionSocketPath(options_.directory));
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  const size_t affordable = size_t(limit.rlim_cur) / kDescriptorsForEachNewClient;
  {
    MutexLock lock(&mutex_);
    most_new_clients_ = std::min<size_t>(kMostNewClients, std::max<size_t>(affordable, 8));
  }
  wake_fd_.Reset(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  const sigset_t signals = LoopSignals();
  signal(SIGPIPE, SIG_IGN);
  signal_fd_.Reset(signalfd(-1, &signals, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!wake_fd_.ok() || !signal_fd_.ok()) return ErrnoStatus("cannot set up the event loop");
  return absl::OkStatus();
}

void Supervisor::SetPolicy(const Policy& policy) {
  MutexLock lock(&mutex_);
  policy_ = policy;
}

Caller Supervisor::CallerOf(const grpc::ServerContext& context) {
  // Without --insecure-tcp there is no TCP but with TLS.
  Peer peer = PeerOf(context, options_.policy.insecure.empty());
  if (!peer.token.empty()) {
    MutexLock lock(&mutex_);
    const auto found = policy_.tokens.find(TokenHash(peer.token));
    if (found != policy_.tokens.end()) peer.identity = TokenIdentity(found->second);
  }
  Caller caller;
  caller.identity = peer.identity;
  caller.unprotected = peer.unprotected;
  if (peer.identity.empty()) {
    caller.refusal = !peer.token.empty() ? "the server does not know this token"
                     : options_.tokens.empty()
                         ? "the client's certificate has no subject by which its sessions could be known"
                         : "the client shows neither a token nor a certificate with a subject";
    std::string more;
    {
      MutexLock lock(&mutex_);
      if (stranger_log_.Allow(&more))
        logging::Warn("refused a client at {}: {}{}", context.peer(), caller.refusal, more);
    }
    if (refused_) refused_(peer.address, peer.port);
    return caller;
  }
  {
    MutexLock lock(&mutex_);
    caller.is_operator = peer.local || policy_.operators.count(peer.identity) != 0;
  }
  if (!peer.local && proven_) proven_(peer.address, peer.port);
  return caller;
}

Caller Supervisor::LocalCaller(uint32_t uid) const {
  Caller caller;
  caller.identity = UserIdentity(uid);
  caller.is_operator = uid == 0 || uid == geteuid() || policy_.operators.count(caller.identity) != 0;
  return caller;
}

void Supervisor::Wake() {
  const uint64_t one = 1;
  if (write(wake_fd_.get(), &one, sizeof(one)) < 0) return;  // full: it is awake anyway
}

void Supervisor::Run(const std::function<void()>& reload) {
  while (true) {
    std::vector<pollfd> waiting;
    int timeout = -1;
    {
      MutexLock lock(&mutex_);
      std::vector<std::function<void()>> posted;
      posted.swap(posted_);
      for (auto& work : posted) work();
      KillOverdue();
      monitor_.KillOverdue();
      if (Now() >= trim_at_) {
        // The heap keeps what it once had, for the next message (buffer_memory.h), in as many arenas as there were
        // threads: without this the process would grow with the sessions that it has had.
        malloc_trim(0);
        // What sessions had that ended just now is perhaps not free yet: it goes the next time.
        trim_at_ = Now() < last_end_ + kTrimDelay ? last_end_ + kTrimDelay : Moment::max();
      }
      DropGoneClients();
      AssignWaiting();
      KeepWarm();
      if (stopping_ && workers_.empty() && !monitor_.running()) break;
      waiting.push_back({wake_fd_.get(), POLLIN, 0});
      waiting.push_back({signal_fd_.get(), POLLIN, 0});
      waiting.push_back({stopping_ || Now() < accept_again_ ? -1 : listen_fd_.get(), POLLIN, 0});
      waiting.push_back({monitor_.link(), POLLIN, 0});
      for (const NewClient& client : new_clients_) waiting.push_back({client.socket, POLLIN, 0});
      for (const Worker& worker : workers_) waiting.push_back({worker.link, POLLIN, 0});
      const bool clock = trim_at_ != Moment::max() || !new_clients_.empty() || !waiting_.empty() ||
                         Now() < accept_again_ || stopping_ || monitor_.busy() ||
                         (start_failures_ > 0 && start_failures_ < 3) ||
                         std::any_of(workers_.begin(), workers_.end(), [](const Worker& worker) {
                           return worker.state == Worker::kStarting || worker.kill_at != Moment::max();
                         });
      if (clock) timeout = 250;
    }
    if (poll(waiting.data(), waiting.size(), timeout) < 0 && errno != EINTR) {
      logging::Critical("poll: {}", strerror(errno));
      break;
    }
    MutexLock lock(&mutex_);
    uint64_t count;
    if (waiting[0].revents && read(wake_fd_.get(), &count, sizeof(count)) < 0) continue;
    signalfd_siginfo signal;
    while (waiting[1].revents && read(signal_fd_.get(), &signal, sizeof(signal)) == sizeof(signal)) {
      if (signal.ssi_signo == SIGCHLD) continue;  // Reap looks for itself
      if (signal.ssi_signo == SIGHUP) {
        lock.Unlock();
        reload();
        lock.Lock();
        continue;
      }
      logging::Info("{}: shutting down", signal.ssi_signo == SIGTERM ? "SIGTERM" : "SIGINT");
      if (stopping_) stop_deadline_ = Now();
      BeginShutdown();
    }
    if (waiting[3].revents && waiting[3].fd == monitor_.link()) monitor_.ReadLink();
    size_t index = 4;
    for (auto client = new_clients_.begin(); client != new_clients_.end();) {
      const bool readable = index < waiting.size() && waiting[index].fd == client->socket && waiting[index].revents;
      ++index;
      if (readable) {
        ReadHello(*client);
        client = new_clients_.erase(client);
      } else if (Now() - client->since > kHelloTimeout) {
        logging::Debug("a client (pid {}) connected and sent nothing", client->pid);
        CloseWithoutWaiting(client->socket);
        client = new_clients_.erase(client);
      } else {
        ++client;
      }
    }
    for (Worker& worker : workers_) {
      if (index < waiting.size() && waiting[index].fd == worker.link && waiting[index].revents) ReadLink(&worker);
      ++index;
    }
    if (waiting[2].revents) AcceptClients();
    Reap();
  }
  MutexLock lock(&mutex_);
  for (const NewClient& client : new_clients_) CloseWithoutWaiting(client.socket);
  new_clients_.clear();
}

bool Supervisor::Admits(int socket, uint32_t uid) const {
  if (uid == 0 || uid == geteuid() || policy_.users.count(uid) != 0) return true;
  if (policy_.groups.empty()) return false;
  // The groups that the peer had when it connected, by the kernel's word.
  ucred peer{};
  socklen_t length = sizeof(peer);
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0) return false;
  if (policy_.groups.count(peer.gid) != 0) return true;
  std::vector<gid_t> groups(256);
  length = socklen_t(groups.size() * sizeof(gid_t));
  if (getsockopt(socket, SOL_SOCKET, SO_PEERGROUPS, groups.data(), &length) != 0) {
    if (errno != ERANGE) return false;
    groups.resize(length / sizeof(gid_t));
    if (getsockopt(socket, SOL_SOCKET, SO_PEERGROUPS, groups.data(), &length) != 0) return false;
  }
  groups.resize(length / sizeof(gid_t));
  return std::any_of(groups.begin(), groups.end(), [this](gid_t group) {
    mutex_.AssertHeld();
    return policy_.groups.count(group) != 0;
  });
}

void Supervisor::AcceptClients() {
  std::string more;
  for (int i = 0; i < kMostAcceptedAtOnce; ++i) {
    const int socket = accept4(listen_fd_.get(), nullptr, nullptr, SOCK_CLOEXEC);
    if (socket < 0) {
      if (errno == EINTR || errno == ECONNABORTED) continue;
      if (errno == EAGAIN) return;
      // The client stays where it is; to look again at once would only take the processor.
      if (accept_log_.Allow(&more)) logging::Error("cannot accept a local client: {}{}", strerror(errno), more);
      accept_again_ = Now() + kAcceptPause;
      return;
    }
    uint32_t uid = 0, pid = 0;
    if (!PeerUser(socket, &uid, &pid) || !Admits(socket, uid)) {
      if (refused_log_.Allow(&more)) logging::Warn("refused a client of user {} (pid {}){}", uid, pid, more);
      Refuse(socket, "this cr-server does not serve user " + std::to_string(uid) +
                         " (its own user does, and root; --allow-user and --allow-group admit others)");
      continue;
    }
    // Whoever has spoken already is no silent client, however many come at once.
    const NewClient client{socket, Now(), pid, uid};
    pollfd looking{socket, POLLIN, 0};
    if (poll(&looking, 1, 0) == 1) {
      ReadHello(client);
      continue;
    }
    const auto of_one = size_t(std::count_if(new_clients_.begin(), new_clients_.end(),
                                             [uid](const NewClient& other) { return other.uid == uid; }));
    if (new_clients_.size() >= most_new_clients_ || of_one >= kMostNewClientsOfOne) {
      if (refused_log_.Allow(&more))
        logging::Warn("refused pid {} of user {}: {} clients of this user have not sent a request{}", pid, uid, of_one,
                      more);
      Refuse(socket, "too many clients have connected to this cr-server and sent nothing");
      continue;
    }
    new_clients_.push_back(client);
  }
}

void Supervisor::ReadHello(const NewClient& client) {
  Packet packet;
  ChannelStatus status;
  {
    const ShortWaits waits;
    status = ReceivePacket(client.socket, &packet, 0, /*may_have_fd=*/false);
  }
  if (status == ChannelStatus::kOk && packet.type == PacketType::kQuery) {
    AskMonitor(client.socket, packet.body, /*remote=*/false, LocalCaller(client.uid));
    return;
  }
  if (status == ChannelStatus::kOk && packet.type == PacketType::kControlCall) {
    AnswerControl(client.socket, packet.body, LocalCaller(client.uid));
    return;
  }
  if (status == ChannelStatus::kOk && packet.type == PacketType::kFaultDevice) {
    GiveFaultDevice(client.socket);
    return;
  }
  Hello hello;
  if (status != ChannelStatus::kOk || packet.type != PacketType::kHello || !DecodeHello(packet.body, &hello)) {
    if (status != ChannelStatus::kClosed) {
      std::string more;
      if (hello_log_.Allow(&more))
        logging::Warn("pid {} connected and did not send a Hello ({}){}", client.pid, ChannelStatusName(status), more);
      Refuse(client.socket, "not a Hello");
    } else {
      CloseWithoutWaiting(client.socket);
    }
    return;
  }
  Admit(client.socket, hello, "ring", "", UserIdentity(client.uid));
}

void Supervisor::GiveFaultDevice(int socket) {
  const int device = options_.give_userfaultfd ? OpenFaultDevice() : -1;
  SendPacket(socket, PacketType::kFaultDevice, {}, device);
  if (device >= 0) close(device);
  CloseWithoutWaiting(socket);
}

void Supervisor::AnswerControl(int socket, const std::string& bytes, const Caller& caller) {
  control::ControlCall call;
  control::ControlAnswer answer;
  if (!call.ParseFromString(bytes)) call.Clear();
  switch (call.call_case()) {
    case control::ControlCall::kGetServerInfo:
      ToMessage(FactsFor(caller), answer.mutable_server_info());
      break;
    case control::ControlCall::kListSessions:
      AddSessions(SessionsOf(caller), call.list_sessions().after(), kMostControlBytes, answer.mutable_sessions());
      break;
    case control::ControlCall::kEndSession:
      answer.mutable_ended()->set_found(EndOwn(call.end_session().id(), call.end_session().reason(), caller));
      break;
    case control::ControlCall::kNoteSaved: {
      answer.mutable_noted()->set_found(NoteSavedLocked(call.note_saved(), caller));
      break;
    }
    case control::ControlCall::CALL_NOT_SET:
      answer.set_error(control::kUnknownCall);
      break;
  }
  SendPacket(socket, PacketType::kControlAnswer, answer.SerializeAsString(), -1);
  CloseWithoutWaiting(socket);
}

void Supervisor::AskMonitor(int socket, const std::string& bytes, bool remote, const Caller& caller) {
  nvml::Question question;
  const bool known = DecodeQuestion(bytes, &question);  // if not, cr-nvml says so
  Ask ask;
  ask.question = bytes;
  ask.remote = remote;
  std::vector<int> gpus;
  if (known && question.gpu < 0 && options_.gpu < 0 && ChooseGpus(caller.identity, question.pid, -1, &gpus))
    ask.gpus.assign(gpus.begin(), gpus.end());
  for (const auto& [id, session] : sessions_) {
    const SessionInfo& info = session.info;
    if (ask.sessions.size() == kMaxAskedSessions) break;
    AskedSession one;
    one.pid = info.hello.pid;
    one.worker_pid = uint32_t(info.worker_pid);
    one.gpu = info.gpu;
    one.program = info.hello.program;
    one.hidden = !caller.MayTouch(info.owner);
    // The worker numbers the GPUs that it was given.
    for (size_t i = 0; i < info.stats.gpu_bytes.size(); ++i) {
      const size_t gpu = i < info.gpus.size() ? size_t(info.gpus[i]) : i;
      if (one.device_bytes.size() <= gpu) one.device_bytes.resize(gpu + 1);
      one.device_bytes[gpu] += info.stats.gpu_bytes[i];
    }
    // What is not of any one GPU's count belongs to the one that the worker began with.
    uint64_t rest = info.stats.device_bytes;
    for (const uint64_t bytes : one.device_bytes) rest -= std::min(rest, bytes);
    if (rest > 0 && info.gpu >= 0) {
      if (one.device_bytes.size() <= size_t(info.gpu)) one.device_bytes.resize(size_t(info.gpu) + 1);
      one.device_bytes[size_t(info.gpu)] += rest;
    }
    ask.sessions.push_back(std::move(one));
  }
  monitor_.Submit(socket, ask, stopping_);
}

uint64_t Supervisor::Admit(int socket, const Hello& hello, const std::string& transport, const std::string& peer,
                           const std::string& owner) {
  std::string why = CheckWireVersion(hello.wire_version);
  if (why.empty() && stopping_) why = "the server is shutting down";
  if (why.empty() && policy_.max_sessions > 0 && int(sessions_.size()) >= policy_.max_sessions) {
    why = "the server has its " + std::to_string(policy_.max_sessions) + " sessions (--max-sessions) already";
  }
  const Usage usage = UsageOf(owner);
  if (why.empty() && policy_.user_sessions > 0 && usage.limited && usage.sessions >= policy_.user_sessions) {
    why = owner + " has its " + std::to_string(policy_.user_sessions) +
          " sessions on this server (--user-sessions) already";
  }
  if (why.empty() && (hello.gpu < -1 || (options_.gpu >= 0 && hello.gpu > 0))) {
    why = "this server has no GPU " + std::to_string(hello.gpu) +
          (options_.gpu >= 0 ? "; it serves one (--gpu), which is its 0" : "");
  }
  if (why.empty() && usage.limited && policy_.user_gpus > 0 && hello.gpu >= 0 && options_.gpu < 0 &&
      int(usage.gpus.size()) >= policy_.user_gpus &&
      std::find(usage.gpus.begin(), usage.gpus.end(), hello.gpu) == usage.gpus.end()) {
    why = owner + " has its " + Counted(policy_.user_gpus, "GPU") +
          " on this server (--user-gpus) already: " + Numbers(usage.gpus) + "; --gpu " + std::to_string(usage.gpus[0]) +
          " asks for that one";
  }
  if (!why.empty()) {
    ++totals_.refused;
    std::string more;
    if (refused_log_.Allow(&more))
      logging::Warn("refused pid {} ({}) of {}: {}{}", hello.pid, hello.program, owner, why, more);
    Refuse(socket, why);
    return 0;
  }
  const uint64_t id = next_session_++;
  Session& session = sessions_[id];
  session.info.id = id;
  session.info.hello = hello;
  session.info.transport = transport;
  session.info.peer = peer;
  session.info.owner = owner;
  session.started = session.stats_at = Now();
  session.socket = socket;
  Place(&session);
  waiting_.push_back(id);
  AssignWaiting();
  return id;
}

bool Supervisor::IsLimited(const std::string& owner) const { return owner != UserIdentity(geteuid()); }

std::vector<int> Supervisor::ServedGpus() const {
  return options_.gpu >= 0 ? std::vector<int>{options_.gpu} : std::vector<int>{};
}

Usage Supervisor::UsageOf(const std::string& owner) const {
  Usage usage;
  usage.identity = owner;
  usage.limited = IsLimited(owner);
  std::set<int> gpus;
  for (const auto& [id, session] : sessions_) {
    if (session.info.owner != owner) continue;
    ++usage.sessions;
    usage.device_bytes += session.info.stats.device_bytes;
    gpus.insert(session.info.gpus.begin(), session.info.gpus.end());
    for (int i = 0; session.placed && session.info.gpus.empty() && i < gpu_count_; ++i) gpus.insert(i);
  }
  usage.gpus.assign(gpus.begin(), gpus.end());
  return usage;
}

bool Supervisor::ChooseGpus(const std::string& owner, uint32_t pid, int wanted, std::vector<int>* gpus) {
  *gpus = ServedGpus();
  if (!gpus->empty()) return true;
  if (wanted >= 0) gpus->push_back(wanted);
  const size_t most_of_one = IsLimited(owner) ? size_t(policy_.user_gpus) : 0;
  const auto most = size_t(policy_.session_gpus);
  if (wanted >= 0 || (most == 0 && most_of_one == 0)) return true;
  if (gpu_count_ == 0) return false;
  const auto all = size_t(gpu_count_);
  const Usage usage = UsageOf(owner);
  std::set<int> own(usage.gpus.begin(), usage.gpus.end());
  const auto before = places_.find({owner, pid});
  if (before != places_.end()) {
    std::set<int> with = own;
    with.insert(before->second.gpus.begin(), before->second.gpus.end());
    if (most_of_one == 0 || with.size() <= std::max(most_of_one, own.size())) {
      *gpus = before->second.gpus;
      return true;
    }
  }
  // Those that fewest sessions see come first.
  std::vector<int> by_load, load(all, 0);
  for (const auto& [id, session] : sessions_) {
    for (const int gpu : session.info.gpus) {
      if (size_t(gpu) < all) ++load[size_t(gpu)];
    }
  }
  for (int gpu = 0; gpu < gpu_count_; ++gpu) by_load.push_back(gpu);
  std::stable_sort(by_load.begin(), by_load.end(), [&](int a, int b) { return load[size_t(a)] < load[size_t(b)]; });
  for (const int gpu : by_load) {
    if (most_of_one == 0 || own.size() < most_of_one) own.insert(gpu);
  }
  for (const int gpu : by_load) {
    if (own.count(gpu) != 0 && (most == 0 || gpus->size() < most)) gpus->push_back(gpu);
  }
  std::sort(gpus->begin(), gpus->end());
  if (gpus->size() == all) gpus->clear();
  return true;
}

void Supervisor::Place(Session* session) {
  SessionInfo& info = session->info;
  if (session->placed || !ChooseGpus(info.owner, info.hello.pid, info.hello.gpu, &info.gpus)) return;
  session->placed = true;
  if (policy_.session_gpus == 0 && policy_.user_gpus == 0) return;
  ForgetPlaces();
  if (info.hello.gpu < 0) places_[{info.owner, info.hello.pid}] = {info.gpus, Now()};
}

void Supervisor::ForgetPlaces() {
  for (auto place = places_.begin(); place != places_.end();) {
    const bool old = Now() - place->second.since > kPlaceTime;
    place = old ? places_.erase(place) : std::next(place);
  }
}

void Supervisor::Refuse(int socket, const std::string& why) {
  Welcome welcome;
  welcome.error = why;
  welcome.server = name_;
  std::string body;
  EncodeWelcome(welcome, &body);
  SendPacket(socket, PacketType::kWelcome, body, -1);
  CloseWithoutWaiting(socket);
}

WorkerKind Supervisor::WantedKind(const Session& session) const {
  WorkerKind kind;
  kind.gpus = session.placed ? session.info.gpus : ServedGpus();
  const std::string& owner = session.info.owner;
  kind.guest = options_.session_user && owner != UserIdentity(geteuid()) && owner != UserIdentity(0);
  return kind;
}

std::vector<WorkerKind> Supervisor::WarmKinds() const {
  std::vector<WorkerKind> kinds = {{ServedGpus(), false}};
  if (options_.session_user) kinds.push_back({ServedGpus(), true});
  return kinds;
}

std::deque<uint64_t>::iterator Supervisor::WaitingFor(const WorkerKind& kind) {
  return std::find_if(waiting_.begin(), waiting_.end(), [&](uint64_t id) {
    mutex_.AssertHeld();
    const auto found = sessions_.find(id);
    return found != sessions_.end() && WantedKind(found->second) == kind;
  });
}

void Supervisor::DropGoneClients() {
  for (auto next = waiting_.begin(); next != waiting_.end();) {
    const uint64_t id = *next;
    const auto found = sessions_.find(id);
    pollfd looking{found == sessions_.end() ? -1 : found->second.socket, POLLRDHUP, 0};
    const bool gone =
        found != sessions_.end() && poll(&looking, 1, 0) == 1 && (looking.revents & (POLLHUP | POLLRDHUP)) != 0;
    next = gone ? waiting_.erase(next) : std::next(next);
    if (gone) EndOfSession(id, "the client left before a worker was ready", false);
  }
}

absl::Status Supervisor::JoinBudget(const std::string& owner, Worker* worker, WorkerAssign* assign) {
  if (policy_.user_memory_limit == 0 || owner == UserIdentity(geteuid())) return absl::OkStatus();
  Budget& budget = budgets_[owner];
  if (!budget.page) {
    absl::StatusOr<std::unique_ptr<MemoryBudget>> page = MemoryBudget::Create();
    if (!page.ok()) {
      budgets_.erase(owner);
      return page.status();
    }
    budget.page = *std::move(page);
  }
  uint32_t slot = 0;
  while (budget.slots.count(slot) != 0) ++slot;
  if (slot >= MemoryBudget::kSlots)
    return absl::ResourceExhaustedError(owner + " has too many sessions for --user-memory-limit");
  budget.page->Clear(slot);
  // A worker that has a limit and no page ends.
  assign->budget_limit = policy_.user_memory_limit;
  if (SendPacket(worker->link, PacketType::kBudget, "", budget.page->fd()) == ChannelStatus::kOk) {
    worker->budget_owner = owner;
    worker->budget_slot = slot;
    budget.slots.insert(slot);
    assign->budget_slot = slot;
  }
  return absl::OkStatus();
}

void Supervisor::LeaveBudget(Worker* worker) {
  const auto found = budgets_.find(worker->budget_owner);
  if (found == budgets_.end()) return;
  found->second.page->Clear(worker->budget_slot);
  found->second.slots.erase(worker->budget_slot);
  if (found->second.slots.empty()) budgets_.erase(found);
}

const std::string& Supervisor::SharingGroup(const std::string& owner) {
  std::string& group = groups_[owner];
  // The server's own user has the same one at each of his servers: nobody else gets to his workers anyway.
  if (group.empty() && owner == UserIdentity(geteuid())) group.assign(kGroupBytes, 0);
  while (group.size() < kGroupBytes) {
    char bytes[kGroupBytes];
    if (getrandom(bytes, sizeof(bytes), 0) == sizeof(bytes)) group.assign(bytes, sizeof(bytes));
  }
  return group;
}

void Supervisor::AssignWaiting() {
  for (const uint64_t id : waiting_) {
    const auto found = sessions_.find(id);
    if (found != sessions_.end()) Place(&found->second);
  }
  for (auto worker = workers_.begin(); worker != workers_.end(); ++worker) {
    if (worker->state != Worker::kReady) continue;
    const auto next = WaitingFor(worker->kind);
    if (next == waiting_.end() || !sessions_.at(*next).placed) continue;
    const uint64_t id = *next;
    waiting_.erase(next);
    Session& session = sessions_.at(id);
    WorkerAssign assign;
    assign.session = id;
    assign.shared_memory = session.info.transport == "ring";
    assign.server = name_;
    assign.hello = session.info.hello;
    assign.sharing_group = SharingGroup(session.info.owner);
    if (const absl::Status joined = JoinBudget(session.info.owner, &*worker, &assign); !joined.ok()) {
      EndOfSession(id, std::string(joined.message()), true);
      continue;
    }
    std::string body;
    EncodeWorkerAssignment(assign, &body);
    if (SendPacket(worker->link, PacketType::kAssign, body, session.socket) != ChannelStatus::kOk) {
      // That worker is dying; another one will come.
      worker->state = Worker::kEnding;
      worker->kill_at = Now();
      waiting_.push_front(id);
      continue;
    }
    CloseWithoutWaiting(session.socket);
    session.socket = -1;
    session.waiting = false;
    session.info.worker_pid = worker->pid;
    session.info.gpu = worker->kind.gpus.empty() ? worker->ready.gpu : worker->kind.gpus[0];
    session.info.driver = worker->ready.driver;
    const double waited = SecondsSince(session.started);
    ++totals_.waits;
    totals_.wait_seconds += waited;
    for (size_t i = 0; i < Totals::kWaitBounds.size(); ++i) totals_.waits_below[i] += waited <= Totals::kWaitBounds[i];
    worker->state = Worker::kServing;
    worker->session = id;
    const Hello& hello = session.info.hello;
    logging::Info("session {} of {} started{}: {} pid {} {}{}{} on worker {}, {}", id, session.info.owner,
                  hello.replaying ? " by a restart or a move" : "", session.info.transport, hello.pid, hello.program,
                  hello.job.empty() ? "" : ", job " + hello.job,
                  session.info.peer.empty() ? "" : ", from " + session.info.peer, worker->pid, worker->ready.driver);
  }
}

void Supervisor::KeepWarm() {
  if (stopping_) return;
  // Warm ones are kept for sessions without a choice of a GPU.
  std::map<WorkerKind, int> missing;
  for (const WorkerKind& kind : WarmKinds()) missing[kind] = 0;
  for (const uint64_t id : waiting_) {
    const auto found = sessions_.find(id);
    if (found != sessions_.end()) ++missing[WantedKind(found->second)];
  }
  // After failures there is a pause, unless somebody waits for the answer; and warm ones are not worth endless
  // attempts.
  const bool warm = start_failures_ == 0 || (start_failures_ < 3 && Now() >= start_again_);
  for (const WorkerKind& kind : WarmKinds()) {
    if (warm) missing[kind] = std::max(missing[kind], options_.workers);
  }
  int starting = 0;
  for (Worker& worker : workers_) {
    starting += worker.state == Worker::kStarting;
    if (worker.state != Worker::kStarting && worker.state != Worker::kReady) continue;
    const auto needed = missing.find(worker.kind);
    if (needed != missing.end()) {
      --needed->second;
    } else if (worker.state == Worker::kReady) {
      // The session that it was started for has gone.
      worker.state = Worker::kEnding;
      worker.kill_at = Now();
    }
  }
  const int most_starting = std::max(kMostStarting, options_.workers * int(WarmKinds().size()));
  for (const auto& [kind, count] : missing) {
    for (int i = 0; i < count && starting < most_starting; ++i, ++starting) StartWorker(kind);
  }
}

void Supervisor::StartWorker(const WorkerKind& kind) {
  int sockets[2];
  if (!SocketPair(sockets)) return StartFailed(kind, std::string("cannot make its socket: ") + strerror(errno));
  std::vector<std::string> command = {options_.worker, "--link-fd", std::to_string(kWorkerLinkFd), "--log-level",
                                      policy_.log_level};
  if (!options_.driver.empty()) command.insert(command.end(), {"--driver", options_.driver});
  if (!kind.gpus.empty()) command.insert(command.end(), {"--gpu", Numbers(kind.gpus)});
  // Others run as the same user.
  if (kind.guest) command.push_back("--secret");
  if (options_.random_addresses) command.push_back("--randomize-addresses");
  if (policy_.memory_limit > 0) command.insert(command.end(), {"--memory-limit", std::to_string(policy_.memory_limit)});
  const absl::StatusOr<pid_t> pid = SpawnWorker(command, sockets[1], kind.guest ? guest_limits_ : own_limits_);
  close(sockets[1]);
  if (!pid.ok()) {
    close(sockets[0]);
    return StartFailed(kind, std::string(pid.status().message()));
  }
  // The event loop must not wait for a worker that does not read.
  fcntl(sockets[0], F_SETFL, O_NONBLOCK);
  Worker worker;
  worker.pid = *pid;
  worker.kind = kind;
  worker.link = sockets[0];
  worker.since = Now();
  worker.kill_at = worker.since + kWorkerStartTimeout;
  workers_.push_back(std::move(worker));
  logging::Debug("worker {} starts", *pid);
}

void Supervisor::StartFailed(const WorkerKind& kind, const std::string& why) {
  std::string more;
  if (start_log_.Allow(&more)) logging::Error("cannot start a worker: {}{}", why, more);
  worker_error_ = why;
  ++totals_.start_failures;
  ++start_failures_;
  start_again_ = Now() + kFailurePause;
  if (const auto next = WaitingFor(kind); next != waiting_.end()) {
    const uint64_t id = *next;
    waiting_.erase(next);
    EndOfSession(id, "no worker could be started: " + why, false);
  }
}

void Supervisor::ReadLink(Worker* worker) {
  while (true) {
    Packet packet;
    const ChannelStatus status = ReceivePacket(worker->link, &packet, 0);
    if (status == ChannelStatus::kTimeout) return;
    if (status != ChannelStatus::kOk) {
      // The process is ending, or it is not a worker; either way it is of no more use.
      close(worker->link);
      worker->link = -1;
      worker->kill_at = std::min(worker->kill_at, Now() + std::chrono::milliseconds(500));
      return;
    }
    switch (packet.type) {
      case PacketType::kReady: {
        WorkerReady ready;
        if (!DecodeWorkerReady(packet.body, &ready) || worker->state != Worker::kStarting) break;
        worker->ready = ready;
        if (!ready.error.empty()) {
          worker->end_reason = ready.error;  // it exits; WorkerGone tells whoever waits
          worker->kill_at = Now() + kStopTimeout;
          break;
        }
        last_start_error_.clear();
        worker->state = Worker::kReady;
        worker->kill_at = Moment::max();
        if (worker->kind.gpus == ServedGpus()) {
          start_failures_ = 0;
          worker_error_.clear();
        }
        // Once: it is not what a person with a GPU expects, and is slow. cr-run shows it, too.
        if (ready.software && !last_ready_.software && options_.driver.empty()) {
          logging::Error("no usable GPU on this machine: programs compute with the software GPU, slowly");
        }
        last_ready_ = ready;
        if (worker->kind.gpus.empty()) gpu_count_ = int(std::min(ready.devices, nvml::kMaxGpus));
        logging::Debug("worker {} is ready after {:.2f} s: {}", worker->pid, SecondsSince(worker->since), ready.driver);
        break;
      }
      case PacketType::kStats: {
        WorkerStats stats;
        const auto session = sessions_.find(worker->session);
        if (!DecodeWorkerStats(packet.body, &stats) || session == sessions_.end()) break;
        SessionInfo& info = session->second.info;
        const double passed = SecondsSince(session->second.stats_at);
        if (passed > 0.01) {
          info.calls_per_second = double(stats.calls - info.stats.calls) / passed;
          info.bytes_per_second =
              double(stats.bytes_in + stats.bytes_out - info.stats.bytes_in - info.stats.bytes_out) / passed;
          session->second.stats_at = Now();
        }
        info.stats = stats;
        break;
      }
      case PacketType::kEnded:
        DecodeEnd(packet.body, &worker->end_reason);
        worker->state = Worker::kEnding;
        worker->kill_at = std::min(worker->kill_at, Now() + kStopTimeout);
        EndOfSession(worker->session, worker->end_reason, false);
        break;
      default:
        break;
    }
  }
}

void Supervisor::Reap() {
  while (true) {
    int status;
    const pid_t pid = waitpid(-1, &status, WNOHANG);
    if (pid <= 0) return;
    const auto worker = std::find_if(workers_.begin(), workers_.end(), [&](const Worker& w) { return w.pid == pid; });
    if (worker == workers_.end()) {
      monitor_.Gone(pid, DescribeStatus(status));
      continue;
    }
    // What it said last may still be in the socket.
    if (worker->link >= 0) ReadLink(&*worker);
    WorkerGone(&*worker, status);
    if (worker->link >= 0) close(worker->link);
    LeaveBudget(&*worker);
    workers_.erase(worker);
  }
}

void Supervisor::WorkerGone(Worker* worker, int status) {
  // Whatever it started itself goes with it.
  kill(-worker->pid, SIGKILL);
  switch (worker->state) {
    case Worker::kStarting:
    case Worker::kReady: {
      if (stopping_) break;
      const std::string why = !worker->end_reason.empty() ? worker->end_reason
                                                          : "cr-worker " + DescribeStatus(status) + " while it started";
      // Said once; the same again, as the next attempts have it, says nothing new.
      if (why != last_start_error_) {
        logging::Warn("worker {}: {}", worker->pid, why);
      } else {
        logging::Debug("worker {}: {}", worker->pid, why);
      }
      last_start_error_ = why;
      ++totals_.start_failures;
      // A GPU that somebody asked for and that is not there says nothing of the others.
      if (worker->kind.gpus == ServedGpus()) {
        ++start_failures_;
        start_again_ = Now() + kFailurePause;
        worker_error_ = why;
        if (start_failures_ == 3)
          logging::Error("{}; no more warm workers are started until a client asks for one", why);
      }
      if (const auto next = WaitingFor(worker->kind); next != waiting_.end()) {
        const uint64_t id = *next;
        waiting_.erase(next);
        EndOfSession(id, "no worker could be started: " + why, false);
      }
      break;
    }
    case Worker::kServing:
      EndOfSession(worker->session,
                   !worker->end_reason.empty() ? worker->end_reason
                                               : "worker " + std::to_string(worker->pid) + " " + DescribeStatus(status),
                   worker->end_reason.empty() && !(WIFEXITED(status) && WEXITSTATUS(status) == 0));
      break;
    case Worker::kEnding:
      break;
  }
  logging::Debug("worker {} {}", worker->pid, DescribeStatus(status));
}

void Supervisor::EndOfSession(uint64_t id, const std::string& reason, bool crashed) {
  const auto found = sessions_.find(id);
  if (found == sessions_.end()) return;
  Session& session = found->second;
  if (session.socket >= 0) Refuse(session.socket, reason);
  const std::string why = !session.end.empty()    ? session.end
                          : reason == kClientGone ? "end: its program has ended, or does not use CUDA any more"
                                                  : "lost: " + reason;
  const Hello& hello = session.info.hello;
  const std::string line = fmt::format("session {} of {} ended after {:.1f} s ({}; {} calls, pid {}{})", id,
                                       session.info.owner, SecondsSince(session.started), why, session.info.stats.calls,
                                       hello.pid, hello.job.empty() ? "" : ", job " + hello.job);
  if (crashed) {
    logging::Error("{}", line);
  } else {
    logging::Info("{}", line);
  }
  const WorkerStats& stats = session.info.stats;
  totals_.failed += crashed;
  totals_.calls += stats.calls;
  totals_.bytes_in += stats.bytes_in;
  totals_.bytes_out += stats.bytes_out;
  const std::string owner = session.info.owner;
  sessions_.erase(found);
  last_end_ = Now();
  // A time that is set stays: sessions that come and go all the time must not put it off.
  const bool trim = ++ends_ % kEndsBeforeTrim == 0 || sessions_.empty();
  if (trim && trim_at_ == Moment::max()) trim_at_ = Now() + kTrimDelay;
  const bool last = std::none_of(sessions_.begin(), sessions_.end(),
                                 [&](const auto& entry) { return entry.second.info.owner == owner; });
  if (last) groups_.erase(owner);
}

void Supervisor::StopWorker(Worker* worker, const std::string& reason) {
  std::string body;
  EncodeEnd(reason, &body);
  if (worker->link >= 0) SendPacket(worker->link, PacketType::kStop, body, -1);
  if (worker->end_reason.empty()) worker->end_reason = reason;
  worker->kill_at = std::min(worker->kill_at, Now() + kStopTimeout);
}

void Supervisor::KillOverdue() {
  const auto now = Now();
  const bool all = stopping_ && now >= stop_deadline_;
  for (Worker& worker : workers_) {
    if (now < worker.kill_at && !all) continue;
    if (worker.state == Worker::kStarting && worker.end_reason.empty()) {
      worker.end_reason = "cr-worker was not ready within " + std::to_string(kWorkerStartTimeout.count()) + " s";
    }
    kill(-worker.pid, SIGKILL);
    kill(worker.pid, SIGKILL);
    worker.kill_at = now + std::chrono::seconds(1);
  }
}

void Supervisor::BeginShutdown() {
  if (stopping_) return;
  stopping_ = true;
  stop_deadline_ = Now() + kStopTimeout;
  unlink(SessionSocketPath(options_.directory).c_str());
  for (Worker& worker : workers_) {
    if (worker.state == Worker::kServing) {
      StopWorker(&worker, "the server is shutting down");
    } else {
      kill(-worker.pid, SIGKILL);
      kill(worker.pid, SIGKILL);
    }
  }
  monitor_.Stop();
  std::deque<uint64_t> waiting;
  waiting.swap(waiting_);
  for (uint64_t id : waiting) EndOfSession(id, "the server is shutting down", false);
}

uint64_t Supervisor::SubmitClient(int socket, const Hello& hello, const std::string& transport, const std::string& peer,
                                  const std::string& owner) {
  uint64_t id;
  {
    MutexLock lock(&mutex_);
    // This takes a ready worker if there is one. Workers are started by the event loop's thread only: their
    // parent-death signal follows that thread.
    id = Admit(socket, hello, transport, peer, owner);
  }
  Wake();
  return id;
}

void Supervisor::SubmitQuestion(int socket, const std::string& question, const Caller& caller) {
  {
    // The monitor is started by the event loop's thread only, as workers are.
    MutexLock lock(&mutex_);
    posted_.push_back([this, socket, question, caller] {
      mutex_.AssertHeld();
      AskMonitor(socket, question, /*remote=*/true, caller);
    });
  }
  Wake();
}

bool Supervisor::EndSession(uint64_t id, const std::string& reason, const Caller& caller) {
  MutexLock lock(&mutex_);
  return EndOwn(id, reason, caller);
}

bool Supervisor::EndOwn(uint64_t id, const std::string& reason, const Caller& caller) {
  const auto found = sessions_.find(id);
  if (found == sessions_.end() || !caller.MayTouch(found->second.info.owner)) return false;
  const std::string by = caller.is_operator ? "ended by the operator" : "ended by its owner";
  const std::string why = Printable(std::string_view(reason).substr(0, kMostReason));
  logging::Info("session {} is ended by request of {}", id, caller.identity);
  found->second.end = "request: " + (why.empty() ? by : by + ": " + why);
  return EndSessionLocked(id, why.empty() ? by : by + ": " + why);
}

bool Supervisor::NoteSaved(const control::NoteSavedRequest& note, const Caller& caller) {
  MutexLock lock(&mutex_);
  return NoteSavedLocked(note, caller);
}

bool Supervisor::NoteSavedLocked(const control::NoteSavedRequest& note, const Caller& caller) {
  const auto found = sessions_.find(note.id());
  if (found == sessions_.end() || !caller.MayTouch(found->second.info.owner)) return false;
  SessionInfo& info = found->second.info;
  if (note.end() == control::NoteSavedRequest::STOPPED) {
    found->second.end = "stop: its job was saved, and ended by cr-checkpoint --stop";
  } else if (note.end() == control::NoteSavedRequest::MOVED) {
    found->second.end = "move: its job has moved to " + Printable(std::string_view(note.to()).substr(0, kMostReason));
  }
  if (note.unix_ms() == 0) return true;
  // A tool that has restarted or moved the job reports an image from before the session.
  const int64_t now = UnixMs();
  const int64_t began =
      now - std::chrono::duration_cast<std::chrono::milliseconds>(Now() - found->second.started).count();
  if (int64_t(note.unix_ms()) >= began) {
    ++totals_.checkpoints;
    totals_.checkpoint_bytes += note.bytes();
    logging::Info("session {} of {}: its job{} was saved, {} bytes", note.id(), info.owner,
                  info.hello.job.empty() ? "" : " " + info.hello.job, note.bytes());
  }
  info.saved_unix_ms = note.unix_ms();
  info.saved_bytes = note.bytes();
  return true;
}

bool Supervisor::EndSessionItself(uint64_t id, const std::string& reason) {
  MutexLock lock(&mutex_);
  return EndSessionLocked(id, reason);
}

bool Supervisor::EndSessionLocked(uint64_t id, const std::string& reason) {
  const auto found = sessions_.find(id);
  if (found == sessions_.end()) return false;
  if (found->second.waiting) {
    waiting_.erase(std::remove(waiting_.begin(), waiting_.end(), id), waiting_.end());
    EndOfSession(id, reason, false);
  } else {
    for (Worker& worker : workers_) {
      if (worker.session == id) StopWorker(&worker, reason);
    }
  }
  Wake();
  return true;
}

std::vector<SessionInfo> Supervisor::Sessions(const Caller& caller) {
  MutexLock lock(&mutex_);
  return SessionsOf(caller);
}

std::vector<SessionInfo> Supervisor::SessionsOf(const Caller& caller) {
  std::vector<SessionInfo> list;
  for (const auto& [id, session] : sessions_) {
    if (!caller.MayTouch(session.info.owner)) continue;
    list.push_back(session.info);
    list.back().seconds = SecondsSince(session.started);
    // A session that has not reported for a while does nothing.
    if (Now() - session.stats_at > std::chrono::seconds(5)) {
      list.back().calls_per_second = list.back().bytes_per_second = 0;
    }
  }
  return list;
}

ServerFacts Supervisor::Facts(const Caller& caller) {
  MutexLock lock(&mutex_);
  return FactsFor(caller);
}

ServerFacts Supervisor::FactsFor(const Caller& caller) {
  ServerFacts facts;
  facts.name = name_;
  facts.pid = getpid();
  for (const Worker& worker : workers_) facts.warm_workers += worker.state == Worker::kReady;
  facts.sessions = int(sessions_.size());
  facts.sessions_ever = next_session_ - 1;
  facts.seconds = SecondsSince(started_);
  facts.driver = last_ready_.driver;
  facts.software = last_ready_.software;
  facts.worker_error = worker_error_;
  facts.policy = policy_;
  std::set<std::string> owners = {caller.identity};
  for (const auto& [id, session] : sessions_) owners.insert(session.info.owner);
  for (const std::string& owner : owners) {
    if (caller.MayTouch(owner)) facts.usage.push_back(UsageOf(owner));
  }
  return facts;
}

MeasuredFacts Supervisor::Measure() {
  MutexLock lock(&mutex_);
  Caller own;
  own.identity = UserIdentity(geteuid());
  own.is_operator = true;
  MeasuredFacts facts;
  facts.server = FactsFor(own);
  facts.totals = totals_;
  facts.sessions = SessionsOf(own);
  for (const SessionInfo& info : facts.sessions) {
    facts.totals.calls += info.stats.calls;
    facts.totals.bytes_in += info.stats.bytes_in;
    facts.totals.bytes_out += info.stats.bytes_out;
  }
  facts.waiting = int(waiting_.size());
  facts.gpus = options_.gpu >= 0 ? 1 : gpu_count_;
  return facts;
}

void Supervisor::Shutdown() {
  {
    MutexLock lock(&mutex_);
    posted_.push_back([this] {
      mutex_.AssertHeld();
      BeginShutdown();
    });
  }
  Wake();
}

}  // namespace cuda_remote::server
