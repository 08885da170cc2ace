// SPDX-License-Identifier: Apache-2.0
#include "client/relay/relay_session.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <thread>
#include <utility>

#include "client/relay/relay_lanes.h"
#include "client/relay/relay_stream.h"
#include "proto/base/clock.h"
#include "proto/channel/end_reasons.h"
#include "proto/channel/handshake.h"
#include "proto/control/control.grpc.pb.h"
#include "proto/control/credentials.h"
#include "proto/control/grpc_call.h"
#include "proto/control/message_check.h"
#include "proto/control/status_text.h"
#include "proto/control/tunnel_message.h"
#include "proto/logging/log.h"
#include "proto/nvml/query.h"
#include "proto/threads/mutex.h"
#include "proto/threads/start_thread.h"

namespace cuda_remote::client {
namespace {

using control::TunnelEnd;
using control::TunnelMessage;

constexpr int kHelloTimeoutMs = 10000;
// How long the first connection may take.
constexpr auto kConnectTimeout = std::chrono::seconds(3);
constexpr auto kFirstPause = std::chrono::milliseconds(100);
constexpr auto kLongestPause = std::chrono::seconds(2);
// A question, with the time that cr-nvml may need to start.
constexpr auto kQueryTimeout = std::chrono::seconds(20);
// How long an ended stream may take to end on the server's side.
constexpr int kCloseMs = 3000;
// The client waits for the server: how long until the relay asks the server whether it is there, how long it waits for
// the answer until it tells the user (2 s in all), and how long until it asks again.
constexpr double kQuietSeconds = 0.5;
constexpr auto kAnswerTimeout = std::chrono::milliseconds(1500);
constexpr auto kAskPause = std::chrono::milliseconds(1500);
constexpr auto kWatchPause = std::chrono::milliseconds(250);

}  // namespace

RelaySession::RelaySession(int client_socket, std::string address,
                           std::shared_ptr<grpc::ChannelCredentials> credentials, bool checked, uint32_t grace_seconds)
    : socket_(client_socket),
      address_(std::move(address)),
      credentials_(std::move(credentials)),
      checked_(checked),
      grace_seconds_(grace_seconds),
      wake_fd_(eventfd(0, EFD_CLOEXEC)) {}

void RelaySession::Stop(const std::string& reason) {
  MutexLock lock(&mutex_);
  if (stop_reason_.empty()) stop_reason_ = reason;
  stopped_.store(true);
  if (end_) end_->End(reason);
  // Without an end, the context is a question's.
  if (!end_ && context_) context_->TryCancel();
  const uint64_t one = 1;
  if (write(wake_fd_.get(), &one, sizeof(one)) < 0) return;
}

void RelaySession::Refuse(const std::string& why) {
  logging::Info("refused: {}", why);  // the client says it where its user looks
  Welcome welcome;
  welcome.error = why;
  welcome.of_relay = true;
  std::string body;
  EncodeWelcome(welcome, &body);
  SendPacket(socket_.get(), PacketType::kWelcome, body, -1);
}

void RelaySession::Tell(const std::string& reason) {
  std::string body;
  EncodeEnd(reason, &body);
  SendPacket(socket_.get(), PacketType::kEnd, body, -1);
  shutdown(socket_.get(), SHUT_RDWR);
}

std::shared_ptr<grpc::Channel> RelaySession::NewChannel() const {
  return grpc::CreateCustomChannel(address_, credentials_, control::ClientArguments());
}

absl::StatusOr<std::unique_ptr<RelayStream>> RelaySession::Open(const std::string& hello) {
  auto opening = std::make_unique<RelayStream>(channel_.get());
  {
    MutexLock lock(&mutex_);
    context_ = opening->context();
  }
  control::TunnelOpen open;
  if (resume_token_.empty()) {
    open.set_hello(hello);
    open.set_grace_seconds(grace_seconds_);
  } else {
    open.set_resume_token(resume_token_);
    const auto positions = end_->received_positions();
    open.set_reply_position(positions[0]);
    open.set_event_position(positions[1]);
  }
  open.set_takes_lanes(WantedLanes() > 0);
  TunnelMessage first;
  first.open = open.SerializeAsString();
  grpc::ByteBuffer buffer;
  control::ReceivedFrames frames;
  control::TunnelOpened opened;
  if (opening->Write(control::EncodeTunnelMessage(first, nullptr, checked_)) && opening->Read(&buffer)) {
    if (checked_ && control::CheckTunnelMessage(buffer) != control::Integrity::kIntact) {
      opening->Cancel();
      opening->Finish();
      MutexLock lock(&mutex_);
      context_ = nullptr;
      return absl::UnavailableError(
          "the server's answer has no checksum, or arrived damaged; both sides need the same release of cuda-remote");
    }
    if (control::DecodeTunnelMessage(buffer, &first, &frames) && opened.ParseFromString(first.open) &&
        !opened.resume_token().empty()) {
      if (resume_token_.empty()) {
        welcome_ = opened.welcome();
        resume_token_ = opened.resume_token();
      }
      request_position_ = opened.request_position();
      grace_seconds_ = opened.grace_seconds();
      number_ = opened.number();
      lanes_ = opened.number() != 0 ? std::min(opened.lanes(), WantedLanes()) : 0;
      return opening;
    }
    opening->Cancel();
    opening->Finish();
    MutexLock lock(&mutex_);
    context_ = nullptr;
    return absl::DataLossError("the server sent an answer that cr-relay cannot read");
  }
  const grpc::Status status = opening->Finish();
  {
    MutexLock lock(&mutex_);
    context_ = nullptr;
  }
  switch (status.error_code()) {
    case grpc::StatusCode::UNAVAILABLE:
    case grpc::StatusCode::CANCELLED:
    case grpc::StatusCode::DEADLINE_EXCEEDED:
    case grpc::StatusCode::UNKNOWN:
    case grpc::StatusCode::INTERNAL:
      return absl::UnavailableError(control::StatusText(status));
    case grpc::StatusCode::UNIMPLEMENTED:
      // A session was there already: on its way without TLS, the name of the call was damaged.
      if (checked_ && !resume_token_.empty()) return absl::UnavailableError(control::StatusText(status));
      return absl::UnimplementedError("the program that answers there is not a cr-server of this release");
    default:
      return absl::FailedPreconditionError(control::StatusText(status));
  }
}

template <typename Work>
grpc::Status RelaySession::CallServer(const Work& call) {
  channel_ = NewChannel();
  grpc::ClientContext context;
  context.set_deadline(WallNow() + kQueryTimeout);
  {
    MutexLock lock(&mutex_);
    if (stopped_.load()) return grpc::Status::CANCELLED;
    context_ = &context;
  }
  const grpc::Status status = call(control::Control::NewStub(channel_).get(), &context);
  MutexLock lock(&mutex_);
  context_ = nullptr;
  return status;
}

void RelaySession::Ask(const std::string& question) {
  control::QueryRequest request;
  request.set_question(question);
  if (checked_) control::AddChecksum(&request);
  control::QueryReply reply;
  grpc::Status status = CallServer([&](control::Control::Stub* stub, grpc::ClientContext* context) {
    return stub->Query(context, request, &reply);
  });
  if (status.ok() && checked_ && !control::ChecksumIsRight(reply))
    status = grpc::Status(grpc::StatusCode::DATA_LOSS, "its answer has no checksum, or arrived damaged");
  std::string body = reply.answer();
  if (!status.ok()) {
    nvml::Answer answer;
    answer.result = nvml::kDriverNotLoaded;
    answer.error = "no answer from the server " + address_ + ": " + control::StatusText(status);
    body.clear();
    EncodeAnswer(answer, &body);
  }
  SendPacket(socket_.get(), PacketType::kAnswer, body, -1);
}

void RelaySession::Control(const std::string& bytes) {
  control::ControlCall call;
  control::ControlAnswer answer;
  if (!call.ParseFromString(bytes)) call.Clear();
  const grpc::Status status = CallServer([&](control::Control::Stub* stub, grpc::ClientContext* context) {
    return control::CallOverGrpc(stub, context, call, checked_, &answer);
  });
  if (!status.ok()) {
    const std::string problem = control::StatusText(status);
    const bool reached = status.error_code() != grpc::StatusCode::UNAVAILABLE;
    answer.set_error("no answer from the server " + address_ + ": " + problem +
                     (reached ? "" : control::WhatToCheck(problem)));
  }
  SendPacket(socket_.get(), PacketType::kControlAnswer, answer.SerializeAsString(), -1);
}

void RelaySession::WatchClient() {
  while (true) {
    pollfd waiting[2] = {{socket_.get(), POLLIN, 0}, {wake_fd_.get(), POLLIN, 0}};
    if (poll(waiting, 2, -1) < 0) continue;
    if (waiting[1].revents) return;
    Packet packet;
    const ChannelStatus status = ReceivePacket(socket_.get(), &packet, 0);
    if (status == ChannelStatus::kTimeout) continue;
    // Descriptors cannot be sent on; a client that tries has not read the Welcome.
    const std::string reason = status == ChannelStatus::kClosed ? kClientGone : "unexpected packet from the client";
    stopped_.store(true);
    MutexLock lock(&mutex_);
    if (stop_reason_.empty()) stop_reason_ = reason;
    end_->End(reason);
    return;
  }
}

double RelaySession::Silence() const { return end_ ? end_->silence() : SecondsSince(watched_since_); }

void RelaySession::Watch(std::shared_ptr<grpc::Channel> channel) {
  MutexLock lock(&mutex_);
  watched_ = std::move(channel);
  watched_since_ = Now();
}

void RelaySession::StopWatching() {
  MutexLock lock(&mutex_);
  watching_ = false;
  if (question_) question_->TryCancel();
  watch_changed_.NotifyAll();
}

void RelaySession::WatchServer() {
  bool said = false;
  auto next = Now(), silent_since = Now();
  MutexLock lock(&mutex_);
  while (watching_) {
    watch_changed_.WaitFor(&mutex_, kWatchPause);
    if (!watching_ || !watched_) continue;
    const double silence = Silence();
    if (said && silence < kQuietSeconds) {
      logging::Warn("the GPU server {} answers again, after {:.0f} s", address_, SecondsSince(silent_since));
      said = false;
    }
    // A server that takes what is sent is there.
    const bool sends = end_ && end_->since_sent() < kQuietSeconds;
    if (silence < kQuietSeconds || sends || Now() < next) continue;
    const std::shared_ptr<grpc::Channel> channel = watched_;
    grpc::ClientContext context;
    context.set_deadline(WallNow() + kAnswerTimeout);
    question_ = &context;
    lock.Unlock();
    control::ServerInfoRequest request;
    if (checked_) control::AddChecksum(&request);
    control::ServerInfo reply;
    const grpc::StatusCode answer =
        control::Control::NewStub(channel)->GetServerInfo(&context, request, &reply).error_code();
    lock.Lock();
    question_ = nullptr;
    logging::Debug("asked the silent server {}: {}", address_, answer == grpc::StatusCode::OK ? "it is there" : "?");
    next = Now() + kAskPause;
    // A broken connection is noticed where the stream is read.
    if (answer == grpc::StatusCode::UNAVAILABLE || answer == grpc::StatusCode::CANCELLED) continue;
    const bool silent = answer == grpc::StatusCode::DEADLINE_EXCEEDED && watched_ == channel && Silence() >= silence;
    if (said && !silent) {
      logging::Warn("the GPU server {} answers again, after {:.0f} s", address_, SecondsSince(silent_since));
    } else if (!said && silent) {
      silent_since = Now() - std::chrono::duration_cast<Moment::duration>(std::chrono::duration<double>(Silence()));
      logging::Warn("the GPU server {} has not answered for {:.0f} s; {}", address_, Silence(),
                    end_ ? "the program waits for it up to " + std::to_string(grace_seconds_) +
                               " s (CUDA_REMOTE_GRACE=SECONDS chooses another time)"
                         : std::string("the program waits for its session"));
    }
    said = silent;
  }
}

void RelaySession::Run() {
  Packet packet;
  Hello hello;
  if (ReceivePacket(socket_.get(), &packet, kHelloTimeoutMs) != ChannelStatus::kOk)
    return;  // just a look whether we are here
  packet.fd.Close();
  if (packet.type == PacketType::kQuery) return Ask(packet.body);
  if (packet.type == PacketType::kControlCall) return Control(packet.body);
  if (packet.type != PacketType::kHello || !DecodeHello(packet.body, &hello)) {
    return Refuse("cr-relay did not get a Hello");
  }
  if (const std::string why = CheckWireVersion(hello.wire_version, "cr-relay"); !why.empty()) return Refuse(why);
  // Without this thread, the user is not told.
  std::thread watcher = StartThread([this] { WatchServer(); });
  Serve(packet.body, hello);
  StopWatching();
  if (watcher.joinable()) watcher.join();
}

void RelaySession::Serve(const std::string& hello_bytes, const Hello& hello) {
  channel_ = NewChannel();
  Watch(channel_);
  std::unique_ptr<RelayStream> stream;
  std::string problem;  // with the last try
  const auto started = Now();
  auto pause = kFirstPause;
  while (true) {
    auto opened = Open(hello_bytes);
    if (opened.ok()) {
      stream = *std::move(opened);
      break;
    }
    problem = std::string(opened.status().message());
    if (!absl::IsUnavailable(opened.status())) return Refuse("the server " + address_ + " refused: " + problem);
    if (Now() - started > kConnectTimeout || stopped_.load()) {
      return Refuse("cannot reach the server " + address_ + ": " + problem + control::WhatToCheck(problem));
    }
    std::this_thread::sleep_for(pause);
    pause *= 2;
  }
  auto rings = ring::RingMemory::Create();
  Welcome welcome;
  if (!rings.ok() || !DecodeWelcome(welcome_, &welcome)) {
    stream->Cancel();
    stream->Finish();
    return Refuse(rings.ok() ? "the server sent a Welcome that cr-relay cannot read"
                             : "cr-relay: " + rings.status().message());
  }
  const std::shared_ptr<ring::RingMemory> memory = *std::move(rings);
  welcome.shared_memory = false;
  std::string body;
  EncodeWelcome(welcome, &body);
  {
    MutexLock lock(&mutex_);
    end_ = std::make_unique<TunnelEnd>(TunnelEnd::Side::kRelay, memory, checked_);
    if (stopped_.load()) end_->End(stop_reason_);
  }
  if (SendPacket(socket_.get(), PacketType::kWelcome, body, memory->fd()) != ChannelStatus::kOk) end_->End(kClientGone);
  logging::Info("session {}: pid {} {} on {}", welcome.session, hello.pid, hello.program, address_);
  std::thread watcher = StartThread([this] { WatchClient(); });
  if (!watcher.joinable()) end_->End("the system gives cr-relay no more threads");

  std::string reason;
  while (true) {
    reason.clear();
    std::optional<RelayLanes> lanes;
    if (lanes_ > 0)
      lanes.emplace(
          end_.get(), [this] { return NewChannel(); }, resume_token_, number_, lanes_, checked_);
    const uint64_t damaged = end_->damaged();
    Watch(channel_);
    const TunnelEnd::Outcome outcome = end_->Run(stream.get(), {request_position_}, &reason, number_);
    Watch(nullptr);
    lanes.reset();
    // The server answers a goodbye by ending the stream; it may also be gone.
    stream->Cancel();
    const grpc::Status status = stream->Finish();
    {
      MutexLock lock(&mutex_);
      context_ = nullptr;
    }
    stream.reset();
    if (end_->damaged() != damaged)
      logging::Warn("session {}: a message from {} arrived damaged; it is sent again", welcome.session, address_);
    if (outcome != TunnelEnd::Outcome::kBroken) break;
    if (status.error_code() == grpc::StatusCode::INVALID_ARGUMENT || status.ok()) {
      reason = status.ok() ? "the server ended the session" : status.error_message();
      break;
    }
    logging::Warn(
        "session {}: the connection to {} broke ({}); the program waits for it up to {} s (CUDA_REMOTE_GRACE=SECONDS "
        "chooses another time)",
        welcome.session, address_, reason.empty() ? control::StatusText(status) : reason, grace_seconds_);
    const auto broken = Now();
    pause = kFirstPause;
    while (Now() - broken < std::chrono::seconds(grace_seconds_) && !stopped_.load()) {
      // A new channel each time: gRPC's own may refuse to connect for half a minute after it was cut while it connected
      // (it waits to be allowed to look the address up again).
      channel_ = NewChannel();
      auto opened = Open("");
      if (opened.ok()) {
        stream = *std::move(opened);
        break;
      }
      problem = std::string(opened.status().message());
      if (!absl::IsUnavailable(opened.status())) break;
      for (auto slept = std::chrono::milliseconds(0); slept < pause && !stopped_.load();
           slept += std::chrono::milliseconds(20)) {
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
      }
      pause = std::min<std::chrono::milliseconds>(pause * 2, kLongestPause);
    }
    if (stream) {
      logging::Warn("session {}: connected again after {:.1f} s", welcome.session, SecondsSince(broken));
      continue;
    }
    const bool late = Now() - broken >= std::chrono::seconds(grace_seconds_);
    reason = stopped_.load() ? "the client left while the connection was broken"
                             : "the connection to " + address_ + " broke and did not come back" +
                                   (late ? " within " + std::to_string(grace_seconds_) + " s: " : ": ") + problem;
    break;
  }
  logging::Info("session {} ended: {}", welcome.session, reason);
  Tell(reason);
  const uint64_t one = 1;
  if (write(wake_fd_.get(), &one, sizeof(one)) < 0) logging::Debug("wake");
  if (watcher.joinable()) watcher.join();
}

}  // namespace cuda_remote::client
