// cr-server, cr-relay and cr-ps as processes, with a worker that needs no CUDA. Programs are found in Bazel's runfiles,
// or in the folder that CR_TEST_PROGRAMS names.

#include <arpa/inet.h>
#include <fcntl.h>
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

#include <atomic>
#include <chrono>
#include <cstring>
#include <fstream>
#include <iterator>
#include <list>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "proto/channel/client_channel.h"
#include "proto/channel/handshake.h"
#include "proto/control/control.grpc.pb.h"
#include "proto/control/credentials.h"
#include "proto/control/tunnel_message.h"

namespace cuda_remote {
namespace {

enum : uint32_t { kEcho = 1, kCount = 2, kBytes = 3, kPrint = 4, kEvent = 5, kCrash = 6, kHang = 7 };

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
bool Eventually(Condition condition, int limit_ms = 15000) {
  for (int i = 0; i < limit_ms / 5; ++i) {
    if (condition()) return true;
    usleep(5000);
  }
  return condition();
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
  int Wait(int limit_ms = 15000) {
    int status = 0;
    if (pid_ <= 0) return code_;
    if (!Eventually([&] { return waitpid(pid_, &status, WNOHANG) == pid_; }, limit_ms)) return -1000;
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
    listen_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(bind(listen_, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    EXPECT_EQ(listen(listen_, 16), 0);
    socklen_t length = sizeof(address);
    getsockname(listen_, reinterpret_cast<sockaddr*>(&address), &length);
    port_ = ntohs(address.sin_port);
    thread_ = std::thread([this] { Loop(); });
  }
  ~Proxy() {
    stop_ = true;
    thread_.join();
    close(listen_);
  }
  int port() const { return port_; }
  uint64_t bytes() const { return bytes_; }
  void Cut() { cut_ = true; }
  void Refuse(bool refuse) { refuse_ = refuse; }

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
      std::vector<pollfd> waiting = {{listen_, POLLIN, 0}};
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
        const int client = accept4(listen_, nullptr, nullptr, SOCK_CLOEXEC);
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
          } else {
            close(client);
            close(server);
          }
        }
      }
    }
    for (auto link = links.begin(); link != links.end();) link = drop(link);
  }
  const int target_;
  int listen_, port_ = 0;
  std::atomic<bool> stop_{false}, cut_{false}, refuse_{false};
  std::atomic<uint64_t> bytes_{0};
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
    std::vector<std::string> command = {
        Program("server/supervisor", "cr-server"),   "--dir",       Path("server"), "--worker",
        Program("server/supervisor", "test_worker"), "--log-level", "debug"};
    if (tcp) {
      command.insert(command.end(), {"--listen", "127.0.0.1:0"});
      if (more.empty() || more[0] != "--tls-cert") command.push_back("--insecure-tcp");
    }
    command.insert(command.end(), more.begin(), more.end());
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
  std::unique_ptr<ClientChannel> Connect(const std::string& path, std::string* error = nullptr) {
    Hello hello;
    hello.pid = uint32_t(getpid());
    hello.program = "/test/program";
    hello.job = "a \"job\"";
    std::string ignored;
    return ClientChannel::Connect(path, hello, &welcome_, error ? error : &ignored);
  }
  std::string Ps(const std::vector<std::string>& more, int expect = 0) {
    static int number = 0;
    const std::string log = Path("ps" + std::to_string(++number));
    std::vector<std::string> command = {Program("server/supervisor", "cr-ps")};
    command.insert(command.end(), more.begin(), more.end());
    Process ps(command, log);
    EXPECT_EQ(ps.Wait(), expect);
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
  int port_ = 0;
  int starts_ = 0;
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
  const auto start = std::chrono::steady_clock::now();
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
    ok = ok && Number(reply.message) == 0 && std::chrono::steady_clock::now() - start < std::chrono::seconds(100);
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
  std::string error;
  EXPECT_FALSE(Connect(Session(), &error));
  EXPECT_NE(error.find("the driver is broken"), std::string::npos) << error;
  StartRelay(port_);
  EXPECT_FALSE(Connect(Relay(), &error));
  EXPECT_NE(error.find("the driver is broken"), std::string::npos) << error;
  server_.reset();
  StartServer({"--driver", "crash"});
  EXPECT_FALSE(Connect(Session(), &error));
  EXPECT_NE(error.find("SIGSEGV"), std::string::npos) << error;
}

TEST_F(Tunnel, LimitsAndVersions) {
  StartServer({"--max-sessions", "1"});
  auto first = Connect(Session());
  ASSERT_TRUE(first);
  std::string error;
  EXPECT_FALSE(Connect(Session(), &error));
  EXPECT_NE(error.find("--max-sessions"), std::string::npos) << error;
  Hello hello;
  hello.wire_version = 99;
  EXPECT_FALSE(ClientChannel::Connect(Session(), hello, &welcome_, &error));
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
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(10));
    control::ServerInfo info;
    const grpc::Status status = stub->GetServerInfo(&context, control::ServerInfoRequest(), &info);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return info.sessions();
  };
  EXPECT_EQ(ask(), 0u);
  for (int round = 0; round < 2; ++round) {
    auto first = Connect(Relay());
    auto second = Connect(Relay());
    ASSERT_TRUE(first && second);
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < 20; ++i) EXPECT_EQ(ask(), 2u);
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(4));
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
      for who in server:ca client:ca stranger:other; do n=${who%:*} a=${who#*:}
        openssl req $K -keyout $n.key -out $n.csr -subj "/CN=$n"
        openssl x509 -req -in $n.csr -CA $a.pem -CAkey $a.key -CAcreateserial -out $n.pem -days 2 -extfile ext
      done; } >openssl.log 2>&1)";
    ASSERT_EQ(system(make.c_str()), 0) << ReadFile(Path("openssl.log"));
  }
  std::vector<std::string> Files(const std::string& who, const std::string& ca) {
    return {"--tls-cert", Path(who + ".pem"), "--tls-key", Path(who + ".key"), "--tls-ca", Path(ca + ".pem")};
  }
};

TEST_F(Tls, BothSidesShowCertificates) {
  StartServer(Files("server", "ca"));
  StartRelay(port_, Files("client", "ca"));
  std::string error;
  auto channel = Connect(Relay(), &error);
  ASSERT_TRUE(channel) << error;
  Exercise(channel.get());
  std::vector<std::string> ps = Files("client", "ca");
  ps.insert(ps.end(), {"--server", "127.0.0.1:" + std::to_string(port_), "--json"});
  EXPECT_NE(Ps(ps).find("\"transport\": \"grpc\""), std::string::npos);
}

TEST_F(Tls, StrangersAreRefused) {
  StartServer(Files("server", "ca"));
  std::string error;
  // Nothing, a certificate of another authority, and a server that the client does not trust.
  for (const auto& files : {std::vector<std::string>{}, Files("stranger", "ca"), Files("client", "other")}) {
    StartRelay(port_, files);
    EXPECT_FALSE(Connect(Relay(), &error)) << (files.empty() ? "plain" : files[1]);
    EXPECT_FALSE(error.empty());
    relay_.reset();
  }
  StartRelay(port_, Files("client", "ca"));
  EXPECT_TRUE(Connect(Relay(), &error)) << error;
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
      std::string error;
      const int fd = ConnectUnix(path, &error);
      ASSERT_GE(fd, 0) << error;
      send(fd, noise.data(), noise.size(), MSG_NOSIGNAL);
      close(fd);
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
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
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
  control::OpenMessage open;
  EncodeHello(Hello(), &open.hello);
  control::TunnelMessage message;
  message.open = control::EncodeTunnelOpen(open);
  const grpc::ByteBuffer good = control::EncodeTunnelMessage(message, nullptr);
  std::mt19937 random(8);
  std::vector<grpc::ByteBuffer> seconds;
  for (int i = 0; i < 8; ++i) {
    std::string noise(1 + random() % 300, 0);
    for (char& c : noise) c = char(random());
    seconds.push_back(Raw(noise));
  }
  const auto frames = [](uint64_t position, const std::string& bytes) {
    control::TunnelMessage batch;
    batch.position = position;
    const grpc::Slice slice(bytes);
    return control::EncodeTunnelMessage(batch, &slice);
  };
  std::string frame(32, 0);
  frame[16] = 1;                                            // sequence number
  seconds.push_back(frames(8, frame));                      // a gap
  seconds.push_back(frames(0, frame.substr(0, 24)));        // half a frame
  seconds.push_back(frames(0, std::string(4000, '\xff')));  // impossible lengths
  seconds.push_back(frames(0, std::string(32, '\0')));      // a whole frame that the worker refuses: sequence 0
  control::TunnelMessage acknowledgement;
  acknowledgement.acknowledged = 4096;  // of what was never sent
  seconds.push_back(control::EncodeTunnelMessage(acknowledgement, nullptr));
  for (size_t i = 0; i < seconds.size(); ++i) {
    const grpc::Status status = BadTunnel(port_, {good, seconds[i]});
    EXPECT_NE(status.error_code(), grpc::StatusCode::DEADLINE_EXCEEDED) << i << " " << status.error_message();
  }
  // As the first message.
  EXPECT_FALSE(BadTunnel(port_, {Raw("")}).ok());
  EXPECT_FALSE(BadTunnel(port_, {Raw("garbage")}).ok());
  open.resume_token = "0123456789abcdef";
  message.open = control::EncodeTunnelOpen(open);
  EXPECT_EQ(BadTunnel(port_, {control::EncodeTunnelMessage(message, nullptr)}).error_code(),
            grpc::StatusCode::NOT_FOUND);
  Reply reply;
  EXPECT_EQ(local->Call(Header(kCount), "", "", nullptr, 0, &reply), ChannelStatus::kOk);
  EXPECT_TRUE(Eventually([&] {
    return Ps({"--server", "unix:" + Session(), "--json"}).find("\"transport\": \"grpc\"") == std::string::npos;
  })) << "sessions of bad tunnels are still there";
}

}  // namespace
}  // namespace cuda_remote
