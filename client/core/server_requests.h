// SPDX-License-Identifier: Apache-2.0
// Requests of the client library's own, which stand for no driver call of the application.
//
// Threads: any that may use the channel: inside a call, or the agent's while the gate is closed. No lock. A request
// waits for the server, so a thread that makes one holds no lock of a table (README, "Locks").
#ifndef CUDA_REMOTE_CLIENT_CORE_SERVER_REQUESTS_H_
#define CUDA_REMOTE_CLIENT_CORE_SERVER_REQUESTS_H_

#include <cuda.h>

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "client/core/connection.h"
#include "client/core/settings.h"
#include "client/memory/managed_mirror.h"
#include "proto/channel/client_channel.h"

namespace cuda_remote::client {

class ServerRequests {
 public:
  // All outlive this.
  ServerRequests(Connection* connection, const Settings* settings, ManagedMirror* mirror)
      : connection_(connection), settings_(settings), mirror_(mirror) {}

  // Sends an operation and waits. Returns the operation's result; `reply` may be null. `context` is the slot of the
  // context to make current, 0 for none.
  CUresult Operate(uint32_t operation, const std::string& message, Reply* reply, uint32_t context = 0);
  // Sends an operation that nobody waits for. In order with the others; a failure of the channel is the session's end.
  void Send(uint32_t operation, const std::string& message, uint32_t context = 0);
  // Passes a file to the server, for the next request that names the tag.
  CUresult SendFile(int fd, uint64_t* tag);
  // Waits until the GPUs have done all work that was sent.
  CUresult WaitForWork();
  // How many microseconds ago events of one context completed on this server; negative for those that did not.
  // `captured`: null, or which of them were last recorded in a capture; only while no capture is in progress.
  CUresult AskEventAges(uint64_t context, const std::vector<uint64_t>& events, std::vector<double>* microseconds,
                        std::set<uint64_t>* captured = nullptr);

 private:
  CUresult Lose(ChannelStatus status) { return connection_->Lose(status, settings_->server); }

  Connection* const connection_;
  const Settings* const settings_;
  ManagedMirror* const mirror_;
};

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_CORE_SERVER_REQUESTS_H_
