// SPDX-License-Identifier: Apache-2.0
// The messages between the server's own processes against libprotobuf.
#include <gtest/gtest.h>

#include "proto/codec/testing/random_messages.h"
#include "server/nvml/ask.gen.h"
#include "server/worker_link/worker_link.h"

namespace cuda_remote::server {
namespace {

TEST(ServerMessages, WorkerLink) {
  wire::MessageFile file("server/worker_link/worker_link.descriptors");
  const std::string package = "cuda_remote.server.";
  wire::CompareWithLibprotobuf<WorkerReady>(&file, package + "WorkerReady", &EncodeWorkerReady, &DecodeWorkerReady);
  wire::CompareWithLibprotobuf<WorkerStats>(&file, package + "WorkerStats", &EncodeWorkerStats, &DecodeWorkerStats);
  wire::CompareWithLibprotobuf<WorkerAssignment>(&file, package + "WorkerAssignment", &EncodeWorkerAssignment,
                                                 &DecodeWorkerAssignment);
}

TEST(ServerMessages, AHelloThatIsNotInTheBytesIsZero) {
  // Though a new one begins with other values.
  WorkerAssign assign;
  EXPECT_EQ(assign.hello.gpu, -1);
  ASSERT_TRUE(DecodeWorkerAssignment("", &assign));
  EXPECT_EQ(assign.hello.gpu, 0);
  EXPECT_EQ(assign.hello.wire_version, 0u);
}

TEST(ServerMessages, Ask) {
  wire::MessageFile file("server/nvml/ask.descriptors");
  wire::CompareWithLibprotobuf<Ask>(&file, "cuda_remote.server.Ask", &EncodeAsk, &DecodeAsk);
}

TEST(ServerMessages, AnAskKeepsTheEndOfALongName) {
  Ask ask, got;
  ask.sessions.resize(kMaxAskedSessions + 3);
  ask.sessions[0].program = std::string(500, 'p') + "end";
  std::string bytes;
  EncodeAsk(ask, &bytes);
  ASSERT_TRUE(DecodeAsk(bytes, &got));
  ASSERT_EQ(got.sessions.size(), kMaxAskedSessions);
  EXPECT_EQ(got.sessions[0].program, std::string(kMaxAskedProgram - 3, 'p') + "end");
  wire::PutBytesAlways(&bytes, 3, "");
  EXPECT_FALSE(DecodeAsk(bytes, &got)) << "one session too many";
}

TEST(ServerMessages, DescriptorsStayBesideTheMessage) {
  WorkerAssign assign;
  assign.session = 9;
  std::string bytes;
  EncodeWorkerAssignment(assign, &bytes);
  assign.client_socket = 5;
  ASSERT_TRUE(DecodeWorkerAssignment(bytes, &assign));
  EXPECT_EQ(assign.client_socket, 5);
  EXPECT_EQ(assign.session, 9u);
}

}  // namespace
}  // namespace cuda_remote::server
