// SPDX-License-Identifier: Apache-2.0
// The agent with a host that only keeps count.

#include "client/agent/agent.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "checkpoint/agent/agent_client.h"
#include "checkpoint/agent/lock.h"
#include "proto/agent/message.h"
#include "proto/base/testing/value_of.h"
#include "proto/base/unique_fd.h"
#include "proto/channel/handshake.h"

namespace cuda_remote::agent {
namespace {

int FileWith(const std::string& text) {
  const int fd = memfd_create("test", MFD_CLOEXEC);
  EXPECT_EQ(write(fd, text.data(), text.size()), ssize_t(text.size()));
  lseek(fd, 0, SEEK_SET);
  return fd;
}

std::string Contents(int fd) {
  char text[64] = {};
  EXPECT_GE(pread(fd, text, sizeof(text) - 1, 0), 0);
  return text;
}

class FakeHost : public AgentHost {
 public:
  Info GetInfo() override {
    Info info;
    info.pid = 4711;
    info.server = "unix:/somewhere";
    info.job = "job";
    info.session = 5;
    info.shared_memory = true;
    info.log_records = 6;
    info.log_bytes = 7;
    return info;
  }
  Status Close() override {
    if (refuse_lock) return Error("a kernel runs for ever");
    closed = true;
    locked = false;
    return OkStatus();
  }
  StatusOr<Activity> Look() override {
    Activity activity;
    ++looks;
    activity.quiet = closed && looks >= quiet_after_looks;
    activity.answered = true;
    activity.asking = 1;
    activity.held_bytes = 12345;
    activity.contexts = {{0x1234, 5, true}, {0x5678, 6, false}};
    return activity;
  }
  bool Admit(const Admission& which) override {
    admitted = which.context;
    asks_admitted += which.asks;
    return which.asks;
  }
  StatusOr<bool> Settle(int timeout_ms, const std::function<bool()>& gone) override {
    last_timeout = timeout_ms;
    if (settle_until_gone) {
      settling = true;
      while (!gone()) usleep(1000);
      return Error("interrupted");
    }
    locked = true;
    return true;
  }
  void SettleMove() override {
    EXPECT_TRUE(closed);
    ++moves_settled;
  }
  void Unlock() override {
    if (before_unlock) before_unlock();
    locked = closed = false;
    ++unlocks;
  }
  StatusOr<uint64_t> Ask(const SideRequest& request, char* out) override {
    if (request.operation == 666) return Error("no such thing");
    if (request.tag != 0) passed = Contents(request.fd);
    asked[++last_asked] = {request, out};
    return last_asked.load();
  }
  Status Answer(uint64_t sequence, int timeout_ms, bool* answered, SideAnswer* answer, size_t* bytes) override {
    EXPECT_LE(timeout_ms, 20);
    *answered = !hold_answers;
    if (hold_answers) return OkStatus();
    const auto& [request, out] = asked.at(sequence);
    answer->result = request.operation;
    answer->message = request.message;
    *bytes = request.payload_bytes;
    for (size_t i = 0; i < *bytes; ++i) out[i] = char(i * 7 + i / 1000);
    return OkStatus();
  }
  void EndAsking(const std::vector<uint64_t>& open) override {
    ++asking_ended;
    given_up = open.size();
  }
  Status BeginTrace(uint64_t events, double max_seconds) override {
    trace_events = events;
    trace_seconds = max_seconds;
    if (events != 77) return OkStatus();
    return Error("another recording");
  }
  Status EndTrace(int timeline_fd, int table_fd, bool json) override {
    const bool written = dprintf(timeline_fd, "timeline") == 8 && dprintf(table_fd, json ? "json" : "text") == 4;
    return written ? OkStatus() : Error("no room");
  }
  Status TraceTotals(int table_fd, bool) override {
    return dprintf(table_fd, "totals") == 6 ? OkStatus() : Error("no room");
  }
  StatusOr<UniqueFd> GiveImages(uint64_t* number) override {
    *number = 77;
    return UniqueFd(FileWith("the images"));
  }
  StatusOr<Taken> Take(uint64_t images) override {
    Taken taken;
    taken_without = images;
    taken.log_fd = FileWith("the log");
    taken.fds.socket = FileWith("the socket");
    taken.fds.ring = FileWith("the ring");
    taken.next_sequence = 1234567890123;
    taken.welcome.session = 9;
    taken.welcome.shared_memory = true;
    taken.welcome.server = "name";
    return taken;
  }
  void Release() override { released = true; }
  void Abandon() override { abandoned = true; }
  Status Give(Given got) override {
    const std::string socket = Contents(got.fds.socket), ring = Contents(got.fds.ring);
    close(got.fds.socket);
    close(got.fds.ring);
    if (refuse_give) return Error("no room");
    given = std::move(got);
    given_contents = socket + "|" + ring;
    return OkStatus();
  }

  std::atomic<bool> locked{false}, closed{false}, settling{false}, settle_until_gone{false};
  std::atomic<int> looks{0}, quiet_after_looks{0}, asks_admitted{0};
  std::atomic<uint64_t> admitted{0};
  std::atomic<bool> released{false}, abandoned{false}, refuse_lock{false}, refuse_give{false};
  std::atomic<int> unlocks{0}, moves_settled{0}, last_timeout{0};
  std::atomic<uint64_t> trace_events{0}, taken_without{0};
  std::atomic<bool> hold_answers{false};
  std::atomic<uint64_t> last_asked{0}, given_up{0};
  std::atomic<int> asking_ended{0};
  std::map<uint64_t, std::pair<SideRequest, char*>> asked;  // the agent's thread only
  std::string passed;
  std::atomic<double> trace_seconds{0};
  std::function<void()> before_unlock;
  Given given;
  std::string given_contents;
};

class AgentTest : public testing::Test {
 protected:
  void SetUp() override {
    char folder[] = "/tmp/agent-test-XXXXXX";
    ASSERT_NE(mkdtemp(folder), nullptr);
    parent_ = folder;
    directory_ = parent_ + "/job";
    agent_ = ValueOf(Agent::Start(directory_, &host_));
  }
  void TearDown() override {
    agent_.reset();
    rmdir(directory_.c_str());
    rmdir(parent_.c_str());
  }
  std::unique_ptr<AgentClient> Connect() {
    return ValueOf(AgentClient::Connect(directory_, uint32_t(getpid()), "the job"));
  }
  UniqueFd ConnectToAgent() { return ValueOf(ConnectUnix(directory_ + "/" + SocketName(uint32_t(getpid())))); }
  absl::Status Lock(const std::unique_ptr<AgentClient>& tool, int timeout_ms = 60000) {
    LockOptions options;
    options.timeout_ms = timeout_ms;
    return LockAll({tool.get()}, options).status();
  }
  static int OpenFiles() {
    int count = 0;
    for (int fd = 0; fd < 256; ++fd) count += fcntl(fd, F_GETFD) >= 0;
    return count;
  }
  template <typename F>
  static bool Eventually(F condition) {
    for (int i = 0; i < 2000; ++i) {
      if (condition()) return true;
      usleep(1000);
    }
    return false;
  }

  FakeHost host_;
  std::string parent_, directory_;
  std::unique_ptr<Agent> agent_;
};

TEST_F(AgentTest, FolderIsPrivate) {
  struct stat folder;
  ASSERT_EQ(stat(directory_.c_str(), &folder), 0);
  EXPECT_EQ(folder.st_mode & 0777, 0700u);
}

TEST_F(AgentTest, Info) {
  const Info info = ValueOf(Connect()->GetInfo());
  EXPECT_EQ(info.pid, 4711u);
  EXPECT_EQ(info.server, "unix:/somewhere");
  EXPECT_EQ(info.job, "job");
  EXPECT_EQ(info.session, 5u);
  EXPECT_TRUE(info.shared_memory);
  EXPECT_EQ(info.log_records, 6u);
  EXPECT_EQ(info.log_bytes, 7u);
  EXPECT_FALSE(info.released);
  EXPECT_FALSE(host_.locked);
}

// Before a lock, and by a connection that may end.
TEST_F(AgentTest, ImagesAreGivenWhileTheJobRuns) {
  const int files = OpenFiles();
  uint64_t number = 0;
  UniqueFd images;
  ASSERT_EQ(Connect()->AskImages(&number, &images), absl::OkStatus());
  EXPECT_EQ(number, 77u);
  EXPECT_EQ(Contents(images.get()), "the images");
  images.Close();
  auto tool = Connect();
  ASSERT_EQ(Lock(tool, 1500), absl::OkStatus());
  EXPECT_FALSE(tool->AskImages(&number, &images).ok());
  tool.reset();
  EXPECT_TRUE(Eventually([&] { return OpenFiles() == files; })) << "descriptors were left open";
}

TEST_F(AgentTest, WholeHandOver) {
  const int files = OpenFiles();
  Taken taken;
  {
    auto tool = Connect();
    ASSERT_EQ(Lock(tool, 1500), absl::OkStatus());
    EXPECT_TRUE(host_.locked);
    EXPECT_GT(host_.last_timeout, 0);
    EXPECT_LE(host_.last_timeout, 1500);
    taken = ValueOf(tool->Take(77));
    EXPECT_EQ(host_.taken_without, 77u);
    EXPECT_EQ(Contents(taken.log_fd), "the log");
    EXPECT_EQ(Contents(taken.fds.socket), "the socket");
    EXPECT_EQ(Contents(taken.fds.ring), "the ring");
    EXPECT_EQ(taken.next_sequence, 1234567890123u);
    EXPECT_EQ(taken.welcome.session, 9u);
    EXPECT_EQ(taken.welcome.server, "name");
    EXPECT_TRUE(taken.welcome.shared_memory);
    ASSERT_EQ(tool->Release(), absl::OkStatus());
    EXPECT_TRUE(host_.released);
    EXPECT_FALSE(tool->Unlock().ok());
  }
  // The end of the connection does not unlock now: there is no channel to go on with.
  usleep(20000);
  EXPECT_TRUE(host_.locked);
  auto tool = Connect();
  EXPECT_TRUE(ValueOf(tool->GetInfo()).released);
  EXPECT_NE(tool->Unlock().message().find("released"), std::string::npos);
  Given given;
  given.fds = taken.fds;
  given.next_sequence = 77;
  given.new_worker = true;
  given.server = "unix:/elsewhere";
  given.welcome = taken.welcome;
  ASSERT_EQ(tool->Give(given), absl::OkStatus());
  EXPECT_EQ(host_.given_contents, "the socket|the ring");
  EXPECT_EQ(host_.given.next_sequence, 77u);
  EXPECT_TRUE(host_.given.new_worker);
  EXPECT_EQ(host_.given.server, "unix:/elsewhere");
  EXPECT_TRUE(host_.locked);
  ASSERT_EQ(tool->Unlock(), absl::OkStatus());
  EXPECT_TRUE(Eventually([&] { return !host_.locked; }));
  for (int fd : {taken.log_fd, taken.fds.socket, taken.fds.ring}) close(fd);
  tool.reset();
  EXPECT_TRUE(Eventually([&] { return OpenFiles() == files; })) << "descriptors were left open";
}

TEST_F(AgentTest, ToolThatDisappearsUnlocks) {
  {
    auto tool = Connect();
    ASSERT_EQ(Lock(tool), absl::OkStatus());
  }
  EXPECT_TRUE(Eventually([&] { return host_.unlocks == 1; }));
  Taken taken;
  {
    auto tool = Connect();
    ASSERT_EQ(Lock(tool), absl::OkStatus());
    taken = ValueOf(tool->Take(0));
  }
  EXPECT_TRUE(Eventually([&] { return host_.unlocks == 2; }));
  for (int fd : {taken.log_fd, taken.fds.socket, taken.fds.ring}) close(fd);
}

// The host finds out which channel the process goes on with. A tool that unlocks has said so.
TEST_F(AgentTest, ToolThatDisappearsInAMoveHasItSettled) {
  for (const bool unlocks : {true, false}) {
    auto tool = Connect();
    ASSERT_EQ(Lock(tool), absl::OkStatus());
    const Taken taken = ValueOf(tool->Take(0));
    EXPECT_FALSE(tool->Look().ok());
    Given given;
    given.fds = taken.fds;
    given.new_worker = true;
    given.welcome = taken.welcome;
    ASSERT_EQ(tool->Give(given), absl::OkStatus());
    // Whether the new worker is there can be asked now; and if it is not, the former one is given back without it.
    EXPECT_TRUE(ValueOf(tool->Look()).answered);
    given.new_worker = false;
    ASSERT_EQ(tool->Give(given), absl::OkStatus());
    EXPECT_FALSE(host_.given.new_worker);
    for (int fd : {taken.log_fd, taken.fds.socket, taken.fds.ring}) close(fd);
    if (unlocks) {
      ASSERT_EQ(tool->Unlock(), absl::OkStatus());
    }
    tool.reset();
    EXPECT_TRUE(Eventually([&] { return host_.unlocks == (unlocks ? 1 : 2); }));
    EXPECT_EQ(host_.moves_settled, unlocks ? 0 : 1);
  }
}

// Also in the middle of a lock, at whatever step, and without the job's help.
TEST_F(AgentTest, ToolThatDisappearsWhileItWaitsUnlocks) {
  for (int step = 0; step < 4; ++step) {
    const int before = host_.unlocks;
    auto tool = Connect();
    ASSERT_EQ(tool->Close(), absl::OkStatus());
    if (step >= 1) {
      ASSERT_EQ(tool->Look().status(), absl::OkStatus());
    }
    if (step >= 2) {
      ASSERT_EQ(tool->Admit({true, 0}).status(), absl::OkStatus());
    }
    if (step >= 3) {
      // The agent is busy when the tool goes.
      host_.settle_until_gone = true;
      Message request;
      request.type = Type::kSettle;
      EncodeTimeout({60000}, &request.body);
      tool.reset();
      ASSERT_TRUE(Eventually([&] { return host_.unlocks == before + 1; }));
      const int socket = ConnectToAgent().Release();
      Message close_request;
      close_request.type = Type::kClose;
      ASSERT_TRUE(SendMessage(socket, close_request));
      Message reply;
      ASSERT_EQ(ReceiveMessage(socket, 5000, &reply), ReceiveStatus::kOk);
      ASSERT_TRUE(SendMessage(socket, request));
      ASSERT_TRUE(Eventually([&] { return host_.settling.load(); }));
      close(socket);
      EXPECT_TRUE(Eventually([&] { return host_.unlocks == before + 2; }));
      host_.settle_until_gone = false;
      break;
    }
    tool.reset();
    EXPECT_TRUE(Eventually([&] { return host_.unlocks == before + 1; })) << step;
  }
}

TEST_F(AgentTest, AsksBesideTheJobsCalls) {
  auto tool = Connect();
  SideRequest request;
  request.operation = 17;
  request.message = "short";
  const uint64_t first = ValueOf(tool->Ask(request));
  request.operation = 18;
  request.message = std::string(20000, 'm');
  request.payload_bytes = 300000;
  request.tag = 5;
  request.fd = FileWith("a descriptor");
  const uint64_t second = ValueOf(tool->Ask(request));
  close(request.fd);
  request.tag = 0;
  std::optional<SideAnswer> answer = ValueOf(tool->Answer(second, 10));
  EXPECT_EQ(host_.passed, "a descriptor");
  ASSERT_TRUE(answer);
  EXPECT_EQ(answer->result, 18u);
  EXPECT_EQ(answer->message, request.message);
  ASSERT_EQ(answer->payload.size(), 300000u);
  for (size_t i = 0; i < answer->payload.size(); ++i) ASSERT_EQ(answer->payload[i], char(i * 7 + i / 1000)) << i;
  host_.hold_answers = true;
  EXPECT_FALSE(ValueOf(tool->Answer(first, 0)));
  host_.hold_answers = false;
  answer = ValueOf(tool->Answer(first, 0));
  ASSERT_TRUE(answer);
  EXPECT_EQ(answer->message, "short");
  EXPECT_EQ(answer->payload, "");
  // Each answer once, and nobody else's.
  EXPECT_FALSE(tool->Answer(first, 0).ok());
  EXPECT_FALSE(tool->Answer(12345, 0).ok());
  request.operation = 666;
  EXPECT_EQ(tool->Ask(request).status().message(), "no such thing");
  // No end of them.
  request.operation = 1;
  request.payload_bytes = 0;
  bool accepted = true;
  size_t count = 0;
  for (; count < 1000 && accepted; ++count) accepted = tool->Ask(request).ok();
  EXPECT_EQ(count - 1, kMostAsked);
  // A closed gate ends them, and there are no more until it opens.
  EXPECT_EQ(host_.asking_ended, 0);
  ASSERT_EQ(tool->Close(), absl::OkStatus());
  EXPECT_EQ(host_.asking_ended, 1);
  EXPECT_EQ(host_.given_up, 0u);
  EXPECT_FALSE(tool->Ask(request).ok());
}

TEST_F(AgentTest, ToolThatDisappearsAsksNoMore) {
  host_.hold_answers = true;
  auto tool = Connect();
  SideRequest request;
  request.payload_bytes = 1000;
  for (int i = 0; i < 3; ++i) {
    ASSERT_EQ(tool->Ask(request).status(), absl::OkStatus());
  }
  tool.reset();
  EXPECT_TRUE(Eventually([&] { return host_.asking_ended == 1; }));
  EXPECT_EQ(host_.given_up, 3u);
  EXPECT_EQ(host_.unlocks, 0);
  // One that asked for nothing leaves nothing behind.
  Connect().reset();
  ASSERT_EQ(Lock(Connect()), absl::OkStatus());
  EXPECT_EQ(host_.asking_ended, 1);
}

TEST_F(AgentTest, LooksAndAdmits) {
  auto tool = Connect();
  // While it runs, a tool may ask how much there is.
  const Activity activity = ValueOf(tool->Look());
  EXPECT_EQ(activity.held_bytes, 12345u);
  EXPECT_FALSE(activity.quiet);
  EXPECT_TRUE(activity.answered);
  EXPECT_EQ(activity.asking, 1u);
  ASSERT_EQ(activity.contexts.size(), 2u);
  EXPECT_EQ(activity.contexts[0].context, 0x1234u);
  EXPECT_EQ(activity.contexts[0].calls, 5u);
  EXPECT_TRUE(activity.contexts[0].has_work);
  EXPECT_FALSE(activity.contexts[1].has_work);
  EXPECT_FALSE(tool->Admit({true, 0}).ok());
  EXPECT_FALSE(tool->Settle(1000).ok());
  ASSERT_EQ(tool->Close(), absl::OkStatus());
  EXPECT_TRUE(ValueOf(tool->Admit({true, 0})));
  EXPECT_FALSE(ValueOf(tool->Admit({false, 0x1234})));
  EXPECT_EQ(host_.admitted, 0x1234u);
  EXPECT_TRUE(ValueOf(tool->Settle(1000)));
  // For the worker's answer. It cannot be had while the channel is the tool's.
  EXPECT_EQ(tool->Look().status(), absl::OkStatus());
  // Another process of the job was not idle: back to before.
  ASSERT_EQ(tool->Close(), absl::OkStatus());
  EXPECT_FALSE(host_.locked);
  EXPECT_FALSE(tool->Take(0).ok());
  ASSERT_EQ(tool->Look().status(), absl::OkStatus());
  EXPECT_EQ(tool->Unlock(), absl::OkStatus());
}

TEST_F(AgentTest, LockWaitsUntilTheJobIsQuiet) {
  host_.quiet_after_looks = 40;
  auto tool = Connect();
  ASSERT_EQ(Lock(tool), absl::OkStatus());
  EXPECT_GE(host_.looks, 40);
  EXPECT_TRUE(host_.locked);
  EXPECT_GE(host_.asks_admitted, 1);
}

TEST_F(AgentTest, LockThatCannotBeHadIsUndone) {
  host_.quiet_after_looks = 1 << 30;
  auto tool = Connect();
  const absl::Status locked = Lock(tool, 100);
  EXPECT_NE(locked.message().find("did not become idle in 0.1 s"), std::string::npos) << locked;
  EXPECT_TRUE(Eventually([&] { return !host_.closed; }));
  EXPECT_EQ(tool->GetInfo().status(), absl::OkStatus());
}

TEST_F(AgentTest, ALostSessionIsAbandoned) {
  Taken taken;
  {
    auto tool = Connect();
    ASSERT_EQ(Lock(tool), absl::OkStatus());
    EXPECT_FALSE(tool->Abandon().ok());
    taken = ValueOf(tool->Take(0));
    ASSERT_EQ(tool->Release(), absl::OkStatus());
  }
  for (int fd : {taken.log_fd, taken.fds.socket, taken.fds.ring}) close(fd);
  auto tool = Connect();
  ASSERT_EQ(tool->Abandon(), absl::OkStatus());
  EXPECT_TRUE(host_.abandoned);
  EXPECT_FALSE(ValueOf(tool->GetInfo()).released);
}

TEST_F(AgentTest, WrongOrderIsRefused) {
  auto tool = Connect();
  const absl::Status taken = tool->Take(0).status();
  EXPECT_NE(taken.message().find("running"), std::string::npos) << taken;
  EXPECT_FALSE(tool->Unlock().ok());
  Given given;
  given.fds = {FileWith("a"), FileWith("b")};
  EXPECT_FALSE(tool->Give(given).ok());
  close(given.fds.socket);
  close(given.fds.ring);
  EXPECT_EQ(Lock(tool), absl::OkStatus());
  EXPECT_FALSE(tool->Settle(0).ok());
  EXPECT_FALSE(tool->Release().ok());
  EXPECT_EQ(tool->Unlock(), absl::OkStatus());
  EXPECT_TRUE(Eventually([&] { return host_.unlocks == 1; }));
}

// A job whose last CUDA call is let in may end before the agent's thread runs again.
TEST_F(AgentTest, UnlockIsAnsweredBeforeTheJobGoesOn) {
  std::atomic<bool> answered{false}, was_answered{false};
  host_.before_unlock = [&] { was_answered = Eventually([&] { return answered.load(); }); };
  auto tool = Connect();
  ASSERT_EQ(Lock(tool), absl::OkStatus());
  ASSERT_EQ(tool->Unlock(), absl::OkStatus());
  answered = true;
  EXPECT_TRUE(Eventually([&] { return host_.unlocks == 1; }));
  EXPECT_TRUE(was_answered);
}

TEST_F(AgentTest, HostsErrorsArrive) {
  host_.refuse_lock = true;
  auto tool = Connect();
  EXPECT_EQ(Lock(tool).message(), "a kernel runs for ever");
  host_.refuse_lock = false;
  host_.refuse_give = true;
  ASSERT_EQ(Lock(tool), absl::OkStatus());
  const Taken taken = ValueOf(tool->Take(0));
  Given given;
  given.fds = taken.fds;
  EXPECT_EQ(tool->Give(given).message(), "no room");
  EXPECT_EQ(tool->Unlock(), absl::OkStatus());
  for (int fd : {taken.log_fd, taken.fds.socket, taken.fds.ring}) close(fd);
}

TEST_F(AgentTest, TraceGoesToTheToolsFiles) {
  auto tool = Connect();
  ASSERT_EQ(tool->BeginTrace(1000, 1500), absl::OkStatus());
  EXPECT_EQ(host_.trace_events, 1000u);
  EXPECT_EQ(host_.trace_seconds, 1.5);
  EXPECT_EQ(tool->BeginTrace(77, 1500).message(), "another recording");
  EXPECT_FALSE(tool->BeginTrace(0, 1500).ok());
  const int timeline = FileWith(""), table = FileWith("");
  // From another connection, as the tool does it.
  tool.reset();
  tool = Connect();
  ASSERT_EQ(tool->EndTrace(timeline, table, true), absl::OkStatus());
  ASSERT_EQ(tool->TraceTotals(table, false), absl::OkStatus());
  EXPECT_EQ(Contents(timeline), "timeline");
  EXPECT_EQ(Contents(table), "jsontotals");
  // Not while a checkpoint has the channel.
  ASSERT_EQ(Lock(tool), absl::OkStatus());
  EXPECT_FALSE(tool->BeginTrace(1000, 1500).ok());
  EXPECT_FALSE(tool->EndTrace(timeline, table, true).ok());
  EXPECT_EQ(tool->Unlock(), absl::OkStatus());
  close(timeline);
  close(table);
}

TEST_F(AgentTest, OneToolAtATime) {
  auto first = Connect();
  ASSERT_EQ(Lock(first), absl::OkStatus());
  auto second = Connect();
  const absl::Status refused = second->GetInfo().status();
  EXPECT_NE(refused.message().find("another tool"), std::string::npos) << refused;
  second.reset();
  EXPECT_EQ(first->Unlock(), absl::OkStatus());
  first.reset();
  EXPECT_EQ(Connect()->GetInfo().status(), absl::OkStatus());
}

TEST_F(AgentTest, GarbageEndsTheConnectionOnly) {
  unsigned seed = 1;
  for (int round = 0; round < 200; ++round) {
    const int socket = ConnectToAgent().Release();
    std::string bytes(rand_r(&seed) % 300 + 1, '\0');
    for (char& byte : bytes) byte = char(rand_r(&seed));
    // Often with a right head, so that the fields are reached.
    const uint32_t head[4] = {kMagic, kVersion, uint32_t(rand_r(&seed) % 16), uint32_t(bytes.size())};
    if (round % 2) bytes.insert(0, reinterpret_cast<const char*>(head), sizeof(head));
    send(socket, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    Message reply;
    ReceiveMessage(socket, 1000, &reply);
    close(socket);
  }
  auto tool = Connect();
  EXPECT_EQ(tool->GetInfo().status(), absl::OkStatus());
  EXPECT_TRUE(Eventually([&] { return !host_.locked && !host_.closed; }));
}

TEST_F(AgentTest, OtherVersionIsToldSo) {
  for (const uint32_t version : {kVersion - 1, kVersion + 1}) {
    const UniqueFd socket = ConnectToAgent();
    const uint32_t head[4] = {kMagic, version, uint32_t(Type::kInfo), 0};
    ASSERT_EQ(send(socket.get(), head, sizeof(head), 0), ssize_t(sizeof(head)));
    Message reply;
    ASSERT_EQ(ReceiveMessage(socket.get(), 1000, &reply), ReceiveStatus::kOk);
    EXPECT_EQ(reply.type, Type::kError);
    EXPECT_NE(reply.body.find("version"), std::string::npos);
  }
}

TEST_F(AgentTest, SecondAgentInTheSameFolderIsRefused) {
  FakeHost other;
  EXPECT_NE(Agent::Start(directory_, &other).status().message(), "");
  EXPECT_EQ(Connect()->GetInfo().status(), absl::OkStatus());
}

TEST_F(AgentTest, SocketIsMadeAgainWhenItsPathIsGone) {
  ASSERT_EQ(unlink((directory_ + "/" + SocketName(uint32_t(getpid()))).c_str()), 0);
  bool again = false;
  for (int i = 0; i < 150 && !again; ++i) {
    usleep(100000);
    again = AgentClient::Connect(directory_, uint32_t(getpid()), "the job").ok();
  }
  EXPECT_TRUE(again);
}

// The program's own limit: a program that has come to it can still be saved, or is told why not.
TEST_F(AgentTest, AnswersAToolWhenTheProgramHasNoDescriptorLeft) {
  rlimit before;
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const rlimit few{64, before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &few), 0);
  for (int round = 0; round < 2; ++round) {
    std::vector<UniqueFd> all;
    for (int fd; (fd = fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, 0)) >= 0;) all.emplace_back(fd);
    all.pop_back();  // for the tool's end, which is in this process
    auto tool = Connect();
    EXPECT_EQ(fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, 0), -1);
    EXPECT_EQ(ValueOf(tool->GetInfo()).pid, 4711u);
    // The tool's end needs one, too, and the agent takes back what it had put aside for the connection.
    all.pop_back();
    all.pop_back();
    uint64_t number = 0;
    UniqueFd images;
    EXPECT_EQ(tool->AskImages(&number, &images), absl::OkStatus());
    EXPECT_EQ(Contents(images.get()), "the images");
  }
  EXPECT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
}

TEST_F(AgentTest, ForkedChildHoldsNothing) {
  const pid_t child = fork();
  if (child == 0) {
    usleep(500000);
    _exit(0);
  }
  agent_.reset();
  // Nobody listens any more, though the child lives.
  EXPECT_FALSE(AgentClient::Connect(directory_, uint32_t(getpid()), "the job").ok());
  EXPECT_EQ(waitpid(child, nullptr, 0), child);
}

TEST_F(AgentTest, ThreadTakesNoSignal) {
  static std::atomic<pthread_t> ran{0};
  static std::atomic<int> count{0};
  ran = pthread_self();
  signal(SIGUSR1, [](int) {
    ran = pthread_self();
    ++count;
  });
  sigset_t one, before;
  sigemptyset(&one);
  sigaddset(&one, SIGUSR1);
  pthread_sigmask(SIG_BLOCK, &one, &before);
  kill(getpid(), SIGUSR1);
  usleep(50000);
  EXPECT_EQ(count, 0) << "the agent's thread took the program's signal";
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  EXPECT_EQ(count, 1);
  EXPECT_EQ(ran.load(), pthread_self());
  signal(SIGUSR1, SIG_DFL);
}

// A process that begins to use CUDA has a socket a moment before it listens there.
TEST_F(AgentTest, ToolWaitsUntilItListens) {
  constexpr uint32_t kOther = 4999999;  // beyond all process numbers
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  const std::string path = directory_ + "/" + SocketName(kOther);
  ASSERT_LT(path.size(), sizeof(address.sun_path));
  memcpy(address.sun_path, path.c_str(), path.size());
  const int listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  ASSERT_EQ(bind(listener, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  std::thread starting([listener] {
    usleep(20000);
    listen(listener, 1);
  });
  EXPECT_EQ(AgentClient::Connect(directory_, kOther, "the job").status(), absl::OkStatus());
  starting.join();
  close(listener);
  unlink(path.c_str());
}

}  // namespace
}  // namespace cuda_remote::agent
