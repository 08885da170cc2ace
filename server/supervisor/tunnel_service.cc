// SPDX-License-Identifier: Apache-2.0
#include "server/supervisor/tunnel_service.h"

#include <grpcpp/impl/rpc_service_method.h>
#include <grpcpp/support/method_handler.h>
#include <poll.h>
#include <sys/random.h>

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "proto/base/clock.h"
#include "proto/base/status_macros.h"
#include "proto/base/unique_fd.h"
#include "proto/channel/handshake.h"
#include "proto/errors/absl_status.h"
#include "proto/logging/log.h"
#include "proto/threads/mutex.h"
#include "proto/threads/start_thread.h"

namespace cuda_remote::server {
namespace {

using control::ReceivedFrames;
using control::TunnelEnd;
using control::TunnelMessage;

// A worker may have to start first.
constexpr int kWelcomeTimeoutMs = 70000;
// A stream's first message.
constexpr auto kOpenTimeout = std::chrono::seconds(10);
// Streams without one, of all and of one identity. More are sent away to try again.
constexpr size_t kMostOpenings = 256;
constexpr size_t kMostOpeningsOfOne = 64;
// What a client may choose.
constexpr uint32_t kLongestGraceSeconds = 86400;

class ServerStream final : public control::TunnelStream {
 public:
  // `poller`: null if messages are not waited for all the time.
  ServerStream(grpc::ServerContext* context, TunnelService::Stream* stream, ServerPoller* poller)
      : context_(context), stream_(stream) {
    if (poller) reads_.emplace(poller);
  }
  bool Read(grpc::ByteBuffer* buffer) override { return stream_->Read(buffer); }
  bool Write(const grpc::ByteBuffer& buffer) override { return stream_->Write(buffer); }
  void Cancel() override { context_->TryCancel(); }
  // What is left to do may take a while, and the client may be connecting anew.
  void DoneReading() override { reads_.reset(); }

 private:
  grpc::ServerContext* const context_;
  TunnelService::Stream* const stream_;
  std::optional<ServerPoller::Substitute> reads_;
};

std::string RandomToken() {
  std::string token(16, 0);
  while (getrandom(&token[0], token.size(), 0) != ssize_t(token.size())) {
  }
  return token;
}

}  // namespace

struct TunnelService::Tunnel {
  uint64_t session = 0;
  std::string owner;
  std::string token;
  UniqueFd socket;  // to the worker
  uint32_t grace_seconds = 0;
  std::unique_ptr<TunnelEnd> end;
  // Under the service's mutex.
  grpc::ServerContext* context = nullptr;  // of the stream that serves it now
  uint64_t generation = 0;                 // counts streams
  uint32_t lanes = 0;
  Moment expires = Moment::max();
  bool worker_gone = false;
};

TunnelService::TunnelService(Supervisor* supervisor, ServerPoller* poller) : supervisor_(supervisor), poller_(poller) {
  AddMethod(new grpc::internal::RpcServiceMethod(
      control::kTunnelMethod, grpc::internal::RpcMethod::BIDI_STREAMING,
      new grpc::internal::BidiStreamingHandler<TunnelService, grpc::ByteBuffer, grpc::ByteBuffer>(
          [](TunnelService* service, grpc::ServerContext* context, Stream* stream) {
            return service->Serve(context, stream);
          },
          this)));
  janitor_ = std::thread([this] { JanitorLoop(); });
}

TunnelService::~TunnelService() {
  Shutdown();
  janitor_.join();
}

void TunnelService::Shutdown() {
  MutexLock lock(&mutex_);
  stopping_ = true;
  for (const Opening& opening : openings_) opening.context->TryCancel();
  for (auto& [token, tunnel] : tunnels_) {
    tunnel->end->End("the server is shutting down");
    if (!tunnel->context) tunnel->expires = Now();
  }
  changed_.NotifyAll();
  // Watchers end with their workers, which the supervisor stops.
  const Moment end = Now() + std::chrono::seconds(5);
  while (watchers_ != 0 && changed_.WaitUntil(&mutex_, end)) {
  }
}

// Sessions whose connection did not come back, and streams whose first message did not come.
void TunnelService::JanitorLoop() {
  MutexLock lock(&mutex_);
  while (!stopping_ || !tunnels_.empty()) {
    Moment next = Now() + std::chrono::seconds(60);
    std::vector<std::shared_ptr<Tunnel>> expired;
    for (Opening& opening : openings_) {
      if (opening.deadline <= Now()) {
        opening.context->TryCancel();
        opening.deadline = Moment::max();
      }
      next = std::min(next, opening.deadline);
    }
    for (const auto& [token, tunnel] : tunnels_) {
      if (tunnel->expires <= Now()) {
        expired.push_back(tunnel);
      } else if (tunnel->expires < next) {
        next = tunnel->expires;
      }
    }
    for (const auto& tunnel : expired) {
      if (!tunnel->worker_gone && !stopping_) {
        logging::Warn("session {}: its connection did not come back within {} s", tunnel->session,
                      tunnel->grace_seconds);
        lock.Unlock();
        supervisor_->EndSessionItself(tunnel->session, "the connection to the client did not come back");
        lock.Lock();
        // Its watcher forgets it when the worker has gone, who would otherwise only see that the client is not there.
        tunnel->expires = Moment::max();
      } else {
        tunnels_.erase(tunnel->token);
      }
    }
    if (stopping_ && tunnels_.empty()) break;
    changed_.WaitUntil(&mutex_, next);
    if (stopping_) changed_.WaitFor(&mutex_, std::chrono::milliseconds(50));
  }
}

void TunnelService::Forget(const std::shared_ptr<Tunnel>& tunnel) {
  // The worker sees the end of file and ends the session.
  MutexLock lock(&mutex_);
  tunnels_.erase(tunnel->token);
  changed_.NotifyAll();
}

absl::StatusOr<std::shared_ptr<TunnelService::Tunnel>> TunnelService::Open(const std::string& hello_bytes,
                                                                           const std::string& owner, bool checked,
                                                                           grpc::ServerContext* context,
                                                                           std::string* welcome_bytes) {
  Hello hello;
  if (!DecodeHello(hello_bytes, &hello)) return absl::DataLossError("not a Hello");
  int sockets[2];
  if (!SocketPair(sockets)) return absl::ResourceExhaustedError("the server has no descriptors left");
  UniqueFd worker(sockets[1]);
  supervisor_->SubmitClient(sockets[0], hello, "grpc", context->peer(), owner);
  Packet packet;
  ChannelStatus status = ChannelStatus::kTimeout;
  for (int waited = 0; status == ChannelStatus::kTimeout && waited < kWelcomeTimeoutMs && !context->IsCancelled();
       waited += 100) {
    status = ReceivePacket(worker.get(), &packet, 100);
  }
  Welcome welcome;
  if (status != ChannelStatus::kOk || packet.type != PacketType::kWelcome || !DecodeWelcome(packet.body, &welcome))
    return absl::UnavailableError("the server's worker ended before it took the session");
  if (!welcome.error.empty()) return absl::FailedPreconditionError(welcome.error);
  if (!packet.fd.ok()) return absl::DataLossError("the server's worker gave no memory for the session");
  CR_ASSIGN_OR_RETURN(std::shared_ptr<ring::RingMemory> memory, ToAbsl(ring::RingMemory::Map(std::move(packet.fd))));
  auto tunnel = std::make_shared<Tunnel>();
  tunnel->session = welcome.session;
  tunnel->owner = owner;
  tunnel->token = RandomToken();
  tunnel->socket = std::move(worker);
  tunnel->end = std::make_unique<TunnelEnd>(TunnelEnd::Side::kServer, std::move(memory), checked);
  welcome.shared_memory = false;
  EncodeWelcome(welcome, welcome_bytes);
  return tunnel;
}

void TunnelService::WatchWorker(std::shared_ptr<Tunnel> tunnel) {
  std::string reason;
  while (true) {
    Packet packet;
    const ChannelStatus status = ReceivePacket(tunnel->socket.get(), &packet, 500);
    if (status == ChannelStatus::kTimeout) {
      MutexLock lock(&mutex_);
      if (tunnels_.count(tunnel->token) != 0) continue;
      break;  // the client left
    }
    if (status == ChannelStatus::kOk && packet.type == PacketType::kEnd) DecodeEnd(packet.body, &reason);
    break;
  }
  tunnel->end->End(reason.empty() ? "the server's process for this session ended" : reason);
  MutexLock lock(&mutex_);
  tunnel->worker_gone = true;
  if (!tunnel->context) tunnels_.erase(tunnel->token);
  --watchers_;
  changed_.NotifyAll();
}

grpc::Status TunnelService::ServeLane(const control::TunnelOpen& open, const std::string& owner, bool checked,
                                      grpc::ServerContext* context, Stream* stream) {
  std::shared_ptr<Tunnel> tunnel;
  {
    MutexLock lock(&mutex_);
    const auto found = tunnels_.find(open.resume_token());
    if (stopping_ || found == tunnels_.end() || found->second->owner != owner || !found->second->context ||
        found->second->generation != open.lane_of() || found->second->lanes >= TunnelEnd::kMostLanes) {
      return grpc::Status(grpc::StatusCode::NOT_FOUND, "the server has no stream that takes this lane");
    }
    tunnel = found->second;
    ++tunnel->lanes;
  }
  control::TunnelOpened opened;
  opened.set_resume_token(tunnel->token);
  TunnelMessage answer;
  answer.open = opened.SerializeAsString();
  if (stream->Write(control::EncodeTunnelMessage(answer, nullptr, checked))) {
    ServerStream io(context, stream, nullptr);
    tunnel->end->RunLane(&io, open.lane_of(), open.lane());
  }
  MutexLock lock(&mutex_);
  --tunnel->lanes;
  return grpc::Status::CANCELLED;
}

grpc::Status TunnelService::ReadOpen(const std::string& owner, bool checked, grpc::ServerContext* context,
                                     Stream* stream, control::TunnelOpen* open) {
  std::list<Opening>::iterator self;
  {
    MutexLock lock(&mutex_);
    const auto of_one = size_t(
        std::count_if(openings_.begin(), openings_.end(), [&](const Opening& other) { return other.owner == owner; }));
    std::string more;
    if (stopping_) return grpc::Status(grpc::StatusCode::UNAVAILABLE, "the server is shutting down");
    if (openings_.size() >= kMostOpenings || of_one >= kMostOpeningsOfOne) {
      if (opening_log_.Allow(&more)) {
        logging::Warn("{} ({}): a tunnel was refused: {} others have not sent their first message{}", context->peer(),
                      owner, of_one, more);
      }
      return grpc::Status(grpc::StatusCode::UNAVAILABLE, "too many tunnels are being opened at this moment");
    }
    self = openings_.insert(openings_.end(), {context, owner, Now() + kOpenTimeout});
    changed_.NotifyAll();
  }
  grpc::ByteBuffer buffer;
  const bool came = stream->Read(&buffer);
  std::string more;
  {
    MutexLock lock(&mutex_);
    openings_.erase(self);
  }
  if (came && checked && control::CheckTunnelMessage(buffer) != control::Integrity::kIntact) {
    return grpc::Status(grpc::StatusCode::UNAVAILABLE,
                        "the first message arrived damaged, or without the checksum that connections without TLS need; "
                        "both sides need the same release of cuda-remote");
  }
  TunnelMessage first;
  ReceivedFrames frames;
  if (came && control::DecodeTunnelMessage(buffer, &first, &frames) && !first.open.empty() && frames.size() == 0 &&
      open->ParseFromString(first.open)) {
    return grpc::Status::OK;
  }
  MutexLock lock(&mutex_);
  if (opening_log_.Allow(&more)) {
    logging::Warn("{} ({}) opened a tunnel without a proper first message within {} s{}", context->peer(), owner,
                  kOpenTimeout.count(), more);
  }
  return grpc::Status(grpc::StatusCode::INVALID_ARGUMENT, "the first message of a tunnel must be TunnelOpen");
}

grpc::Status TunnelService::Serve(grpc::ServerContext* context, Stream* stream) {
  const auto fail = [](grpc::StatusCode code, const std::string& why) { return grpc::Status(code, why); };
  const Caller caller = supervisor_->CallerOf(*context);
  if (!caller.refusal.empty()) return fail(grpc::StatusCode::UNAUTHENTICATED, caller.refusal);
  const std::string& owner = caller.identity;
  const bool checked = caller.unprotected;
  control::TunnelOpen open;
  if (const grpc::Status status = ReadOpen(owner, checked, context, stream, &open); !status.ok()) return status;
  if (open.lane_of() != 0) return ServeLane(open, owner, checked, context, stream);
  std::shared_ptr<Tunnel> tunnel;
  control::TunnelOpened opened;
  std::vector<uint64_t> peer_positions = {0, 0};
  uint64_t generation;
  if (open.resume_token().empty()) {
    absl::StatusOr<std::shared_ptr<Tunnel>> begun =
        Open(open.hello(), owner, checked, context, opened.mutable_welcome());
    if (!begun.ok()) return fail(grpc::StatusCode::FAILED_PRECONDITION, std::string(begun.status().message()));
    tunnel = *std::move(begun);
    tunnel->grace_seconds = open.grace_seconds() == 0 ? uint32_t(supervisor_->options().grace_seconds)
                                                      : std::min(open.grace_seconds(), kLongestGraceSeconds);
    MutexLock lock(&mutex_);
    if (stopping_) return fail(grpc::StatusCode::UNAVAILABLE, "the server is shutting down");
    std::thread watcher = StartThread([this, tunnel] { WatchWorker(tunnel); });
    // The worker sees that nobody is there, and ends.
    if (!watcher.joinable()) return fail(grpc::StatusCode::FAILED_PRECONDITION, "the server has no threads left");
    watcher.detach();
    tunnels_[tunnel->token] = tunnel;
    tunnel->context = context;
    generation = ++tunnel->generation;
    ++watchers_;
  } else {
    MutexLock lock(&mutex_);
    const auto found = tunnels_.find(open.resume_token());
    // That somebody else's session is there is nobody's business.
    if (found == tunnels_.end() || found->second->owner != owner) {
      return fail(grpc::StatusCode::NOT_FOUND, "the server does not have this session any more");
    }
    tunnel = found->second;
    // A connection that the server still believes in gives way to the new one.
    generation = ++tunnel->generation;
    if (tunnel->context) tunnel->context->TryCancel();
    const Moment end = Now() + std::chrono::seconds(20);
    while (tunnel->context && tunnel->generation == generation && changed_.WaitUntil(&mutex_, end)) {
    }
    if (tunnel->context || tunnel->generation != generation || tunnels_.count(tunnel->token) == 0) {
      return fail(grpc::StatusCode::ABORTED, "another connection took this session over");
    }
    tunnel->context = context;
    tunnel->expires = Moment::max();
    peer_positions = {open.reply_position(), open.event_position()};
    logging::Info("session {}: its connection is back", tunnel->session);
  }
  opened.set_resume_token(tunnel->token);
  opened.set_grace_seconds(tunnel->grace_seconds);
  opened.set_request_position(tunnel->end->received_positions()[0]);
  if (open.takes_lanes()) {
    opened.set_number(generation);
    opened.set_lanes(TunnelEnd::kMostLanes);
  }
  TunnelMessage answer;
  answer.open = opened.SerializeAsString();
  TunnelEnd::Outcome outcome = TunnelEnd::Outcome::kBroken;
  std::string reason;
  const std::string peer = context->peer();
  if (stream->Write(control::EncodeTunnelMessage(answer, nullptr, checked))) {
    ServerStream io(context, stream, poller_);
    const uint64_t damaged = tunnel->end->damaged();
    outcome = tunnel->end->Run(&io, peer_positions, &reason, opened.number());
    if (tunnel->end->damaged() != damaged)
      logging::Warn("session {}: a message from {} arrived damaged; it is sent again", tunnel->session, peer);
  }
  {
    MutexLock lock(&mutex_);
    tunnel->context = nullptr;
    if (outcome == TunnelEnd::Outcome::kBroken && !stopping_) {
      if (!tunnel->worker_gone) {
        logging::Warn("session {}: its connection broke{}{}; waiting {} s for a new one", tunnel->session,
                      reason.empty() ? "" : ": ", reason, opened.grace_seconds());
      }
      tunnel->expires = Now() + std::chrono::seconds(tunnel->grace_seconds);
      changed_.NotifyAll();
      return grpc::Status::CANCELLED;
    }
    changed_.NotifyAll();
  }
  if (outcome == TunnelEnd::Outcome::kFailed) logging::Error("session {}: {}", tunnel->session, reason);
  if (outcome == TunnelEnd::Outcome::kFailed || outcome == TunnelEnd::Outcome::kPeerEnded) {
    // The worker is told why, for its own last words.
    supervisor_->EndSessionItself(tunnel->session, reason);
  }
  Forget(tunnel);
  return outcome == TunnelEnd::Outcome::kFailed ? fail(grpc::StatusCode::INVALID_ARGUMENT, reason) : grpc::Status::OK;
}

}  // namespace cuda_remote::server
