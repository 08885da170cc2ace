// SPDX-License-Identifier: Apache-2.0
#include "proto/control/status_text.h"

#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <chrono>
#include <string>

#include "proto/base/clock.h"
#include "proto/control/control.grpc.pb.h"

namespace cuda_remote::control {
namespace {

using grpc::StatusCode;

std::string TextOf(StatusCode code, const std::string& message) { return StatusText(grpc::Status(code, message)); }

// What this machine's gRPC says of a server there.
std::string CallOf(const std::string& address, const std::shared_ptr<grpc::ChannelCredentials>& credentials) {
  grpc::ClientContext context;
  context.set_deadline(WallNow() + std::chrono::seconds(30));
  ServerInfo reply;
  const auto stub = Control::NewStub(grpc::CreateChannel(address, credentials));
  const grpc::Status status = stub->GetServerInfo(&context, ServerInfoRequest(), &reply);
  EXPECT_FALSE(status.ok());
  return StatusText(status);
}

TEST(StatusText, SaysThatNobodyListens) {
  // Port 1 needs root, and no service has it.
  EXPECT_EQ(CallOf("127.0.0.1:1", grpc::InsecureChannelCredentials()), "connection refused");
  EXPECT_EQ(CallOf("unix:/nowhere/x.sock", grpc::InsecureChannelCredentials()), "no such file or directory");
}

TEST(StatusText, LeavesOutHowGrpcIsMade) {
  EXPECT_EQ(
      TextOf(StatusCode::UNAVAILABLE,
             "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:9: Failed to connect to remote "
             "host: Connection refused"),
      "connection refused");
  EXPECT_EQ(TextOf(StatusCode::UNAVAILABLE,
                   "failed to connect to all addresses; last error: UNAVAILABLE: ipv6:%5B::1%5D:9: Socket closed"),
            "the connection was closed");
  EXPECT_EQ(TextOf(StatusCode::UNAVAILABLE,
                   "DNS resolution failed for nowhere.invalid:9: C-ares status is not ARES_SUCCESS qtype=AAAA "
                   "name=nowhere.invalid is_balancer=0: Domain name not found"),
            "the address has no known host: domain name not found");
  EXPECT_EQ(TextOf(StatusCode::UNAVAILABLE,
                   "failed to connect to all addresses; last error: UNKNOWN: ipv4:10.0.0.1:7070: Ssl handshake failed: "
                   "SSL_ERROR_SSL: error:0A000086:SSL routines::certificate verify failed"),
            "the TLS handshake failed: certificate verify failed");
  EXPECT_EQ(TextOf(StatusCode::DEADLINE_EXCEEDED, "Deadline Exceeded"), "it did not answer in time");
  EXPECT_EQ(TextOf(StatusCode::UNAVAILABLE, "Socket closed"), "the connection was closed");
  EXPECT_EQ(TextOf(StatusCode::CANCELLED, "CANCELLED"), "the connection was closed");
}

TEST(WhatToCheck, FitsTheProblem) {
  EXPECT_EQ(WhatToCheck("the address has no known host: domain name not found"), "");
  EXPECT_NE(WhatToCheck("the TLS handshake failed: certificate verify failed").find("CUDA_REMOTE_TLS_CA"),
            std::string::npos);
  for (const char* const problem : {"connection refused", "the connection was closed", "it did not answer in time"})
    EXPECT_NE(WhatToCheck(problem).find("--listen"), std::string::npos) << problem;
}

TEST(StatusText, LeavesWhatOurProgramsAnswer) {
  EXPECT_EQ(TextOf(StatusCode::PERMISSION_DENIED, "the token is not known: tokens expire"),
            "the token is not known: tokens expire");
  EXPECT_EQ(StatusText(grpc::Status::OK), "");
}

}  // namespace
}  // namespace cuda_remote::control
