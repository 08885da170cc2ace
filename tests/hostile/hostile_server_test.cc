// SPDX-License-Identifier: Apache-2.0
// A GPU server that does not behave: a real worker's answers, some of them changed, for a program that makes every
// driver call. The client library may fail its calls or give the session up; it must not crash, and not write where the
// program has offered no room.
//
// HOSTILE_SEED=N repeats one round, HOSTILE_ROUNDS=N makes so many.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <list>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "proto/base/clock.h"
#include "proto/base/unique_fd.h"
#include "proto/channel/client_channel.h"
#include "proto/channel/handshake.h"
#include "proto/channel/server_channel.h"
#include "proto/frame/frame.h"
#include "server/worker/testing/worker_process.h"

namespace cuda_remote {
namespace {

constexpr int kArrivalTimeoutMs = 60000;
constexpr int kEventTimeoutMs = 50;
// Most bytes that one answer carries in this test.
constexpr size_t kMostPayload = size_t{8} << 20;

std::string Runfile(const std::string& name) { return std::string(getenv("TEST_SRCDIR")) + "/cuda_remote/" + name; }

// Changes answers. Not thread-safe.
class Chaos {
 public:
  explicit Chaos(uint64_t seed) : random_(seed), every_(1 + Below(200)) {}

  struct Answer {
    uint32_t result;
    uint32_t pending_error;
    std::string message;
    std::string payload;
  };

  // One answer of `every_`, on average, gets one or more changes.
  void Change(Answer* answer) {
    if (Below(every_) != 0) {
      if (Below(4) == 0) earlier_ = answer->message;
      return;
    }
    for (uint64_t i = 1 + Below(3); i > 0; --i) ChangeOnce(answer);
  }

 private:
  uint64_t Below(uint64_t n) { return random_() % n; }

  void ChangeOnce(Answer* answer) {
    std::string& text = Below(4) == 0 ? answer->payload : answer->message;
    switch (Below(9)) {
      case 0:
        if (!text.empty()) text[Below(text.size())] = char(random_());
        break;
      case 1:
        if (!text.empty()) text[Below(text.size())] ^= char(1 << Below(8));
        break;
      case 2:
        text.resize(text.empty() ? 0 : Below(text.size()));
        break;
      case 3:
        text.append(1 + Below(64), char(random_()));
        break;
      case 4:
        Enlarge(&answer->message);
        break;
      case 5:
        answer->payload.resize(Below(2) == 0 ? Below(4096) : answer->payload.size() + 1 + Below(100000), 'x');
        break;
      case 6:
        answer->result = Below(2) == 0 ? 0 : uint32_t(Below(1000));
        break;
      case 7:
        answer->pending_error = uint32_t(Below(1000));
        break;
      default:
        answer->message = earlier_;
        break;
    }
  }

  // Makes a number in the message, or the length of a field, one of many bytes.
  void Enlarge(std::string* message) {
    if (message->empty()) return;
    const size_t at = Below(message->size());
    message->replace(at, 1, std::string(1 + Below(9), '\xff') + char(Below(128)));
  }

  std::mt19937_64 random_;
  const uint64_t every_;
  std::string earlier_;
};

// Between a client and a worker: hands requests on, and answers as Chaos has changed them.
class HostileServer {
 public:
  HostileServer(uint64_t seed, const std::string& path) : chaos_(seed) {
    StatusOr<UniqueFd> listener = ListenUnix(path);
    if (!listener.ok()) return;
    listener_ = *std::move(listener);
    thread_ = std::thread([this] { Serve(); });
  }
  // Once the client has gone, or will never come.
  ~HostileServer() {
    over_ = true;
    if (thread_.joinable()) thread_.join();
  }

 private:
  bool Connect() {
    pollfd waiting{listener_.get(), POLLIN, 0};
    while (!over_ && poll(&waiting, 1, kEventTimeoutMs) <= 0) continue;
    const int socket = accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC);
    Packet packet;
    if (socket < 0 || ReceivePacket(socket, &packet, kArrivalTimeoutMs) != ChannelStatus::kOk) return false;
    Welcome welcome;
    welcome.session = 7;
    welcome.shared_memory = false;
    welcome.server = "hostile";
    worker_process_ = std::make_unique<server::WorkerProcess>(std::vector<std::string>{
        Runfile("server/worker/cr-worker"), "--driver", Runfile("softgpu/libsoftgpu.so"), "--log-level", "off"});
    worker_ = worker_process_->Connect();
    StatusOr<std::unique_ptr<ServerChannel>> client = ServerChannel::Create(UniqueFd(socket), welcome, nullptr);
    if (worker_ == nullptr || !client.ok()) return false;
    client_ = *std::move(client);
    return true;
  }

  void Serve() {
    if (!Connect()) return;
    std::thread events([this] { ForwardEvents(); });
    std::list<std::thread> waits;
    FrameHeader header;
    std::string message;
    PayloadView payload;
    while (client_->Next(&header, &message, &payload)) {
      if (header.flags & kFlagNoReply) {
        worker_->Send(header, message, payload.view());
        continue;
      }
      const std::shared_ptr<char> room(new char[kMostPayload], std::default_delete<char[]>());
      const uint64_t number = worker_->Begin(header, message, payload.view(), room.get(), kMostPayload);
      if (number == 0) break;
      waits.emplace_back([this, header, number, room] { AnswerWhenDone(header, number, room.get()); });
    }
    over_ = true;
    // What still waits in the worker ends with it.
    kill(worker_process_->pid(), SIGKILL);
    for (std::thread& wait : waits) wait.join();
    events.join();
  }

  void AnswerWhenDone(const FrameHeader& header, uint64_t number, const char* room) {
    Reply reply;
    if (worker_->Wait(number, &reply) != ChannelStatus::kOk) {
      client_->Stop();
      return;
    }
    Chaos::Answer answer{reply.result, reply.pending_error, reply.message, {room, reply.payload_bytes}};
    {
      std::lock_guard<std::mutex> lock(chaos_mutex_);
      chaos_.Change(&answer);
    }
    client_->Reply(header.sequence, header.call, answer.result, answer.pending_error, answer.message, answer.payload);
  }

  void ForwardEvents() {
    FrameHeader header;
    std::string message;
    while (!over_) {
      const ChannelStatus status = worker_->ReadEvent(&header, &message, kEventTimeoutMs);
      if (status == ChannelStatus::kTimeout) continue;
      if (status != ChannelStatus::kOk) return;
      client_->Event(header.call, header.sequence, message);
    }
  }

  UniqueFd listener_;
  std::atomic<bool> over_{false};
  std::mutex chaos_mutex_;
  Chaos chaos_;
  std::unique_ptr<server::WorkerProcess> worker_process_;
  std::unique_ptr<ClientChannel> worker_;
  std::unique_ptr<ServerChannel> client_;
  std::thread thread_;
};

class HostileServerTest : public ::testing::Test {
 protected:
  void SetUp() override {
    char folder[] = "/tmp/hostile-XXXXXX";
    ASSERT_NE(mkdtemp(folder), nullptr);
    folder_ = folder;
    ASSERT_EQ(symlink(Runfile("client/libcuda-remote.so").c_str(), (folder_ + "/libcuda.so.1").c_str()), 0);
  }
  void TearDown() override {
    unlink((folder_ + "/libcuda.so.1").c_str());
    unlink(socket().c_str());
    rmdir(folder_.c_str());
  }
  std::string socket() const { return folder_ + "/socket"; }

  // Runs the cases of one family of calls against a hostile server; gives the wait status.
  int Run(uint64_t seed, const std::string& family) {
    unlink(socket().c_str());
    HostileServer server(seed, socket());
    const pid_t program = fork();
    if (program == 0) {
      // Memory that was freed is no longer what it was, and a heap whose words are written over ends the program.
      setenv("GLIBC_TUNABLES", "glibc.malloc.check=3:glibc.malloc.perturb=165", 1);
      setenv("LD_PRELOAD", "libc_malloc_debug.so.0", 1);
      setenv("LD_LIBRARY_PATH", folder_.c_str(), 1);
      setenv("CUDA_REMOTE_SERVER", ("unix:" + socket()).c_str(), 1);
      const std::string path = Runfile("tests/conformance/every_call");
      const int null = open("/dev/null", O_WRONLY);
      if (getenv("HOSTILE_SEED") == nullptr) dup2(null, 1);
      if (getenv("HOSTILE_SEED") == nullptr) dup2(null, 2);
      execl(path.c_str(), path.c_str(), family.c_str(), "0", "100000", nullptr);
      _exit(127);
    }
    int status = 0;
    waitpid(program, &status, 0);
    return status;
  }

 private:
  std::string folder_;
};

TEST_F(HostileServerTest, NoAnswerMakesTheClientCrash) {
  const std::vector<std::string> families = {"array",  "context", "copy",   "device",  "event",  "function",
                                             "graph",  "green",   "launch", "library", "memory", "memset",
                                             "module", "pool",    "stream", "texture", "tools",  "virtual"};
  const char* const only = getenv("HOSTILE_SEED");
  const char* const asked = getenv("HOSTILE_ROUNDS");
  const uint64_t first = only ? strtoull(only, nullptr, 10) : 0;
  const uint64_t rounds = only ? 1 : asked ? strtoull(asked, nullptr, 10) : 60;
  for (uint64_t seed = first; seed < first + rounds; ++seed) {
    const std::string& family = families[seed % families.size()];
    const int status = Run(seed, family);
    // A case that waits for what the server has not said is ended by its own alarm.
    const bool crashed = WIFSIGNALED(status) && WTERMSIG(status) != SIGALRM;
    EXPECT_FALSE(crashed) << "HOSTILE_SEED=" << seed << " (" << family << "): signal " << WTERMSIG(status);
    EXPECT_FALSE(WIFEXITED(status) && WEXITSTATUS(status) == 127) << "the program does not start";
  }
}

}  // namespace
}  // namespace cuda_remote
