// SPDX-License-Identifier: Apache-2.0
// cr-server, cr-relay and cr-ps as processes, with a worker that needs no CUDA. Programs are found in Bazel's runfiles,
// or in the folder that CR_TEST_PROGRAMS names.

#include <arpa/inet.h>
#include <dirent.h>
#include <fcntl.h>
#include <grp.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/impl/rpc_method.h>
#include <grpcpp/support/sync_stream.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <fstream>
#include <functional>
#include <iterator>
#include <list>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "proto/base/clock.h"
#include "proto/base/proc.h"
#include "proto/base/testing/lingering.h"
#include "proto/base/testing/value_of.h"
#include "proto/base/unique_fd.h"
#include "proto/channel/client_channel.h"
#include "proto/channel/handshake.h"
#include "proto/control/control.grpc.pb.h"
#include "proto/control/credentials.h"
#include "proto/control/message_check.h"
#include "proto/control/socket_call.h"
#include "proto/control/tunnel_message.h"
#include "proto/nvml/query.h"

namespace cuda_remote {
namespace {

enum : uint32_t {
  kEcho = 1,
  kCount = 2,
  kBytes = 3,
  kPrint = 4,
  kEvent = 5,
  kCrash = 6,
  kHang = 7,
  kTake = 10,
  kGpus = 11,
  kStop = 12
};

std::string Program(const std::string& package, const std::string& name) {
  if (const char* folder = getenv("CR_TEST_PROGRAMS")) return std::string(folder) + "/" + name;
  const char* const runfiles = getenv("TEST_SRCDIR");
  const char* const workspace = getenv("TEST_WORKSPACE");
  return std::string(runfiles ? runfiles : ".") + "/" + (workspace ? workspace : "") + "/" + package + "/" + name;
}

std::string ReadFile(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return std::string(std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>());
}

template <typename Condition>
bool Eventually(Condition condition) {
  for (int i = 0; i < 24000; ++i) {  // two minutes, or longer on a busy machine
    if (condition()) return true;
    usleep(5000);
  }
  return condition();
}

// What a tool reports of a session whose job was saved.
control::ControlCall Saved(uint64_t session, uint64_t unix_ms, uint64_t bytes) {
  control::ControlCall call;
  control::NoteSavedRequest* const saved = call.mutable_note_saved();
  saved->set_id(session);
  saved->set_unix_ms(unix_ms);
  saved->set_bytes(bytes);
  return call;
}

// A program that was started; ended at the latest with this object.
class Process {
 public:
  Process(const std::vector<std::string>& command, const std::string& log, bool quiet = false) : log_(log) {
    std::vector<char*> arguments;
    for (const std::string& argument : command) arguments.push_back(const_cast<char*>(argument.c_str()));
    arguments.push_back(nullptr);
    const pid_t parent = getpid();
    pid_ = fork();
    if (pid_ == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (getppid() != parent) _exit(1);
      const int out = open(log.c_str(), O_CREAT | O_WRONLY | O_APPEND, 0600);
      dup2(out, 1);
      dup2(out, 2);
      execv(arguments[0], arguments.data());
      _exit(127);
    }
  }
  ~Process() {
    if (pid_ > 0) {
      kill(pid_, SIGKILL);
      waitpid(pid_, nullptr, 0);
    }
    if (testing::Test::HasFailure()) fprintf(stderr, "---- %s\n%s", log_.c_str(), log().c_str());
  }
  pid_t pid() const { return pid_; }
  std::string log() const { return ReadFile(log_); }
  void Signal(int signal) { kill(pid_, signal); }
  // The exit code, -signal, or -1000 if it does not end.
  int Wait() {
    int status = 0;
    if (pid_ <= 0) return code_;
    if (!Eventually([&] { return waitpid(pid_, &status, WNOHANG) == pid_; })) return -1000;
    pid_ = -1;
    return code_ = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  }

 private:
  std::string log_;
  pid_t pid_;
  int code_ = -1000;
};

// A TCP proxy that can cut its connections.
class Proxy {
 public:
  explicit Proxy(int target_port) : target_(target_port) {
    listen_.Reset(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(bind(listen_.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    EXPECT_EQ(listen(listen_.get(), 16), 0);
    socklen_t length = sizeof(address);
    getsockname(listen_.get(), reinterpret_cast<sockaddr*>(&address), &length);
    port_ = ntohs(address.sin_port);
    thread_ = std::thread([this] { Loop(); });
  }
  ~Proxy() {
    stop_ = true;
    thread_.join();
  }
  int port() const { return port_; }
  uint64_t bytes() const { return bytes_; }
  void Cut() { cut_ = true; }
  void Refuse(bool refuse) { refuse_ = refuse; }
  // Where new connections go, and how many there were.
  void SetTarget(int port) { target_ = port; }
  int connections() const { return connections_; }
  // Changes one bit in about each so many bytes, in either direction.
  void FlipEvery(uint64_t bytes) { flip_every_ = bytes; }
  int flips() const { return flips_; }

 private:
  struct Link {
    int client, server;
  };
  void Loop() {
    std::list<Link> links;
    std::vector<char> buffer(256 << 10);
    const auto drop = [&](std::list<Link>::iterator link) {
      // No goodbye: the way a broken network looks.
      linger none{1, 0};
      for (int fd : {link->client, link->server}) {
        setsockopt(fd, SOL_SOCKET, SO_LINGER, &none, sizeof(none));
        close(fd);
      }
      return links.erase(link);
    };
    while (!stop_) {
      if (cut_.exchange(false)) {
        for (auto link = links.begin(); link != links.end();) link = drop(link);
      }
      std::vector<pollfd> waiting = {{listen_.get(), POLLIN, 0}};
      for (const Link& link : links) {
        waiting.push_back({link.client, POLLIN, 0});
        waiting.push_back({link.server, POLLIN, 0});
      }
      poll(waiting.data(), waiting.size(), 5);
      size_t index = 1;
      for (auto link = links.begin(); link != links.end();) {
        bool alive = true;
        for (int direction = 0; alive && direction < 2; ++direction) {
          if (!waiting[index + size_t(direction)].revents) continue;
          const int from = direction ? link->server : link->client, to = direction ? link->client : link->server;
          const ssize_t n = read(from, buffer.data(), buffer.size());
          alive = n > 0;
          const uint64_t every = flip_every_;
          if (alive && every > 0 && (since_flip_ += uint64_t(n)) >= every && n > 4096) {
            buffer[random_() % size_t(n)] ^= char(1 << random_() % 8);
            since_flip_ = 0;
            ++flips_;
          }
          for (ssize_t done = 0; alive && done < n;) {
            const ssize_t written = send(to, buffer.data() + done, size_t(n - done), MSG_NOSIGNAL);
            alive = written > 0;
            done += written;
            bytes_ += alive ? uint64_t(written) : 0;
          }
        }
        index += 2;
        link = alive ? std::next(link) : drop(link);
      }
      if (waiting[0].revents) {
        const int client = accept4(listen_.get(), nullptr, nullptr, SOCK_CLOEXEC);
        if (client >= 0 && refuse_) {
          close(client);
        } else if (client >= 0) {
          const int server = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
          sockaddr_in address{};
          address.sin_family = AF_INET;
          address.sin_port = htons(uint16_t(target_));
          address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
          if (connect(server, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0) {
            links.push_back({client, server});
            ++connections_;
          } else {
            close(client);
            close(server);
          }
        }
      }
    }
    for (auto link = links.begin(); link != links.end();) link = drop(link);
  }
  std::atomic<int> target_;
  std::atomic<int> connections_{0};
  UniqueFd listen_;
  int port_ = 0;
  std::atomic<bool> stop_{false}, cut_{false}, refuse_{false};
  std::atomic<uint64_t> bytes_{0}, flip_every_{0};
  std::atomic<int> flips_{0};
  uint64_t since_flip_ = 0;  // the thread's
  std::mt19937 random_{4};
  std::thread thread_;
};

class Tunnel : public testing::Test {
 protected:
  void SetUp() override {
    char name[] = "/tmp/crt-XXXXXX";
    ASSERT_TRUE(mkdtemp(name));
    folder_ = name;
    mkdir(Path("server").c_str(), 0700);
    // Also where there are few processors; sessions with little bulk have none all the same.
    setenv("CUDA_REMOTE_TUNNEL_LANES", "2", 1);
  }
  void TearDown() override {
    relay_.reset();
    server_.reset();
    if (system(("rm -rf " + folder_).c_str()) != 0) fprintf(stderr, "cannot remove %s\n", folder_.c_str());
  }
  std::string Path(const std::string& name) const { return folder_ + "/" + name; }
  std::string Session() const { return Path("server/session.sock"); }
  std::string Relay() const { return Path("relay.sock"); }

  void StartServer(std::vector<std::string> more = {}, bool tcp = true) {
    std::vector<std::string> command = {Program("server/supervisor", "cr-server"),
                                        "--dir",
                                        Path("server"),
                                        "--worker",
                                        worker_.empty() ? Program("server/supervisor", "test_worker") : worker_,
                                        "--log-level",
                                        "debug"};
    if (tcp) {
      command.insert(command.end(), {"--listen", "127.0.0.1:0"});
      if (more.empty() || (more[0] != "--tls-cert" && more[0] != "--insecure-tcp"))
        command.insert(command.end(), {"--insecure-tcp", "127.0.0.1"});
    }
    command.insert(command.end(), more.begin(), more.end());
    if (descriptors_ > 0) {
      command.insert(command.begin(),
                     {"/bin/sh", "-c", "ulimit -n " + std::to_string(descriptors_) + "; exec \"$0\" \"$@\""});
    }
    server_ = std::make_unique<Process>(command, Path("server" + std::to_string(++starts_) + ".log"));
    ASSERT_TRUE(Eventually([&] { return server_->log().find("cr-server ready: ") != std::string::npos; }))
        << server_->log();
    const std::string log = server_->log();
    if (tcp) port_ = atoi(log.c_str() + log.find("127.0.0.1:", log.find("cr-server ready: ")) + 10);
  }
  void StartRelay(int port, std::vector<std::string> more = {}) {
    std::vector<std::string> command = {Program("client/relay", "cr-relay"),
                                        "--connect",
                                        "127.0.0.1:" + std::to_string(port),
                                        "--socket",
                                        Relay(),
                                        "--log-level",
                                        "debug"};
    command.insert(command.end(), more.begin(), more.end());
    relay_ = std::make_unique<Process>(command, Path("relay" + std::to_string(++starts_) + ".log"));
    ASSERT_TRUE(Eventually([&] { return relay_->log().find("cr-relay ready") != std::string::npos; })) << relay_->log();
  }
  StatusOr<std::unique_ptr<ClientChannel>> TryConnect(const std::string& path, int gpu = -1,
                                                      uint32_t pid = uint32_t(getpid())) {
    Hello hello;
    hello.pid = pid;
    hello.gpu = gpu;
    hello.program = "/test/program";
    hello.job = "a \"job\"";
    return ClientChannel::Connect(path, hello, &welcome_);
  }
  // Null if that fails.
  std::unique_ptr<ClientChannel> Connect(const std::string& path, int gpu = -1, uint32_t pid = uint32_t(getpid())) {
    auto channel = TryConnect(path, gpu, pid);
    return channel.ok() ? *std::move(channel) : nullptr;
  }
  // Why it fails; empty if it does not.
  std::string Refusal(const std::string& path, int gpu = -1) { return TryConnect(path, gpu).status().message(); }
  std::string Ps(const std::vector<std::string>& more, int expect = 0) {
    static int number = 0;
    const std::string log = Path("ps" + std::to_string(++number));
    std::vector<std::string> command = {Program("programs/tools", "cr-ps")};
    command.insert(command.end(), more.begin(), more.end());
    Process ps(command, log);
    const int code = ps.Wait();
    if (expect >= 0) {
      EXPECT_EQ(code, expect) << ps.log();
    }
    return ps.log();
  }
  std::vector<pid_t> Workers() const {
    std::vector<pid_t> found;
    std::istringstream list(
        ReadFile("/proc/" + std::to_string(server_->pid()) + "/task/" + std::to_string(server_->pid()) + "/children"));
    for (pid_t pid; list >> pid;) found.push_back(pid);
    return found;
  }

  std::string folder_;
  // A Hello that nobody waits for the answer of.
  int SendHello() {
    std::string body;
    Hello hello;
    hello.pid = uint32_t(getpid());
    EncodeHello(hello, &body);
    StatusOr<UniqueFd> fd = ConnectUnix(Session());
    if (!fd.ok()) return -1;
    SendPacket(fd->get(), PacketType::kHello, body, -1);
    return fd->Release();
  }
  size_t LogLines() const {
    const std::string log = server_->log();
    return size_t(std::count(log.begin(), log.end(), '\n'));
  }

  int port_ = 0;
  int starts_ = 0;
  int descriptors_ = 0;  // the server's limit; 0: as it is
  std::string worker_;   // another place of the worker
  Welcome welcome_;
  std::unique_ptr<Process> server_, relay_;
};

FrameHeader Header(uint32_t call) {
  FrameHeader header;
  header.call = call;
  return header;
}
uint64_t Number(std::string_view bytes) {
  uint64_t value = 0;
  memcpy(&value, bytes.data(), std::min<size_t>(8, bytes.size()));
  return value;
}
std::string AsBytes(uint64_t value) { return std::string(reinterpret_cast<char*>(&value), 8); }

bool IsPattern(const std::string& bytes) {
  for (size_t i = 0; i < bytes.size(); ++i) {
    if (bytes[i] != char(i * 131 + (i >> 13))) return false;
  }
  return true;
}

std::string g_printed;

// Uses everything that a channel has.
void Exercise(ClientChannel* channel) {
  Reply reply;
  char out[64];
  for (int i = 0; i < 200; ++i) {
    const std::string text = "text " + std::to_string(i);
    ASSERT_EQ(channel->Call(Header(kEcho), text, text, out, sizeof(out), &reply), ChannelStatus::kOk)
        << channel->end_reason();
    ASSERT_EQ(reply.message, text);
    ASSERT_EQ(std::string(out, reply.payload_bytes), text);
  }
  for (int i = 0; i < 5000; ++i)
    ASSERT_EQ(channel->Send(Header(kCount), std::string(100, 'x'), ""), ChannelStatus::kOk);
  ASSERT_EQ(channel->Call(Header(kCount), "", "", nullptr, 0, &reply), ChannelStatus::kOk);
  ASSERT_EQ(Number(reply.message), 5001u);
  const std::string big(20 << 20, 'b');
  ASSERT_EQ(channel->Call(Header(kCount), "", big, nullptr, 0, &reply), ChannelStatus::kOk);
  std::string down(30 << 20, 0);
  ASSERT_EQ(channel->Call(Header(kBytes), AsBytes(down.size()), "", &down[0], down.size(), &reply), ChannelStatus::kOk);
  ASSERT_EQ(reply.payload_bytes, down.size());
  ASSERT_TRUE(IsPattern(down));
  g_printed.clear();
  channel->SetStdoutSink([](const char* bytes, size_t count) { g_printed.append(bytes, count); });
  ASSERT_EQ(channel->Call(Header(kPrint), "printed\n", "", nullptr, 0, &reply), ChannelStatus::kOk);
  ASSERT_EQ(g_printed, "printed\n");
  ASSERT_EQ(channel->Send(Header(kEvent), "event", ""), ChannelStatus::kOk);
  FrameHeader header;
  std::string message;
  ASSERT_EQ(channel->ReadEvent(&header, &message, 10000), ChannelStatus::kOk);
  ASSERT_EQ(message, "event");
}

TEST_F(Tunnel, RingSession) {
  StartServer();
  auto channel = Connect(Session());
  ASSERT_TRUE(channel);
  EXPECT_TRUE(welcome_.shared_memory);
  Exercise(channel.get());
}

TEST_F(Tunnel, GrpcSession) {
  StartServer();
  StartRelay(port_);
  auto channel = Connect(Relay());
  ASSERT_TRUE(channel);
  EXPECT_FALSE(welcome_.shared_memory);
  Exercise(channel.get());
  EXPECT_EQ(channel->SendFd(1, 0), ChannelStatus::kProtocolError);
  // There was bulk enough for lanes; over them, too, nothing gets lost.
  EXPECT_TRUE(Eventually([&] { return relay_->log().find("lane 1 is open") != std::string::npos; }));
  Reply reply;
  std::string down(20 << 20, 0);
  for (int i = 0; i < 5; ++i) {
    const std::string up(size_t(3 + i) << 20, char(i));
    std::string back(up.size(), 0);
    ASSERT_EQ(channel->Call(Header(kEcho), "", up, &back[0], back.size(), &reply), ChannelStatus::kOk);
    ASSERT_TRUE(back == up);
    down.assign(down.size(), 0);
    ASSERT_EQ(channel->Call(Header(kBytes), AsBytes(down.size()), "", &down[0], down.size(), &reply),
              ChannelStatus::kOk);
    ASSERT_TRUE(IsPattern(down));
  }
}

TEST_F(Tunnel, WithoutLanes) {
  setenv("CUDA_REMOTE_TUNNEL_LANES", "0", 1);
  StartServer();
  StartRelay(port_);
  auto channel = Connect(Relay());
  ASSERT_TRUE(channel);
  Exercise(channel.get());
  EXPECT_EQ(relay_->log().find("lane"), std::string::npos);
}

TEST_F(Tunnel, SeveralSessionsThroughOneRelay) {
  StartServer({"--workers", "2"});
  StartRelay(port_);
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (int t = 0; t < 4; ++t) {
    auto channel = Connect(Relay());
    ASSERT_TRUE(channel);
    threads.emplace_back([&wrong, channel = std::move(channel)] {
      Reply reply;
      for (int i = 1; i <= 500; ++i) {
        wrong += channel->Call(Header(kCount), "", "", nullptr, 0, &reply) != ChannelStatus::kOk ||
                 Number(reply.message) != uint64_t(i);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

// Everything is in flight in both directions; nobody reads replies until all requests are out.
TEST_F(Tunnel, BothDirectionsFullIsNoDeadlock) {
  StartServer();
  StartRelay(port_);
  auto channel = Connect(Relay());
  ASSERT_TRUE(channel);
  constexpr size_t kPiece = 1 << 20, kPieces = 150;
  std::string down(kPiece * kPieces, 0);
  const std::string up(kPiece, 'u');
  std::vector<uint64_t> sequences;
  for (size_t i = 0; i < kPieces; ++i) {
    sequences.push_back(channel->Begin(Header(kBytes), AsBytes(kPiece), "", &down[i * kPiece], kPiece));
    ASSERT_NE(sequences.back(), 0u);
    ASSERT_EQ(channel->Send(Header(kCount), "", up), ChannelStatus::kOk);
  }
  Reply reply;
  for (uint64_t sequence : sequences) ASSERT_EQ(channel->Wait(sequence, &reply), ChannelStatus::kOk);
  for (size_t i = 0; i < kPieces; ++i) ASSERT_TRUE(IsPattern(down.substr(i * kPiece, kPiece)));
}

// The connection is cut again and again while calls and bulk data are under way; nothing is lost, doubled or reordered.
TEST_F(Tunnel, CutConnectionsAreResumed) {
  StartServer();
  Proxy proxy(port_);
  StartRelay(proxy.port());
  auto channel = Connect(Relay());
  ASSERT_TRUE(channel);
  std::atomic<bool> stop{false};
  std::atomic<int> cuts{0};
  std::thread cutter([&] {
    std::mt19937 random(3);
    while (!stop) {
      usleep(20000 + random() % 200000);
      proxy.Cut();
      ++cuts;
    }
  });
  Reply reply;
  uint64_t count = 0;
  const std::string up(3 << 20, 'u');
  std::string down(5 << 20, 0);
  const auto start = Now();
  bool ok = true;
  for (int round = 0; ok && (round < 15 || cuts < 5); ++round) {
    for (int i = 0; i < 300; ++i)
      ok = ok && channel->Send(Header(kCount), std::string(size_t(i), 'x'), "") == ChannelStatus::kOk;
    ok = ok && channel->Send(Header(kCount), "", up) == ChannelStatus::kOk;
    ok = ok && channel->Call(Header(kCount), "", "", nullptr, 0, &reply) == ChannelStatus::kOk;
    count += 302;
    EXPECT_EQ(Number(reply.message), count);
    down.assign(down.size(), 0);
    ok = ok &&
         channel->Call(Header(kBytes), AsBytes(down.size()), "", &down[0], down.size(), &reply) == ChannelStatus::kOk;
    EXPECT_TRUE(IsPattern(down));
    ok = ok && Number(reply.message) == 0 && Now() - start < std::chrono::seconds(100);
    // Events are resumed as well.
    ok = ok && channel->Send(Header(kEvent), AsBytes(uint64_t(round)), "") == ChannelStatus::kOk;
    FrameHeader header;
    std::string message;
    ok = ok && channel->ReadEvent(&header, &message, 20000) == ChannelStatus::kOk && Number(message) == uint64_t(round);
  }
  stop = true;
  cutter.join();
  EXPECT_TRUE(ok) << channel->end_reason();
  EXPECT_GE(cuts, 5);
  EXPECT_NE(server_->log().find("its connection is back"), std::string::npos);
}

TEST_F(Tunnel, ConnectionThatDoesNotComeBackEndsTheSession) {
  StartServer({"--grace", "2"});
  Proxy proxy(port_);
  StartRelay(proxy.port());
  auto channel = Connect(Relay());
  ASSERT_TRUE(channel);
  Reply reply;
  ASSERT_EQ(channel->Call(Header(kCount), "", "", nullptr, 0, &reply), ChannelStatus::kOk);
  proxy.Refuse(true);
  proxy.Cut();
  EXPECT_EQ(channel->Call(Header(kCount), "", "", nullptr, 0, &reply), ChannelStatus::kClosed);
  EXPECT_NE(channel->end_reason().find("did not come back"), std::string::npos) << channel->end_reason();
  EXPECT_TRUE(Eventually(
      [&] { return server_->log().find("the connection to the client did not come back") != std::string::npos; }));
  EXPECT_TRUE(Eventually([&] {
    return Ps({"--server", "unix:" + Session(), "--json"}).find("\"sessions\": []") != std::string::npos;
  }));
}

// A bit of the call's name that changes on its way makes a server say that it does not know the call. While a session
// waits to be resumed, that is no reason to give it up.
TEST_F(Tunnel, AServerThatDoesNotKnowTheCallIsAskedAgain) {
  StartServer();
  grpc::ServerBuilder builder;
  int unknowing_port = 0;
  control::Control::Service others;  // without tunnels
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &unknowing_port);
  builder.RegisterService(&others);
  const std::unique_ptr<grpc::Server> unknowing = builder.BuildAndStart();
  ASSERT_TRUE(unknowing);
  Proxy proxy(port_);
  StartRelay(proxy.port());
  auto channel = Connect(Relay());
  ASSERT_TRUE(channel);
  Reply reply;
  ASSERT_EQ(channel->Call(Header(kCount), "", "", nullptr, 0, &reply), ChannelStatus::kOk);
  const int before = proxy.connections();
  proxy.SetTarget(unknowing_port);
  proxy.Cut();
  // With the second connection, the answer to the first one was taken as no refusal.
  EXPECT_TRUE(Eventually([&] { return proxy.connections() >= before + 2; }));
  proxy.SetTarget(port_);
  EXPECT_EQ(channel->Call(Header(kCount), "", "", nullptr, 0, &reply), ChannelStatus::kOk) << channel->end_reason();
}

// The user's choice counts at both ends; without one, it is ten minutes.
TEST_F(Tunnel, TheClientChoosesHowLongItsSessionWaits) {
  StartServer();
  Proxy proxy(port_);
  StartRelay(proxy.port());
  auto channel = Connect(Relay());
  ASSERT_TRUE(channel);
  proxy.Cut();
  const auto says = [](const Process& process, const char* text) {
    return process.log().find(text) != std::string::npos;
  };
  EXPECT_TRUE(Eventually([&] { return says(*server_, "waiting 600 s for a new one"); })) << server_->log();
  EXPECT_TRUE(Eventually([&] { return says(*relay_, "up to 600 s (CUDA_REMOTE_GRACE=SECONDS"); })) << relay_->log();
  Reply reply;
  EXPECT_EQ(channel->Call(Header(kCount), "", "", nullptr, 0, &reply), ChannelStatus::kOk);
  channel.reset();
  relay_.reset();
  setenv("CUDA_REMOTE_GRACE", "1", 1);
  StartRelay(proxy.port());
  unsetenv("CUDA_REMOTE_GRACE");
  channel = Connect(Relay());
  ASSERT_TRUE(channel);
  proxy.Refuse(true);
  proxy.Cut();
  EXPECT_EQ(channel->Call(Header(kCount), "", "", nullptr, 0, &reply), ChannelStatus::kClosed);
  EXPECT_NE(channel->end_reason().find("did not come back within 1 s"), std::string::npos) << channel->end_reason();
  EXPECT_TRUE(Eventually([&] { return says(*server_, "its connection did not come back within 1 s"); }))
      << server_->log();
}

// A server whose host or process stands still: no connection breaks, and nothing comes.
TEST_F(Tunnel, ASilentServerIsReportedAndWaitedFor) {
  StartServer();
  StartRelay(port_);
  auto channel = Connect(Relay());
  ASSERT_TRUE(channel);
  Reply reply;
  ASSERT_EQ(channel->Call(Header(kCount), "", "", nullptr, 0, &reply), ChannelStatus::kOk);
  const auto says = [&](const std::string& text) { return relay_->log().find(text) != std::string::npos; };
  const std::string server = "the GPU server 127.0.0.1:" + std::to_string(port_);
  // A worker that computes is not silent.
  std::thread computing([&] {
    Reply ignored;
    channel->Call(Header(kHang), "", "", nullptr, 0, &ignored);
  });
  EXPECT_TRUE(Eventually([&] { return says("asked the silent server"); })) << relay_->log();
  EXPECT_FALSE(says("has not answered")) << relay_->log();
  server_->Signal(SIGSTOP);
  EXPECT_TRUE(Eventually([&] { return says(server + " has not answered for "); })) << relay_->log();
  EXPECT_TRUE(says("600 s (CUDA_REMOTE_GRACE=SECONDS")) << relay_->log();
  server_->Signal(SIGCONT);
  EXPECT_TRUE(Eventually([&] { return says(server + " answers again"); })) << relay_->log();
  relay_->Signal(SIGTERM);
  computing.join();
}

TEST_F(Tunnel, ServerGoneForGoodIsReported) {
  StartServer({"--grace", "1"});
  StartRelay(port_);
  auto channel = Connect(Relay());
  ASSERT_TRUE(channel);
  server_->Signal(SIGKILL);
  Reply reply;
  EXPECT_EQ(channel->Call(Header(kHang), "", "", nullptr, 0, &reply), ChannelStatus::kClosed);
  EXPECT_NE(channel->end_reason().find("127.0.0.1"), std::string::npos) << channel->end_reason();
}

TEST_F(Tunnel, WorkerCrashEndsItsSessionOnly) {
  StartServer();
  StartRelay(port_);
  auto local = Connect(Session());
  auto remote = Connect(Relay());
  auto other = Connect(Session());
  ASSERT_TRUE(local && remote && other);
  Reply reply;
  EXPECT_EQ(local->Call(Header(kCrash), "", "", nullptr, 0, &reply), ChannelStatus::kClosed);
  EXPECT_EQ(remote->Call(Header(kCrash), "", "", nullptr, 0, &reply), ChannelStatus::kClosed);
  EXPECT_EQ(other->Call(Header(kCount), "", "", nullptr, 0, &reply), ChannelStatus::kOk);
  EXPECT_TRUE(Eventually([&] { return server_->log().find("was killed by SIGSEGV") != std::string::npos; }));
  auto again = Connect(Relay());
  ASSERT_TRUE(again);
  EXPECT_EQ(again->Call(Header(kCount), "", "", nullptr, 0, &reply), ChannelStatus::kOk);
}

TEST_F(Tunnel, ClientKilledFreesItsWorker) {
  StartServer();
  StartRelay(port_);
  for (const std::string& path : {Session(), Relay()}) {
    int ready[2];
    ASSERT_EQ(pipe(ready), 0);
    const pid_t client = fork();
    if (client == 0) {
      auto channel = Connect(path);
      Reply reply;
      if (write(ready[1], "x", 1) != 1) _exit(1);
      channel->Call(Header(kHang), "", "", nullptr, 0, &reply);
      _exit(0);
    }
    char byte;
    ASSERT_EQ(read(ready[0], &byte, 1), 1);
    EXPECT_NE(Ps({"--server", "unix:" + Path("server"), "--json"}).find("\"program\": \"/test/program\""),
              std::string::npos);
    kill(client, SIGKILL);
    waitpid(client, nullptr, 0);
    EXPECT_TRUE(Eventually([&] {
      return Ps({"--server", "unix:" + Session(), "--json"}).find("\"sessions\": []") != std::string::npos;
    })) << path;
    EXPECT_TRUE(Eventually([&] { return Workers().size() == 1; })) << "only the warm worker stays";
    close(ready[0]);
    close(ready[1]);
  }
}

TEST_F(Tunnel, ControlCallsAtTheSocketAndThroughARelay) {
  StartServer();
  StartRelay(port_);
  for (const std::string& path : {Session(), Relay()}) {
    SCOPED_TRACE(path);
    auto channel = Connect(path);
    ASSERT_TRUE(channel);
    const uint64_t id = channel->welcome().session;
    control::ControlCall call;
    control::ControlAnswer answer;
    const auto ask = [&] { answer = ValueOf(control::CallOnSocket(path, call, 10000)); };
    call.mutable_get_server_info();
    ask();
    EXPECT_EQ(answer.server_info().pid(), uint32_t(server_->pid()));
    call = Saved(id, 1234567, 42);
    ask();
    EXPECT_TRUE(answer.noted().found());
    call.mutable_list_sessions()->set_after(id - 1);
    ask();
    ASSERT_EQ(answer.sessions().sessions_size(), 1);
    EXPECT_EQ(answer.sessions().sessions(0).saved_unix_ms(), 1234567u);
    EXPECT_EQ(answer.sessions().sessions(0).saved_bytes(), 42u);
    call.mutable_end_session()->set_id(id);
    ask();
    EXPECT_TRUE(answer.ended().found());
    Reply reply;
    EXPECT_EQ(channel->Call(Header(kHang), "", "", nullptr, 0, &reply), ChannelStatus::kClosed);
    ask();
    EXPECT_FALSE(answer.ended().found());
    call.Clear();
    const std::string error(control::CallOnSocket(path, call, 10000).status().message());
    EXPECT_NE(error.find("both sides need the same release"), std::string::npos) << error;
  }
  relay_->Signal(SIGTERM);
  relay_->Wait();
  EXPECT_NE(control::CallOnSocket(Relay(), Saved(1, 1, 1), 10000).status().message(), "");
}

TEST_F(Tunnel, CleanShutdownAndKill) {
  StartServer();
  auto channel = Connect(Session());
  ASSERT_TRUE(channel);
  auto workers = Workers();
  EXPECT_GE(workers.size(), 1u);
  server_->Signal(SIGTERM);
  Reply reply;
  EXPECT_EQ(channel->Call(Header(kHang), "", "", nullptr, 0, &reply), ChannelStatus::kClosed);
  EXPECT_EQ(channel->end_reason(), "the server is shutting down");
  EXPECT_EQ(server_->Wait(), 0) << server_->log();
  EXPECT_NE(access(Session().c_str(), F_OK), 0);
  EXPECT_NE(access(Path("server/control.sock").c_str(), F_OK), 0);
  for (pid_t worker : workers) EXPECT_TRUE(Eventually([&] { return kill(worker, 0) != 0; }));
  // Killed: its workers end by themselves, and the next server takes the folder over.
  StartServer();
  channel = Connect(Session());
  ASSERT_TRUE(channel);
  workers = Workers();
  server_->Signal(SIGKILL);
  EXPECT_EQ(channel->Call(Header(kHang), "", "", nullptr, 0, &reply), ChannelStatus::kClosed);
  for (pid_t worker : workers) EXPECT_TRUE(Eventually([&] { return kill(worker, 0) != 0; })) << worker;
  server_.reset();
  StartServer();
  EXPECT_TRUE(Connect(Session()));
}

TEST_F(Tunnel, RelayEndsWithTheRunAndWhenIdle) {
  StartServer();
  StartRelay(port_, {"--idle-exit", "0.5"});
  EXPECT_EQ(relay_->Wait(), 0);
  EXPECT_NE(access(Relay().c_str(), F_OK), 0);
  mkdir(Path("own").c_str(), 0700);
  Process own({Program("client/relay", "cr-relay"), "--connect", "127.0.0.1:" + std::to_string(port_), "--socket",
               Path("own/relay.sock"), "--idle-exit", "0.5", "--remove-folder"},
              Path("own.log"));
  EXPECT_EQ(own.Wait(), 0) << own.log();
  EXPECT_NE(access(Path("own").c_str(), F_OK), 0);
  int run[2];
  ASSERT_EQ(pipe(run), 0);
  fcntl(run[1], F_SETFD, FD_CLOEXEC);
  StartRelay(port_, {"--watch-fd", std::to_string(run[0])});
  auto channel = Connect(Relay());
  ASSERT_TRUE(channel);
  close(run[1]);
  Reply reply;
  EXPECT_EQ(channel->Call(Header(kHang), "", "", nullptr, 0, &reply), ChannelStatus::kClosed);
  EXPECT_EQ(relay_->Wait(), 0);
  close(run[0]);
}

TEST_F(Tunnel, BrokenDriverIsExplained) {
  StartServer({"--driver", "broken"});
  // Once, however often it is tried.
  EXPECT_TRUE(Eventually([&] { return server_->log().find("no more warm workers") != std::string::npos; }));
  const std::string log = server_->log();
  size_t errors = 0;
  for (size_t at = 0; (at = log.find(" error ", at)) != std::string::npos; ++at) ++errors;
  EXPECT_EQ(errors, 1u) << log;
  std::string error = Refusal(Session());
  EXPECT_NE(error.find("the driver is broken"), std::string::npos) << error;
  StartRelay(port_);
  error = Refusal(Relay());
  EXPECT_NE(error.find("the driver is broken"), std::string::npos) << error;
  server_.reset();
  StartServer({"--driver", "crash"});
  error = Refusal(Session());
  EXPECT_NE(error.find("SIGSEGV"), std::string::npos) << error;
}

TEST_F(Tunnel, LimitsAndVersions) {
  StartServer({"--max-sessions", "1"});
  auto first = Connect(Session());
  ASSERT_TRUE(first);
  std::string error = Refusal(Session());
  EXPECT_NE(error.find("--max-sessions"), std::string::npos) << error;
  Hello hello;
  hello.wire_version = 99;
  error = ClientChannel::Connect(Session(), hello, &welcome_).status().message();
  EXPECT_NE(error.find("99"), std::string::npos) << error;
}

TEST_F(Tunnel, PsShowsAndEnds) {
  StartServer();
  StartRelay(port_);
  auto local = Connect(Session());
  auto remote = Connect(Relay());
  ASSERT_TRUE(local && remote);
  Reply reply;
  ASSERT_EQ(local->Call(Header(kCount), "", "", nullptr, 0, &reply), ChannelStatus::kOk);
  const std::string json = Ps({"--server", "unix:" + Session(), "--json"});
  EXPECT_NE(json.find("\"transport\": \"ring\""), std::string::npos) << json;
  EXPECT_NE(json.find("\"transport\": \"grpc\""), std::string::npos) << json;
  EXPECT_NE(json.find("\"job\": \"a \\\"job\\\"\""), std::string::npos) << json;
  EXPECT_NE(json.find("\"worker_pid\": "), std::string::npos);
  // There is a limit though none was named.
  EXPECT_NE(json.find("\"limits\": {\"sessions\": 128,"), std::string::npos) << json;
  EXPECT_NE(Ps({"--server", "127.0.0.1:" + std::to_string(port_)}).find("/test/program"), std::string::npos);
  Ps({"--server", "unix:" + Session(), "--end", "777"}, 4);
  Ps({"--server", "unix:" + Path("nowhere")}, 1);
  Ps({"--server", "unix:" + Session(), "--end", std::to_string(remote->welcome().session), "--reason", "maintenance"});
  EXPECT_EQ(remote->Call(Header(kHang), "", "", nullptr, 0, &reply), ChannelStatus::kClosed);
  EXPECT_NE(remote->end_reason().find("maintenance"), std::string::npos) << remote->end_reason();
  EXPECT_EQ(local->Call(Header(kCount), "", "", nullptr, 0, &reply), ChannelStatus::kOk);
}

// While a session is quiet its thread is the one that looks at all of gRPC's sockets in cr-server; nobody else's
// connection may wait for that.
TEST_F(Tunnel, OthersAreServedBesideQuietSessions) {
  StartServer();
  StartRelay(port_);
  const auto ask = [this] {
    const auto stub = control::Control::NewStub(grpc::CreateCustomChannel(
        "127.0.0.1:" + std::to_string(port_), grpc::InsecureChannelCredentials(), control::ClientArguments()));
    grpc::ClientContext context;
    context.set_deadline(WallNow() + std::chrono::seconds(10));
    control::ServerInfo info;
    control::ServerInfoRequest request;
    control::AddChecksum(&request);
    const grpc::Status status = stub->GetServerInfo(&context, request, &info);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return info.sessions();
  };
  EXPECT_EQ(ask(), 0u);
  for (int round = 0; round < 2; ++round) {
    auto first = Connect(Relay());
    auto second = Connect(Relay());
    ASSERT_TRUE(first && second);
    const auto start = Now();
    for (int i = 0; i < 20; ++i) EXPECT_EQ(ask(), 2u);
    EXPECT_LT(Now() - start, std::chrono::seconds(4));
    second.reset();
    EXPECT_TRUE(Eventually([&] { return ask() == 1; }));
    Reply reply;
    EXPECT_EQ(first->Call(Header(kCount), "", "", nullptr, 0, &reply), ChannelStatus::kOk);
    first.reset();
    EXPECT_TRUE(Eventually([&] { return ask() == 0; }));
  }
}

TEST_F(Tunnel, SecondServerInTheSameFolderIsRefused) {
  StartServer();
  Process second({Program("server/supervisor", "cr-server"), "--dir", Path("server"), "--worker", "/bin/true"},
                 Path("second.log"));
  EXPECT_EQ(second.Wait(), 3);
  EXPECT_NE(second.log().find("another cr-server"), std::string::npos) << second.log();
  ASSERT_TRUE(Connect(Session()));
}

// A tunnel that is opened by hand. Its first answer is in `opened`.
class RawTunnel {
 public:
  RawTunnel(int port, const std::shared_ptr<grpc::ChannelCredentials>& credentials, bool checked = false)
      : checked_(checked),
        channel_(
            grpc::CreateCustomChannel("127.0.0.1:" + std::to_string(port), credentials, control::ClientArguments())) {
    context_.set_deadline(WallNow() + std::chrono::seconds(40));
    const grpc::internal::RpcMethod method(control::kTunnelMethod, grpc::internal::RpcMethod::BIDI_STREAMING);
    stream_.reset(grpc::internal::ClientReaderWriterFactory<grpc::ByteBuffer, grpc::ByteBuffer>::Create(
        channel_.get(), method, &context_));
  }
  ~RawTunnel() {
    context_.TryCancel();
    Finish();
  }
  bool Open(const control::TunnelOpen& open) {
    control::TunnelMessage message;
    control::ReceivedFrames frames;
    message.open = open.SerializeAsString();
    grpc::ByteBuffer buffer;
    return stream_->Write(control::EncodeTunnelMessage(message, nullptr, checked_)) && stream_->Read(&buffer) &&
           control::DecodeTunnelMessage(buffer, &message, &frames) && opened.ParseFromString(message.open);
  }
  bool Write(const grpc::ByteBuffer& buffer) { return stream_->Write(buffer); }
  bool Read() {
    grpc::ByteBuffer buffer;
    return stream_->Read(&buffer);
  }
  grpc::Status Finish() {
    if (!finished_) status_ = stream_->Finish();
    finished_ = true;
    return status_;
  }
  control::TunnelOpened opened;

 private:
  const bool checked_;
  std::shared_ptr<grpc::Channel> channel_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReaderWriter<grpc::ByteBuffer, grpc::ByteBuffer>> stream_;
  bool finished_ = false;
  grpc::Status status_;
};

control::TunnelOpen NewSession() {
  control::TunnelOpen open;
  Hello hello;
  hello.program = "/alices/program";
  EncodeHello(hello, open.mutable_hello());
  return open;
}

// Something between relay and server changes single bits. What the program gets is right all the same.
TEST_F(Tunnel, DamagedMessagesAreSentAgain) {
  StartServer();
  Proxy proxy(port_);
  StartRelay(proxy.port());
  auto channel = Connect(Relay());
  ASSERT_TRUE(channel);
  // More than a message has: between two flips one comes through, however often it is sent again.
  proxy.FlipEvery(9 << 20);
  Reply reply;
  std::string back;
  std::mt19937_64 random(9);
  for (int round = 0; round < 12 || (proxy.flips() < 6 && round < 60); ++round) {
    std::string up(6 << 20, 0);
    for (size_t i = 0; i < up.size(); i += 8) {
      const uint64_t value = random();
      memcpy(&up[i], &value, 8);
    }
    back.assign(up.size(), 0);
    ASSERT_EQ(channel->Call(Header(kEcho), "", up, &back[0], back.size(), &reply), ChannelStatus::kOk)
        << channel->end_reason();
    ASSERT_TRUE(back == up) << "round " << round;
  }
  EXPECT_GE(proxy.flips(), 6);
  EXPECT_TRUE(server_->log().find("arrived damaged") != std::string::npos ||
              relay_->log().find("arrived damaged") != std::string::npos);
}

// A connection that changes everything is given up, with a reason.
TEST_F(Tunnel, AConnectionThatDamagesEverythingIsGivenUp) {
  StartServer({"--insecure-tcp", "127.0.0.1", "--grace", "20"});
  Proxy proxy(port_);
  StartRelay(proxy.port());
  auto channel = Connect(Relay());
  ASSERT_TRUE(channel);
  proxy.FlipEvery(1);
  Reply reply;
  const std::string up(8 << 20, 'u');
  std::string back(up.size(), 0);
  EXPECT_EQ(channel->Call(Header(kEcho), "", up, &back[0], back.size(), &reply), ChannelStatus::kClosed);
  EXPECT_FALSE(channel->end_reason().empty());
}

TEST_F(Tunnel, MessagesWithoutChecksumAreRefusedWithoutTls) {
  StartServer();
  RawTunnel unchecked(port_, grpc::InsecureChannelCredentials());
  EXPECT_FALSE(unchecked.Open(NewSession()));
  EXPECT_NE(unchecked.Finish().error_message().find("checksum"), std::string::npos);
  const auto stub = control::Control::NewStub(grpc::CreateCustomChannel(
      "127.0.0.1:" + std::to_string(port_), grpc::InsecureChannelCredentials(), control::ClientArguments()));
  control::EndSessionRequest request;
  request.set_id(1);
  control::AddChecksum(&request);
  request.set_id(2);  // damaged
  control::EndSessionReply reply;
  grpc::ClientContext context;
  EXPECT_EQ(stub->EndSession(&context, request, &reply).error_code(), grpc::StatusCode::DATA_LOSS);
  RawTunnel checked(port_, grpc::InsecureChannelCredentials(), true);
  EXPECT_TRUE(checked.Open(NewSession()));
}

TEST_F(Tunnel, PlainTcpIsForListedHosts) {
  StartServer({"--insecure-tcp", "127.0.0.2,10.0.0.0/8"});
  StartRelay(port_);
  const std::string error = Refusal(Relay());
  EXPECT_NE(error.find("--insecure-tcp"), std::string::npos) << error;
  EXPECT_NE(server_->log().find("turned away a connection from 127.0.0.1"), std::string::npos);
  EXPECT_TRUE(Connect(Session()));
  for (const char* list : {"gpu7", "10.0.0.0/33", "10.0.0.1/8"}) {
    Process server({Program("server/supervisor", "cr-server"), "--dir", Path("other"), "--worker", "/bin/true",
                    "--listen", "127.0.0.1:0", "--insecure-tcp", list},
                   Path(std::string("list") + std::to_string(++starts_) + ".log"));
    EXPECT_EQ(server.Wait(), 2);
    EXPECT_NE(server.log().find("is not an address or a network"), std::string::npos) << server.log();
  }
}

TEST_F(Tunnel, ABusyPortIsExplained) {
  StartServer();
  for (const std::string& address : {"127.0.0.1:" + std::to_string(port_), std::string("192.0.2.1:0"),
                                     std::string("7070"), std::string("nohost.invalid:7070")}) {
    Process second({Program("server/supervisor", "cr-server"), "--dir", Path("other"), "--worker", "/bin/true",
                    "--listen", address, "--insecure-tcp", "127.0.0.1"},
                   Path("second" + std::to_string(++starts_) + ".log"));
    EXPECT_EQ(second.Wait(), 3);
    const std::string log = second.log();
    EXPECT_NE(log.find("listen"), std::string::npos) << log;
    EXPECT_NE(log.find(address), std::string::npos) << log;
    EXPECT_EQ(log.find(".cc:"), std::string::npos) << log;
    EXPECT_EQ(std::count(log.begin(), log.end(), '\n'), 1) << log;
  }
}

// Without a host, the server listens at all addresses of both families.
TEST_F(Tunnel, NoHostIsEveryAddress) {
  Process server({Program("server/supervisor", "cr-server"), "--dir", Path("server"), "--worker", "/bin/true",
                  "--workers", "0", "--listen", ":0", "--insecure-tcp", "127.0.0.1,::1"},
                 Path("every.log"));
  ASSERT_TRUE(Eventually([&] { return server.log().find("cr-server ready: ") != std::string::npos; })) << server.log();
  const std::string log = server.log();
  const auto port = uint16_t(atoi(log.c_str() + log.find("tcp::", log.find("cr-server ready: ")) + 5));
  sockaddr_in v4{};
  v4.sin_family = AF_INET;
  v4.sin_port = htons(port);
  v4.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  sockaddr_in6 v6{};
  v6.sin6_family = AF_INET6;
  v6.sin6_port = htons(port);
  v6.sin6_addr = in6addr_loopback;
  const auto connects = [](const auto& address) {
    const UniqueFd fd(socket(reinterpret_cast<const sockaddr*>(&address)->sa_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    return connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0;
  };
  EXPECT_TRUE(connects(v4));
  // Some containers have no IPv6, or no ::1.
  if (ReadFile("/proc/net/if_inet6").find(std::string(31, '0') + "1 ") != std::string::npos) {
    EXPECT_TRUE(connects(v6));
  }
}

TEST_F(Tunnel, ManyHellosStartFewWorkersAtATime) {
  StartServer({"--insecure-tcp", "127.0.0.1", "--driver", "slow"});
  std::vector<int> clients;
  for (int i = 0; i < 60; ++i) clients.push_back(SendHello());
  size_t most = 0;
  const auto all = [&] {
    most = std::max(most, Workers().size());
    const std::string log = server_->log();
    return log.find("session 20 of") != std::string::npos;
  };
  EXPECT_TRUE(Eventually(all));
  EXPECT_LE(most, 30u);
  // Those that leave are not waited for.
  for (int fd : clients) close(fd);
  EXPECT_TRUE(Eventually(
      [&] { return server_->log().find("the client left before a worker was ready") != std::string::npos; }));
  EXPECT_TRUE(Eventually([&] { return Workers().size() <= 10; }));
  EXPECT_TRUE(Connect(Session()));
}

TEST_F(Tunnel, SessionsOfOneIdentityAreLimited) {
  StartServer({"--insecure-tcp", "127.0.0.1", "--user-sessions", "2"});
  StartRelay(port_);
  auto first = Connect(Relay()), second = Connect(Relay());
  ASSERT_TRUE(first && second);
  const std::string error = Refusal(Relay());
  EXPECT_NE(error.find("address:127.0.0.1 has its 2 sessions"), std::string::npos) << error;
  auto local = Connect(Session()), more = Connect(Session()), third = Connect(Session());
  EXPECT_TRUE(local && more && third);
  first.reset();
  EXPECT_TRUE(Eventually([&] { return Connect(Relay()) != nullptr; }));
}

TEST_F(Tunnel, MemoryOfOneIdentityIsLimited) {
  StartServer({"--insecure-tcp", "127.0.0.1", "--user-memory-limit", "1000"});
  StartRelay(port_);
  auto first = Connect(Relay()), second = Connect(Relay()), local = Connect(Session());
  ASSERT_TRUE(first && second && local);
  const auto take = [](const std::unique_ptr<ClientChannel>& channel, uint64_t bytes) {
    Reply reply;
    EXPECT_EQ(channel->Call(Header(kTake), AsBytes(bytes), "", nullptr, 0, &reply), ChannelStatus::kOk);
    return Number(reply.message) == 1;
  };
  EXPECT_TRUE(take(first, 600));
  EXPECT_FALSE(take(second, 500));
  EXPECT_TRUE(take(second, 400));
  EXPECT_FALSE(take(first, 1));
  EXPECT_TRUE(take(local, 5000));  // the server's own user has no such limit
  // What a worker held that died is free again.
  Reply reply;
  EXPECT_EQ(first->Call(Header(kCrash), "", "", nullptr, 0, &reply), ChannelStatus::kClosed);
  EXPECT_TRUE(Eventually([&] { return take(second, 600); }));
  auto third = Connect(Relay());
  ASSERT_TRUE(third);
  EXPECT_FALSE(take(third, 1));
}

// The test's worker has four GPUs.
TEST_F(Tunnel, GpusOfOneIdentityAreLimited) {
  StartServer({"--insecure-tcp", "127.0.0.1", "--user-gpus", "2", "--session-gpus", "1", "--user-sessions", "4"});
  StartRelay(port_);
  const auto gpus = [](const std::unique_ptr<ClientChannel>& channel) {
    Reply reply;
    if (!channel) return std::string("no session");
    EXPECT_EQ(channel->Call(Header(kGpus), "", "", nullptr, 0, &reply), ChannelStatus::kOk);
    return std::string(reply.message);
  };
  auto first = Connect(Relay(), -1, 101);
  const std::string own = gpus(first);
  ASSERT_EQ(own.size(), 1u) << own;
  // Another process's goes where there is less to do, and the same process's to the same GPU.
  auto second = Connect(Relay(), -1, 102);
  const std::string other = gpus(second);
  ASSERT_EQ(other.size(), 1u) << other;
  EXPECT_NE(other, own);
  auto again = Connect(Relay(), -1, 101);
  EXPECT_EQ(gpus(again), own);
  // With two GPUs it has its share. The error says what to do.
  std::string third;
  for (const char* gpu : {"0", "1", "2", "3"}) {
    if (gpu != own && gpu != other) third = gpu;
  }
  const std::string error = Refusal(Relay(), atoi(third.c_str()));
  EXPECT_NE(error.find("address:127.0.0.1 has its 2 GPUs on this server (--user-gpus) already: "), std::string::npos)
      << error;
  EXPECT_NE(error.find("--gpu " + std::min(own, other)), std::string::npos) << error;
  auto named = Connect(Relay(), atoi(other.c_str()));
  EXPECT_EQ(gpus(named), other);
  const std::string ps = Ps({"--server", "unix:" + Session()});
  EXPECT_NE(ps.find("limit for each session: 1 GPU\n"), std::string::npos) << ps;
  EXPECT_NE(ps.find("address:127.0.0.1: sessions 4 of 4, GPU memory 0 B, GPUs 2 of 2 ("), std::string::npos) << ps;
  // The server's own user may have all, in each session one: those that nobody uses first.
  std::vector<std::unique_ptr<ClientChannel>> mine;
  std::set<std::string> seen;
  for (uint32_t pid = 201; pid < 205; ++pid) {
    mine.push_back(Connect(Session(), -1, pid));
    seen.insert(gpus(mine.back()));
  }
  EXPECT_EQ(seen.size(), 2u);
  EXPECT_EQ(seen.count(own) + seen.count(other), 0u);
  // When its sessions have ended, it may have others.
  first.reset();
  second.reset();
  again.reset();
  named.reset();
  EXPECT_TRUE(Eventually([&] { return Refusal(Relay(), atoi(third.c_str())).empty(); }));
}

// Without --session-gpus a session sees all that its owner may have; it waits until a worker has counted them.
TEST_F(Tunnel, ASessionSeesItsOwnersGpus) {
  StartServer({"--insecure-tcp", "127.0.0.1", "--user-gpus", "3", "--workers", "0"});
  StartRelay(port_);
  Reply reply;
  auto channel = Connect(Relay());
  ASSERT_TRUE(channel);
  ASSERT_EQ(channel->Call(Header(kGpus), "", "", nullptr, 0, &reply), ChannelStatus::kOk);
  EXPECT_EQ(reply.message, "0,1,2");
  auto own = Connect(Session());
  ASSERT_TRUE(own);
  ASSERT_EQ(own->Call(Header(kGpus), "", "", nullptr, 0, &reply), ChannelStatus::kOk);
  EXPECT_EQ(reply.message, "");
  EXPECT_NE(Ps({"--server", "127.0.0.1:" + std::to_string(port_), "--json"}).find("\"gpus\": [0, 1, 2]"),
            std::string::npos);
}

// The server's memory levels off, however many sessions it has had.
TEST_F(Tunnel, ManySessionsLeaveNoMemory) {
  StartServer();
  StartRelay(port_);
  const auto resident = [&] {
    const std::string status = ReadFile("/proc/" + std::to_string(server_->pid()) + "/status");
    return size_t(atol(status.c_str() + status.find("VmRSS:") + 6)) << 10;
  };
  const std::string up(4 << 20, 'u');
  const auto sessions = [&](int count) {
    for (int i = 0; i < count; ++i) {
      auto channel = Connect(i % 4 == 0 ? Session() : Relay());
      ASSERT_TRUE(channel);
      Reply reply;
      std::string back(up.size(), 0);
      ASSERT_EQ(channel->Call(Header(kEcho), "", up, &back[0], back.size(), &reply), ChannelStatus::kOk);
    }
    EXPECT_TRUE(Eventually([&] {
      return Ps({"--server", "unix:" + Session(), "--json"}).find("\"sessions\": []") != std::string::npos;
    }));
    sleep(4);  // what is kept for the next session goes after a moment
  };
  std::vector<size_t> sizes;
  for (const int count : {40, 40, 80}) {
    sessions(count);
    sizes.push_back(resident());
    fprintf(stderr, "after %d sessions more: %zu KiB\n", count, sizes.back() >> 10);
  }
  // What a session sends is 4 MiB, and as much comes back: if a tenth of it stayed, that would be 64 MiB after 80
  // sessions. A heap arena keeps up to 6 MiB, and how many have something varies from time to time: 560 sessions had 29
  // to 58 MiB.
  EXPECT_LT(sizes.back(), size_t{96} << 20);
  EXPECT_LT(sizes[2], sizes[0] + (32 << 20));
}

// Without descriptors the server waits, and says so now and then; it serves again when there are some.
TEST_F(Tunnel, WithoutDescriptorsNothingSpins) {
  descriptors_ = 64;
  StartServer({}, /*tcp=*/false);
  std::vector<int> clients;
  for (int i = 0; i < 90; ++i) {
    clients.push_back(SendHello());
    if (i % 10 == 0) usleep(20000);
  }
  for (int i = 0; i < 12; ++i) clients.push_back(ValueOf(ConnectUnix(Session())).Release());  // these say nothing
  EXPECT_TRUE(Eventually([&] { return server_->log().find("Too many open files") != std::string::npos; }));
  const size_t lines = LogLines();
  sleep(1);
  EXPECT_LT(LogLines() - lines, 200u);
  for (int fd : clients) close(fd);
  EXPECT_TRUE(Eventually([&] { return Connect(Session()) != nullptr; }));
}

// Local clients that say nothing are few, and are sent away after a while.
TEST_F(Tunnel, SilentLocalClientsAreSentAway) {
  StartServer({}, /*tcp=*/false);
  std::vector<pollfd> silent;
  for (int i = 0; i < 70; ++i) silent.push_back({ValueOf(ConnectUnix(Session())).Release(), POLLIN, 0});
  const auto sent_away = [&] { return poll(silent.data(), silent.size(), 0); };
  EXPECT_TRUE(Eventually([&] { return sent_away() == 6; }));
  EXPECT_NE(server_->log().find("clients of this user have not sent a request"), std::string::npos);
  EXPECT_TRUE(Eventually([&] { return sent_away() == 70; }));
  EXPECT_TRUE(Connect(Session()));
  for (const pollfd& client : silent) close(client.fd);
}

// A worker that reads nothing more does not stop the server, however often it is to end.
TEST_F(Tunnel, AWorkerThatDoesNotReadHoldsUpNobody) {
  StartServer({}, /*tcp=*/false);
  auto channel = Connect(Session());
  ASSERT_TRUE(channel);
  ASSERT_EQ(channel->Send(Header(kStop), "", ""), ChannelStatus::kOk);
  const auto stopped = [&] {
    for (const pid_t pid : Workers()) {
      if (StatOf(pid).state == 'T') return true;
    }
    return false;
  };
  ASSERT_TRUE(Eventually(stopped));
  control::ControlCall call;
  call.mutable_end_session()->set_id(channel->welcome().session);
  call.mutable_end_session()->set_reason(std::string(1000, 'r'));
  for (int i = 0; i < 300; ++i) {
    const auto answer = control::CallOnSocket(Session(), call, 20000);
    ASSERT_TRUE(answer.ok()) << "call " << i << ": " << answer.status();
  }
  EXPECT_TRUE(Eventually([&] { return !stopped(); }));
  EXPECT_TRUE(Connect(Session()));
}

// Descriptors that a client attaches to what it sends do not stop the server when it drops them.
TEST_F(Tunnel, DescriptorsOfStrangersHoldUpNobody) {
  StartServer({"--driver", "slow", "--workers", "0"}, /*tcp=*/false);
  std::string hello;
  EncodeHello(Hello(), &hello);
  control::ControlCall call;
  call.mutable_get_server_info();
  std::list<Lingering> all;
  const auto send = [&](const std::vector<std::pair<PacketType, std::string>>& packets) {
    // Until all has been sent, and its close is the last one.
    server_->Signal(SIGSTOP);
    UniqueFd socket = ValueOf(ConnectUnix(Session()));
    all.emplace_back();
    EXPECT_TRUE(all.back().made());
    for (const auto& packet : packets) {
      // The last one has the descriptor.
      const int fd = &packet == &packets.back() ? all.back().fd() : -1;
      EXPECT_EQ(SendPacket(socket.get(), packet.first, packet.second, fd), ChannelStatus::kOk);
    }
    all.back().Drop();
    server_->Signal(SIGCONT);
    return socket;
  };
  const auto serves = [&] { return control::CallOnSocket(Session(), call, 20000).ok(); };
  // With the first packet, a right one or a wrong one.
  send({{PacketType::kHello, hello}});
  EXPECT_TRUE(serves());
  send({{PacketType::kEnd, ""}});
  EXPECT_TRUE(serves());
  // In what the server does not read before it closes the socket.
  send({{PacketType::kControlCall, call.SerializeAsString()}, {PacketType::kFd, ""}});
  EXPECT_TRUE(serves());
  // Behind the Hello of a client that leaves before it has a worker.
  send({{PacketType::kHello, hello}, {PacketType::kFd, ""}}).Close();
  EXPECT_TRUE(Eventually([&] { return server_->log().find("the client left before") != std::string::npos; }));
  EXPECT_TRUE(serves());
  EXPECT_TRUE(Connect(Session()));
}

// Root's server for chosen users of the machine: their sessions are theirs, and their workers are nobody's who could
// read the server's files.
TEST_F(Tunnel, OtherLocalUsersAreServedApart) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can run workers as another user";
  ASSERT_EQ(chmod(folder_.c_str(), 0711), 0);
  std::ofstream(Path("worker"), std::ios::binary) << ReadFile(Program("server/supervisor", "test_worker"));
  ASSERT_EQ(chmod(Path("worker").c_str(), 0755), 0);
  constexpr uid_t kAlice = 40001, kMember = 40002, kStranger = 40003;
  constexpr gid_t kGroup = 40100;
  worker_ = Path("worker");
  StartServer(
      {"--allow-user", std::to_string(kAlice), "--allow-group", std::to_string(kGroup), "--session-user", "nobody"},
      /*tcp=*/false);
  // What a client of this user and these groups sees: "ok", its worker's user and whether root's file can be read
  // there.
  const auto as = [&](uid_t uid, gid_t group, const std::function<std::string()>& act) {
    int answer[2];
    EXPECT_EQ(pipe(answer), 0);
    const pid_t child = fork();
    if (child == 0) {
      if (setgroups(1, &group) != 0 || setresgid(uid, uid, uid) != 0 || setresuid(uid, uid, uid) != 0) _exit(1);
      const std::string text = act();
      _exit(write(answer[1], text.data(), text.size()) == ssize_t(text.size()) ? 0 : 1);
    }
    close(answer[1]);
    std::string text;
    char piece[256];
    for (ssize_t n; (n = read(answer[0], piece, sizeof(piece))) > 0;) text.append(piece, size_t(n));
    close(answer[0]);
    waitpid(child, nullptr, 0);
    return text;
  };
  const auto use = [&] {
    auto tried = TryConnect(Session());
    if (!tried.ok()) return tried.status().message();
    const std::unique_ptr<ClientChannel> channel = *std::move(tried);
    Reply reply;
    if (channel->Call(Header(kCount), "", "", nullptr, 0, &reply) != ChannelStatus::kOk) return channel->end_reason();
    usleep(300000);
    return std::string("ok");
  };
  auto own = Connect(Session());
  ASSERT_TRUE(own);
  // Of a worker that serves somebody else, while it does.
  std::map<std::string, std::string> workers;
  std::atomic<bool> stop{false};
  std::thread watcher([&] {
    for (; !stop; usleep(20000)) {
      for (const pid_t pid : Workers()) {
        std::istringstream status(ReadFile("/proc/" + std::to_string(pid) + "/status"));
        std::string uid, capabilities, seccomp;
        for (std::string line; std::getline(status, line);) {
          if (line.compare(0, 5, "Uid:\t") == 0) uid = line.substr(5);
          if (line.compare(0, 8, "CapBnd:\t") == 0) capabilities = line.substr(8);
          if (line.compare(0, 9, "Seccomp:\t") == 0) seccomp = line.substr(9);
        }
        if (seccomp == "2") workers[uid] = capabilities;
      }
    }
  });
  EXPECT_EQ(as(kAlice, kAlice, use), "ok");
  EXPECT_EQ(as(kMember, kGroup, use), "ok");
  EXPECT_NE(as(kStranger, kStranger, use).find("does not serve user 40003"), std::string::npos);
  stop = true;
  watcher.join();
  const std::string nobody = "65534\t65534\t65534\t65534", root = "0\t0\t0\t0";
  EXPECT_EQ(workers.size(), 2u);
  EXPECT_EQ(workers[nobody], std::string(16, '0'));
  EXPECT_EQ(workers[root], std::string(16, '0'));
  EXPECT_NE(server_->log().find("of uid:40001 started"), std::string::npos);
  // Another user's session is not theirs.
  const auto noted = [&] {
    const auto answer = control::CallOnSocket(Session(), Saved(own->welcome().session, 1, 1), 10000);
    if (!answer.ok()) return "no answer: " + std::string(answer.status().message());
    return std::string(answer->noted().found() ? "noted" : "not theirs");
  };
  EXPECT_EQ(as(kAlice, kAlice, noted), "not theirs");
  // cr-ps shows those who were admitted their own sessions, ends those, and no others.
  const std::string cr_ps = Path("cr-ps");
  std::ofstream(cr_ps, std::ios::binary) << ReadFile(Program("programs/tools", "cr-ps"));
  ASSERT_EQ(chmod(cr_ps.c_str(), 0755), 0);
  const auto ps = [&](const std::string& more) {
    std::string text;
    const std::string command =
        "cd /; " + cr_ps + " --server unix:" + Path("server") + " " + more + " 2>&1; echo code $?";
    FILE* const out = popen(command.c_str(), "r");
    char piece[512];
    for (size_t n; out && (n = fread(piece, 1, sizeof(piece), out)) > 0;) text.append(piece, n);
    if (out) pclose(out);
    return text;
  };
  EXPECT_NE(as(kAlice, kAlice, [&] { return ps("--json"); }).find("\"sessions\": []"), std::string::npos)
      << as(kAlice, kAlice, [&] { return ps("--json"); });
  const std::string foreign = std::to_string(own->welcome().session);
  EXPECT_NE(as(kAlice, kAlice, [&] { return ps("--end " + foreign); }).find("code 4"), std::string::npos);
  EXPECT_NE(as(kStranger, kStranger, [&] { return ps(""); }).find("does not serve user 40003"), std::string::npos);
  const std::string alices = as(kAlice, kAlice, [&] {
    auto channel = Connect(Session());
    if (!channel) return std::string("no session");
    std::string text = ps("--json") + ps("");
    text += ps("--end " + std::to_string(channel->welcome().session) + " --reason over");
    Reply reply;
    channel->Call(Header(kHang), "", "", nullptr, 0, &reply);
    return text + channel->end_reason();
  });
  EXPECT_NE(alices.find("\"owner\": \"uid:40001\""), std::string::npos) << alices;
  EXPECT_EQ(alices.find("uid:0"), std::string::npos) << alices;
  EXPECT_NE(alices.find("uid:40001: sessions 1 of 64, GPU memory 0 B, GPUs 4 (0,1,2,3)"), std::string::npos) << alices;
  EXPECT_NE(alices.find("ended by its owner: over"), std::string::npos) << alices;
  Reply still;
  EXPECT_EQ(own->Call(Header(kCount), "", "", nullptr, 0, &still), ChannelStatus::kOk);
  EXPECT_EQ(noted(), "noted");
  // Without a user for them there are no foreign sessions.
  Process refused({Program("server/supervisor", "cr-server"), "--dir", Path("other"), "--worker", "/bin/true",
                   "--allow-user", "nobody"},
                  Path("refused.log"));
  EXPECT_EQ(refused.Wait(), 2);
  EXPECT_NE(refused.log().find("--session-user"), std::string::npos) << refused.log();
}

// Sessions of other hosts, too.
TEST_F(Tunnel, SessionsOfOtherHostsRunApart) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can run workers as another user";
  ASSERT_EQ(chmod(folder_.c_str(), 0711), 0);
  std::ofstream(Path("worker"), std::ios::binary) << ReadFile(Program("server/supervisor", "test_worker"));
  ASSERT_EQ(chmod(Path("worker").c_str(), 0755), 0);
  worker_ = Path("worker");
  StartServer({"--insecure-tcp", "127.0.0.1", "--session-user", "nobody"});
  StartRelay(port_);
  const auto user_of_worker = [&](const std::string& path) {
    auto channel = Connect(path);
    Reply reply;
    if (!channel || channel->Call(Header(kCount), "", "", nullptr, 0, &reply) != ChannelStatus::kOk) {
      return std::string("no session");
    }
    const std::string list = Ps({"--server", "unix:" + Session(), "--json"}), name = "\"worker_pid\": ";
    const std::string status =
        ReadFile("/proc/" + std::to_string(atoi(list.c_str() + list.find(name) + name.size())) + "/status");
    const size_t at = status.find("Uid:\t");
    return status.substr(at, status.find('\n', at) - at);
  };
  EXPECT_EQ(user_of_worker(Relay()), "Uid:\t65534\t65534\t65534\t65534");
  const auto is_free = [&] {
    return Ps({"--server", "unix:" + Session(), "--json"}).find("\"sessions\": []") != std::string::npos;
  };
  EXPECT_TRUE(Eventually(is_free));
  EXPECT_EQ(user_of_worker(Session()), "Uid:\t0\t0\t0\t0");
}

TEST_F(Tunnel, HangupEndsNothing) {
  StartServer();
  StartRelay(port_);
  auto channel = Connect(Session()), remote = Connect(Relay());
  ASSERT_TRUE(channel && remote);
  server_->Signal(SIGHUP);
  relay_->Signal(SIGHUP);
  EXPECT_TRUE(Eventually([&] { return server_->log().find("SIGHUP") != std::string::npos; }));
  Reply reply;
  EXPECT_EQ(channel->Call(Header(kCount), "", "", nullptr, 0, &reply), ChannelStatus::kOk);
  EXPECT_TRUE(Connect(Session()));
  EXPECT_EQ(remote->Call(Header(kCount), "", "", nullptr, 0, &reply), ChannelStatus::kOk);
  EXPECT_TRUE(Connect(Relay()));
}

TEST_F(Tunnel, PlainTcpNeedsItsName) {
  Process server({Program("server/supervisor", "cr-server"), "--dir", Path("server"), "--worker", "/bin/true",
                  "--listen", "127.0.0.1:0"},
                 Path("s.log"));
  EXPECT_EQ(server.Wait(), 2);
  EXPECT_NE(server.log().find("--insecure-tcp"), std::string::npos) << server.log();
}

// ------------------------------------------------------------------------------------------------ TLS

class Tls : public Tunnel {
 protected:
  void SetUp() override {
    Tunnel::SetUp();
    const std::string make = "cd " + folder_ + R"( && {
      K="-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes"
      for ca in ca other; do openssl req -x509 $K -days 2 -keyout $ca.key -out $ca.pem -subj "/CN=$ca"; done
      printf 'subjectAltName=IP:127.0.0.1,DNS:localhost\n' > ext
      for who in server:ca client:ca eve:ca ops:ca stranger:other server2:other client2:other; do n=${who%:*} a=${who#*:}
        openssl req $K -keyout $n.key -out $n.csr -subj "/CN=$n"
        openssl x509 -req -in $n.csr -CA $a.pem -CAkey $a.key -CAcreateserial -out $n.pem -days 2 -extfile ext
      done; } >openssl.log 2>&1)";
    ASSERT_EQ(system(make.c_str()), 0) << ReadFile(Path("openssl.log"));
  }
  std::shared_ptr<grpc::ChannelCredentials> Credentials(const std::string& who, const std::string& ca) {
    return ValueOf(control::ClientTls({Path(who + ".pem"), Path(who + ".key"), Path(ca + ".pem"), ""}));
  }
  size_t Entries(const std::string& folder) const {
    size_t count = 0;
    DIR* const list = opendir(("/proc/" + std::to_string(server_->pid()) + "/" + folder).c_str());
    while (list && readdir(list)) ++count;
    if (list) closedir(list);
    return count;
  }
  size_t Descriptors() const { return Entries("fd"); }
  size_t Threads() const { return Entries("task"); }
  std::vector<std::string> Files(const std::string& who, const std::string& ca) {
    return {"--tls-cert", Path(who + ".pem"), "--tls-key", Path(who + ".key"), "--tls-ca", Path(ca + ".pem")};
  }
};

TEST_F(Tls, BothSidesShowCertificates) {
  StartServer(Files("server", "ca"));
  StartRelay(port_, Files("client", "ca"));
  auto channel = Connect(Relay());
  ASSERT_TRUE(channel) << Refusal(Relay());
  Exercise(channel.get());
  std::vector<std::string> ps = Files("client", "ca");
  ps.insert(ps.end(), {"--server", "127.0.0.1:" + std::to_string(port_), "--json"});
  EXPECT_NE(Ps(ps).find("\"transport\": \"grpc\""), std::string::npos);
}

TEST_F(Tls, SessionsBelongToWhoOpenedThem) {
  std::vector<std::string> options = Files("server", "ca");
  options.insert(options.end(), {"--operator", "CN=ops"});
  StartServer(options);
  StartRelay(port_, Files("client", "ca"));
  auto channel = Connect(Relay());
  ASSERT_TRUE(channel);
  const std::string id = std::to_string(channel->welcome().session);
  const auto as = [&](const std::string& who, std::vector<std::string> more) {
    const std::vector<std::string> files = Files(who, "ca");
    more.insert(more.end(), files.begin(), files.end());
    more.insert(more.end(), {"--server", "127.0.0.1:" + std::to_string(port_)});
    return more;
  };
  // Eve's certificate is as good as the client's; the session is not hers.
  EXPECT_NE(Ps(as("eve", {"--json"})).find("\"sessions\": []"), std::string::npos);
  EXPECT_EQ(Ps(as("eve", {})).find("/test/program"), std::string::npos);
  EXPECT_NE(Ps(as("eve", {"--end", id}), 4).find("there is no session"), std::string::npos);
  Reply reply;
  ASSERT_EQ(channel->Call(Header(kCount), "", "", nullptr, 0, &reply), ChannelStatus::kOk);
  // What tools report about a session, likewise.
  const auto note = [&](const std::string& who, uint64_t unix_ms) {
    const auto stub = control::Control::NewStub(grpc::CreateCustomChannel(
        "127.0.0.1:" + std::to_string(port_), Credentials(who, "ca"), control::ClientArguments()));
    grpc::ClientContext context;
    context.set_deadline(WallNow() + std::chrono::seconds(10));
    control::NoteSavedReply noted;
    const grpc::Status status =
        stub->NoteSaved(&context, Saved(channel->welcome().session, unix_ms, 42).note_saved(), &noted);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return noted.found();
  };
  EXPECT_FALSE(note("eve", 1234567));
  EXPECT_EQ(Ps(as("client", {"--json"})).find("1234567"), std::string::npos);
  for (const auto& [who, unix_ms] : {std::pair("ops", 1234567), std::pair("client", 7654321)}) {
    EXPECT_TRUE(note(who, uint64_t(unix_ms)));
    EXPECT_NE(Ps(as("client", {"--json"})).find(std::to_string(unix_ms)), std::string::npos);
  }
  // The owner, and an operator, see it; log lines name them.
  EXPECT_NE(Ps(as("client", {"--json"})).find("\"owner\": \"cert:CN=client\""), std::string::npos);
  EXPECT_NE(Ps(as("ops", {"--json"})).find("/test/program"), std::string::npos);
  EXPECT_NE(Ps({"--server", "unix:" + Session(), "--json"}).find("cert:CN=client"), std::string::npos);
  EXPECT_NE(server_->log().find("session " + id + " of cert:CN=client started"), std::string::npos);
  Ps(as("ops", {"--end", id, "--reason", "drained"}));
  EXPECT_EQ(channel->Call(Header(kHang), "", "", nullptr, 0, &reply), ChannelStatus::kClosed);
  EXPECT_NE(channel->end_reason().find("drained"), std::string::npos) << channel->end_reason();
  EXPECT_NE(server_->log().find("ended by request of cert:CN=ops"), std::string::npos);
}

// Whoever learns the token of a session cannot go on with it, break it, or open a lane of it.
TEST_F(Tls, TokensAreOfUseToTheOwnerOnly) {
  StartServer(Files("server", "ca"));
  RawTunnel alice(port_, Credentials("client", "ca"));
  control::TunnelOpen open = NewSession();
  open.set_takes_lanes(true);
  ASSERT_TRUE(alice.Open(open));
  control::TunnelOpen stolen;
  stolen.set_resume_token(alice.opened.resume_token());
  {
    RawTunnel eve(port_, Credentials("eve", "ca"));
    EXPECT_FALSE(eve.Open(stolen));
    EXPECT_EQ(eve.Finish().error_code(), grpc::StatusCode::NOT_FOUND);
  }
  {
    control::TunnelOpen lane = stolen;
    lane.set_lane_of(alice.opened.number());
    RawTunnel eve(port_, Credentials("eve", "ca"));
    EXPECT_FALSE(eve.Open(lane));
    EXPECT_EQ(eve.Finish().error_code(), grpc::StatusCode::NOT_FOUND);
    RawTunnel own(port_, Credentials("client", "ca"));
    EXPECT_TRUE(own.Open(lane));
  }
  RawTunnel again(port_, Credentials("client", "ca"));
  EXPECT_TRUE(again.Open(stolen));
}

// The port of the metrics, from what the server says when it is ready. 0: it names none.
int MetricsPort(const std::string& log) {
  const size_t at = log.find(" metrics:127.0.0.1:", log.find("cr-server ready: "));
  EXPECT_NE(at, std::string::npos) << log;
  return at == std::string::npos ? 0 : atoi(log.c_str() + at + strlen(" metrics:127.0.0.1:"));
}

// What an HTTP server of this machine answers; the beginning of its refusal, or nothing if the answer does not come.
std::string GetPage(int port, const std::string& path, int limit_s = 60) {
  const UniqueFd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(uint16_t(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  EXPECT_EQ(connect(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  const timeval limit{limit_s, 0};
  setsockopt(fd.get(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
  const std::string request = "GET " + path + " HTTP/1.0\r\n\r\n";
  EXPECT_EQ(write(fd.get(), request.data(), request.size()), ssize_t(request.size()));
  std::string text;
  char piece[4096];
  for (ssize_t n; (n = read(fd.get(), piece, sizeof(piece))) > 0;) text.append(piece, size_t(n));
  const size_t body = text.find("\r\n\r\n");
  if (body == std::string::npos) return text.substr(0, 12);
  return text.compare(9, 3, "200") == 0 ? text.substr(body + 4) : text.substr(0, 12);
}

// The metrics are in the format that Prometheus reads, keep its rules for names, and say what happened.
TEST_F(Tunnel, MetricsAreAsPrometheusWantsThem) {
  std::string promtool = "/opt/cuda-remote/promtool/promtool";
  if (system("command -v promtool > /dev/null 2>&1") == 0) promtool = "promtool";
  ASSERT_EQ(system((promtool + " --version > " + Path("version") + " 2>&1").c_str()), 0)
      << "promtool is missing: tools/setup installs it";
  StartServer({"--insecure-tcp", "127.0.0.1", "--metrics", "127.0.0.1:0", "--max-sessions", "2"});
  const int port = MetricsPort(server_->log());
  const auto get = [&](const std::string& path) { return GetPage(port, path); };
  const auto value = [&](const std::string& text, const std::string& series) {
    const size_t line = text.find("\ncuda_remote_" + series + " ");
    return line == std::string::npos ? -1.0 : atof(text.c_str() + line + strlen("\ncuda_remote_") + series.size());
  };
  EXPECT_EQ(value(get("/metrics"), "sessions"), 0);
  EXPECT_EQ(value(get("/metrics"), "session_wait_seconds_count"), 0);
  StartRelay(port_);
  auto first = Connect(Session()), second = Connect(Relay());
  ASSERT_TRUE(first && second);
  EXPECT_FALSE(Connect(Session()));
  Reply reply;
  const std::string up(100000, 'u');
  for (int i = 0; i < 40; ++i) ASSERT_EQ(second->Call(Header(kCount), "", up, nullptr, 0, &reply), ChannelStatus::kOk);
  // What cr-checkpoint reports, and what cr-restart does of an older image.
  for (const uint64_t age_ms : {uint64_t{0}, uint64_t{100000}}) {
    const auto now = uint64_t(UnixMs());
    const control::ControlCall call = Saved(first->welcome().session, now - age_ms, 4096);
    EXPECT_TRUE(ValueOf(control::CallOnSocket(Session(), call, 10000)).noted().found());
  }
  EXPECT_TRUE(Eventually([&] { return value(get("/metrics"), "received_bytes_total") > 1000000; }));
  const std::string text = get("/metrics");
  EXPECT_EQ(value(text, "sessions"), 2) << text;
  EXPECT_EQ(value(text, "sessions_opened_total"), 2);
  EXPECT_EQ(value(text, "sessions_refused_total"), 1);
  EXPECT_EQ(value(text, "session_wait_seconds_count"), 2);
  EXPECT_EQ(value(text, "session_wait_seconds_bucket{le=\"+Inf\"}"), 2);
  EXPECT_EQ(value(text, "checkpoints_total"), 1);
  EXPECT_EQ(value(text, "checkpoint_bytes_total"), 4096);
  const std::string session = std::to_string(second->welcome().session);
  const std::string labels = "{session=\"" + session + "\",job=\"a \\\"job\\\"\",owner=\"address:127.0.0.1\"}";
  EXPECT_GT(value(text, "session_calls_total" + labels), 0);
  std::ofstream(Path("metrics")) << text;
  const std::string check = promtool + " check metrics < " + Path("metrics") + " > " + Path("promtool.log") + " 2>&1";
  EXPECT_EQ(system(check.c_str()), 0) << ReadFile(Path("promtool.log"));
  EXPECT_EQ(ReadFile(Path("promtool.log")), "") << "promtool finds fault with a name or a help text";
  // A worker that dies is a failed session; what it did stays in the sums.
  const double received = value(text, "received_bytes_total");
  EXPECT_EQ(first->Call(Header(kCrash), "", "", nullptr, 0, &reply), ChannelStatus::kClosed);
  second.reset();
  EXPECT_TRUE(Eventually([&] { return value(get("/metrics"), "sessions") == 0; }));
  EXPECT_EQ(value(get("/metrics"), "sessions_failed_total"), 1);
  EXPECT_GE(value(get("/metrics"), "received_bytes_total"), received);
  EXPECT_NE(get("/else").find(" 404"), std::string::npos);
  // A port that is in use.
  Process busy({Program("server/supervisor", "cr-server"), "--dir", Path("busy"), "--worker", "/bin/true", "--metrics",
                "127.0.0.1:" + std::to_string(port)},
               Path("busy.log"));
  EXPECT_EQ(busy.Wait(), 3);
  EXPECT_NE(busy.log().find("cannot listen at 127.0.0.1:" + std::to_string(port) + " (--metrics)"), std::string::npos)
      << busy.log();
}

// If cr-nvml hangs, as it does with the driver, everything else is still measured within Prometheus's patience.
TEST_F(Tunnel, MetricsOfAHungDriver) {
  const std::string server = Path("cr-server");
  std::ofstream(server, std::ios::binary) << ReadFile(Program("server/supervisor", "cr-server"));
  std::ofstream(Path("cr-nvml")) << "#!/bin/sh\nexec sleep 3600\n";
  for (const std::string& file : {server, Path("cr-nvml")}) ASSERT_EQ(chmod(file.c_str(), 0755), 0);
  server_ = std::make_unique<Process>(
      std::vector<std::string>{server, "--dir", Path("server"), "--worker", Program("server/supervisor", "test_worker"),
                               "--metrics", "127.0.0.1:0"},
      Path("hung.log"));
  ASSERT_TRUE(Eventually([&] { return server_->log().find("cr-server ready: ") != std::string::npos; }));
  ASSERT_TRUE(Connect(Session()));  // so that a worker has counted the GPUs
  // Its four GPUs would take 24 s, one after the other.
  const std::string text = GetPage(MetricsPort(server_->log()), "/metrics", 14);
  EXPECT_NE(text.find("\ncuda_remote_sessions "), std::string::npos) << text;
}

// What --init-tls makes is all that a server and its clients need; a second run keeps it, and renews what must be.
TEST_F(Tunnel, InitTlsMakesCertificatesThatWork) {
  int runs = 0;
  const auto init = [&](const std::vector<std::string>& more) {
    std::vector<std::string> command = {Program("server/supervisor", "cr-server"), "--init-tls", Path("tls"),
                                        "--tls-client", "alice,bob"};
    command.insert(command.end(), more.begin(), more.end());
    Process run(command, Path("init" + std::to_string(++runs) + ".log"));
    EXPECT_EQ(run.Wait(), 0) << run.log();
    return run.log();
  };
  const std::string first = init({});
  for (const char* name : {"ca", "server", "alice", "bob"}) {
    EXPECT_NE(first.find("made     " + Path(std::string("tls/") + name + ".pem")), std::string::npos) << first;
    struct stat facts;
    ASSERT_EQ(stat(Path(std::string("tls/") + name + ".key").c_str(), &facts), 0);
    EXPECT_EQ(facts.st_mode & 0777, 0600u) << name;
  }
  EXPECT_NE(first.find("(CN=alice), valid until 20"), std::string::npos) << first;
  EXPECT_NE(first.find(", 365 days"), std::string::npos) << first;
  const auto verify = [&](const std::string& purpose, const std::string& name) {
    return system(("openssl verify -CAfile " + Path("tls/ca.pem") + " -purpose " + purpose + " " +
                   Path("tls/" + name + ".pem") + " > " + Path("verify.log") + " 2>&1")
                      .c_str()) == 0;
  };
  EXPECT_TRUE(verify("sslserver", "server") && verify("sslclient", "alice"));
  EXPECT_FALSE(verify("sslserver", "alice")) << "a client must not pass for a server";

  const auto files = [&](const std::string& who) {
    return std::vector<std::string>{"--tls-cert", Path("tls/" + who + ".pem"), "--tls-key", Path("tls/" + who + ".key"),
                                    "--tls-ca",   Path("tls/ca.pem")};
  };
  StartServer(files("server"));
  StartRelay(port_, files("alice"));
  auto channel = Connect(Relay());
  ASSERT_TRUE(channel) << Refusal(Relay());
  EXPECT_NE(Ps({"--server", "unix:" + Session(), "--json"}).find("\"owner\": \"cert:CN=alice\""), std::string::npos);

  const auto bytes = [&](const std::string& name) { return ReadFile(Path("tls/" + name + ".pem")); };
  const std::string ca = bytes("ca"), server = bytes("server"), alice = bytes("alice");
  const std::string second = init({});
  EXPECT_EQ(second.find("made "), std::string::npos) << second;
  EXPECT_TRUE(bytes("ca") == ca && bytes("server") == server && bytes("alice") == alice);
  // Another name of the server, and a certificate that ends soon.
  const std::string sign = "cd " + Path("tls") +
                           " && openssl req -new -key bob.key -subj /CN=bob -out bob.csr 2>/dev/null && "
                           "openssl x509 -req -in bob.csr -CA ca.pem -CAkey ca.key -days 20 -out bob.pem 2>/dev/null";
  ASSERT_EQ(system(sign.c_str()), 0);
  const std::string third = init({"--tls-name", "gpu9.test,192.0.2.9"});
  EXPECT_TRUE(bytes("ca") == ca && bytes("alice") == alice);
  EXPECT_NE(third.find("made     " + Path("tls/server.pem")), std::string::npos) << third;
  EXPECT_NE(third.find("made     " + Path("tls/bob.pem")), std::string::npos) << third;
  EXPECT_EQ(system(("openssl x509 -noout -checkhost gpu9.test -checkip 192.0.2.9 -in " + Path("tls/server.pem") +
                    " | grep -q 'does match'")
                       .c_str()),
            0);
  // Somebody's files are not written over.
  std::ofstream(Path("tls/alice.key")) << "mine";
  Process refused({Program("server/supervisor", "cr-server"), "--init-tls", Path("tls"), "--tls-client", "alice"},
                  Path("refused.log"));
  EXPECT_EQ(refused.Wait(), 1);
  EXPECT_NE(refused.log().find("remove both to have new ones"), std::string::npos) << refused.log();
  EXPECT_EQ(ReadFile(Path("tls/alice.key")), "mine");
  Process odd({Program("server/supervisor", "cr-server"), "--init-tls", Path("tls"), "--tls-client", "../x"},
              Path("odd.log"));
  EXPECT_EQ(odd.Wait(), 1);
}

// A token stands in for a client's certificate: its name is the owner of sessions, and nobody gets in without one.
TEST_F(Tls, TokensNameTheirOwner) {
  // The token is the line of standard output; the log has standard error, too.
  const auto make = [&](const std::string& name, int expect) {
    Process run({Program("server/supervisor", "cr-server"), "--tokens", Path("tokens"), "--new-token", name},
                Path("token-" + name + std::to_string(expect) + ".log"));
    EXPECT_EQ(run.Wait(), expect) << run.log();
    std::istringstream lines(run.log());
    for (std::string line; std::getline(lines, line);) {
      if (line.size() == 67 && line.find(' ') == std::string::npos) return line;
    }
    return std::string();
  };
  const auto save = [&](const std::string& name, const std::string& token) {
    std::ofstream(Path(name)) << token << "\n";
    chmod(Path(name).c_str(), 0600);
  };
  // An editor left the last line without an end.
  std::ofstream(Path("tokens")) << "# who may come";
  chmod(Path("tokens").c_str(), 0600);
  const std::string carol = make("carol", 0), dave = make("dave", 0);
  ASSERT_FALSE(carol.empty() || dave.empty() || carol == dave);
  EXPECT_EQ(make("carol", 1), "");
  EXPECT_EQ(ReadFile(Path("tokens")).find(carol), std::string::npos) << "the server's file has hashes only";
  std::vector<std::string> options = Files("server", "ca");
  options.insert(options.end(), {"--tokens", Path("tokens")});
  StartServer(options);
  save("carol.token", carol);
  save("wrong.token", "cr-" + std::string(64, '0'));
  setenv("CUDA_REMOTE_TOKEN_FILE", Path("carol.token").c_str(), 1);
  StartRelay(port_, {"--tls-ca", Path("ca.pem")});
  auto channel = Connect(Relay());
  ASSERT_TRUE(channel) << Refusal(Relay());
  Exercise(channel.get());
  const std::vector<std::string> ps = {"--server", "127.0.0.1:" + std::to_string(port_), "--tls-ca", Path("ca.pem"),
                                       "--json"};
  EXPECT_NE(Ps(ps).find("\"owner\": \"token:carol\""), std::string::npos);
  // Another token's owner does not see the session; no token, or a wrong one, sees nothing.
  save("dave.token", dave);
  setenv("CUDA_REMOTE_TOKEN_FILE", Path("dave.token").c_str(), 1);
  EXPECT_NE(Ps(ps).find("\"sessions\": []"), std::string::npos);
  setenv("CUDA_REMOTE_TOKEN_FILE", Path("wrong.token").c_str(), 1);
  EXPECT_NE(Ps(ps, 1).find("the server does not know this token"), std::string::npos);
  chmod(Path("wrong.token").c_str(), 0644);
  EXPECT_NE(Ps(ps, 2).find("open to other users"), std::string::npos);
  unsetenv("CUDA_REMOTE_TOKEN_FILE");
  EXPECT_NE(Ps(ps, 2).find("--tls-cert"), std::string::npos);
  grpc::SslCredentialsOptions only_ca;
  only_ca.pem_root_certs = ReadFile(Path("ca.pem"));
  const auto stub = control::Control::NewStub(grpc::CreateCustomChannel(
      "127.0.0.1:" + std::to_string(port_), grpc::SslCredentials(only_ca), control::ClientArguments()));
  grpc::ClientContext context;
  control::ServerInfo info;
  const grpc::Status status = stub->GetServerInfo(&context, control::ServerInfoRequest(), &info);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAUTHENTICATED) << status.error_message();
  EXPECT_NE(status.error_message().find("neither a token nor a certificate"), std::string::npos);
  // Certificates count as before, those of others do not.
  std::vector<std::string> by_certificate = Files("client", "ca");
  by_certificate.insert(by_certificate.end(), {"--server", "127.0.0.1:" + std::to_string(port_), "--json"});
  EXPECT_NE(Ps(by_certificate).find("\"sessions\": []"), std::string::npos);
  std::vector<std::string> stranger = Files("stranger", "ca");
  stranger.insert(stranger.end(), {"--server", "127.0.0.1:" + std::to_string(port_), "--json"});
  Ps(stranger, 1);
  // A token whose line is gone is none after SIGHUP.
  std::ofstream(Path("tokens")) << "dave "
                                << "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef\n";
  server_->Signal(SIGHUP);
  EXPECT_TRUE(Eventually([&] { return server_->log().find("the configuration was read again") != std::string::npos; }));
  setenv("CUDA_REMOTE_TOKEN_FILE", Path("carol.token").c_str(), 1);
  EXPECT_NE(Ps(ps, 1).find("the server does not know this token"), std::string::npos);
  unsetenv("CUDA_REMOTE_TOKEN_FILE");
}

// Who guesses tokens is logged, fills no log, is cut off after a few guesses, and keeps nobody else away.
TEST_F(Tls, GuessedTokensAreLimitedAndLogged) {
  const std::string right = std::string(64, '7');
  // Its SHA-256.
  std::ofstream(Path("tokens")) << "carol c0b6304bd6ce9b3e65150392c91a3aa76803a59c29e46f9fb2b9aac235e58386\n";
  chmod(Path("tokens").c_str(), 0600);
  std::vector<std::string> options = Files("server", "ca");
  options.insert(options.end(), {"--tokens", Path("tokens")});
  StartServer(options);
  Proxy proxy(port_);
  grpc::SslCredentialsOptions only_ca;
  only_ca.pem_root_certs = ReadFile(Path("ca.pem"));
  const auto ask = [&](const std::string& token, control::Control::Stub* stub) {
    grpc::ClientContext context;
    context.set_credentials(grpc::AccessTokenCredentials(token));
    control::ServerInfo info;
    return stub->GetServerInfo(&context, control::ServerInfoRequest(), &info).error_code();
  };
  const auto open = [&](int port) {
    return control::Control::NewStub(grpc::CreateCustomChannel(
        "127.0.0.1:" + std::to_string(port), grpc::SslCredentials(only_ca), control::ClientArguments()));
  };
  const size_t lines = LogLines();
  const auto guesser = open(proxy.port());
  int refused = 0;
  for (int i = 0; i < 100; ++i) {
    const grpc::StatusCode code = ask("cr-" + std::to_string(i), guesser.get());
    EXPECT_TRUE(code == grpc::StatusCode::UNAUTHENTICATED || code == grpc::StatusCode::UNAVAILABLE) << code;
    refused += code == grpc::StatusCode::UNAUTHENTICATED;
  }
  EXPECT_GT(refused, 0);
  EXPECT_LE(refused, 8 * proxy.connections()) << "a connection was left open for more guesses";
  EXPECT_NE(server_->log().find("the server does not know this token"), std::string::npos) << server_->log();
  EXPECT_LT(LogLines() - lines, 50u);
  EXPECT_EQ(ask(right, open(port_).get()), grpc::StatusCode::OK);
}

TEST_F(Tls, SilentConnectionsTakeNothingFromOthers) {
  descriptors_ = 256;
  StartServer(Files("server", "ca"));
  const size_t lines = LogLines();
  std::vector<int> silent;
  for (int i = 0; i < 400; ++i) {
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(uint16_t(port_));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    ASSERT_EQ(connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    silent.push_back(fd);
  }
  EXPECT_TRUE(Eventually([&] { return server_->log().find("have not shown who they are") != std::string::npos; }));
  for (int i = 0; i < 5; ++i) {
    auto channel = Connect(Session());
    ASSERT_TRUE(channel);
    Reply reply;
    EXPECT_EQ(channel->Call(Header(kCount), "", "", nullptr, 0, &reply), ChannelStatus::kOk);
  }
  EXPECT_TRUE(Eventually([&] { return Descriptors() < 128u; })) << Descriptors();
  EXPECT_LT(LogLines() - lines, 100u);
  // They are sent away after a while, and then there is room for others.
  StartRelay(port_, Files("client", "ca"));
  EXPECT_TRUE(Eventually([&] { return Connect(Relay()) != nullptr; }));
  for (int fd : silent) close(fd);
}

TEST_F(Tls, SilentStreamsTakeNoThreads) {
  StartServer(Files("server", "ca"));
  StartRelay(port_, Files("client", "ca"));
  auto channel = Connect(Relay());
  ASSERT_TRUE(channel);
  const size_t before = Threads();
  std::list<RawTunnel> silent;
  for (int i = 0; i < 200; ++i) silent.emplace_back(port_, Credentials("eve", "ca"));
  // The first are answered by the deadline, the others at once.
  std::map<grpc::StatusCode, int> ends;
  size_t most = 0;
  std::atomic<bool> stop{false};
  std::thread watcher([&] {
    for (; !stop; usleep(2000)) most = std::max(most, Threads());
  });
  Reply reply;
  EXPECT_EQ(channel->Call(Header(kCount), "", "", nullptr, 0, &reply), ChannelStatus::kOk);
  for (RawTunnel& tunnel : silent) {
    EXPECT_FALSE(tunnel.Read());
    ++ends[tunnel.Finish().error_code()];
  }
  stop = true;
  watcher.join();
  EXPECT_EQ(ends[grpc::StatusCode::DEADLINE_EXCEEDED], 0);
  EXPECT_GE(ends[grpc::StatusCode::UNAVAILABLE], 100);
  EXPECT_LT(most, before + 100);
}

TEST_F(Tls, HangupReadsConfigurationAndCertificates) {
  const auto write = [&](const std::string& name, const std::string& text) {
    std::ofstream(Path(name), std::ios::binary | std::ios::trunc) << text;
  };
  const auto copy = [&](const std::string& from, const std::string& to) { write(to, ReadFile(Path(from))); };
  for (const char* end : {".pem", ".key"}) copy(std::string("server") + end, std::string("used") + end);
  copy("ca.pem", "usedca.pem");
  write("server.conf", "operator = \"CN=nobody\"\nmax-sessions = 9\n");
  std::vector<std::string> options = Files("used", "usedca");
  options.insert(options.end(), {"--config", Path("server.conf")});
  StartServer(options);
  StartRelay(port_, Files("client", "ca"));
  auto channel = Connect(Relay());
  auto local = Connect(Session());
  ASSERT_TRUE(channel && local);
  std::vector<std::string> ps = Files("eve", "ca");
  ps.insert(ps.end(), {"--server", "127.0.0.1:" + std::to_string(port_), "--json"});
  EXPECT_NE(Ps(ps).find("\"sessions\": []"), std::string::npos);
  size_t hangups = 0;
  const auto hang_up = [&] {
    const auto count = [&] {
      size_t found = 0;
      const std::string log = server_->log();
      for (size_t at = 0; (at = log.find("SIGHUP: ", at)) != std::string::npos; ++at) ++found;
      return found;
    };
    server_->Signal(SIGHUP);
    ++hangups;
    EXPECT_TRUE(Eventually([&] { return count() >= 2 * hangups; })) << server_->log();
  };
  write("server.conf", "operator = \"CN=eve\"\nmax-sessions = 2\n");
  hang_up();
  EXPECT_NE(Ps(ps).find("/test/program"), std::string::npos);
  std::string error = Refusal(Session());
  EXPECT_NE(error.find("--max-sessions"), std::string::npos) << error;
  // What is wrong changes nothing.
  write("server.conf", "operator = \"somebody\"\nmax-sessions = 0\n");
  write("used.pem", "-----BEGIN CERTIFICATE-----\nthis is none\n-----END CERTIFICATE-----\n");
  hang_up();
  EXPECT_NE(server_->log().find("the configuration stays as it was: --operator"), std::string::npos);
  EXPECT_NE(server_->log().find("the certificates stay as they were"), std::string::npos);
  EXPECT_NE(Refusal(Session()), "");
  EXPECT_NE(Ps(ps).find("/test/program"), std::string::npos);
  // New certificates, of another authority.
  for (const char* end : {".pem", ".key"}) copy(std::string("server2") + end, std::string("used") + end);
  copy("other.pem", "usedca.pem");
  write("server.conf", "operator = \"CN=client2\"\n");
  hang_up();
  std::vector<std::string> new_ps = Files("client2", "other");
  new_ps.insert(new_ps.end(), {"--server", "127.0.0.1:" + std::to_string(port_), "--json"});
  EXPECT_TRUE(Eventually([&] { return Ps(new_ps, -1).find("/test/program") != std::string::npos; }));
  EXPECT_TRUE(Eventually([&] { return Ps(ps, -1).find("/test/program") == std::string::npos; }));
  // The sessions of before are still there.
  Reply reply;
  EXPECT_EQ(channel->Call(Header(kCount), "", "", nullptr, 0, &reply), ChannelStatus::kOk);
  EXPECT_EQ(local->Call(Header(kCount), "", "", nullptr, 0, &reply), ChannelStatus::kOk);
}

// What is wrong with a file is one line of ours, and none of gRPC's.
TEST_F(Tls, BadFilesAreExplained) {
  std::ofstream(Path("broken.pem")) << "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
  std::ofstream(Path("text.pem")) << "hello\n";
  struct {
    const char* cert;
    const char* key;
    const char* ca;
    const char* says;
  } const cases[] = {
      {"broken.pem", "server.key", "ca.pem", "holds no intact certificate"},
      {"text.pem", "server.key", "ca.pem", "is no PEM file"},
      {"nowhere.pem", "server.key", "ca.pem", "No such file"},
      {"server.pem", "server.pem", "ca.pem", "holds no intact private key"},
      {"server.pem", "client.key", "ca.pem", "is not that of the certificate"},
      {"server.pem", "server.key", "server.key", "holds no intact certificate of an authority"},
      {"server.pem", "server.key", "broken.pem", "holds no intact certificate of an authority"},
  };
  int number = 0;
  for (const auto& one : cases) {
    const std::vector<std::string> files = {"--tls-cert",  Path(one.cert), "--tls-key",
                                            Path(one.key), "--tls-ca",     Path(one.ca)};
    const auto run = [&](std::vector<std::string> command, int code) {
      command.insert(command.end(), files.begin(), files.end());
      Process process(command, Path("bad" + std::to_string(++number) + ".log"));
      EXPECT_EQ(process.Wait(), code) << process.log();
      const std::string log = process.log();
      EXPECT_NE(log.find(one.says), std::string::npos) << log;
      EXPECT_EQ(log.find(".cc:"), std::string::npos) << log;
      EXPECT_EQ(log.find("--insecure-tcp"), std::string::npos) << log;
      EXPECT_EQ(std::count(log.begin(), log.end(), '\n'), 1) << log;
    };
    run({Program("server/supervisor", "cr-server"), "--dir", Path("server"), "--worker", "/bin/true", "--listen",
         "127.0.0.1:0"},
        2);
    run({Program("client/relay", "cr-relay"), "--connect", "127.0.0.1:1", "--socket", Relay()}, 2);
    run({Program("programs/tools", "cr-ps"), "--server", "127.0.0.1:1"}, 2);
  }
}

TEST_F(Tls, StrangersAreRefused) {
  StartServer(Files("server", "ca"));
  // Nothing, a certificate of another authority, and a server that the client does not trust.
  for (const auto& files : {std::vector<std::string>{}, Files("stranger", "ca"), Files("client", "other")}) {
    StartRelay(port_, files);
    EXPECT_NE(Refusal(Relay()), "") << (files.empty() ? "plain" : files[1]);
    relay_.reset();
  }
  StartRelay(port_, Files("client", "ca"));
  EXPECT_EQ(Refusal(Relay()), "");
}

TEST_F(Tls, CutConnectionIsResumed) {
  StartServer(Files("server", "ca"));
  Proxy proxy(port_);
  StartRelay(proxy.port(), Files("client", "ca"));
  auto channel = Connect(Relay());
  ASSERT_TRUE(channel);
  Reply reply;
  for (int i = 1; i <= 5; ++i) {
    std::thread cutter([&] {
      usleep(3000);
      proxy.Cut();
    });
    for (int k = 0; k < 20; ++k)
      ASSERT_EQ(channel->Send(Header(kCount), "", std::string(500000, 'x')), ChannelStatus::kOk);
    ASSERT_EQ(channel->Call(Header(kCount), "", "", nullptr, 0, &reply), ChannelStatus::kOk) << channel->end_reason();
    EXPECT_EQ(Number(reply.message), uint64_t(i) * 21);
    cutter.join();
  }
}

// ------------------------------------------------------------------------------------------------ garbage

TEST_F(Tunnel, GarbageOnEverySocket) {
  StartServer();
  StartRelay(port_);
  auto local = Connect(Session());
  auto remote = Connect(Relay());
  ASSERT_TRUE(local && remote);
  std::mt19937 random(5);
  for (int round = 0; round < 30; ++round) {
    std::string noise(1 + random() % 60000, 0);
    for (char& c : noise) c = char(random());
    for (const std::string& path : {Session(), Relay()}) {
      const UniqueFd fd = ValueOf(ConnectUnix(path));
      send(fd.get(), noise.data(), noise.size(), MSG_NOSIGNAL);
    }
    const int tcp = socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(uint16_t(port_));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    ASSERT_EQ(connect(tcp, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    send(tcp, noise.data(), noise.size(), MSG_NOSIGNAL);
    close(tcp);
  }
  Reply reply;
  EXPECT_EQ(local->Call(Header(kCount), "", "", nullptr, 0, &reply), ChannelStatus::kOk);
  EXPECT_EQ(remote->Call(Header(kCount), "", "", nullptr, 0, &reply), ChannelStatus::kOk);
}

// Speaks gRPC properly and the tunnel wrongly. Returns the status that the server ends the stream with.
grpc::Status BadTunnel(int port, const std::vector<grpc::ByteBuffer>& messages) {
  const auto channel = grpc::CreateCustomChannel("127.0.0.1:" + std::to_string(port),
                                                 grpc::InsecureChannelCredentials(), control::ClientArguments());
  grpc::ClientContext context;
  context.set_deadline(WallNow() + std::chrono::seconds(20));
  const grpc::internal::RpcMethod method(control::kTunnelMethod, grpc::internal::RpcMethod::BIDI_STREAMING);
  std::unique_ptr<grpc::ClientReaderWriter<grpc::ByteBuffer, grpc::ByteBuffer>> stream(
      grpc::internal::ClientReaderWriterFactory<grpc::ByteBuffer, grpc::ByteBuffer>::Create(channel.get(), method,
                                                                                            &context));
  grpc::ByteBuffer answer;
  bool first = true;
  for (const grpc::ByteBuffer& message : messages) {
    if (!stream->Write(message)) break;
    if (first && messages.size() > 1 && !stream->Read(&answer)) break;
    first = false;
  }
  // A message that happens to mean nothing is no reason to end the stream.
  stream->WritesDone();
  while (stream->Read(&answer)) {
  }
  return stream->Finish();
}

grpc::ByteBuffer Raw(const std::string& bytes) {
  const grpc::Slice slice(bytes);
  return grpc::ByteBuffer(&slice, 1);
}

TEST_F(Tunnel, GarbageInATunnelEndsThatSessionOnly) {
  StartServer({"--grace", "1"});
  auto local = Connect(Session());
  ASSERT_TRUE(local);
  control::TunnelOpen open;
  EncodeHello(Hello(), open.mutable_hello());
  control::TunnelMessage message;
  message.open = open.SerializeAsString();
  const grpc::ByteBuffer good = control::EncodeTunnelMessage(message, nullptr, true);
  std::mt19937 random(8);
  std::vector<grpc::ByteBuffer> seconds;
  for (int i = 0; i < 8; ++i) {
    std::string noise(1 + random() % 300, 0);
    for (char& c : noise) c = char(random());
    seconds.push_back(Raw(noise));
    // Noise with the right checksum, too.
    control::TunnelMessage wrapped;
    wrapped.lanes = noise;
    seconds.push_back(control::EncodeTunnelMessage(wrapped, nullptr, true));
  }
  const auto frames = [](uint64_t position, const std::string& bytes) {
    control::TunnelMessage batch;
    batch.position = position;
    const grpc::Slice slice(bytes);
    return control::EncodeTunnelMessage(batch, &slice, true);
  };
  std::string frame(32, 0);
  frame[16] = 1;                                            // sequence number
  seconds.push_back(frames(8, frame));                      // a gap
  seconds.push_back(frames(0, frame.substr(0, 24)));        // half a frame
  seconds.push_back(frames(0, std::string(4000, '\xff')));  // impossible lengths
  seconds.push_back(frames(0, std::string(32, '\0')));      // a whole frame that the worker refuses: sequence 0
  control::TunnelMessage acknowledgement;
  acknowledgement.acknowledged = 4096;  // of what was never sent
  seconds.push_back(control::EncodeTunnelMessage(acknowledgement, nullptr, true));
  for (size_t i = 0; i < seconds.size(); ++i) {
    const grpc::Status status = BadTunnel(port_, {good, seconds[i]});
    EXPECT_NE(status.error_code(), grpc::StatusCode::DEADLINE_EXCEEDED) << i << " " << status.error_message();
  }
  // As the first message.
  EXPECT_FALSE(BadTunnel(port_, {Raw("")}).ok());
  EXPECT_FALSE(BadTunnel(port_, {Raw("garbage")}).ok());
  open.set_resume_token("0123456789abcdef");
  message.open = open.SerializeAsString();
  EXPECT_EQ(BadTunnel(port_, {control::EncodeTunnelMessage(message, nullptr, true)}).error_code(),
            grpc::StatusCode::NOT_FOUND);
  Reply reply;
  EXPECT_EQ(local->Call(Header(kCount), "", "", nullptr, 0, &reply), ChannelStatus::kOk);
  EXPECT_TRUE(Eventually([&] {
    return Ps({"--server", "unix:" + Session(), "--json"}).find("\"transport\": \"grpc\"") == std::string::npos;
  })) << "sessions of bad tunnels are still there";
}

}  // namespace
}  // namespace cuda_remote
