// SPDX-License-Identifier: Apache-2.0
// A GPU server for tests of the client library: it takes one session, keeps the requests that come, and answers as it
// is told. Without being told, it answers CUDA_SUCCESS and an empty message.
//
// Thread-safe; a thread of its own serves the session.
#ifndef CUDA_REMOTE_CLIENT_CORE_TESTING_FAKE_SERVER_H_
#define CUDA_REMOTE_CLIENT_CORE_TESTING_FAKE_SERVER_H_

#include <poll.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "proto/base/unique_fd.h"
#include "proto/channel/handshake.h"
#include "proto/channel/server_channel.h"
#include "proto/frame/frame.h"

namespace cuda_remote::client {

template <typename Message>
std::string Encoded(const Message& message) {
  std::string bytes;
  message.Encode(&bytes);
  return bytes;
}

// Numbers of calls, such as those of requests.
using Calls = std::vector<uint32_t>;

class FakeServer {
 public:
  struct Request {
    FrameHeader header;
    std::string message;
    std::string payload;
  };
  struct Answer {
    Answer(uint32_t answer = 0, std::string reply = {}, uint32_t pending = 0, std::string bytes = {})
        : result(answer), message(std::move(reply)), pending_error(pending), payload(std::move(bytes)) {}
    uint32_t result;
    std::string message;
    uint32_t pending_error;
    std::string payload;
  };
  using Handler = std::function<Answer(const Request&)>;

  // Listens in a folder of its own. Ends the process if that is impossible: nothing can be tested then.
  // `shared_memory`: as a server on this machine, which shares memory with the client; else as over a relay.
  explicit FakeServer(bool shared_memory = true) : shared_memory_(shared_memory) {
    char folder[] = "/tmp/fake-server-XXXXXX";
    StatusOr<UniqueFd> listener = Error("mkdtemp failed");
    if (mkdtemp(folder)) {
      folder_ = folder;
      listener = ListenUnix(path());
    }
    if (!listener.ok()) {
      fprintf(stderr, "fake server: %s\n", listener.status().message().c_str());
      _exit(1);
    }
    listener_ = *std::move(listener);
    thread_ = std::thread([this] { Serve(); });
  }
  ~FakeServer() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      over_ = true;
      if (channel_) channel_->Stop();
    }
    thread_.join();
    unlink(path().c_str());
    rmdir(folder_.c_str());
  }

  // For CUDA_REMOTE_SERVER.
  std::string address() const { return "unix:" + path(); }

  // How requests of this call are answered from now on. Those that nobody waits for are handed over too.
  void On(uint32_t call, Handler handler) {
    std::lock_guard<std::mutex> lock(mutex_);
    handlers_[call] = std::move(handler);
  }
  void On(uint32_t call, Answer answer) {
    On(call, [answer = std::move(answer)](const Request&) { return answer; });
  }

  // The requests since the last time, oldest first. Those behind the last answered one may be missing.
  std::vector<Request> Take() {
    std::lock_guard<std::mutex> lock(mutex_);
    return std::exchange(requests_, {});
  }

  // The file that the client passed under this tag, which a request has named. Not ok() if it does not come.
  UniqueFd TakeFile(uint64_t tag) {
    ServerChannel* channel;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      channel = channel_.get();
    }
    return UniqueFd(channel ? channel->TakeFd(tag, kArrivalTimeoutMs) : -1);
  }

  // Sends the client an event, such as that a host function is to run.
  void Event(uint32_t operation, const std::string& message) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (channel_) channel_->Event(operation, 0, message);
  }

  // The server goes away.
  void End(const std::string& reason) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (channel_) channel_->End(reason);
  }

 private:
  // For what is on its way already.
  static constexpr int kArrivalTimeoutMs = 10000;

  std::string path() const { return folder_ + "/session.sock"; }

  void Serve() {
    int socket = -1;
    while (socket < 0) {
      pollfd waiting{listener_.get(), POLLIN, 0};
      poll(&waiting, 1, 50);
      socket = accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC);
      std::lock_guard<std::mutex> lock(mutex_);
      if (over_ && socket < 0) return;
    }
    // Whoever asks for something else than a session is refused at once.
    listener_.Close();
    Packet packet;
    Hello hello;
    if (ReceivePacket(socket, &packet, kArrivalTimeoutMs) != ChannelStatus::kOk || !DecodeHello(packet.body, &hello))
      return;
    Welcome welcome;
    welcome.session = 7;
    welcome.shared_memory = shared_memory_;
    welcome.server = "fake";
    StatusOr<std::unique_ptr<ServerChannel>> channel = ServerChannel::Create(UniqueFd(socket), welcome, nullptr);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (channel.ok()) channel_ = *std::move(channel);
      if (over_ && channel_) channel_->Stop();
    }
    Request request;
    PayloadView payload;
    while (channel_ && channel_->Next(&request.header, &request.message, &payload)) {
      request.payload = std::string(payload.view());
      Handler handler;
      {
        std::lock_guard<std::mutex> lock(mutex_);
        requests_.push_back(request);
        if (const auto found = handlers_.find(request.header.call); found != handlers_.end()) handler = found->second;
      }
      const Answer answer = handler ? handler(request) : Answer();
      if (request.header.flags & kFlagNoReply) {
        if (answer.result != 0 && pending_ == 0) pending_ = answer.result;
        continue;
      }
      const uint32_t pending = answer.pending_error != 0 ? answer.pending_error : std::exchange(pending_, 0);
      channel_->Reply(request.header.sequence, request.header.call, answer.result, pending, answer.message,
                      answer.payload);
    }
  }

  const bool shared_memory_;
  std::string folder_;
  UniqueFd listener_;
  std::thread thread_;
  std::mutex mutex_;
  bool over_ = false;
  std::unique_ptr<ServerChannel> channel_;
  std::map<uint32_t, Handler> handlers_;
  std::vector<Request> requests_;
  uint32_t pending_ = 0;  // the serving thread's: a failure that nobody has been told of
};

}  // namespace cuda_remote::client

#endif  // CUDA_REMOTE_CLIENT_CORE_TESTING_FAKE_SERVER_H_
