// SPDX-License-Identifier: Apache-2.0
// The gRPC service Sessions: sessions whose client is behind a cr-relay on another host.
//
// For each one the supervisor plays the worker's client: it holds one end of a socket pair and the worker's rings, and
// a TunnelEnd carries them over the stream. When the stream breaks, the session waits for a new one with its resume
// token; after the grace period it is ended. When the worker ends, the relay is told why.
//
// A session, its further streams and its lanes belong to the identity that opened it. Streams whose first message has
// not come are few and get a deadline, so that silence costs nobody a thread.
//
// The messages are gRPC byte buffers, so the handler is registered by hand, in the way that generated code does it.
// Thread-safe. Shutdown ends all sessions and waits for the handlers.
#ifndef CUDA_REMOTE_SERVER_SUPERVISOR_TUNNEL_SERVICE_H_
#define CUDA_REMOTE_SERVER_SUPERVISOR_TUNNEL_SERVICE_H_

#include <grpcpp/grpcpp.h>
#include <grpcpp/impl/service_type.h>
#include <grpcpp/support/sync_stream.h>

#include <list>
#include <map>
#include <memory>
#include <string>
#include <thread>

#include "absl/status/statusor.h"
#include "proto/base/clock.h"
#include "proto/control/control.pb.h"
#include "proto/control/log_limit.h"
#include "proto/control/tunnel_end.h"
#include "proto/threads/mutex.h"
#include "server/supervisor/server_poller.h"
#include "server/supervisor/supervisor.h"

namespace cuda_remote::server {

class TunnelService final : public grpc::Service {
 public:
  using Stream = grpc::ServerReaderWriter<grpc::ByteBuffer, grpc::ByteBuffer>;

  // Both must outlive it.
  TunnelService(Supervisor* supervisor, ServerPoller* poller);
  ~TunnelService() override;

  // Ends every session, and refuses new ones.
  void Shutdown();

 private:
  struct Tunnel;
  // A stream whose first message is awaited.
  struct Opening {
    grpc::ServerContext* context;
    std::string owner;
    Moment deadline;
  };
  grpc::Status Serve(grpc::ServerContext* context, Stream* stream);
  // A further connection of a stream that is being served (TunnelEnd::RunLane).
  grpc::Status ServeLane(const control::TunnelOpen& open, const std::string& owner, bool checked,
                         grpc::ServerContext* context, Stream* stream);
  // Reads a stream's first message. Not OK: the stream ends so.
  grpc::Status ReadOpen(const std::string& owner, bool checked, grpc::ServerContext* context, Stream* stream,
                        control::TunnelOpen* open);
  absl::StatusOr<std::shared_ptr<Tunnel>> Open(const std::string& hello, const std::string& owner, bool checked,
                                               grpc::ServerContext* context, std::string* welcome);
  void WatchWorker(std::shared_ptr<Tunnel> tunnel);
  void Forget(const std::shared_ptr<Tunnel>& tunnel);
  void JanitorLoop();

  Supervisor* const supervisor_;
  ServerPoller* const poller_;
  Mutex mutex_;
  Condition changed_;
  std::map<std::string, std::shared_ptr<Tunnel>> tunnels_ CR_GUARDED_BY(mutex_);  // by resume token
  std::list<Opening> openings_ CR_GUARDED_BY(mutex_);
  control::LogLimit opening_log_ CR_GUARDED_BY(mutex_);
  bool stopping_ CR_GUARDED_BY(mutex_) = false;
  int watchers_ CR_GUARDED_BY(mutex_) = 0;
  std::thread janitor_;
};

}  // namespace cuda_remote::server

#endif  // CUDA_REMOTE_SERVER_SUPERVISOR_TUNNEL_SERVICE_H_
