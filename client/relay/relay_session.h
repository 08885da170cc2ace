// SPDX-License-Identifier: Apache-2.0
// One session of cr-relay: a client on this host, its rings, and the gRPC stream to the server.
//
// The client's frames are not looked at beyond their lengths. When the connection to the server breaks, the session
// opens a new stream and goes on where it was, for as long as the server keeps its side; the client notices nothing but
// the time. When the server ends the session, the client is told why.
//
// Run blocks the calling thread until the session is over; Stop may come from any other.
#ifndef CUDA_REMOTE_CLIENT_RELAY_RELAY_SESSION_H_
#define CUDA_REMOTE_CLIENT_RELAY_RELAY_SESSION_H_

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "proto/base/clock.h"
#include "proto/base/unique_fd.h"
#include "proto/channel/channel_types.h"
#include "proto/control/tunnel_end.h"
#include "proto/threads/mutex.h"

namespace cuda_remote::client {

class RelayStream;

class RelaySession {
 public:
  // Takes `client_socket` over. `address` is for messages. `checked`: nothing else notices damage on the way, so that
  // all messages carry checksums. `grace_seconds`: how long the session is to wait for a server that is not reached; 0:
  // as the server has it.
  RelaySession(int client_socket, std::string address, std::shared_ptr<grpc::ChannelCredentials> credentials,
               bool checked, uint32_t grace_seconds);

  void Run();
  void Stop(const std::string& reason);

 private:
  std::shared_ptr<grpc::Channel> NewChannel() const;
  // Opens a stream; the first one also makes the session on the server. kUnavailable: it may work later; else the
  // server refuses.
  absl::StatusOr<std::unique_ptr<RelayStream>> Open(const std::string& hello);
  void Refuse(const std::string& why);
  // A question about the server's GPUs, or a call of its Control service, instead of a session: one call, one answer.
  void Ask(const std::string& question);
  void Control(const std::string& call);
  // Runs the one call of such a connection, which Stop can end.
  template <typename Work>
  grpc::Status CallServer(const Work& call);
  void Serve(const std::string& hello_bytes, const Hello& hello);
  void WatchClient();
  // Says so when the server does not answer although the client waits for it. Ends with StopWatching.
  void WatchServer();
  // From now on the server is reached over `channel`; null: over none.
  void Watch(std::shared_ptr<grpc::Channel> channel);
  void StopWatching();
  double Silence() const CR_REQUIRES(mutex_);
  void Tell(const std::string& reason);

  const UniqueFd socket_;
  const std::string address_;
  const std::shared_ptr<grpc::ChannelCredentials> credentials_;
  const bool checked_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<control::TunnelEnd> end_;
  std::string resume_token_;
  uint64_t request_position_ = 0;
  uint32_t grace_seconds_;
  uint64_t number_ = 0;  // of the stream that was opened last
  uint32_t lanes_ = 0;   // that it may have
  std::string welcome_;
  Mutex mutex_;
  std::string stop_reason_ CR_GUARDED_BY(mutex_);
  grpc::ClientContext* context_ CR_GUARDED_BY(mutex_) = nullptr;  // of the stream in use
  // Of WatchServer.
  Condition watch_changed_;
  bool watching_ CR_GUARDED_BY(mutex_) = true;
  std::shared_ptr<grpc::Channel> watched_ CR_GUARDED_BY(mutex_);
  Moment watched_since_ CR_GUARDED_BY(mutex_);
  grpc::ClientContext* question_ CR_GUARDED_BY(mutex_) = nullptr;
  std::atomic<bool> stopped_{false};
  UniqueFd wake_fd_;
};

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_RELAY_RELAY_SESSION_H_
