// SPDX-License-Identifier: Apache-2.0
// The gRPC service Control: what cr-ps asks and does.
//
// Thread-safe; calls into the Supervisor's thread-safe functions only.
#ifndef CUDA_REMOTE_SERVER_SUPERVISOR_CONTROL_SERVICE_H_
#define CUDA_REMOTE_SERVER_SUPERVISOR_CONTROL_SERVICE_H_

#include "proto/control/control.grpc.pb.h"
#include "server/supervisor/supervisor.h"

namespace cuda_remote::server {

class ControlService final : public control::Control::Service {
 public:
  explicit ControlService(Supervisor* supervisor) : supervisor_(supervisor) {}

  grpc::Status GetServerInfo(grpc::ServerContext* context, const control::ServerInfoRequest* request,
                             control::ServerInfo* reply) override;
  grpc::Status ListSessions(grpc::ServerContext* context, const control::ListSessionsRequest* request,
                            control::ListSessionsReply* reply) override;
  grpc::Status Query(grpc::ServerContext* context, const control::QueryRequest* request,
                     control::QueryReply* reply) override;
  grpc::Status EndSession(grpc::ServerContext* context, const control::EndSessionRequest* request,
                          control::EndSessionReply* reply) override;
  grpc::Status NoteSaved(grpc::ServerContext* context, const control::NoteSavedRequest* request,
                         control::NoteSavedReply* reply) override;

 private:
  Supervisor* const supervisor_;
};

}  // namespace cuda_remote::server

#endif  // CUDA_REMOTE_SERVER_SUPERVISOR_CONTROL_SERVICE_H_
