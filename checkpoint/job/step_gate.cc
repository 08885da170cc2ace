// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/job/step_gate.h"

#include <errno.h>
#include <sys/socket.h>

#include "absl/status/status.h"

namespace cuda_remote::checkpoint {
namespace {

// The next message; empty if there is none and will be none.
std::string ReceiveNext(int socket) {
  ssize_t bytes;
  do {
    bytes = recv(socket, nullptr, 0, MSG_PEEK | MSG_TRUNC);
  } while (bytes < 0 && errno == EINTR);
  if (bytes <= 0) return {};
  std::string message(size_t(bytes), '\0');
  return recv(socket, message.data(), message.size(), 0) == bytes ? message : std::string();
}

}  // namespace

absl::StatusOr<std::string> HostdGate::Pass(Step step) {
  if (!socket_.ok()) return "";
  StepAnnouncement announced;
  announced.set_step(step);
  const std::string bytes = announced.SerializeAsString();
  StepAnswer answer;
  if (send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL) == ssize_t(bytes.size()) &&
      answer.ParseFromString(ReceiveNext(socket_.get()))) {
    if (answer.done()) return answer.text();
    if (answer.interrupted()) return absl::CancelledError(answer.text());
    if (!answer.text().empty()) return absl::FailedPreconditionError(answer.text());
  }
  return absl::UnavailableError("the cr-hostd that started this tool has ended");
}

}  // namespace cuda_remote::checkpoint
